"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): the columns of a weight are rounded one after another, and the columns
that are not yet rounded are changed to compensate each column's error.  The second moments of the inputs determine the
changes.

With H = sum of x xᵀ and U the upper Cholesky factor of the inverse of H (plus a damping term), column j has the error e
= (w_j - q_j) / U_jj, and w_k -= e U_jk for k > j.  Columns behind a block are updated once per block.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError

from .grid import Coded, Grid

BLOCK = 128
DAMPED_AGAIN = 3  # further attempts with ten times the damping for a matrix that has no Cholesky factor


def solve(w: Tensor, moments: Tensor, grid: Grid, damping: float, act_order: str = "no") -> Coded:
    """Return the codes of a weight f32 [n, k] whose inputs have second moments f32 [k, k].

    ``damping`` is a share of the mean second moment; for ``act_order`` see ``QuantizeOptions``.  Raise ModelError for
    moments that are not finite or have no Cholesky factor.
    """
    k = w.shape[1]
    size = grid.size(k)
    order = torch.arange(k, device=w.device)
    w = w.clone()
    if act_order != "no":
        order = torch.argsort(moments.diagonal(), descending=True, stable=True)
        w = w[:, order]
        moments = moments[order][:, order]
    factor = inverse_factor(moments, damping)
    # the weight of an error, after the compensation by later columns
    importance = factor.diagonal().square().reciprocal()
    group_of = torch.arange(k, device=w.device) // size  # index of the group of each column, in the order of rounding
    back = torch.argsort(order)
    if act_order == "static":
        group_of = group_of[order]
    fixed = size == k or act_order == "static"
    if fixed:  # the scales are chosen before any column is rounded
        groups = w[:, back].view(len(w), -1, size)
        scales, zeros = grid.fitted(groups, importance[back].view(-1, size))
    else:
        scales = torch.empty(len(w), k // size, device=w.device)
        zeros = torch.empty_like(scales)
    weight = Weight(w, factor, importance, grid, scales, zeros, group_of, fixed)
    rounding = _rounding(w)(weight)
    for start in range(0, k, rounding.step):
        stop = min(start + rounding.step, k)
        errors = rounding.round(start, stop)
        w[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    codes = rounding.codes[:, back].contiguous()
    return Coded(codes, scales, zeros.to(torch.uint8), group_of[back])


class Weight(NamedTuple):
    """A weight whose columns are being rounded, with the factor, scales and zero points that this uses."""

    w: Tensor  # f32 [n, k]
    factor: Tensor  # [k, k] the factor U
    importance: Tensor  # [k] factor of a column's squared error when a group's scale is chosen
    grid: Grid
    scales: Tensor  # [n, groups], written during rounding unless ``fixed``
    zeros: Tensor  # [n, groups], likewise
    group_of: Tensor  # [k]
    fixed: bool

    def fit_group(self, columns: Tensor, start: int) -> None:
        """Choose the scales and zero points of the group with the columns [n, size] from ``start`` on."""
        size = columns.shape[1]
        scale, zero = self.grid.fitted(columns[:, None], self.importance[None, start : start + size])
        self.scales[:, start // size] = scale[:, 0]
        self.zeros[:, start // size] = zero[:, 0]


class Rounding:
    """Round the columns of a weight in torch, at most ``step`` columns per call."""

    def __init__(self, weight: Weight) -> None:
        self.of = weight
        n, k = weight.w.shape
        self._group_of = weight.group_of.tolist()
        self.size = weight.grid.size(k)
        self.step = BLOCK if self.size == k else self.size * max(1, BLOCK // self.size)
        # transposed, so that a column is contiguous
        self._codes = torch.empty(k, n, dtype=torch.uint8, device=weight.w.device)

    def round(self, start: int, stop: int) -> Tensor:
        """Round columns [start, stop) and return their errors [n, stop - start], for the update of later columns."""
        of = self.of
        block = of.w[:, start:stop].t().contiguous()
        factor = of.factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for j in range(stop - start):
            g = self._group_of[start + j]
            if not of.fixed and (start + j) % self.size == 0:
                of.fit_group(block[j : j + self.size].t(), start + j)
            scale = of.scales[:, g]
            zero = of.zeros[:, g]
            column = block[j]
            code = of.grid.codes(column, scale, zero)
            self._codes[start + j] = code.to(torch.uint8)
            error = (column - (code - zero) * scale) / factor[j, j]
            block[j + 1 :].addr_(factor[j, j + 1 :], error, alpha=-1)
            errors[j] = error
        return errors.t()

    @property
    def codes(self) -> Tensor:
        """Return the codes, u8 [n, k]."""
        return self._codes.t()


def _rounding(w: Tensor) -> type[Any]:
    """Return the class that rounds columns: the kernel on a CUDA device with Triton, else the loop in torch."""
    if w.device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return Rounding
    from .columns import ColumnKernel

    return ColumnKernel


def inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """Return the upper triangular U with Uᵀ U = (H + damping * mean(diag H))⁻¹ for the second moments H.

    The damping is raised where the matrix has no factor.  Raise ModelError if no attempt succeeds.
    """
    h = moments.clone()
    unused = h.diagonal() == 0
    # inputs that were always 0 in the samples; their columns are rounded without compensation
    h.diagonal()[unused] = 1.0
    used = h.diagonal()[~unused]
    mean = used.mean() if len(used) else h.new_tensor(1.0)
    if not bool(torch.isfinite(h).all()):
        raise ModelError("activations of the calibration are not finite numbers; use another dtype or another text")
    for _ in range(DAMPED_AGAIN + 1):
        h.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(h)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise ModelError("the second moments of the calibration have no Cholesky factor; use more samples or --damping 0.1")
