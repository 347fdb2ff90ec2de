"""A row of numbers in 8 bits: codes, int8 or float8_e4m3fn, times the largest element of the row / 127 or 448.

What a row becomes does not depend on the others.  A row of zeros, or of less than 1e-30, has scale 1.  The scale of a
row with a NaN is NaN, and so is all that is multiplied by it; an infinite element makes all products of its row NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def size_of(v):
    """Return |v| of float32 as the int32 with the same bits.

    They have the order of the numbers, with NaN above all numbers, which a maximum of floats would ignore.
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
    """Return v / step, rounded once as by a division (Markstein 1990; the inverse is rounded too), in a third of
    its time.
    """
    r = v * inverse
    return tl.fma(tl.fma(-r, step, v), inverse, r)


@triton.jit
def codes_of(v, step, inverse, TOP: tl.constexpr, WHOLE: tl.constexpr):
    """Return float32 v in steps, as float8 numbers or with WHOLE as int8 numbers in float32."""
    v = divided(v, step, inverse)
    if WHOLE:
        v = (v + 12582912.0) - 12582912.0  # the nearest whole number, of two the even one
    v = tl.minimum(tl.maximum(v, -TOP), TOP)
    if not WHOLE:
        v = v.to(tl.float8e4nv)
    return v


def empty_rows(m: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate codes [M, K] of a dtype and scales f32 [M, 1]."""
    return torch.empty((m, k), dtype=dtype, device=device), torch.empty((m, 1), dtype=torch.float32, device=device)
