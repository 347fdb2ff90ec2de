"""Fields of a Hugging Face config: which a decoder need not read, other values for them, and who reads what; and what
transformers' model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.device.loading.overrides import BY_ENGINE, UNREAD

IGNORED = {**BY_ENGINE, **UNREAD}  # fields that no decoder here need read, and why
UNCHANGED = {"architectures", "model_type", "return_dict", "is_encoder_decoder"}  # of those, not ones to vary


def names(values: Any) -> Iterator[str]:
    """Names of fields, and of those inside of them."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from names(value)


def others(value: Any) -> list[Any]:
    """Values to try in place of one; none for what is no number."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2] if value else [1]
    return [value * 1.5 + 0.05] if isinstance(value, float) else []


def record(cfg: Any) -> set[str]:
    """The set that holds, from now on, the names of all attributes that are read of a config."""
    cls: Any = type(cfg)
    read: set[str] = set()

    def recorder(self: Any, name: str) -> Any:
        read.update((name, cls.attribute_map.get(name, name)))  # a class may have a name of its own for it
        return cls.__getattribute__(self, name)

    cfg.__class__ = type(cls.__name__, (cls,), {"__getattribute__": recorder})
    return read


def logits(hf: Any, tokens: Sequence[int]) -> Tensor:
    """float32 [tokens, V]."""
    with torch.inference_mode():
        return hf(torch.tensor([list(tokens)])).logits[0].float()


def jumps(hf: Any, tokens: Sequence[int], far: float) -> bool:
    """Whether logits move by more than ``far`` where embeddings do by some 1e-5 of themselves: two experts are nearly
    as good as each other to a router, and rounding decides."""

    def shaken(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * (1 + 1e-5 * torch.randn(out.shape, generator=generator).to(out))

    want, generator = logits(hf, tokens), torch.Generator().manual_seed(0)
    handle = hf.get_input_embeddings().register_forward_hook(shaken)
    try:
        return any(float((logits(hf, tokens) - want).abs().max()) > far for _ in range(8))
    finally:
        handle.remove()
