"""int8 keys and values: x = scale * q, q = round(x / scale).  A scale is max |x| / 127 over the elements of a token
and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.plugin import AttnSpec, KVFormat, KVLayout, TensorSpec

SMALLEST = torch.finfo(torch.float32).tiny  # scale of a head of zeros


class MyPlugin(KVFormat):
    """A block has ``k`` and ``v`` int8 [block, kv_heads, dim], ``k_scale`` and ``v_scale`` float32 [block, kv_heads].

    The first axis is the token within the block, so that a back end may view the cache as blocks of one token.
    """

    dtype = "int8"

    def layout(self, spec: AttnSpec, block: int) -> KVLayout:
        tensors = dict(super().layout(spec, block).tensors)  # no ``v`` if values are part of the keys
        scale = TensorSpec((block, spec.kv_heads), "float32")
        for name in tuple(tensors):
            tensors[f"{name}_scale"] = scale
        return KVLayout(block, tensors)

    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                x = x.float()
                largest = x.abs().amax(dim=-1)
                scale = largest.div(127).clamp(min=SMALLEST)
                q = (x / scale[..., None]).round()
                q = q.clamp(-127, 127)
                self._put(cache[name], q, slot_map)
                self._put(cache[f"{name}_scale"], scale, slot_map)

    def _put(self, tensor: Tensor, values: Tensor, slot_map: Tensor) -> None:
        """Write the values of tokens into a tensor of the cache."""
        slots = tensor.view(-1, *tensor.shape[2:])
        slots.index_copy_(0, slot_map, values.to(tensor.dtype))

    def load(self, cache: Mapping[str, Tensor], blocks: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        k = self._take(cache, "k", blocks, dtype)
        if "v" not in cache:
            return k, k
        v = self._take(cache, "v", blocks, dtype)
        return k, v

    def _take(self, cache: Mapping[str, Tensor], name: str, blocks: Tensor, dtype: Any) -> Tensor:
        """Return the keys or values [..., n * block, kv_heads, dim] of blocks i64 [..., n]."""
        flat = blocks.reshape(-1)
        q = cache[name].index_select(0, flat)
        scale = cache[f"{name}_scale"].index_select(0, flat)
        x = q.float() * scale[..., None]
        tokens = x.to(dtype).flatten(0, 1)
        return tokens.view(*blocks.shape[:-1], -1, *tokens.shape[1:])
