"""GPT-OSS (arXiv:2508.10925), with experts with biases and a clamped gate, attention sinks, and a window in every other
layer.
"""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import (
    CHOSEN_SOFTMAX,
    CLAMPED,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    Norm,
    Router,
    WeightNames,
)
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields

GATE_UP, DOWN = ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"
STACKED = ExpertNames("stacked", "mlp.router", GATE_UP, DOWN, transposed=True, interleaved=True)
# the form of the experts on the hub, MXFP4
PACKED = ExpertNames("packed", "mlp.router", GATE_UP, DOWN, interleaved=True, params=("blocks", "scales"))
NAMES = WeightNames(experts=(STACKED, PACKED))


class GptOss(ModelArch):
    """The architecture ``GptOssForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        mlp = fields.experts(
            cfg,
            cfg.intermediate_size,
            Router(CHOSEN_SOFTMAX, bias=True),
            activation=CLAMPED,
            bias=True,
            limit=getattr(cfg, "swiglu_limit", 7.0),  # a constant in transformers before 5.18
            alpha=getattr(cfg, "swiglu_alpha", 1.702),
        )
        layers = [
            LayerSpec(
                fields.attention(cfg, window, sinks=True),
                mlp,
                fields.rope(cfg),
                qkv_bias=cfg.attention_bias,
                out_bias=cfg.attention_bias,
            )
            for window in fields.windows(cfg, cfg.layer_types)
        ]
        norm = Norm(cfg.rms_norm_eps)
        return DecoderSpec(cfg.vocab_size, cfg.hidden_size, tuple(layers), norm, cfg.tie_word_embeddings, names=NAMES)
