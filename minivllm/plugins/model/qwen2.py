"""Qwen2 and Qwen2.5 (arXiv:2407.10671), which are Llama with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from typing import Any

from minivllm.device.layers import fields
from minivllm.errors import ModelError

from .llama import Llama


class Qwen2(Llama):
    """The architecture ``Qwen2ForCausalLM``."""

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return True, False, False

    def windows(self, cfg: Any) -> list[int | None]:
        """Return the attention window of each layer, None for a layer without one.

        ``layer_types`` names the layers with a window.  Without it, these are the layers from max_window_layers on.
        """
        types = getattr(cfg, "layer_types", None)
        if types is None:
            layers = first = cfg.num_hidden_layers
            if getattr(cfg, "sliding_window", None) and getattr(cfg, "use_sliding_window", False):
                first = cfg.max_window_layers
            types = [fields.SLIDING if i >= first else fields.FULL for i in range(layers)]
        return fields.windows(cfg, types)

    def check(self, cfg: Any) -> None:
        super().check(cfg)
        if getattr(cfg, "use_mrope", False):
            raise ModelError("use_mrope=True: expected False, multimodal rotary embedding is not implemented")
