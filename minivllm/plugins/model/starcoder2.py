"""StarCoder 2 (arXiv:2402.19173), with LayerNorm, biases, an MLP without a gate, and one window for all layers."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, Norm, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields


class Starcoder2(ModelArch):
    """The architecture ``Starcoder2ForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        layer = LayerSpec(
            fields.attention(cfg, cfg.sliding_window),
            MLP(cfg.intermediate_size, fields.activation(cfg), gated=False, bias=cfg.use_bias),
            fields.rope(cfg),
            qkv_bias=cfg.use_bias,
            out_bias=cfg.use_bias,
        )
        return DecoderSpec(
            cfg.vocab_size,
            cfg.hidden_size,
            (layer,) * cfg.num_hidden_layers,
            Norm(cfg.norm_epsilon, centered=True, bias=True),
            cfg.tie_word_embeddings,
            names=WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        )
