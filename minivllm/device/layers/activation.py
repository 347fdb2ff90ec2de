"""Activations between the two halves of an MLP, by the names of ``core.interfaces.decoder.ACTIVATIONS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """Return the squared ReLU, max(x, 0) ** 2 (Primer, arXiv:2109.08668)."""
    return F.relu(x).square_()


APPLY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


def gate_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """Return activation(gate) * up [T, n] for x [T, 2 n] = gate | up, as in a gated MLP (arXiv:2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return APPLY[activation](gate).mul_(up)


def gate_out(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate) [T, n], the output of attention with a gate (Qwen3-Next)."""
    return x * gate.sigmoid()
