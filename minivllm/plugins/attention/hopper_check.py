"""Compare the Hopper kernel with ``triton_prefill`` on this device before an engine uses it.

The kernel is written in Gluon, which has no interpreter, and it runs on one kind of GPU only.  The comparison costs a
few milliseconds of a start.  A kernel that gives other outputs, or fails, is not used.
"""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import AttnLayer, AttnSpec
from minivllm.device.kernels.ahead import rehearsing
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
    because a failure may be a lack of memory that passes.  In a rehearsal nothing is computed, and the result is "";
    both kernels are compiled at the same time then.
    """
    if (spec, dtype, block, device) in AGREED:
        return ""
    if rehearsing():
        with suppress(Exception), torch.inference_mode():  # the comparison itself reports errors
            _outputs(spec, dtype, block, device)
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
    found, want = (out.float() for out in _outputs(spec, dtype, block, device))
    norms = want.norm(dim=2)
    distance = (found - want).norm(dim=2) / norms
    return float(distance.max())


def _outputs(spec: AttnSpec, dtype: torch.dtype, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the outputs of both kernels for the same rows.  Nothing waits for the device."""
    generator = torch.Generator(device).manual_seed(0)  # numbers drawn on the host would take most of the time

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    meta, table = _meta(block, device)
    pages = 1 + int(table.max())
    shape = (pages, block, spec.kv_heads, spec.dim_qk)
    cache = {"k": drawn(*shape), "v": drawn(*shape)}
    for tensor in cache.values():
        _spoil_unused(tensor, table)
    sinks = None
    if spec.sinks:
        sinks = drawn(spec.heads).float()
    layer = AttnLayer(0, 0, spec, cache, sinks)
    q = drawn(sum(NEW), spec.heads, spec.dim_qk)
    found = torch.full_like(q, torch.nan)
    want = torch.full_like(q, torch.nan)
    kernel: Any = kernel_module()
    tiles = _tiles(spec, LINES, device)
    kernel.attend(layer, q, meta, found, None, tiles, VARIANTS[spec.dim_qk])
    lines = triton_prefill.tile_lines(spec.heads // spec.kv_heads, max(NEW))
    tiles = _tiles(spec, lines, device)
    triton_prefill.prefill(layer, q, meta, want, None, tiles)
    return found, want


def _spoil_unused(tensor: Tensor, table: np.ndarray) -> None:
    """Write NaN to the null block, and behind the end of each row, where no kernel may read."""
    tensor[0] = torch.nan  # the null block
    block = tensor.shape[1]
    for blocks, length in zip(table, ALL, strict=True):
        full, rest = divmod(length, block)
        if rest:
            tensor[blocks[full], rest:] = torch.nan


def _meta(block: int, device: torch.device) -> tuple[Any, np.ndarray]:
    """Return the fields of ``AttnMeta`` that both kernels read, and the block table [row, block] of the rows of the
    comparison on the host.
    """
    counts = [-(-length // block) for length in ALL]
    total = sum(counts)
    numbers = np.arange(1, total + 1)
    order = np.random.default_rng(0).permutation(numbers)
    ends = np.cumsum(counts)
    table = np.zeros((1, len(ALL), max(counts) + 1), np.int32)
    for row, blocks in enumerate(np.split(order, ends[:-1])):
        table[0, row, : len(blocks)] = blocks

    def put(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows = list(range(len(ALL)))
    meta = SimpleNamespace(block=block)
    meta.table = put(table)
    meta.slots = put(rows, torch.int64)
    meta.kv_len = put([ALL])
    meta.cu_q = put([0, *np.cumsum(NEW)])
    return meta, table[0]


def _tiles(spec: AttnSpec, lines: int, device: torch.device) -> triton_prefill.Tiles:
    """Return the tiles of the rows, with some empty ones at the end."""
    new = np.array(NEW, np.int32)
    length = np.array(ALL, np.int32)
    group = spec.heads // spec.kv_heads
    row, token = triton_prefill.make_tiles(new, length, 0, lines // group)
    count = torch.tensor([len(row)], dtype=torch.int32, device=device)

    def padded(values: np.ndarray, spare: int) -> Tensor:
        spares = np.full(SPARE_TILES, spare, np.int32)
        every = np.concatenate([values, spares])
        return torch.from_numpy(every).to(device)

    rows = padded(row, -1)
    tokens = padded(token, 0)
    return triton_prefill.Tiles(rows, tokens, lines, count)
