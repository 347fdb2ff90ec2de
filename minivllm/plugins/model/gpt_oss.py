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

from .assembly import decoder

GATE_UP, DOWN = ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"
STACKED = ExpertNames("stacked", "mlp.router", GATE_UP, DOWN, transposed=True, interleaved=True)
# names of the experts' tensors in the checkpoints on the Hugging Face hub, which are in MXFP4
PACKED = ExpertNames("packed", "mlp.router", GATE_UP, DOWN, interleaved=True, params=("blocks", "scales"))
NAMES = WeightNames(experts=(STACKED, PACKED))


class GptOss(ModelArch):
    """The architecture ``GptOssForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        router = Router(CHOSEN_SOFTMAX, bias=True)
        # limit and alpha are constants in transformers before 5.18, and fields of the configuration from then on
        limit = getattr(cfg, "swiglu_limit", 7.0)
        alpha = getattr(cfg, "swiglu_alpha", 1.702)
        width = cfg.intermediate_size
        mlp = fields.experts(cfg, width, router, activation=CLAMPED, bias=True, limit=limit, alpha=alpha)
        bias = cfg.attention_bias
        rope = fields.rope(cfg)
        layers = []
        for window in fields.windows(cfg, cfg.layer_types):
            attention = fields.attention(cfg, window, sinks=True)
            layer = LayerSpec(attention, mlp, rope, qkv_bias=bias, out_bias=bias)
            layers.append(layer)
        return decoder(cfg, layers, Norm(cfg.rms_norm_eps), names=NAMES)
