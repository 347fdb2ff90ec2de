"""Mistral (arXiv:2310.06825), which is Llama without biases and with one attention window for all layers, or none."""

from __future__ import annotations

from typing import Any

from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .llama import Llama


class Mistral(Llama):
    """The architecture ``MistralForCausalLM``."""

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return False, False, False

    def windows(self, cfg: Any) -> list[int | None]:
        kind = fields.FULL if cfg.sliding_window is None else fields.SLIDING
        types = getattr(cfg, "layer_types", None)
        if types is not None and set(types) != {kind}:
            raise ModelError(
                f"layer_types={shown(types)}: expected {kind} for all layers, this architecture has one kind"
            )
        return fields.windows(cfg, [kind] * cfg.num_hidden_layers)
