"""OPT (arXiv:2205.01068), with learned positions, LayerNorm and ReLU."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, Norm, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

EPS = 1e-5  # torch's default, which the configuration of this family cannot change
FIRST = 2  # the row of position 0 in the table of positions
WANTED = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}


class OPT(ModelArch):
    """The architecture ``OPTForCausalLM``, except the sizes that project the embedding or normalize after the
    addition.
    """

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        for name, want in {**WANTED, "word_embed_proj_dim": cfg.hidden_size}.items():
            if getattr(cfg, name) != want:
                raise ModelError(
                    f"{name}={shown(getattr(cfg, name))}: expected {want}, other values are not implemented"
                )
        heads, dim = cfg.num_attention_heads, cfg.hidden_size // cfg.num_attention_heads
        layer = LayerSpec(
            AttnSpec(heads, heads, dim, dim),
            MLP(cfg.ffn_dim, fields.activation(cfg, "activation_function"), gated=False, bias=cfg.enable_bias),
            rope=None,
            qkv_bias=cfg.enable_bias,
            out_bias=cfg.enable_bias,
        )
        names = WeightNames(
            embed="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            norm="model.decoder.final_layer_norm",
            layer="model.decoder.layers.{i}.",
            out="self_attn.out_proj",
            gate_up=("fc1",),
            down="fc2",
            norms=("self_attn_layer_norm", "final_layer_norm"),
        )
        return DecoderSpec(
            cfg.vocab_size,
            cfg.hidden_size,
            (layer,) * cfg.num_hidden_layers,
            Norm(EPS, centered=True, bias=True),
            cfg.tie_word_embeddings,
            positions=cfg.max_position_embeddings + FIRST,
            first_position=FIRST,
            names=names,
        )
