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
    """|v| of float32, as the int32 with the same bits: these have the order of the numbers, and NaN above them all,
    which a maximum of floats passes over."""
    return tl.abs(v).to(tl.int32, bitcast=True)


@triton.jit
def step_of(most, TOP: tl.constexpr):
    """(the scale of a row whose largest ``size_of`` is ``most``, its inverse).  A row of less than 1e-30 has 1, as
    the inverse of a smaller one may be no number."""
    top = most.to(tl.float32, bitcast=True)
    step = tl.where(top <= 1e-30, 1.0, tl.div_rn(top, TOP))
    return step, tl.div_rn(1.0, step)


@triton.jit
def divided(v, step, inverse):
    """v / step, rounded once as a division is (Markstein 1990: the inverse is, too), in a third of the instructions."""
    r = v * inverse
    return tl.fma(tl.fma(-r, step, v), inverse, r)


@triton.jit
def codes_of(v, step, inverse, TOP: tl.constexpr, WHOLE: tl.constexpr):
    """v float32 in steps: the numbers of float8, or of int8 (WHOLE) in float32."""
    v = divided(v, step, inverse)
    if WHOLE:
        v = (v + 12582912.0) - 12582912.0  # the nearest whole number, of two the even one
    v = tl.minimum(tl.maximum(v, -TOP), TOP)
    if not WHOLE:
        v = v.to(tl.float8e4nv)
    return v


def empty_rows(m: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes [M, K] of a dtype and scales f32 [M, 1], to be filled."""
    return torch.empty((m, k), dtype=dtype, device=device), torch.empty((m, 1), dtype=torch.float32, device=device)
