"""SmolLM3 (https://huggingface.co/blog/smollm3), which is Llama without a rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import Rope
from minivllm.device.layers import fields
from minivllm.errors import ModelError

from .qwen2 import Qwen2


class SmolLM3(Qwen2):
    """The architecture ``SmolLM3ForCausalLM``."""

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return cfg.attention_bias, cfg.attention_bias, cfg.mlp_bias

    def check(self, cfg: Any) -> None:
        super().check(cfg)
        if len(cfg.no_rope_layers) != cfg.num_hidden_layers:
            raise ModelError(
                f"no_rope_layers has {len(cfg.no_rope_layers)} entries: expected "
                f"num_hidden_layers={cfg.num_hidden_layers}"
            )

    def rope(self, cfg: Any, layer: int) -> Rope | None:
        return fields.rope(cfg) if cfg.no_rope_layers[layer] else None
