"""Compare the Hopper kernel with ``triton_prefill`` on this device before an engine uses it.

The kernel is written in Gluon, which has no interpreter, and it runs on one kind of GPU only.  The comparison costs a
few milliseconds of a start.  A kernel that gives other outputs, or fails, is not used.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import AttnLayer, AttnSpec
from minivllm.errors import describe_error

from . import triton_prefill
from .hopper_choice import LINES, VARIANTS, kernel_module

# new tokens and all tokens of the rows: whole prompts, prompts behind a prefix, and lengths near multiples of a tile
NEW, ALL = (700, 129, 300, 33), (700, 129, 1500, 1065)
FAR = 0.05  # largest accepted distance of a token's output, relative to its norm; rounding gives 0.004
SPARE_TILES = 7  # unused tiles at the end of the tables, as in a captured step


# shapes for which both kernels agreed in this process
AGREED: set[tuple[AttnSpec, torch.dtype, int, torch.device]] = set()


def disagreement(spec: AttnSpec, dtype: torch.dtype, block: int, device: torch.device) -> str:
    """Return why the Hopper kernel must not be used for layers of this shape, "" if it agrees with ``triton_prefill``.

    ``dtype`` is that of queries, keys and values.  The call waits for the device.  Only agreement is remembered,
    because a failure may be a lack of memory that passes."""
    if (spec, dtype, block, device) in AGREED:
        return ""
    try:
        with torch.inference_mode():
            far = _distance(spec, dtype, block, device)
    except Exception as e:  # the compiler and the driver raise errors of many types
        return f"it fails on this device: {describe_error(as_exception(e))}"
    if not far <= FAR:
        return f"it disagrees with the other kernel on this device: distance {far:.3g}, expected at most {FAR}"
    AGREED.add((spec, dtype, block, device))
    return ""


def _distance(spec: AttnSpec, dtype: torch.dtype, block: int, device: torch.device) -> float:
    """Return the largest relative distance between the outputs of both kernels for a token; NaN for NaN."""
    generator = torch.Generator(device).manual_seed(0)  # numbers drawn on the host would take most of the time

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    meta, pages = _meta(block, device)
    cache = {name: drawn(pages, block, spec.kv_heads, spec.dim_qk) for name in ("k", "v")}
    for tensor in cache.values():
        tensor[0] = torch.nan  # the null block
        for blocks, length in zip(meta.table[0].tolist(), ALL, strict=True):
            if length % block:
                tensor[blocks[length // block], length % block :] = torch.nan
    sinks = drawn(spec.heads).float() if spec.sinks else None
    layer = AttnLayer(0, 0, spec, cache, sinks)
    q = drawn(sum(NEW), spec.heads, spec.dim_qk)
    found, want = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    kernel: Any = kernel_module()
    kernel.attend(layer, q, meta, found, None, _tiles(spec, LINES, device), VARIANTS[spec.dim_qk])
    lines = triton_prefill.tile_lines(spec.heads // spec.kv_heads, max(NEW))
    triton_prefill.prefill(layer, q, meta, want, None, _tiles(spec, lines, device))
    distance = (found.float() - want.float()).norm(dim=2) / want.float().norm(dim=2)
    return float(distance.max())


def _meta(block: int, device: torch.device) -> tuple[Any, int]:
    """Return the fields of ``AttnMeta`` that both kernels read, for the rows of the comparison, and the number of cache
    blocks.
    """
    counts = [-(-length // block) for length in ALL]
    order = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1))
    table = np.zeros((1, len(ALL), max(counts) + 1), np.int32)
    for row, blocks in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        table[0, row, : len(blocks)] = blocks

    def put(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    starts = np.concatenate([[0], np.cumsum(NEW)])
    slots = put(list(range(len(ALL))), torch.int64)
    meta = SimpleNamespace(table=put(table), slots=slots, kv_len=put([ALL]), cu_q=put(starts), block=block)
    return meta, 1 + sum(counts)


def _tiles(spec: AttnSpec, lines: int, device: torch.device) -> triton_prefill.Tiles:
    """Return the tiles of the rows, with some empty ones at the end."""
    lengths = np.array(NEW, np.int32), np.array(ALL, np.int32)
    row, token = triton_prefill.make_tiles(*lengths, 0, lines // (spec.heads // spec.kv_heads))
    count = torch.tensor([len(row)], dtype=torch.int32, device=device)
    row = np.concatenate([row, np.full(SPARE_TILES, -1, np.int32)])
    token = np.concatenate([token, np.zeros(SPARE_TILES, np.int32)])
    return triton_prefill.Tiles(torch.from_numpy(row).to(device), torch.from_numpy(token).to(device), lines, count)
