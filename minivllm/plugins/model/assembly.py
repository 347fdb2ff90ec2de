"""The fields of a decoder that all families of models read from their configuration in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.core.interfaces.decoder import DecoderSpec, LayerSpec, Norm


def decoder(cfg: Any, layers: Sequence[LayerSpec], norm: Norm, **more: Any) -> DecoderSpec:
    """Return a decoder with the vocabulary size, the hidden size and the tied embedding of a configuration.

    ``cfg`` is transformers' configuration object.  ``norm`` is the norm of all layers and of the last hidden states.
    ``more`` are further fields of ``DecoderSpec``.
    """
    return DecoderSpec(cfg.vocab_size, cfg.hidden_size, tuple(layers), norm, cfg.tie_word_embeddings, **more)


def layer_norm(eps: float, bias: bool = True) -> Norm:
    """Return LayerNorm (arXiv:1607.06450); ``eps`` is added to the variance."""
    return Norm(eps, centered=True, bias=bias)
