"""Low-rank products of adapters: y[t] += h[t] B[place of t]^T, with h = x A[place of t]^T of a kernel before.

    few rows     inside the product (``products.Product``), behind the sums over the inputs
    more rows    ``add_rows`` behind the product, or ``gated_rows`` together with the gate of an MLP

Each kernel multiplies [h of the first adapter | h of the second ...] and [B | B ...]^T.  A token has one adapter, so
its row is zero in the columns of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import NUMBER, activate
from .launch import kernel, pdl, wait

COLUMNS = 128  # columns of h and B that are multiplied at a time in steps of few tokens
FEW = 1024  # tokens of such steps, whose tiles have rows of several adapters; tiles of longer steps mostly have one
# (tokens, outputs) of a tile, and warps
ADDED_TILES = {True: (32, 64, 4), False: (64, 128, 4)}
GATED_TILES = {True: (32, 64, 8), False: (64, 64, 4)}


class LowRankRows(NamedTuple):
    """The low-rank products of the rows of a step.

    The kernel that writes ``inner`` is launched directly before the product that reads it, and waits for x before it
    allows the product to start."""

    inner: Tensor  # f32 [splits, parts, T, width]; only rows with an adapter are set
    b: Tensor  # [places, out, width]
    starts: tuple[int, ...]  # first output of each part, at most three
    slots: Tensor  # i32 [T] number of each token's adapter among those of the step, -1 for none
    present: Tensor  # i32 [places] place of each adapter of the step
    count: Tensor  # i32 [1] adapters of the step


@triton.jit
def adapter_columns(b, present, count, j0, outputs, stop, b_place, W: tl.constexpr, G: tl.constexpr):
    """Return B [outputs, G * W] of the adapters [j0, j0 + G) of the step, 0 behind the last."""
    j = j0 + tl.arange(0, G)
    place = tl.load(present + j, mask=j < count, other=0)
    at = b + tl.cast(place, tl.int64)[None, :, None] * b_place + outputs.to(tl.int64)[:, None, None] * W
    there = (outputs < stop)[:, None, None] & (j < count)[None, :, None]
    found = tl.load(at + tl.arange(0, W)[None, None, :], mask=there, other=0.0)
    return tl.reshape(found, (outputs.shape[0], G * W))


@triton.jit
def inner_rows(inner, part, rows, M, PARTS: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr):
    """Return h f32 [rows, W] of a part, summed over the splits."""
    at = inner + (part * M + rows)[:, None] * W + tl.arange(0, W)[None, :]
    total = tl.zeros((rows.shape[0], W), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(at + split * PARTS * M * W, mask=(rows < M)[:, None], other=0.0)
    return total


@triton.jit
def add_columns(acc, h, slots, columns, j0, W: tl.constexpr, G: tl.constexpr, IEEE: tl.constexpr):
    """Return acc [outputs, rows] plus the products of B [outputs, G * W] and h [rows, W] of the adapters from j0."""
    mine = slots[:, None, None] == (j0 + tl.arange(0, G))[None, :, None]
    wide = tl.reshape(tl.where(mine, h[:, None, :], 0.0), (h.shape[0], G * W)).to(columns.dtype)
    return tl.dot(columns, tl.trans(wide), acc, input_precision="ieee" if IEEE else "tf32")


@triton.jit
def _added(h, slots, b, present, count, outputs, stop, b_place, first, last, W: tl.constexpr, G: tl.constexpr,
           IEEE: tl.constexpr):  # fmt: skip
    """Return the products f32 [rows, outputs] of h [rows, W] and B of the adapters [first, last] of the step."""
    total = tl.zeros((h.shape[0], outputs.shape[0]), tl.float32)
    for j in range(first, last + 1, G):
        columns = adapter_columns(b, present, count, j, outputs, stop, b_place, W, G)
        mine = slots[:, None, None] == (j + tl.arange(0, G))[None, :, None]
        wide = tl.reshape(tl.where(mine, h[:, None, :], 0.0), (h.shape[0], G * W)).to(columns.dtype)
        total = tl.dot(wide, tl.trans(columns), total, input_precision="ieee" if IEEE else "tf32")
    return total


@kernel("T", "slots", "present", "count")
def _add_rows(
    y, out, inner, b, slots, present, count, b_place, T, N, y_row,
    OF: tl.constexpr, W: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr, START_1: tl.constexpr,
    START_2: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    rows, outputs = tile * BT + tl.arange(0, BT), block * BN + tl.arange(0, BN)
    slot = tl.load(slots + rows, mask=rows < T, other=-1)
    last = tl.max(slot, 0)
    if GATED == 0 and last < 0:
        return
    first = tl.min(tl.where(slot < 0, 1 << 30, slot), 0)
    adapters = tl.load(count)
    there = (rows < T)[:, None] & (outputs < N)[None, :]
    at = y + rows.to(tl.int64)[:, None] * y_row + outputs[None, :]
    old = tl.load(at, mask=there, other=0.0)
    dtype: tl.constexpr = y.dtype.element_ty
    if GATED:
        old_up = tl.load(at + N, mask=there, other=0.0)
        h = inner_rows(inner, 0, rows, T, OF, W, SPLITS)
        gate = old.to(tl.float32)
        gate += _added(h, slot, b, present, adapters, outputs, N, b_place, first, last, W, G, IEEE)
        h = inner_rows(inner, 1, rows, T, OF, W, SPLITS)
        up = old_up.to(tl.float32)
        up += _added(h, slot, b + N * W, present, adapters, outputs, N, b_place, first, last, W, G, IEEE)
        found = activate(gate.to(dtype).to(tl.float32), ACT) * up.to(dtype).to(tl.float32)
        tl.store(out + rows.to(tl.int64)[:, None] * N + outputs[None, :], found.to(dtype), mask=there)
    else:
        of = (block * BN >= START_1).to(tl.int32) + (block * BN >= START_2).to(tl.int32)
        h = inner_rows(inner, of, rows, T, OF, W, SPLITS)
        found = _added(h, slot, b, present, adapters, outputs, N, b_place, first, last, W, G, IEEE)
        tl.store(at, (old.to(tl.float32) + found).to(dtype), mask=there & (slot >= 0)[:, None])


def fits_rows(starts: tuple[int, ...]) -> bool:
    """Return whether parts that begin at the outputs ``starts`` consist of whole tiles of ``add_rows``."""
    return len(starts) <= 3 and all(start % bn == 0 for start in starts for _, bn, _ in ADDED_TILES.values())


def add_rows(y: Tensor, low: LowRankRows) -> Tensor:
    """Add low-rank products to y [T, out] in place, and return y.  Parts must fit (``fits_rows``)."""
    starts = (*low.starts, y.shape[1], y.shape[1])
    _launch(y, y, low, y.shape[1], ADDED_TILES, dict(START_1=starts[1], START_2=starts[2], GATED=False, ACT=0))
    return y


def gated_rows(y: Tensor, low: LowRankRows, activation: str) -> Tensor:
    """Return activation(gate) * up [T, n] of y [T, 2 n] = gate | up plus low-rank products of the same two parts."""
    n = y.shape[1] // 2
    out = torch.empty((y.shape[0], n), dtype=y.dtype, device=y.device)
    _launch(y, out, low, n, GATED_TILES, dict(START_1=n, START_2=n, GATED=True, ACT=NUMBER[activation]))
    return out


def _launch(y: Tensor, out: Tensor, low: LowRankRows, n: int, tiles: Any, mode: dict[str, Any]) -> None:
    """Launch the kernel for ``n`` outputs of each row."""
    few = len(y) <= FEW
    bt, bn, warps = tiles[few]
    splits, parts, tokens, width = low.inner.shape
    sizes = dict(OF=parts, W=width, G=max(1, COLUMNS // width) if few else 1, SPLITS=splits, BT=bt, BN=bn)
    options = dict(IEEE=y.dtype == torch.float32, num_warps=warps, **pdl(y))
    tensors = low.inner, low.b, low.slots, low.present, low.count
    grid = triton.cdiv(n, bn), triton.cdiv(tokens, bt)
    _add_rows[grid](y, out, *tensors, low.b.stride(0), tokens, n, y.stride(0), **mode, **sizes, **options)
