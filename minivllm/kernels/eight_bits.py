"""A row of numbers in 8 bits: codes, int8 or float8_e4m3fn, times the largest element of the row / 127 or 448.

What a row becomes does not depend on the others.  A row of zeros has scale 1.  What is no number is lost: it becomes
an end of the range, as the largest element and the clamp pass over it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def step_of(top, TOP: tl.constexpr):
    """The scale of a row whose largest element is ``top``."""
    return tl.where(top > 0, tl.div_rn(top, TOP), 1.0)


@triton.jit
def codes_of(v, step, TOP: tl.constexpr, WHOLE: tl.constexpr):
    """v float32 in steps: the numbers of float8, or of int8 (WHOLE) in float32."""
    v = tl.div_rn(v, tl.broadcast_to(step, v.shape))
    if WHOLE:
        v = (v + 12582912.0) - 12582912.0  # the nearest whole number, of two the even one
    v = tl.minimum(tl.maximum(v, -TOP), TOP)
    if not WHOLE:
        v = v.to(tl.float8e4nv)
    return v


def empty_rows(m: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes [M, K] of a dtype and scales f32 [M, 1], to be filled."""
    return torch.empty((m, k), dtype=dtype, device=device), torch.empty((m, 1), dtype=torch.float32, device=device)
