"""LoRA (arXiv:2106.09685): the product of two matrices of a small rank is added to the product of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterMethod

from .lora_config import padded_rank, read_settings

if TYPE_CHECKING:
    from minivllm.core.interfaces.quantizer import ModuleInfo

    from .lora_memory import LoraMemory


# Largest number of rows of A behind a part of a weight.  Each step with adapters reads all of these rows.
MOST_ROWS = 512


class LoRA(AdapterMethod):
    """The adapter method that reads folders written by PEFT's LoRA."""

    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        read_settings(folder, config, self.ctx.max_rank)

    def rows_behind(self, info: ModuleInfo) -> int:
        from .lora_memory import runs_kernels

        rows = self.ctx.places * padded_rank(self.ctx.max_rank)
        if rows > MOST_ROWS or not runs_kernels(info.device):
            return 0
        return rows * len(info.parts)

    def memory(self, model: AdaptedModel) -> LoraMemory:
        from .lora_memory import LoraMemory

        return LoraMemory(model, self.ctx.places, self.ctx.max_rank)
