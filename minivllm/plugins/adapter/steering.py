"""Steering: add a vector to each token of a row at tap points (named places, such as the stream behind a layer).

adapter_config.json          {"peft_type": "STEERING", "scale": 4.0}     the scale is 1 by default
adapter_model.safetensors    {"layers.2.residual": [width], ...}         a vector for each point
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterMethod

from .peft_config import finite_number, refuse_other_fields

if TYPE_CHECKING:
    from .steering_memory import SteeringMemory

HINT = "a steering folder has peft_type and scale"


class Steering(AdapterMethod):
    """The adapter method that reads folders with steering vectors."""

    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        refuse_other_fields(folder, config, ("scale",), {}, HINT)
        finite_number(folder, "scale", config.get("scale", 1.0))

    def memory(self, model: AdaptedModel) -> SteeringMemory:
        from .steering_memory import SteeringMemory

        return SteeringMemory(model, self.ctx.places, self.options.points)
