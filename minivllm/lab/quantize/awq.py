"""AWQ (Lin et al. 2023, arXiv:2306.00978): inputs of large activations are scaled up in the weight, so that they lose
less when it is rounded, and down in what makes them.

    s = mean|x| ** a, of the a in 0 to 0.95 with the least  sum over weights of  |(Q(W s) / s - W) x|²

which is read off the second moments of x.  Groups are then cut to the width with the least error of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .grid import Grid

TRIES = 20
ROWS = 512  # of a weight by which scales are chosen, evenly taken
LEAST = 1e-4


def lost(error: Tensor, moments: Tensor) -> float:
    """Squared error of the outputs, of a weight's error [n, k] and the inputs' moments [k, k]."""
    return float((error @ moments * error).sum(dtype=torch.float64))


def find_scales(weights: Sequence[Tensor], means: Tensor, moments: Tensor, grid: Grid) -> Tensor:
    """The s [k] for weights f32 [n, k] that are given the same inputs, of mean absolute values ``means`` [k]."""
    best, found = float("inf"), torch.ones_like(means)
    weights = [w[:: -(-len(w) // ROWS)] for w in weights]
    means = means.clamp(min=LEAST * max(float(means.mean()), torch.finfo(means.dtype).tiny))
    for n in range(TRIES):
        s = means.pow(n / TRIES)
        s = s / (s.max() * s.min()).sqrt()
        error = sum(lost(grid.coded(w * s).weight().div_(s).sub_(w), moments) for w in weights)
        if error < best:
            best, found = error, s
    return found
