"""Adapters (LoRA): small weights that change the linear layers of a model for the rows of some requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minivllm.errors import RequestError, shown

MOST_NAME = 256  # characters


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request: a name, a positive number, and the folder that PEFT wrote.

    The fields have vLLM's names.  Requests with equal values share one adapter.  RequestError for a value of a wrong
    type."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or "\0" in value:
                raise RequestError(
                    f"LoRARequest: {field}={shown(value)}: expected text", "lora_request"
                )
        if len(self.lora_name) > MOST_NAME:
            raise RequestError(
                f"LoRARequest: lora_name has {len(self.lora_name)} characters: expected at most {MOST_NAME}",
                "lora_request",
            )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RequestError(
                f"LoRARequest: lora_int_id={shown(number)}: expected a number of at least 1",
                "lora_request",
            )


class AdapterFiles(NamedTuple):
    """The files of an adapter, as the host has checked them before they are loaded."""

    folder: str
    stamp: str  # digest of the folder's path and of the sizes and times of its files
