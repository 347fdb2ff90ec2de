"""Qwen3.5, its mixture of experts, and Qwen3-Next, with three gated delta nets for each layer of softmax attention.

Attention has a gate for each query head, a norm of each head of q and k, and a rotary embedding of a part of a head.
Norms store their difference from 1, except the gated norm of the delta nets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import (
    HEAD,
    MLP,
    DecoderSpec,
    DeltaNames,
    Experts,
    GatedDelta,
    LayerSpec,
    Norm,
    Router,
    WeightNames,
)
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder

LINEAR = "linear_attention"


QKVZ = ("linear_attn.in_proj_qkvz", ("q", "k", "v", "z"))
BA = ("linear_attn.in_proj_ba", ("b", "a"))
NEXT_NAMES = WeightNames(delta=DeltaNames(mixed=(QKVZ, BA), grouped=True))


class Qwen35(ModelArch):
    """The architecture ``Qwen3_5ForCausalLM``."""

    def mlp(self, cfg: Any, layer: int) -> MLP | Experts:
        """Return the dense MLP of a layer."""
        return MLP(cfg.intermediate_size, fields.activation(cfg))

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        rope = fields.rope(cfg, partial=True)
        delta = _delta_net(cfg)
        attention = fields.attention(cfg)
        bias = cfg.attention_bias
        layers = []
        for i, kind in enumerate(fields.layer_types(cfg, LINEAR)):
            mlp = self.mlp(cfg, i)
            if kind == LINEAR:
                layer = LayerSpec(delta, mlp, None)
            else:
                layer = LayerSpec(attention, mlp, rope, qk_norm=HEAD, qkv_bias=bias, out_bias=bias, gated=True)
            layers.append(layer)
        norm = Norm(cfg.rms_norm_eps, offset=1.0)
        return decoder(cfg, layers, norm)


class Qwen35Moe(Qwen35):
    """The architecture ``Qwen3_5MoeForCausalLM``, with a mixture of experts and a gated shared expert in each layer."""

    def mlp(self, cfg: Any, layer: int) -> MLP | Experts:
        return _experts(cfg, Router(normalize=True))


class Qwen3Next(Qwen35):
    """The architecture ``Qwen3NextForCausalLM``, whose delta nets have two matrices with rows in the order of key
    heads.
    """

    def mlp(self, cfg: Any, layer: int) -> MLP | Experts:
        dense = super().mlp(cfg, layer)
        sparse = fields.sparse_layers(cfg)[layer]
        return _experts(cfg, Router(normalize=cfg.norm_topk_prob)) if sparse else dense

    def describe(self, cfg: Any) -> DecoderSpec:
        spec = super().describe(cfg)
        return replace(spec, names=NEXT_NAMES)


def _experts(cfg: Any, router: Router) -> Experts:
    """Return the experts of a layer, including the shared expert."""
    shared = MLP(cfg.shared_expert_intermediate_size, fields.activation(cfg))
    return fields.experts(cfg, cfg.moe_intermediate_size, router, shared=shared, shared_gate=True)


def _delta_net(cfg: Any) -> GatedDelta:
    """Return the gated delta net of all linear layers.  ModelError for sizes that are not possible."""
    sizes = []
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
        value = getattr(cfg, f"linear_{name}")
        if type(value) is not int or value < 1:
            raise ModelError(f"linear_{name}={shown(value)}: expected a whole number >= 1")
        sizes.append(value)
    key_heads, value_heads, key_dim, value_dim, width = sizes
    if value_heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads={value_heads}: expected a multiple of linear_num_key_heads={key_heads}"
        )
    if fields.activation(cfg) != "silu":
        raise ModelError(
            f"hidden_act={shown(cfg.hidden_act)}: expected 'silu', the convolution supports no other activation"
        )
    return GatedDelta(key_heads, value_heads, key_dim, value_dim, width, cfg.rms_norm_eps)
