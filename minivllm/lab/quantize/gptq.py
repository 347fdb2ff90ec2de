"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after another, and what each loses is made up
for by those that are not rounded yet, by the second moments of the inputs.

With H = sum of x xᵀ and U the upper Cholesky factor of its damped inverse, column j leaves the error
e = (w_j - q_j) / U_jj, and w_k -= e U_jk for k > j.  Updates beyond a block of columns are made once a block.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError

from .grid import Coded, Grid

BLOCK = 128
DAMPED_AGAIN = 3  # times, by ten each: a matrix whose factor does not come out


def solve(w: Tensor, moments: Tensor, grid: Grid, damping: float, act_order: str = "no") -> Coded:
    """w f32 [n, k] with inputs of ``moments`` f32 [k, k] -> its codes; ``act_order`` as in ``QuantizeOptions``.
    ModelError if the moments are no numbers."""
    w, k = w.clone(), w.shape[1]
    order, size = torch.arange(k, device=w.device), grid.size(k)
    if act_order != "no":
        order = torch.argsort(moments.diagonal(), descending=True, stable=True)
        w, moments = w[:, order], moments[order][:, order]
    factor = inverse_factor(moments, damping)
    importance = factor.diagonal().square().reciprocal()  # of an error that is made up for
    scales, zeros = (torch.empty(len(w), k // size, device=w.device) for _ in range(2))
    group_of = torch.arange(k, device=w.device) // size  # of columns in the order in which they are rounded
    fixed = size == k or act_order == "static"
    back = torch.argsort(order)
    if act_order == "static":
        group_of = group_of[order]
    if fixed:  # before any is rounded
        groups = w[:, back].view(len(w), -1, size)
        scales, zeros = grid.fitted(groups, importance[back].view(-1, size))
    rounding = _rounding(w)(Weight(w, factor, importance, grid, scales, zeros, group_of, fixed))
    for start in range(0, k, rounding.step):
        stop = min(start + rounding.step, k)
        errors = rounding.round(start, stop)
        w[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return Coded(rounding.codes[:, back].contiguous(), scales, zeros.to(torch.uint8), group_of[back])


class Weight(NamedTuple):
    """What is rounded column after column."""

    w: Tensor  # f32 [n, k]
    factor: Tensor  # [k, k], the U
    importance: Tensor  # [k]: what an error of a column counts
    grid: Grid
    scales: Tensor  # [n, groups], filled in unless ``fixed``; zeros likewise
    zeros: Tensor
    group_of: Tensor  # [k]
    fixed: bool


class Rounding:
    """Rounds some columns at a time, ``step`` of them."""

    def __init__(self, weight: Weight) -> None:
        self.of, (n, k) = weight, weight.w.shape
        self._places, self.size = weight.group_of.tolist(), weight.grid.size(k)
        self.step = BLOCK if self.size == k else self.size * max(1, BLOCK // self.size)
        self._codes = torch.empty(k, n, dtype=torch.uint8, device=weight.w.device)  # a column lies together

    def round(self, start: int, stop: int) -> Tensor:
        """Columns ``start`` to ``stop``: their errors [n, stop - start], which those behind do not know of yet."""
        of = self.of
        block, own = of.w[:, start:stop].t().contiguous(), of.factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for j in range(stop - start):
            g = self._places[start + j]
            if not of.fixed and (start + j) % self.size == 0:
                group = block[j : j + self.size].t()[:, None]
                s, z = of.grid.fitted(group, of.importance[None, start + j : start + j + self.size])
                of.scales[:, g], of.zeros[:, g] = s[:, 0], z[:, 0]
            column, scale, zero = block[j], of.scales[:, g], of.zeros[:, g]
            code = of.grid.codes(column, scale, zero)
            self._codes[start + j] = code.to(torch.uint8)
            error = (column - (code - zero) * scale) / own[j, j]
            block[j + 1 :].addr_(own[j, j + 1 :], error, alpha=-1)
            errors[j] = error
        return errors.t()

    @property
    def codes(self) -> Tensor:
        """u8 [n, k]."""
        return self._codes.t()


def _rounding(w: Tensor) -> type[Any]:
    """What rounds columns: a kernel where there is one."""
    if w.device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return Rounding
    from .columns import ColumnKernel

    return ColumnKernel


def inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """The upper U with Uᵀ U = (H + damping * mean(diag H))⁻¹, damped more where that has no factor."""
    h = moments.clone()
    unused = h.diagonal() == 0
    h.diagonal()[unused] = 1.0  # inputs that were never anything: rounded by themselves
    mean = h.diagonal()[~unused].mean() if bool((~unused).any()) else h.new_tensor(1.0)
    if not bool(torch.isfinite(h).all()):
        raise ModelError("activations of the calibration are not finite numbers; want another dtype or another text")
    for _ in range(DAMPED_AGAIN + 1):
        h.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(h)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise ModelError(
        "the second moments of the calibration have no Cholesky factor; want more samples or --damping 0.1"
    )
