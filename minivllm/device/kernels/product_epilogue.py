"""The epilogues of products: a gate, or the residual addition and the next norm's weight (``products``).

A kernel calls ``ahead`` as soon as it may read results of the preceding kernel, so that these loads overlap with the
product, and ``finish`` at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gate_rounded

PLAIN, GATED, ADDED = 0, 1, 2


@triton.jit
def ahead(om, on, residual, in_squares, eps, M, N: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
          PARTS_P: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Return the factor [BM] of each row by its norm, and in MODE 2 the residual stream [BM, BN]."""
    factor = tl.full(om.shape, 1.0, tl.float32)
    if PARTS > 0:
        op = tl.arange(0, PARTS_P)
        at = in_squares + om[:, None] * PARTS + op[None, :]
        squares = tl.load(at, mask=(om < M)[:, None] & (op < PARTS)[None, :], other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 1) / DIM + eps)
    stream = factor
    if MODE == 2:
        at = residual + om.to(tl.int64)[:, None] * N + on[None, :]
        stream = tl.load(at, mask=(om < M)[:, None] & (on < N)[None, :], other=0.0)
    return factor, stream


@triton.jit
def weight_of(norm, on, N: tl.constexpr, MODE: tl.constexpr):
    """Return the norm's weight [BN] in MODE 2.  It is constant, so a kernel loads it before it waits."""
    weight = on
    if MODE == 2:
        weight = tl.load(norm + on, mask=on < N, other=0.0).to(tl.float32)
    return weight


@triton.jit
def added(acc, stream, to, ok):
    """Add a product to the residual stream, store the sum at the addresses ``to``, and return it as float32.

    It is rounded as by two kernels, first the product, then the sum, so later squares are those of the rounded sum."""
    dtype: tl.constexpr = stream.dtype
    stream = (acc.to(dtype) + stream).to(dtype)
    tl.store(to, stream, mask=ok)
    return stream.to(tl.float32)


@triton.jit
def finish(
    acc, up, om, on, tile, factor, stream, after, y, bias, residual, out_squares, M, N: tl.constexpr,
    PARTS: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to sums [BM, BN] at rows ``om`` and outputs ``on``, and store it; ``up`` is used by GATED.

    ``factor`` and ``stream`` are those of ``ahead``, and ``after`` is that of ``weight_of``."""
    ok = (om < M)[:, None] & (on < N)[None, :]
    if PARTS > 0:
        acc = acc * factor[:, None]
        up = up * factor[:, None]
    if BIAS:
        acc += tl.load(bias + on, mask=on < N, other=0.0).to(tl.float32)[None, :]
        if MODE == 1:
            up += tl.load(bias + N + on, mask=on < N, other=0.0).to(tl.float32)[None, :]
    at = om.to(tl.int64)[:, None] * N + on[None, :]
    if MODE == 1:
        acc = gate_rounded(acc, up, y.dtype.element_ty, ACT)
    if MODE == 2:
        wide = added(acc, stream, residual + at, ok)
        squares = tl.sum(tl.where(ok, wide * wide, 0.0), 1)
        tl.store(out_squares + om * ((N + on.shape[0] - 1) // on.shape[0]) + tile, squares, mask=om < M)
        acc = wide * after[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)
