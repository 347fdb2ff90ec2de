"""Mistral (arXiv:2310.06825), which is Llama without biases and with one attention window for all layers, or none.

Ministral 3 also multiplies queries by a factor that grows with their position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import Rope
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


class Ministral3(Mistral):
    """The architecture ``Ministral3ForCausalLM`` (transformers ``models/ministral3``)."""

    def rope(self, cfg: Any, layer: int) -> Rope:
        """Return the rotary embedding with the growth of queries (``Rope.query_growth``)."""
        # transformers does not read ``max_position_embeddings`` in the table of rope parameters
        rope = fields.rope(cfg, ignored=(fields.BETA, "max_position_embeddings"))
        return replace(rope, query_growth=fields.query_growth(cfg))
