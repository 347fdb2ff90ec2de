"""Qwen3-MoE (arXiv:2505.09388), which is Qwen3 with a mixture of experts in place of the MLP of some or all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import HEAD, DecoderSpec, Experts, Router
from minivllm.device.layers import fields

from .qwen2 import Qwen2


class SparseLayers(Qwen2):
    """Qwen2 in which ``decoder_sparse_step`` and ``mlp_only_layers`` select the layers with experts."""

    def experts(self, cfg: Any) -> Experts:
        return fields.experts(cfg, cfg.moe_intermediate_size, Router(normalize=cfg.norm_topk_prob))

    def describe(self, cfg: Any) -> DecoderSpec:
        spec = super().describe(cfg)
        sparse = fields.sparse_layers(cfg)
        layers = list(spec.layers)
        for i, layer in enumerate(spec.layers):
            if sparse[i]:
                layers[i] = replace(layer, mlp=self.experts(cfg))
        return replace(spec, layers=tuple(layers))


class Qwen3Moe(SparseLayers):
    """The architecture ``Qwen3MoeForCausalLM``."""

    qk_norm = HEAD

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return cfg.attention_bias, cfg.attention_bias, False

    def windows(self, cfg: Any) -> list[int | None]:
        return fields.windows(cfg, fields.all_alike(cfg))
