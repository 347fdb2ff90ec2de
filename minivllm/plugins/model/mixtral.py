"""Mixtral (arXiv:2401.04088), which is Mistral with a mixture of experts in place of each MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import EXPERT_NAMES, DecoderSpec, ExpertNames, Router, WeightNames
from minivllm.device.layers import fields

from .mistral import Mistral

EXPERTS = "block_sparse_moe.experts.{e}."
GATE_UP = (EXPERTS + "w1", EXPERTS + "w3")
SEPARATE = ExpertNames("one tensor each", "block_sparse_moe.gate", GATE_UP, EXPERTS + "w2")
NAMES = WeightNames(experts=(SEPARATE, EXPERT_NAMES[1]))


class Mixtral(Mistral):
    """The architecture ``MixtralForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        spec = super().describe(cfg)
        router = Router(normalize=True, rounded=False)  # the weights of a token's experts stay in float32
        mlp = fields.experts(cfg, cfg.intermediate_size, router)
        layers = [replace(layer, mlp=mlp) for layer in spec.layers]
        return replace(spec, layers=tuple(layers), names=NAMES)
