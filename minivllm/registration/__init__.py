"""What stands behind ``minivllm.registry``: entry points are found, and imported within limits."""
