"""CPU products and activations whose bits for a row do not depend on the other rows (``batch_invariant``).

A matrix library chooses its kernel, and so the order of its sums, by the number of rows.  So every product here is a
series of library calls on exactly ``ROWS`` rows; the last call is filled up with zeros::

    x [T, in] ──► [ROWS, in] [ROWS, in] ... [ROWS, in] ──► y [T, out]

A row's *position* in the call could still matter.  It does not with the libraries examined.  This is tested for the
shape of each weight; if it matters, a call has one row.  Elementwise operations that are correctly rounded (+, *, /,
sqrt) are safe.  The results of torch's ``exp``, ``log`` and ``tanh`` depend only on the element.  Results of ``silu``
and ``sigmoid`` do not: the last few elements of a thread's share are computed by another method.

On a GPU ``device.kernels.fixed_products.FixedProduct`` and the kernels of norm and activation do the same.
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
    """Return whether ``call`` returns the same bits for equal rows at all positions.

    The test input has the shape, dtype and device of ``like``; all its rows are the same random row.
    """
    generator = torch.Generator().manual_seed(0)
    line = torch.randn(like.shape[-1], generator=generator).to(like)
    rows = line.expand(like.shape).contiguous()
    got = call(rows)
    got = got.reshape(-1, got.shape[-1])
    first = got[:1]
    return torch.equal(got, first.expand_as(got))


class FixedRows:
    """A product x [T, in] -> x W^T [T, out] in library calls of ``rows`` rows each.

    ``rows`` 0 means ``ROWS``, or 1 if the position of a row changes its bits for this shape of weight."""

    def __init__(self, weight: Tensor, rows: int = 0) -> None:
        self.weight = weight
        self.packed = pack(weight)
        self.rows = rows or ROWS
        like = weight.new_empty(ROWS, weight.shape[1])
        if not rows and not same_at_every_place(self._call, like):
            self.rows = 1

    def _call(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.packed)

    def __call__(self, x: Tensor) -> Tensor:
        tokens, width = x.shape[:2]
        whole = -(-tokens // self.rows) * self.rows
        if whole == 0:
            return x.new_empty(0, self.weight.shape[0])
        if whole != tokens or not x.is_contiguous():
            given = x
            x = given.new_zeros(whole, width)
            x[:tokens] = given
        parts = x.split(self.rows)
        size = self.rows * width * x.element_size()
        if x.data_ptr() % 64 or size % 64:  # alignment may affect the kernel
            parts = tuple(part.clone() for part in parts)
        y = torch.cat([self._call(part) for part in parts])
        return y[:tokens]


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function in operations whose result depends on each element alone."""
    y = x.float().neg().exp_()
    y = y.add_(1.0).reciprocal_()
    return y.to(x.dtype)


def gate_out(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate) as ``device.layers.activation.gate_out``."""
    return x * sigmoid(gate)


def activate(x: Tensor, activation: str = "silu") -> Tensor:
    """Apply an activation of ``activation.APPLY`` in operations whose result depends on each element alone."""
    y = x.float()
    if activation == "silu":
        divisor = y.neg().exp_().add_(1.0)
        y = y.div(divisor)
    elif activation == "gelu_tanh":
        cube = y * y * y * 0.044715
        inner = cube.add_(y).mul_(math.sqrt(2 / math.pi))
        share = torch.tanh(inner).add_(1.0)
        y = share.mul_(y * 0.5)
    elif activation == "gelu":
        share = torch.erf(y * math.sqrt(0.5)).add_(1.0)
        y = share.mul_(y * 0.5)
    else:
        y = APPLY[activation](y)
    return y.to(x.dtype)


def gate_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """Return activation(gate) * up [T, n] for x [T, 2 n] = gate | up, with the batch-invariant ``activate``."""
    gate, up = x.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


def logsumexp(x: Tensor) -> Tensor:
    """Return the logsumexp of each row, [N, V] -> [N, 1], computed row by row.

    torch sums a wide single row in several threads but not the rows of a batch, so a batch would have other bits."""
    if not len(x):
        return x.new_empty(0, 1)
    return torch.stack([torch.logsumexp(row.clone(), 0, keepdim=True) for row in x])
