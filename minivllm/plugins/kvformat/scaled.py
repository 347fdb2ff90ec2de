"""Keys and values of one byte an element, with a float32 scale for each token and head.

    k [block, kv_heads, dim_qk]  int8 or float8      k_scale [block, kv_heads]  float32
    v [block, kv_heads, dim_v]                       v_scale [block, kv_heads]

    scale = greatest magnitude of the head / the dtype's greatest number         x is read as element * scale

A scale is of one token, so a block that is written token by token is never scaled anew, and what is stored of a token
does not depend on its neighbours.  NaN and infinity make a head NaN, by its scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout, TensorSpec

SCALE = "_scale"  # behind the name of the tensor that is scaled
TINY = torch.finfo(torch.float32).tiny


class Scaled(KVFormat):
    """Where values are the head of the key (``v_in_k``) there are no tensors of values."""

    most: float  # the dtype's greatest number

    def layout(self, spec: AttnSpec, block: int) -> KVLayout:
        plain = super().layout(spec, block).tensors
        scales = {name + SCALE: TensorSpec((block, spec.kv_heads), "float32") for name in plain}
        return KVLayout(block, {**plain, **scales})

    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                scale = (x.abs().amax(-1).float() / self.most)[..., None]
                scaled = (x.float() / scale.clamp_min(TINY)).clamp_(-self.most, self.most)
                for to, values in ((name, self.rounded(scaled)), (name + SCALE, scale[..., 0])):
                    _bytes(cache[to]).flatten(0, 1).index_copy_(0, slot_map, _bytes(values))

    def load(self, cache: Mapping[str, Tensor], blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = self._take(cache, "k", blocks, dtype)
        return k, self._take(cache, "v", blocks, dtype) if "v" in cache else k

    def rounded(self, x: Tensor) -> Tensor:
        """Round float32 values, which must be in the range of the dtype, to its nearest values."""
        return x.to(getattr(torch, self.dtype))

    def _take(self, cache: Mapping[str, Tensor], name: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        at, shape = blocks.reshape(-1), (*blocks.shape[:-1], -1)
        elements = _bytes(cache[name]).index_select(0, at).view(cache[name].dtype).float()
        scales = cache[name + SCALE].index_select(0, at)[..., None]
        return elements.mul_(scales).view(*shape, *cache[name].shape[2:]).to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """Return float8 values as bytes, because torch can copy and select bytes on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


class Int8KV(Scaled):
    """int8: 1 byte an element, steps of 1/127 of the head's greatest magnitude."""

    dtype, most, native = "int8", 127.0, True

    def rounded(self, x: Tensor) -> Tensor:
        return x.round_().to(torch.int8)


class Fp8KV(Scaled):
    """float8 e4m3: 1 byte an element, each within 1/16 of its own magnitude."""

    dtype, most = "float8_e4m3fn", 448.0
