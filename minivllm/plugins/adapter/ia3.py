"""IA3 (arXiv:2205.05638): each output of a linear layer, or each input, is multiplied by a factor of the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterMethod

from .peft_config import LAYERS, MERGE, refuse_other_fields

if TYPE_CHECKING:
    from .ia3_memory import IA3Memory

# fields without an effect on the weights in the file, whose shapes say whether they are factors of inputs
FIELDS = ("feedforward_modules", "init_ia3_weights", *LAYERS)


class IA3(AdapterMethod):
    """The method of PEFT's IA3 folders."""

    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        refuse_other_fields(folder, config, FIELDS, {}, f"train a plain IA3, or {MERGE}")

    def memory(self, model: AdaptedModel) -> IA3Memory:
        from .ia3_memory import IA3Memory

        return IA3Memory(model, self.ctx.places)
