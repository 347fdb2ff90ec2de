"""Store keys and values in a floating dtype: ``k`` [block, kv_heads, dim_qk] and ``v`` [block, kv_heads, dim_v]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.core.interfaces.kvformat import KVFormat

Cache = Mapping[str, Tensor]


class Plain(KVFormat):
    """A format that casts keys and values when it stores and loads them.

    There is no ``v`` tensor if values are the first elements of keys (``v_in_k``).
    """

    def store(self, cache: Cache, k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                stored = cache[name]
                slots = stored.view(-1, *stored.shape[2:])
                slots.index_copy_(0, slot_map, x.to(stored.dtype))

    def load(self, cache: Cache, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = _gather(cache["k"], blocks, dtype)
        if "v" not in cache:
            return k, k
        return k, _gather(cache["v"], blocks, dtype)


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tokens of some blocks, [..., tokens, heads, dim]; ``blocks`` is [..., blocks of a row]."""
    gathered = cache.index_select(0, blocks.reshape(-1))
    rows = blocks.shape[:-1]
    element = cache.shape[2:]
    return gathered.view(*rows, -1, *element).to(dtype)


# ``native`` means that captured steps of a CPU can read and write the format.  Subclasses by users do not inherit it.


class Fp32(Plain):
    """float32: 4 bytes an element, exact for float32 models."""

    dtype = "float32"
    native = True


class Bf16(Plain):
    """bfloat16: 2 bytes an element, float32's range."""

    dtype = "bfloat16"
    native = True


class Fp16(Plain):
    """float16: 2 bytes an element, three bits finer than bfloat16, overflows above 65504."""

    dtype = "float16"
    native = True
