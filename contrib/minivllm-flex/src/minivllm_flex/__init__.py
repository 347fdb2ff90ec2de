"""Attention by torch's FlexAttention.  This module imports nothing, so that reading the spec costs nothing."""
