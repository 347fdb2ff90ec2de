"""Contrastive decoding for minivllm.  This module imports nothing, so that reading the spec costs nothing."""
