"""x W^T for a plain weight.  On a CPU, several rows at once run on a second copy of the weight in oneDNN's own order.

A float32 product of 8 to 128 rows is 1.4 to 2 times as fast that way (measured, AVX-512, 256 to 512 columns); one row
is slower, and large matrices are bound by memory either way, so those keep the plain weight alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_LIMIT = 4 << 20  # bytes of a weight that is worth a second copy
PACK_ROWS = 32  # rows that the order is chosen for
PACKED_FROM = 4  # rows from which the packed copy wins


def pack(weight: Tensor) -> Tensor | None:
    """An opaque oneDNN copy of weight [out, in], or None where the plain weight does as well."""
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
    """``pack`` of a weight, made by the first product that takes it: native steps run the short ones without."""

    def __init__(self, weight: Tensor) -> None:
        self._weight: Tensor | None = weight
        self._copy: Tensor | None = None

    def of(self, rows: int) -> Tensor | None:
        """The copy if a product of so many rows takes it."""
        if rows >= PACKED_FROM and self._weight is not None:
            self._copy, self._weight = pack(self._weight), None
        return self._copy


def matmul(x: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out]."""
    if packed is None or x.shape[0] < PACKED_FROM:
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
