"""Compute probabilities as whole numbers, whose sums do not depend on the order and therefore not on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .default import MASS_SCALE


def masses(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits / temperature relative to the best f32 [N, V], and their exponentials times MASS_SCALE i64 [N, V].

    ``temperature`` is f32 [N]; 0, which means greedy, counts as 1.
    """
    logits = logits.float()
    x = (logits - logits.amax(dim=1, keepdim=True)).div_(torch.where(temperature > 0, temperature, 1.0)[:, None])
    return x, (x.exp() * MASS_SCALE).nan_to_num_(0.0).to(torch.int64)


def mean(x: Tensor, mass: Tensor) -> Tensor:
    """Return the mean f32 [N] of ``x`` [N, V] <= 0 under ``mass``, with an error of about 1e-7; -inf has no mass."""
    # x * mass is at most MASS_SCALE / e, and rounding it to whole numbers makes the sum exact
    part = torch.where(mass > 0, x, 0.0).double() * mass.double()
    return (part.to(torch.int64).sum(dim=1).double() / mass.sum(dim=1).clamp(min=1).double()).float()
