"""A request's own Python functions on logits, which run on the host."""
