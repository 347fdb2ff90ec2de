"""Contrastive decoding for minivllm.  Nothing is imported here: asking for the spec must cost nothing."""
