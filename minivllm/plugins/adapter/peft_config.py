"""The fields that adapter_config.json has for every method of PEFT.  No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from minivllm.core.interfaces.adapter import adapter_refusal
from minivllm.errors import brief, shown

# fields of adapter_config.json that only describe the adapter and have no effect
DESCRIPTIVE = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision", "task_type",
}  # fmt: skip
# fields of adapter_config.json that choose modules (``peft_targets``), and one that need not be read, because shapes
# show the order of dimensions
LAYERS = ("exclude_modules", "fan_in_fan_out", "target_modules")
MERGE = "merge the adapter into the weights"


def refuse_other_fields(
    folder: str, config: Mapping[str, Any], fields: Collection[str], hints: Mapping[str, str], hint: str
) -> None:
    """Raise RequestError for a field with an effect that is not implemented.

    ``fields`` are read, or have no effect.  ``hints`` says for a field what to do instead; ``hint`` is the default."""
    for name, value in config.items():
        if not value or name in fields or name in DESCRIPTIVE:
            continue
        what = f"{brief(name, 80)}={shown(value)} is not implemented"
        raise adapter_refusal(folder, f"{what}: {hints.get(name, hint)}")


def finite_number(folder: str, name: str, value: Any) -> float:
    """Return the value of a field.  RequestError for another value than a finite number."""
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not right or not math.isfinite(value):
        raise adapter_refusal(folder, f"{name}={shown(value)}: expected a finite number")
    return float(value)
