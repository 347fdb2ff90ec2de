"""Adapters (LoRA) of a linear layer: y [T, out] += (x A^T) B^T, with the A and B of each token's adapter.

    shrink   x [T, in]  ── A of the adapters in the tile ──► h f32 [splits, T, parts * rank]
    expand   h, summed over the splits ── B ──► added to y

A program handles a tile of tokens and loops over the adapters on the device.  It reads the A or B of an adapter only if
a token of the tile has it, so the launches have the same shape for every mixture of adapters, and can be captured.
Rows and columns beyond an adapter's rank are not read.  A tile without adapters ends at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

FEW, MANY = 16, 64  # tokens of a tile, for steps of few and of many tokens
MANY_FROM = 256  # tokens of a step from which the tiles are large and the inputs are not split
SPLIT, SPLITS = 512, 8  # inputs of a program of ``shrink``, and most programs that share the inputs
OUTPUTS = 128  # outputs of a program of ``expand``


@kernel("T")
def _shrink(
    x, a, places, ranks, h, T, K, x_row, a_place, ranks_row, adapters,
    PARTS: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part, split = tl.program_id(1), tl.program_id(2)
    place = tl.load(places + t, mask=t < T, other=-1)
    if tl.max(place, 0) < 0:
        return
    r = tl.arange(0, R)
    first = split * SPAN
    acc = tl.zeros((BT, R), tl.float32)
    for s in range(adapters):
        chosen = place == s
        if tl.max(chosen.to(tl.int32), 0) > 0:
            rank = tl.load(ranks + s * ranks_row)
            weights = a + tl.cast(s, tl.int64) * a_place + part * R * K
            for k0 in range(first, tl.minimum(first + SPAN, K), BK):
                k = k0 + tl.arange(0, BK)
                xs = tl.load(
                    x + tl.cast(t, tl.int64)[:, None] * x_row + k[None, :],
                    mask=chosen[:, None] & (k < K)[None, :],
                    other=0.0,
                )
                ws = tl.load(
                    weights + r[None, :] * K + k[:, None], mask=(r < rank)[None, :] & (k < K)[:, None], other=0.0
                )
                acc = tl.dot(xs, ws, acc, input_precision=PRECISION)
    out = h + (tl.cast(split, tl.int64) * T + t)[:, None] * (PARTS * R) + (part * R + r)[None, :]
    tl.store(out, acc, mask=(t < T)[:, None])


@kernel("T")
def _expand(
    h, b, places, ranks, starts, y, T, y_row, b_place, ranks_row, adapters, splits,
    PARTS: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part = tl.program_id(2)
    begin, stop = tl.load(starts + part), tl.load(starts + part + 1)
    n = begin + tl.program_id(1) * BN + tl.arange(0, BN)
    place = tl.load(places + t, mask=t < T, other=-1)
    if (tl.max(place, 0) < 0) | (begin + tl.program_id(1) * BN >= stop):
        return
    r = tl.arange(0, R)
    inner = tl.zeros((BT, R), tl.float32)
    for split in range(splits):
        at = h + (tl.cast(split, tl.int64) * T + t)[:, None] * (PARTS * R) + (part * R + r)[None, :]
        inner += tl.load(at, mask=(t < T)[:, None], other=0.0)
    inner = inner.to(b.dtype.element_ty)
    acc = tl.zeros((BT, BN), tl.float32)
    for s in range(adapters):
        chosen = place == s
        if tl.max(chosen.to(tl.int32), 0) > 0:
            rank = tl.load(ranks + s * ranks_row)
            ws = tl.load(
                b + tl.cast(s, tl.int64) * b_place + n[None, :] * R + r[:, None],
                mask=(r < rank)[:, None] & (n < stop)[None, :],
                other=0.0,
            )
            hs = tl.where(chosen[:, None] & (r < rank)[None, :], inner, 0.0)
            acc = tl.dot(hs, ws, acc, input_precision=PRECISION)
    there = (place >= 0)[:, None] & (n < stop)[None, :]
    out = y + tl.cast(t, tl.int64)[:, None] * y_row + n[None, :]
    tl.store(out, (tl.load(out, mask=there, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=there)


class LoraProduct:
    """The product of one layer's adapters.

    a [places, parts, rank, in] and b [places, out, rank] are views of the arena, and ``ranks`` i32 [places] a column of
    its ranks.  ``starts`` are the first outputs of the parts.  With ``invariant`` the bits of a row do not depend on
    the other rows."""

    def __init__(self, a: Tensor, b: Tensor, ranks: Tensor, starts: Sequence[int], invariant: bool) -> None:
        self.a, self.b, self.ranks, self.invariant = a, b, ranks, invariant
        _, self.parts, self.rank, self.inputs = a.shape
        bounds = [*starts, b.shape[1]]
        self.widest = max(stop - start for start, stop in itertools.pairwise(bounds))
        self.starts = torch.tensor(bounds, dtype=torch.int32, device=a.device)
        self.precision = "ieee" if a.dtype == torch.float32 else "tf32"

    def __call__(self, x: Tensor, y: Tensor, places: Tensor) -> Tensor:
        """Add the product for x [T, in] to y [T, out] in place, and return y; places i32 [T] is -1 for no adapter."""
        tokens = x.shape[0]
        many = tokens >= MANY_FROM and not self.invariant
        splits = 1 if many else max(1, min(SPLITS, self.inputs // SPLIT))
        span = -(-self.inputs // splits)
        block_k = 64 if self.rank > 64 else 128
        span = -(-span // block_k) * block_k
        splits = -(-self.inputs // span)
        tile = MANY if many else FEW
        h = torch.empty(splits, tokens, self.parts * self.rank, dtype=torch.float32, device=x.device)
        tiles, shape = triton.cdiv(tokens, tile), {"PARTS": self.parts, "R": self.rank, "BT": tile}
        adapters, ranks_row = len(self.a), self.ranks.stride(0)
        inputs = x, self.a, places, self.ranks, h, tokens, self.inputs
        strides = self.a.stride(0), ranks_row, adapters
        more = {**shape, "PRECISION": self.precision, "num_warps": 4, "num_stages": 2}
        _shrink[tiles, self.parts, splits](*inputs, x.stride(0), *strides, **more, BK=block_k, SPAN=span)
        products = h, self.b, places, self.ranks, self.starts, y, tokens
        strides = self.b.stride(0), ranks_row, adapters
        grid = tiles, triton.cdiv(self.widest, OUTPUTS), self.parts
        _expand[grid](*products, y.stride(0), *strides, splits, **more, BN=OUTPUTS)
        return y
