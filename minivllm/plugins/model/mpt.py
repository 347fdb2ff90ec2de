"""MPT (MosaicML 2023), with ALiBi, LayerNorm without biases, and one matrix for q, k and v."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder, layer_norm

NAMES = WeightNames(
    embed="transformer.wte",
    norm="transformer.norm_f",
    layer="transformer.blocks.{i}.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    gate_up=("ffn.up_proj",),
    down="ffn.down_proj",
    norms=("norm_1", "norm_2"),
)
# fields for which transformers implements only this value
WANTED = {"no_bias": True, "expansion_ratio": 4, "logit_scale": None}
WANTED_OF_ATTENTION = {
    "attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8, "qk_ln": False, "prefix_lm": False,
}  # fmt: skip


class Mpt(ModelArch):
    """The architecture ``MptForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        attn = cfg.attn_config
        _check_fixed(cfg, "", WANTED)
        _check_fixed(attn, "attn_config.", WANTED_OF_ATTENTION)
        for name in ("softmax_scale", "clip_qkv"):
            value = getattr(attn, name)
            if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
                raise ModelError(f"attn_config.{name}={shown(value)}: expected a positive number, or null")
        heads = cfg.num_attention_heads
        dim = fields.even_share(cfg, "d_model", "n_heads", heads)
        attention = AttnSpec(heads, heads, dim, dim, scale=attn.softmax_scale, alibi=fields.alibi(heads))
        mlp = MLP(4 * cfg.hidden_size, "gelu", gated=False)
        layer = LayerSpec(attention, mlp, rope=None, qkv_clip=attn.clip_qkv or None)
        layers = [layer] * cfg.num_hidden_layers
        norm = layer_norm(cfg.layer_norm_epsilon, bias=False)
        return decoder(cfg, layers, norm, names=NAMES)


def _check_fixed(part: Any, prefix: str, wanted: Mapping[str, Any]) -> None:
    """Raise ModelError if a field of a configuration differs from the only value that is implemented.

    ``prefix`` comes before the name of the field in the message.
    """
    for name, want in wanted.items():
        value = getattr(part, name)
        if value != want:
            raise ModelError(f"{prefix}{name}={shown(value)}: expected {want}, no other value is implemented")
