"""The product x W^T with an unquantized weight.  On a CPU a second copy in oneDNN's order serves several rows.

A float32 product of 8 to 128 rows is 1.4 to 2 times as fast that way (measured, AVX-512, 256 to 512 columns); one row
is slower.  Large matrices are limited by memory bandwidth in both forms, so they have no second copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_LIMIT = 4 << 20  # largest size in bytes of a weight that gets a second, packed copy
PACK_ROWS = 32  # number of input rows for which oneDNN chooses the order of the packed copy
PACKED_FROM = 4  # smallest number of input rows for which a product with the packed copy is faster


def pack(weight: Tensor) -> Tensor | None:
    """Return a copy of ``weight`` [out, in] in oneDNN's opaque order; None if that is not faster or not available."""
    small = weight.numel() * weight.element_size() <= PACK_LIMIT
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not small
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)


class Packed:
    """A packed copy of a weight (see ``pack``), created by the first product with enough rows.

    Native steps compute short products without it, so it may never be created.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight: Tensor | None = weight
        self._copy: Tensor | None = None

    def of(self, rows: int) -> Tensor | None:
        """Return the packed copy for a product of ``rows`` rows, made at the first use; None if the weight alone is
        faster."""
        if rows >= PACKED_FROM and self._weight is not None:
            self._copy = pack(self._weight)
            self._weight = None
        return self._copy


def matmul(x: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    """Return x W^T, x [T, in] -> [T, out], with ``packed`` for several rows; None means only ``weight``."""
    if packed is None or x.shape[0] < PACKED_FROM:
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
