"""Activations between the two halves of an MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate (arXiv:2002.05202): [T, 2 n] = gate | up -> silu(gate) * up [T, n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
