"""Images of requests: decoding under limits, and the checkpoint's image processor."""
