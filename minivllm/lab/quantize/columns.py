"""Round the columns of a GPTQ block in one kernel: a program holds some rows of the weight in registers, and rounds
their columns one after another.

    grid (n / BR)    reads w [BR, C], the columns ``start`` to ``stop``, and the factor U row by row

    fit              with FIT the block is one group, and its scale is found first (as ``Grid.fitted`` does)
    column j         code, e_j = (w_j - q_j) / U_jj, w_k -= e_j U_jk for each k > j of the block

The kernel moves the block, its codes and its errors once, and C² / 2 numbers of the factor per program.  The caller
updates the columns behind the block, by a matrix product.  The reference is ``gptq.solve``.  The kernel adds in another
order, so a weight halfway between two codes may get the other code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import cdiv, kernel, power

from .grid import CUTS, SHORTEST

if TYPE_CHECKING:
    from .gptq import Weight

MOST = 128  # largest number of columns that a call of the kernel rounds
ROWS = 8  # rows that a program of the kernel rounds
HALF = {torch.float16: 1, torch.bfloat16: 2}  # dtype of scales -> the kernel's number; 0 for other dtypes


@triton.jit
def _nearest(x):
    """Return x rounded to whole numbers, halves to even, and clamped to ±65536, far beyond every code."""
    return (tl.minimum(tl.maximum(x, -65536.0), 65536.0) + 12582912.0) - 12582912.0


@triton.jit
def _stored(s, HALF: tl.constexpr, TINY: tl.constexpr):
    """Return a scale rounded to the dtype of the checkpoint's scales, with 1 for a group of zeros."""
    s = tl.maximum(tl.where(s > 0, s, 1.0), TINY)
    if HALF == 1:
        s = s.to(tl.float16).to(tl.float32)
    if HALF == 2:
        s = s.to(tl.bfloat16).to(tl.float32)
    return s


@triton.jit
def _fitted(w, there, importance, TOP: tl.constexpr, LEAST_ZERO: tl.constexpr, SYMMETRIC: tl.constexpr,
            HALF: tl.constexpr, TINY: tl.constexpr, TRIES: tl.constexpr, SHORT: tl.constexpr):  # fmt: skip
    """Return the scale and zero point [BR] of rows w [BR, C] whose range has the width with the least error.

    ``there`` masks the columns of the block.  ``importance`` [C] is the factor of each column's squared error.
    """
    most = tl.max(tl.where(there, tl.abs(w), 0.0), 1)
    low = tl.minimum(tl.min(tl.where(there, w, 0.0), 1), 0.0)
    high = tl.maximum(tl.max(tl.where(there, w, 0.0), 1), 0.0)
    best = most * 0.0 + float("inf")
    scale, zero = best, best
    for cut in range(TRIES):
        width = 1.0 - cut * (1.0 - SHORT) / TRIES
        if SYMMETRIC:
            s = _stored(most * (2.0 * width / TOP), HALF, TINY)
            z = s * 0.0 + (TOP + 1) // 2
        else:
            s = _stored((high * width - low * width) / TOP, HALF, TINY)
            z = tl.minimum(tl.maximum(_nearest(tl.div_rn(-low * width, s)), LEAST_ZERO), TOP)
        q = _nearest(tl.div_rn(w, s[:, None])) + z[:, None]
        q = tl.minimum(tl.maximum(q, 0.0), TOP)
        off = (q - z[:, None]) * s[:, None] - w
        lost = tl.sum(tl.where(there, off * off * importance[None, :], 0.0), 1)
        better = lost < best
        first = cut == 0  # the first width is taken even if its error is NaN
        scale, zero = tl.where(better | first, s, scale), tl.where(better | first, z, zero)
        best = tl.where(better | first, lost, best)
    return scale, zero


@kernel("start", "stop", "group", "n")
def _columns(
    w, factor, importance, places, codes, errors, scales, zeros, start, stop, group, n, K: tl.constexpr,
    GROUPS: tl.constexpr, FIT: tl.constexpr, TOP: tl.constexpr, LEAST_ZERO: tl.constexpr, SYMMETRIC: tl.constexpr,
    HALF: tl.constexpr, TINY: tl.constexpr, TRIES: tl.constexpr, SHORT: tl.constexpr, BR: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Round the columns ``start`` to ``stop`` of some rows, and write their codes and errors.

    With FIT the columns are those of ``group``, and its scale and zero point are found and written.  Otherwise
    ``places`` i32 [K] holds the group of each column, whose scale and zero point are read.  HALF is the dtype of
    scales: 1 is float16, 2 is bfloat16, 0 is float32.
    """
    row, oc = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, C)
    wide = row.to(tl.int64)
    here, rows = start + oc < stop, row < n
    there = rows[:, None] & here[None, :]
    at = wide[:, None] * K + start + oc[None, :]
    block = tl.load(w + at, mask=there, other=0.0)
    code, error = tl.zeros([BR, C], tl.float32), tl.zeros([BR, C], tl.float32)
    s, z = tl.zeros([BR], tl.float32) + 1.0, tl.zeros([BR], tl.float32)
    if FIT:
        counts = tl.load(importance + start + oc, mask=here, other=0.0)
        s, z = _fitted(block, there, counts, TOP, LEAST_ZERO, SYMMETRIC, HALF, TINY, TRIES, SHORT)
        tl.store(scales + wide * GROUPS + group, s, mask=rows)
        tl.store(zeros + wide * GROUPS + group, z, mask=rows)
    for j in range(stop - start):
        if not FIT:
            g = tl.load(places + start + j)
            s = tl.load(scales + wide * GROUPS + g, mask=rows, other=1.0)
            z = tl.load(zeros + wide * GROUPS + g, mask=rows, other=0.0)
        line = factor + (start + j).to(tl.int64) * K + start
        mine = oc == j
        column = tl.sum(tl.where(mine[None, :], block, 0.0), 1)
        q = tl.minimum(tl.maximum(_nearest(tl.div_rn(column, s)) + z, 0.0), TOP)
        e = tl.div_rn(column - (q - z) * s, s * 0.0 + tl.load(line + j))
        behind = tl.load(line + oc, mask=here & (oc > j), other=0.0)
        block = block - e[:, None] * behind[None, :]
        code = tl.where(mine[None, :], q[:, None], code)
        error = tl.where(mine[None, :], e[:, None], error)
    tl.store(codes + at, code.to(tl.uint8), mask=there)
    tl.store(errors + wide[:, None] * C + oc[None, :], error, mask=there)


class ColumnKernel:
    """Round the columns of a weight on a GPU, as ``gptq.Rounding`` does; w, scales and zeros are contiguous."""

    def __init__(self, weight: Weight) -> None:
        self.of = weight._replace(factor=weight.factor.contiguous(), importance=weight.importance.contiguous())
        n, k = weight.w.shape
        grid = weight.grid
        self.size = grid.size(k)
        self._group_of = weight.group_of.int()
        self.fit = not weight.fixed and self.size <= MOST  # a block is one group, whose scale the kernel computes
        if self.fit:
            self.step = self.size
        elif weight.fixed:
            self.step = MOST
        else:
            self.step = math.gcd(self.size, MOST)
        self.codes = torch.empty(n, k, dtype=torch.uint8, device=weight.w.device)
        width = power(self.step)
        self._errors = weight.w.new_empty(n, width)
        shape = {"K": k, "GROUPS": weight.scales.shape[1], "BR": ROWS, "C": width}
        codes = {"TOP": grid.top, "LEAST_ZERO": grid.least_zero, "SYMMETRIC": grid.symmetric}
        scales = {"HALF": HALF.get(grid.stored, 0), "TINY": torch.finfo(grid.stored).tiny}
        fit = {"FIT": self.fit, "TRIES": CUTS, "SHORT": SHORTEST}
        self._constants = {**shape, **codes, **scales, **fit}

    def round(self, start: int, stop: int) -> Tensor:
        """Round columns [start, stop) and return their errors [n, stop - start]."""
        of = self.of
        group = start // self.size
        n = len(self.codes)
        # at the first block of a group, the scale is computed
        if not self.fit and not of.fixed and start % self.size == 0:
            of.fit_group(of.w[:, start : start + self.size], start)
        launch = _columns[(cdiv(n, ROWS),)]
        tensors = (of.w, of.factor, of.importance, self._group_of, self.codes, self._errors, of.scales, of.zeros)
        launch(*tensors, start, stop, group, n, num_warps=4, **self._constants)
        return self._errors[:, : stop - start]
