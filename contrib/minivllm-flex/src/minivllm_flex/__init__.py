"""Attention by FlexAttention.  Nothing is imported here: asking for the spec must cost nothing."""
