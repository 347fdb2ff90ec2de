"""Keys and values as they are, in one floating dtype: ``k`` [block, kv_heads, dim_qk] and ``v`` [.., dim_v]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.core.interfaces.kvformat import KVFormat


class Plain(KVFormat):
    """Casts on the way in and out.  Where values are the head of the key (``v_in_k``) there is no ``v`` tensor."""

    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                t = cache[name]
                t.view(-1, *t.shape[2:]).index_copy_(0, slot_map, x.to(t.dtype))

    def load(self, cache: Mapping[str, Tensor], blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = _take(cache["k"], blocks, dtype)
        return k, _take(cache["v"], blocks, dtype) if "v" in cache else k


def _take(t: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return t.index_select(0, blocks.reshape(-1)).view(*blocks.shape[:-1], -1, *t.shape[2:]).to(dtype)


# ``native``: captured steps of a CPU read and write what lies in these formats; not so of classes made of them.


class Fp32(Plain):
    """float32: 4 bytes an element, exact for float32 models."""

    dtype, native = "float32", True


class Bf16(Plain):
    """bfloat16: 2 bytes an element, float32's range."""

    dtype, native = "bfloat16", True


class Fp16(Plain):
    """float16: 2 bytes an element, three bits finer than bfloat16, overflows above 65504."""

    dtype, native = "float16", True
