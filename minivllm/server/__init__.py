"""The request layer: clients of an engine that runs elsewhere, and the protocols that are served through them."""
