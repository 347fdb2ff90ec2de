"""Store keys and values in one byte per element, with a float32 scale for each token and head.

    k [block, kv_heads, dim_qk]  int8 or float8      k_scale [block, kv_heads]  float32
    v [block, kv_heads, dim_v]                       v_scale [block, kv_heads]

    scale = greatest magnitude of the head / greatest number of the dtype        x is read as element * scale

Each token has its own scale.  A block that is written token by token is therefore never scaled again, and the stored
bytes of a token do not depend on other tokens.  NaN and infinity make a whole head NaN, because they make its scale
NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout, TensorSpec

Cache = Mapping[str, Tensor]

SCALE = "_scale"  # suffix of the name of the scaled tensor
TINY = torch.finfo(torch.float32).tiny


class Scaled(KVFormat):
    """A format with scales.  There are no tensors of values if values are the first elements of keys (``v_in_k``)."""

    most: float  # largest number of the dtype

    def layout(self, spec: AttnSpec, block: int) -> KVLayout:
        tensors = dict(super().layout(spec, block).tensors)
        scale = TensorSpec((block, spec.kv_heads), "float32")
        for name in list(tensors):
            tensors[name + SCALE] = scale
        return KVLayout(block, tensors)

    def store(self, cache: Cache, k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                largest = x.abs().amax(-1, keepdim=True)
                scale = largest.float() / self.most
                scaled = x.float() / scale.clamp_min(TINY)
                elements = self.rounded(scaled.clamp_(-self.most, self.most))
                _put(cache[name], slot_map, elements)
                _put(cache[name + SCALE], slot_map, scale[..., 0])

    def load(self, cache: Cache, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = _gather(cache, "k", blocks, dtype)
        if "v" not in cache:
            return k, k
        return k, _gather(cache, "v", blocks, dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """Round float32 values, which must be in the range of the dtype, to the nearest values of the dtype."""
        return x.to(getattr(torch, self.dtype))


def _put(cache: Tensor, slot_map: Tensor, values: Tensor) -> None:
    """Write the values of some tokens to the cache."""
    slots = _bytes(cache).flatten(0, 1)
    slots.index_copy_(0, slot_map, _bytes(values))


def _gather(cache: Cache, name: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tokens of some blocks, with their scales applied, [..., tokens, heads, dim].

    ``blocks`` is [..., blocks of a row].
    """
    stored = cache[name]
    at = blocks.reshape(-1)
    gathered = _bytes(stored).index_select(0, at)
    elements = gathered.view(stored.dtype)
    scales = cache[name + SCALE].index_select(0, at)
    scaled = elements.float().mul_(scales[..., None])
    rows = blocks.shape[:-1]
    element = stored.shape[2:]
    return scaled.view(*rows, -1, *element).to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """Return float8 values as bytes, because torch can copy and select bytes on every device."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x


class Int8KV(Scaled):
    """int8: 1 byte per element, in steps of 1/127 of the head's greatest magnitude."""

    dtype = "int8"
    most = 127.0
    native = True

    def rounded(self, x: Tensor) -> Tensor:
        return x.round_().to(torch.int8)


class Fp8KV(Scaled):
    """float8 e4m3: 1 byte per element, with an error of at most 1/16 of its magnitude."""

    dtype = "float8_e4m3fn"
    most = 448.0
