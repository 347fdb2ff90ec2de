"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after another, and what each loses is made up
for by those that are not rounded yet, by the second moments of the inputs.

With H = sum of x xᵀ and U the upper Cholesky factor of its damped inverse, column j leaves the error
e = (w_j - q_j) / U_jj, and w_k -= e U_jk for k > j.  Updates beyond a block of columns are made once a block.
"""

from __future__ import annotations

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
    step = size if size >= BLOCK else size * (BLOCK // size)
    step = BLOCK if size == k else step
    codes = torch.empty(k, len(w), dtype=torch.uint8, device=w.device)  # a column lies together
    scales, zeros = (torch.empty(len(w), k // size, device=w.device) for _ in range(2))
    group_of = torch.arange(k, device=w.device) // size  # of columns in the order in which they are rounded
    fixed = size == k or act_order == "static"
    back = torch.argsort(order)
    if act_order == "static":
        group_of = group_of[order]
    if fixed:  # before any is rounded
        groups = w[:, back].view(len(w), -1, size)
        scales, zeros = grid.fitted(groups, importance[back].view(-1, size))
    places = group_of.tolist()
    for start in range(0, k, step):
        stop = min(start + step, k)
        block, own = w[:, start:stop].t().contiguous(), factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for j in range(stop - start):
            g = places[start + j]
            if not fixed and (start + j) % size == 0:
                group = block[j : j + size].t()[:, None]
                s, z = grid.fitted(group, importance[None, start + j : start + j + size])
                scales[:, g], zeros[:, g] = s[:, 0], z[:, 0]
            column, scale, zero = block[j], scales[:, g], zeros[:, g]
            code = grid.codes(column, scale, zero)
            codes[start + j] = code.to(torch.uint8)
            error = (column - (code - zero) * scale) / own[j, j]
            block[j + 1 :].addr_(own[j, j + 1 :], error, alpha=-1)
            errors[j] = error
        w[:, stop:].addmm_(errors.t(), factor[start:stop, stop:], alpha=-1)
    return Coded(codes[back].t().contiguous(), scales, zeros.to(torch.uint8), group_of[back])


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
