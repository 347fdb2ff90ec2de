"""LFM2 and LFM2-MoE (arXiv:2511.23404): short convolutions, with softmax attention in some of the layers.

Attention has a norm of each head of q and k.  A convolution keeps its newest inputs as the state of a sequence.
"""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import (
    HEAD,
    MLP,
    SIGMOID,
    DecoderSpec,
    ExpertNames,
    Experts,
    LayerSpec,
    Norm,
    Router,
    ShortConv,
    WeightNames,
)
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder

CONV = "conv"
GATE_UP, DOWN = ("feed_forward.w1", "feed_forward.w3"), "feed_forward.w2"
ROUTER, BIAS = "feed_forward.gate", "feed_forward.expert_bias"
EXPERT_GATE_UP = ("feed_forward.experts.{e}.w1", "feed_forward.experts.{e}.w3")
STACKED_GATE_UP = ("feed_forward.experts.gate_up_proj",)
FORMS = (
    ExpertNames("one tensor each", ROUTER, EXPERT_GATE_UP, "feed_forward.experts.{e}.w2", choice_bias=BIAS),
    ExpertNames("stacked", ROUTER, STACKED_GATE_UP, "feed_forward.experts.down_proj", choice_bias=BIAS),
)
NAMES = WeightNames(
    norm="model.embedding_norm",
    out="self_attn.out_proj",
    qk_norm=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    gate_up=GATE_UP,
    down=DOWN,
    experts=FORMS,
    norms=("operator_norm", "ffn_norm"),
)
FLOOR = 1e-6  # added to the sum of the weights of a token's experts


class Lfm2(ModelArch):
    """The architecture ``Lfm2ForCausalLM``."""

    def mlp(self, cfg: Any, layer: int) -> MLP | Experts:
        """Return the dense MLP of a layer, with the width that ``_adjusted`` computes."""
        return MLP(_adjusted(cfg))

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        rope = fields.rope(cfg)
        conv = _short_conv(cfg)
        attention = fields.attention(cfg)
        layers = []
        for i, kind in enumerate(fields.layer_types(cfg, CONV)):
            mlp = self.mlp(cfg, i)
            if kind == CONV:
                layer = LayerSpec(conv, mlp, None, out_bias=conv.bias)
            else:
                layer = LayerSpec(attention, mlp, rope, qk_norm=HEAD)
            layers.append(layer)
        return decoder(cfg, layers, Norm(cfg.norm_eps), names=NAMES)


class Lfm2Moe(Lfm2):
    """The architecture ``Lfm2MoeForCausalLM``, with a mixture of experts after the first ``num_dense_layers``
    layers.
    """

    def mlp(self, cfg: Any, layer: int) -> MLP | Experts:
        if layer < cfg.num_dense_layers:
            return MLP(cfg.intermediate_size)
        router = Router(
            SIGMOID,
            normalize=cfg.norm_topk_prob,
            floor=FLOOR,
            scale=cfg.routed_scaling_factor,
            choice_bias=cfg.use_expert_bias,
        )
        return fields.experts(cfg, cfg.moe_intermediate_size, router, activation="silu")


def _adjusted(cfg: Any) -> int:
    """Return the width of the MLP: two thirds of ``intermediate_size`` times ``block_ffn_dim_multiplier``, rounded up
    to a multiple of ``block_multiple_of``.

    If ``block_auto_adjust_ff_dim`` is false, it is ``intermediate_size`` itself.  Raise ModelError for a multiple below
    1.
    """
    if not cfg.block_auto_adjust_ff_dim:
        return cfg.intermediate_size
    inner, multiple = int(2 * cfg.intermediate_size / 3), cfg.block_multiple_of
    if cfg.block_ffn_dim_multiplier is None:
        return inner
    if type(multiple) is not int or multiple < 1:
        raise ModelError(f"block_multiple_of={shown(multiple)}: expected a whole number >= 1")
    inner = int(cfg.block_ffn_dim_multiplier * inner)
    return multiple * -(-inner // multiple)


def _short_conv(cfg: Any) -> ShortConv:
    """Return the convolution of all layers of type "conv".  Raise ModelError if ``conv_L_cache``, its width, is below
    1.
    """
    width = cfg.conv_L_cache
    if type(width) is not int or width < 1:
        raise ModelError(f"conv_L_cache={shown(width)}: expected a whole number >= 1")
    return ShortConv(cfg.hidden_size, width, bool(cfg.conv_bias))
