"""Compute probabilities as whole numbers, whose sums do not depend on the order and therefore not on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .default import MASS_SCALE, relative


def masses(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits minus the largest one, divided by the temperature, f32 [N, V] (see ``relative``), and the
    exponentials of these as whole numbers i64 [N, V], multiplied by MASS_SCALE."""
    x = relative(logits, temperature)
    scaled = x.exp() * MASS_SCALE
    return x, scaled.nan_to_num_(0.0).to(torch.int64)


def totals(mass: Tensor) -> Tensor:
    """Return the sum f64 [N] of ``mass`` i64 [N, V], at least 1."""
    return mass.sum(dim=1).clamp(min=1).double()


def mean(x: Tensor, mass: Tensor) -> Tensor:
    """Return the mean f32 [N] of ``x`` [N, V] <= 0 with the weights ``mass`` [N, V], with an error of about 1e-7.
    Elements of -inf have no weight."""
    # x * mass is at most MASS_SCALE / e; rounded to whole numbers, so that the sum is exact
    finite = torch.where(mass > 0, x, 0.0)
    part = finite.double() * mass.double()
    weighted = part.to(torch.int64).sum(dim=1)
    return (weighted.double() / totals(mass)).float()
