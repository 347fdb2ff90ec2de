"""LoRA (arXiv:2106.09685): the product of two matrices of a small rank is added to the product of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterMethod

from .lora_config import read_settings

if TYPE_CHECKING:
    from .lora_memory import LoraMemory


class LoRA(AdapterMethod):
    """The adapter method that reads folders written by PEFT's LoRA."""

    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        read_settings(folder, config, self.ctx.max_rank)

    def memory(self, model: AdaptedModel) -> LoraMemory:
        from .lora_memory import LoraMemory

        return LoraMemory(model, self.ctx.places, self.ctx.max_rank)
