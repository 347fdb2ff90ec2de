"""AWQ (Lin et al. 2023, arXiv:2306.00978): the weights of inputs with large activations are multiplied by a scale, so
that rounding loses less of them, and the module that computes these inputs is divided by it.

    s = mean|x| ** a, with the a in 0 to 0.95 that has the least  sum over weights of  |(Q(W s) / s - W) x|²

The sum is computed from the second moments of x.  The ranges of the groups are then clipped to the least error of the
same kind (``Grid.coded``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .grid import Grid

TRIES = 20
ROWS = 512  # number of evenly spaced rows of a weight from which its scales are chosen
LEAST = 1e-4  # a mean below this share of the average over all inputs is raised to it


def output_error(error: Tensor, moments: Tensor) -> float:
    """Return the squared error of the outputs for a weight's error [n, k] and the inputs' second moments [k, k]."""
    return float((error @ moments * error).sum(dtype=torch.float64))


def find_scales(weights: Sequence[Tensor], means: Tensor, moments: Tensor, grid: Grid) -> Tensor:
    """Return scales s [k] for weights f32 [n, k] that have the same inputs.

    ``means`` [k] are the inputs' mean absolute values, ``moments`` [k, k] their second moments.
    """
    best = torch.ones_like(means)
    least = float("inf")
    samples = [w[:: -(-len(w) // ROWS)] for w in weights]
    floor = LEAST * max(float(means.mean()), torch.finfo(means.dtype).tiny)
    means = means.clamp(min=floor)
    for n in range(TRIES):
        s = means.pow(n / TRIES)
        s = s / (s.max() * s.min()).sqrt()
        error = 0.0
        for w in samples:
            restored = grid.coded(w * s).weight().div_(s)
            error += output_error(restored.sub_(w), moments)
        if error < least:
            least = error
            best = s
    return best
