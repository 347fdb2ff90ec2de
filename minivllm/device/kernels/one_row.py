"""The product of one row with a small weight, whose rows are loaded before the preceding kernel has ended.

Launches and latencies take most of the time of one row.  So each of eight warps has a whole row of the weight in
registers before it waits, loads x itself, and adds its products without the other warps::

    grid (N / 8)    warp i: W[i] ── wait ── x, sums of squares, residual ──► W[i] · x ──► epilogue of one output

The reference is that of ``products``.  Bytes: W once; each program loads x.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .activation import gate_rounded
from .launch import cdiv, kernel, wait
from .product_epilogue import added

OUTPUTS = 8  # number of outputs of a program, one for each warp
INPUTS = 256  # number of inputs that a warp loads with one instruction
SQUARES = tl.constexpr(128)  # number of sums of squares that a warp loads with one instruction
SMALL = 1 << 23  # largest number of elements of a weight of more than 1,024 inputs
MOST_INPUTS = 4096  # largest number of inputs that fit in registers


@triton.jit
def _loaded(at, on, ok, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Load rows [BN, K] of a weight as a tuple of [BN, BK]."""
    parts = ()
    for k in tl.static_range(0, K, BK):
        if N % BN == 0 and K % BK == 0:
            part = tl.load(at + k, eviction_policy="evict_first")
        else:
            inside = (on < N)[:, None] & (k + ok < K)[None, :]
            part = tl.load(at + k, mask=inside, other=0.0, eviction_policy="evict_first")
        parts = parts + (part,)  # noqa: RUF005 - not in kernels
    return parts


@kernel()
def _one_row(
    x, weight, y, bias, residual, norm, in_squares, out_squares, eps, N: tl.constexpr, K: tl.constexpr,
    PARTS: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one row x by the weight, and apply the epilogue of ``products``.  PARTS is the number of ``in_squares``.

    Results are in the first of 32 columns, so that each warp stores those of its own rows of the weight."""
    tile = tl.program_id(0)
    on, ok = tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    at = weight + on.to(tl.int64)[:, None] * K + ok[None, :]
    weights = _loaded(at, on, ok, N, K, BN, BK)
    ups = weights
    if MODE == 1:
        ups = _loaded(at + N * K, on, ok, N, K, BN, BK)
    column = tl.arange(0, 32)[None, :]
    to = on[:, None] + column
    there = (on < N)[:, None] & (column == 0)
    after = eps
    if MODE == 2:
        after = tl.load(norm + to, mask=there, other=0.0).to(tl.float32)
    wait(PDL)
    # every warp loads x and the squares itself
    values = ()
    for k in tl.static_range(0, K, BK):
        if K % BK == 0:
            value = tl.load(x + k + ok[None, :] + on[:, None] * 0)
        else:
            value = tl.load(x + k + ok[None, :] + on[:, None] * 0, mask=(k + ok < K)[None, :], other=0.0)
        values = values + (value,)  # noqa: RUF005
    squares = tl.zeros([BN, SQUARES], tl.float32)
    op = tl.arange(0, SQUARES)
    for part in tl.static_range(0, PARTS, SQUARES):
        some = (part + op < PARTS)[None, :] & (on < N)[:, None]
        squares += tl.load(in_squares + part + op[None, :] + on[:, None] * 0, mask=some, other=0.0)
    stream = after
    if MODE == 2:
        stream = tl.load(residual + to, mask=there, other=0.0)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for i in tl.static_range((K + BK - 1) // BK):
        value = values[i].to(tl.float32)
        acc += weights[i].to(tl.float32) * value
        if MODE == 1:
            up += ups[i].to(tl.float32) * value
    total = tl.sum(acc, 1)[:, None]
    other = tl.sum(up, 1)[:, None]
    if PARTS > 0:
        factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        total *= factor
        other *= factor
    spread = tl.zeros([BN, 32], tl.float32)
    total += spread
    if BIAS:
        total += tl.load(bias + to, mask=there, other=0.0).to(tl.float32)
    if MODE == 1:
        other += spread
        if BIAS:
            other += tl.load(bias + N + to, mask=there, other=0.0).to(tl.float32)
        total = gate_rounded(total, other, y.dtype.element_ty, ACT)
    if MODE == 2:
        wide = added(total, stream, residual + to, there)
        total = wide * after
    tl.store(y + to, total.to(y.dtype.element_ty), mask=there)
    if MODE == 2:
        tl.store(out_squares + tile, tl.sum(tl.sum(tl.where(there, wide * wide, 0.0), 1), 0))


def serves(n: int, k: int) -> bool:
    """Return whether the kernel is fast for a weight of k inputs and n outputs, with a gate n pairs."""
    return k <= 1024 or (k <= MOST_INPUTS and n * k <= SMALL)


def multiply_row(x: Tensor, weight: Tensor, tensors: list[Tensor], eps: float, constants: dict[str, Any]) -> None:
    """Launch the kernel for x [1, K].

    ``tensors`` are y, bias, residual, norm, and the squares of x and of the result.  ``constants`` are N, K, PARTS,
    MODE, BIAS, ACT, and those of a dependent launch."""
    constants["BN"] = OUTPUTS
    constants["BK"] = INPUTS
    constants["num_warps"] = OUTPUTS
    _one_row[(cdiv(constants["N"], OUTPUTS),)](x, weight, *tensors, eps, **constants)
