"""Products and activations that give a row the same bits whatever rows are beside it (``batch_invariant``), on a CPU.

A library picks its kernel, and with it the order of its sums, by the number of rows.  So a product is always a call on
``ROWS`` of them, the last ones filled up with zeros::

    x [T, in] ──► [ROWS, in] [ROWS, in] ... [ROWS, in] ──► y [T, out]

What is left is that a row's *place* in the call might matter.  It does not on the libraries that were looked at; it is
tried on each weight's shape, and where it does matter a call is one row.  Elementwise operations that are exact in
every element (+, *, /, sqrt) are safe; of the others torch's ``exp``, ``log`` and ``tanh`` go by the element alone,
``silu`` and ``sigmoid`` do not: the last few elements of a thread's share are computed otherwise.

On a GPU ``device.kernels.products.FixedProduct`` and the kernels of norm and activation do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .activation import APPLY
from .matmul import matmul, pack

ROWS = 16


def same_at_every_place(call: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether ``call``, given the last axis of ``like`` repeated over all others, gives each of them the same bits."""
    line = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
    got = call(line.expand(like.shape).contiguous())
    got = got.reshape(-1, got.shape[-1])
    return torch.equal(got, got[:1].expand_as(got))


class FixedRows:
    """x [T, in] -> x W^T [T, out] in calls of ``rows`` rows each; 0: as many as are found to be right for
    the weight."""

    def __init__(self, weight: Tensor, rows: int = 0) -> None:
        self.weight, self.packed, self.rows = weight, pack(weight), rows or ROWS
        if not rows and not same_at_every_place(self._call, weight.new_empty(ROWS, weight.shape[1])):
            self.rows = 1

    def _call(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.packed)

    def __call__(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        whole = -(-tokens // self.rows) * self.rows
        if whole == 0:
            return x.new_empty(0, self.weight.shape[0])
        if whole != tokens or not x.is_contiguous():
            x, given = x.new_zeros(whole, x.shape[1]), x
            x[:tokens] = given
        parts = x.split(self.rows)
        if x.data_ptr() % 64 or (self.rows * x.shape[1] * x.element_size()) % 64:  # libraries may look at that, too
            parts = tuple(part.clone() for part in parts)
        return torch.cat([self._call(part) for part in parts])[:tokens]


def activate(x: Tensor, activation: str = "silu") -> Tensor:
    """As ``activation.APPLY``, of operations that go by the element alone."""
    y = x.float()
    if activation == "silu":
        y = y.div(y.neg().exp_().add_(1.0))
    elif activation == "gelu_tanh":
        inner = (y * y * y * 0.044715).add_(y).mul_(math.sqrt(2 / math.pi))
        y = torch.tanh(inner).add_(1.0).mul_(y * 0.5)
    elif activation == "gelu":
        y = torch.erf(y * math.sqrt(0.5)).add_(1.0).mul_(y * 0.5)
    else:
        y = APPLY[activation](y)
    return y.to(x.dtype)


def gate_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """As ``activation.gate_mul``: [T, 2 n] = gate | up -> activation(gate) * up [T, n]."""
    gate, up = x.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


def logsumexp(x: Tensor) -> Tensor:
    """[N, V] -> [N, 1]: a wide row by itself is summed by several threads, one of several rows is not."""
    if not len(x):
        return x.new_empty(0, 1)
    return torch.stack([torch.logsumexp(row.clone(), 0, keepdim=True) for row in x])
