"""IA3 (arXiv:2205.05638): each output of a linear layer, or each input, is multiplied by a factor of the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterMethod

from .peft_config import LAYERS, MERGE, refuse_other_fields
from .peft_targets import read_targets

if TYPE_CHECKING:
    from .ia3_memory import IA3Memory

# fields of adapter_config.json that are known; ``read_targets`` reads those of LAYERS, and the shape of a tensor shows
# whether it has factors of inputs or of outputs
FIELDS = ("feedforward_modules", "init_ia3_weights", *LAYERS)


class IA3(AdapterMethod):
    """The adapter method that reads folders written by PEFT's IA3."""

    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        read_targets(folder, config)
        refuse_other_fields(folder, config, FIELDS, {}, f"train a plain IA3, or {MERGE}")

    def memory(self, model: AdaptedModel) -> IA3Memory:
        from .ia3_memory import IA3Memory

        return IA3Memory(model, self.ctx.places)
