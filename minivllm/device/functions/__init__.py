"""A request's own Python functions on logits: they run on the host, on tensors that came from the device."""
