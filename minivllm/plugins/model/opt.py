"""OPT (arXiv:2205.01068), with learned positions, LayerNorm and ReLU."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder, layer_norm

EPS = 1e-5  # torch's default, which the configuration of this family cannot change
FIRST = 2  # the row of position 0 in the table of positions
WANTED = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}


NAMES = WeightNames(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{i}.",
    out="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
    norms=("self_attn_layer_norm", "final_layer_norm"),
)


class OPT(ModelArch):
    """The architecture ``OPTForCausalLM``, without the two variants that project the embedding or normalize after the
    residual addition.
    """

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        wanted = {**WANTED, "word_embed_proj_dim": cfg.hidden_size}
        for name, want in wanted.items():
            value = getattr(cfg, name)
            if value != want:
                raise ModelError(f"{name}={shown(value)}: expected {want}, other values are not implemented")
        heads = cfg.num_attention_heads
        dim = cfg.hidden_size // heads
        bias = cfg.enable_bias
        attention = AttnSpec(heads, heads, dim, dim)
        activation = fields.activation(cfg, "activation_function")
        mlp = MLP(cfg.ffn_dim, activation, gated=False, bias=bias)
        layer = LayerSpec(attention, mlp, rope=None, qkv_bias=bias, out_bias=bias)
        layers = [layer] * cfg.num_hidden_layers
        positions = cfg.max_position_embeddings + FIRST
        return decoder(cfg, layers, layer_norm(EPS), positions=positions, first_position=FIRST, names=NAMES)
