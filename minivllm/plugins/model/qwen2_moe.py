"""Qwen2-MoE and Qwen1.5-MoE (arXiv:2407.10671), which are Qwen2 with a mixture of experts and a gated shared MLP in
some or all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import MLP, Experts
from minivllm.device.layers import fields

from .qwen3_moe import SparseLayers


class Qwen2Moe(SparseLayers):
    """The architecture ``Qwen2MoeForCausalLM``."""

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return cfg.qkv_bias, False, False

    def windows(self, cfg: Any) -> list[int | None]:
        return fields.windows(cfg, cfg.layer_types)

    def experts(self, cfg: Any) -> Experts:
        shared = MLP(cfg.shared_expert_intermediate_size, fields.activation(cfg))
        return replace(super().experts(cfg), shared=shared, shared_gate=True)
