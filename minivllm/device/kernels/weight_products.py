"""Host code that products x W^T with stored weights share: their outputs, and the product by parts of the weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def result_of(x: Tensor, outputs: int, out: Tensor | None) -> Tensor:
    """Return ``out`` if kernels can write the result of x [M, K] to it, otherwise new memory [M, outputs]."""
    if out is not None and out.is_contiguous():
        return out
    return x.new_empty(len(x), outputs)


def copied(y: Tensor, out: Tensor | None) -> Tensor:
    """Return the result y, or ``out`` with a copy of it if ``out`` is other memory."""
    if out is None or y is out:
        return y
    return out.copy_(y)


def dense_product(x: Tensor, numbers: Callable[[slice, torch.dtype], Tensor], step: int, y: Tensor) -> Tensor:
    """Compute y [M, N] of x [M, K] with torch's product, ``step`` rows of the weight at a time.

    ``numbers`` returns some rows of the weight in a dtype.  Each part is freed before the next one is made.
    """
    n = y.shape[1]
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        torch.mm(x, numbers(rows, x.dtype).t(), out=y[:, rows])
    return y
