"""What the models of a configuration have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from minivllm.errors import ConfigError
from minivllm.validation import FieldFault, faults


def refusal(found: Sequence[FieldFault]) -> ConfigError:
    """The error, which carries the faults, so that who knows where the values came from can say so."""
    error = ConfigError("; ".join(fault.text for fault in found))
    error.faults = tuple(found)
    return error


class Strict(BaseModel):
    """Unknown keys are refused, nothing is converted silently, and a fault is a ConfigError."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise refusal(faults(exc, type(self), values)) from exc
