"""Rounding of a row of numbers to 8-bit codes, int8 or float8_e4m3fn, or to two int8, with one scale per row.

The scale is the largest absolute element of the row, divided by 127 or 448.  The codes of a row do not depend on other
rows.  A row with no element of at least 1e-30 has the scale 1.  A row with a NaN has the scale NaN, so all its products
are NaN.  An infinite element makes all products of its row NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel, pdl, power, wait

TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LARGEST = 16256.0  # 127 * 128: the largest number that a high and a low part of 8 bits represent


@triton.jit
def size_of(v):
    """Return the bits of |v|, for v float32, as an int32.

    These integers have the order of the numbers, with NaN above all numbers.  A maximum of floats would ignore NaN.
    """
    return tl.abs(v).to(tl.int32, bitcast=True)


@triton.jit
def step_of(most, TOP: tl.constexpr):
    """Return the scale of a row whose largest ``size_of`` is ``most``, and the inverse of the scale.

    Rows below 1e-30 have the scale 1, since the inverse of a smaller scale may overflow.
    """
    top = most.to(tl.float32, bitcast=True)
    step = tl.where(top <= 1e-30, 1.0, tl.div_rn(top, TOP))
    return step, tl.div_rn(1.0, step)


@triton.jit
def divided(v, step, inverse):
    """Return v / step with the rounding of a division, in a third of its time.

    The method is Markstein's of 1990.  ``inverse`` is 1 / step, rounded.
    """
    r = v * inverse
    return tl.fma(tl.fma(-r, step, v), inverse, r)


@triton.jit
def codes_of(v, step, inverse, TOP: tl.constexpr, WHOLE: tl.constexpr):
    """Return float32 v in units of step, as float8 numbers, or with WHOLE as whole numbers of int8 in float32."""
    v = divided(v, step, inverse)
    if WHOLE:
        v = (v + 12582912.0) - 12582912.0  # round to the nearest whole number, ties to even
    v = tl.minimum(tl.maximum(v, -TOP), TOP)
    if not WHOLE:
        v = v.to(tl.float8e4nv)
    return v


def empty_rows(m: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate codes [M, K] of a dtype and scales f32 [M, 1]."""
    codes = torch.empty((m, k), dtype=dtype, device=device)
    scales = torch.empty((m, 1), dtype=torch.float32, device=device)
    return codes, scales


@kernel()
def _rows(
    x, q, scale, K: tl.constexpr, BK: tl.constexpr, TOP: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round a row of x to 8-bit codes q and a scale: int8 codes with WHOLE, otherwise float8.  q may have a wider
    dtype."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ok = tl.arange(0, BK)
    most = tl.zeros([BK], tl.int32)
    for k in tl.range(0, K, BK):
        most = tl.maximum(most, size_of(tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)))
    step, inverse = step_of(tl.max(most, 0), TOP)
    tl.store(scale + row, step)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)
        v = codes_of(v, step, inverse, TOP, WHOLE)
        tl.store(q + row * K + k + ok, v.to(q.dtype.element_ty), mask=k + ok < K)


def rows(x: Tensor, dtype: torch.dtype, kept: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Round contiguous x [M, K] to ``dtype``, and return q [M, K] and scale f32 [M, 1].

    ``kept`` is the dtype of q.  None means ``dtype``.
    """
    m, k = x.shape
    q, scale = empty_rows(m, k, kept or dtype, x.device)
    if not m:
        return q, scale
    block = min(power(k), 16384)
    constants = pdl(x)
    constants["K"] = k
    constants["BK"] = block
    constants["TOP"] = TOP[dtype]
    constants["WHOLE"] = dtype == torch.int8
    constants["num_warps"] = min(16, max(4, block // 512))
    _rows[(m,)](x, q, scale, **constants)
    return q, scale


@kernel("M")
def _halved(x, q, scale, M, K: tl.constexpr, BK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr):
    """Split a row of x into high and low parts of int8."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ok = tl.arange(0, BK)
    most, odd = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)
        most, odd = tl.maximum(most, tl.abs(v)), odd + (v - v)
    top = tl.max(most, 0)
    step = tl.where(top > 0, tl.div_rn(top, TOP), 1.0)
    tl.store(scale + row, step + tl.sum(odd, 0))  # a number that is not finite makes the scale NaN
    inverse = tl.div_rn(1.0, step)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32) * inverse
        high = (v * 0.0078125 + 12582912.0) - 12582912.0  # round to the nearest multiple of 128
        low = (v - high * 128.0 + 12582912.0) - 12582912.0
        low = tl.minimum(tl.maximum(low, -127.0), 127.0)
        tl.store(q + row * K + k + ok, high.to(tl.int8), mask=k + ok < K)
        tl.store(q + (M + row) * K + k + ok, low.to(tl.int8), mask=k + ok < K)


def halved_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split contiguous x [M, K] into q int8 [2 M, K], with the high parts of all rows first, and scale f32 [M].

    x is (128 high + low) * scale, with scale = the largest element of a row / 16256.  An element changes by at most
    1 / 32512 of the largest.
    """
    m, k = x.shape
    q = torch.empty((2 * m, k), dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        block = min(power(k), 8192)
        warps = 8 if block > 2048 else 4
        _halved[(m,)](x, q, scale, m, K=k, BK=block, TOP=LARGEST, num_warps=warps, **pdl(x))
    return q, scale
