"""Functions on Hugging Face configs and models for the suite of models.

They find config fields that are read or may be ignored, give other values to test, and compute the logits of a model
of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.device.loading.overrides import BY_ENGINE, UNREAD

IGNORED = {**BY_ENGINE, **UNREAD}  # config fields that no model needs to read -> the reason
# config fields whose value the tests do not change
UNCHANGED = {"architectures", "model_type", "return_dict", "is_encoder_decoder"}


def field_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of fields, and of the fields nested in their values."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from field_names(value)


def other_values(value: Any) -> list[Any]:
    """Return values to test in place of a number or a switch; empty for a value of another type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if value:
            return [value + 1, value * 2]
        return [1]
    if isinstance(value, float):
        return [value * 1.5 + 0.05]
    return []


def record_reads(cfg: Any) -> set[str]:
    """Return a set to which, from now on, the name of each attribute of a config is added when code reads it."""
    cls: Any = type(cfg)
    read: set[str] = set()

    def recorder(self: Any, name: str) -> Any:
        read.update((name, cls.attribute_map.get(name, name)))  # the class may store the attribute under another name
        return cls.__getattribute__(self, name)

    cfg.__class__ = type(cls.__name__, (cls,), {"__getattribute__": recorder})
    return read


def logits(hf: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits that a model of transformers computes, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        output = hf(torch.tensor([list(tokens)]))
        return output.logits[0].float()


def largest(difference: Tensor) -> float:
    """Return the largest absolute value of a tensor."""
    return float(difference.abs().max())


def tolerance_of(want: Tensor, half: Tensor | None) -> float:
    """Return the largest allowed difference of a logit from ``want``.

    ``half`` has the logits that transformers computes in half precision, and None means float32.
    """
    if half is None:
        return max(1e-4, 2e-5 * largest(want))
    return 4 * largest(half - want) + 1e-3


def unstable(hf: Any, tokens: Sequence[int], limit: float) -> bool:
    """Return whether logits move by more than ``limit`` when noise of 1e-5 of their size is added to the embeddings.

    Then two experts are nearly equal to a router, and rounding decides between them.
    """
    generator = torch.Generator().manual_seed(0)

    def add_noise(module: Any, args: Any, out: Tensor) -> Tensor:
        noise = torch.randn(out.shape, generator=generator).to(out)
        return out * (1 + 1e-5 * noise)

    want = logits(hf, tokens)
    handle = hf.get_input_embeddings().register_forward_hook(add_noise)
    try:
        return any(largest(logits(hf, tokens) - want) > limit for _ in range(8))
    finally:
        handle.remove()
