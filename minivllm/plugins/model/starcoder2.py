"""StarCoder 2 (arXiv:2402.19173), with LayerNorm, biases, an MLP without a gate, and one window for all layers."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields

from .assembly import decoder, layer_norm


class Starcoder2(ModelArch):
    """The architecture ``Starcoder2ForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        bias = cfg.use_bias
        attention = fields.attention(cfg, cfg.sliding_window)
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg), gated=False, bias=bias)
        rope = fields.rope(cfg)
        layer = LayerSpec(attention, mlp, rope, qkv_bias=bias, out_bias=bias)
        layers = [layer] * cfg.num_hidden_layers
        norm = layer_norm(cfg.norm_epsilon)
        names = WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")
        return decoder(cfg, layers, norm, names=names)
