"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on q, k and v, and sliding windows if asked."""

from __future__ import annotations

from typing import Any

from minivllm.errors import ModelError, shown

from .llama import Llama


class Qwen2(Llama):
    """``Qwen2ForCausalLM``."""

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return True, False, False

    def windows(self, cfg: Any) -> list[int | None]:
        """``layer_types`` says which layers have the window; without it they are those from max_window_layers on."""
        layers, window = cfg.num_hidden_layers, getattr(cfg, "sliding_window", None)
        types = getattr(cfg, "layer_types", None)
        if types is None:
            first = cfg.max_window_layers if window and getattr(cfg, "use_sliding_window", False) else layers
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        if len(types) != layers:
            raise ModelError(f"layer_types has {len(types)} entries: want num_hidden_layers={layers}")
        wrong = sorted(set(types) - {"full_attention", "sliding_attention"})
        if wrong:
            raise ModelError(f"layer_types has {shown(wrong[0])}: want 'full_attention' or 'sliding_attention'")
        if "sliding_attention" in types and (not isinstance(window, int) or window < 1):
            raise ModelError(
                f"sliding_window={shown(window)} while layer_types has sliding_attention: want a whole number >= 1"
            )
        return [window if kind == "sliding_attention" else None for kind in types]

    def check(self, cfg: Any) -> None:
        super().check(cfg)
        if getattr(cfg, "use_mrope", False):
            raise ModelError("use_mrope=True: want False, multimodal rotary embedding is not implemented")
