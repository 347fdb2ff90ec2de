"""The base class of the configuration models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from minivllm.errors import ConfigError
from minivllm.validation import FieldFault, faults


def refusal(found: Sequence[FieldFault]) -> ConfigError:
    """Return a ConfigError that carries its faults, so that the caller can add the source of each value."""
    error = ConfigError("; ".join(fault.text for fault in found))
    error.faults = tuple(found)
    return error


def refuse(path: str, text: str) -> NoReturn:
    """Raise a ConfigError with one fault: the dotted path of the wrong value, and the message."""
    raise refusal([FieldFault(path, text)])


class Strict(BaseModel):
    """A model that refuses unknown keys and converts nothing silently.  An error is a ConfigError."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def __init__(self, **values: Any) -> None:
        """Validate the values."""
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise refusal(faults(exc, type(self), values)) from exc
