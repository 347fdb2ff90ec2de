"""Compute the layout of the KV cache's tensors, and allocate them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttentionBackend
from minivllm.core.interfaces.kvformat import KVLayout
from minivllm.errors import PluginError, from_file, shown


def layouts_of(backend: AttentionBackend, layers: Sequence[Any], fmt: Any, block: int) -> list[KVLayout]:
    """Return the back end's layout of blocks of ``block`` tokens for each layer.  PluginError if one is no KVLayout."""
    found = [backend.layout(layer.spec, fmt, block) for layer in layers]
    if wrong := [one for one in found if not isinstance(one, KVLayout)]:
        who = f"attention {type(backend).__name__}{from_file(backend)}"
        raise PluginError(f"{who}: layout() gave {shown(wrong[0])}; expected a KVLayout")
    return found


Cache = dict[str, torch.Tensor]  # tensors of the KV cache of a layer, by name


def allocate(
    layers: Sequence[Any],
    layouts: Sequence[Any],
    groups: Sequence[Sequence[int]],
    blocks: Sequence[int],
    device: torch.device,
) -> list[list[Cache]]:
    """Allocate the KV blocks of each layer and return them as [group][layer of the group][tensor's name].

    The memory is zeroed, so that a slot without a token holds no NaN.
    """
    found = []
    for group, n in zip(groups, blocks, strict=True):
        caches = []
        for i in group:
            cache: Cache = {}
            for name, tensor in layouts[i].tensors.items():
                dtype = getattr(torch, tensor.dtype)
                shape = (n, *tensor.shape)
                cache[name] = zeros(shape, dtype, device)
            layers[i].cache = cache
            caches.append(cache)
        found.append(caches)
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros.  On a CPU the operating system provides the memory page by page, at the first write."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(size, np.uint8)
    except ValueError as e:  # the size exceeds the largest size of a numpy array
        raise MemoryError(str(e)) from e
    return torch.from_numpy(memory).view(dtype).reshape(shape)
