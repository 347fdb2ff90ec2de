"""Memory behind the weight of a linear layer, for rows whose products are computed by the same launch.

    whole [out + n, in] = weight [out, in] | rows [n, in]
    whole(x) [T, out + n] = the product of the weight | the products of the rows

Adapters (LoRA) write their first matrices to the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo

if TYPE_CHECKING:
    from minivllm.core.interfaces.adapter import NeededRows
    from minivllm.device.kernels.products import Limit


class ExtendedProduct:
    """A weight and the rows behind it in memory, multiplied by one kernel (``adapter.ExtendedWeight``)."""

    def __init__(self, info: ModuleInfo, rows: int) -> None:
        """Allocate memory for the weight of ``info`` and for ``rows`` further rows, which are 0."""
        shape = info.out_features + rows, info.in_features
        self.whole = torch.empty(shape, dtype=getattr(torch, info.dtype), device=info.device)
        self.weight = self.whole[: info.out_features]
        self.rows = self.whole[info.out_features :]
        self.rows.zero_()
        self.renew: Callable[[], object] | None = None
        self.row: Any = None  # the kernel that multiplies few tokens, or None

    def finish(self) -> None:
        """Create the kernel for few tokens, after the weight has been loaded."""
        from minivllm.device.kernels.products import Product

        self.row = Product(self.whole, None)

    def refresh(self) -> None:
        """Call ``renew``, the function of the rows' owner that writes them again."""
        if self.renew is not None:
            self.renew()

    def fits(self, x: Tensor) -> bool:
        return self.row is not None and self.row.fits(x)

    def divided(self, x: Tensor, squares: Tensor, eps: float, needed: NeededRows | None = None) -> Tensor:
        y: Tensor = self.row(x, squares, eps, limit=self._limit(needed))[0]
        return y

    def _faster(self, rows: int) -> bool:
        """Return whether the kernel multiplies ``rows`` rows faster than the library.

        For more than 32 rows its programs must fit on the device at once."""
        from minivllm.device.kernels.launch import cdiv
        from minivllm.device.kernels.products import SLOTS, matrix_tile

        if rows <= 32:
            return True
        outputs, inputs = self.whole.shape
        tile = matrix_tile(rows, outputs, inputs, False)
        return cdiv(rows, tile["BM"]) * cdiv(outputs, tile["BN"]) <= SLOTS

    def _limit(self, needed: NeededRows | None) -> Limit | None:
        """Return the outputs that are needed, None for all."""
        if needed is None:
            return None
        from minivllm.device.kernels.products import Limit

        return Limit(needed.used, len(self.weight), needed.each)

    def extends(self, product: Callable[[Tensor], Tensor]) -> bool:
        scheme = getattr(product, "__self__", None)
        return getattr(scheme, "extended", None) is self

    def __call__(self, x: Tensor, needed: NeededRows | None = None) -> Tensor:
        if self.fits(x) and self._faster(len(x)):
            y: Tensor = self.row(x, limit=self._limit(needed))[0]
            return y
        return F.linear(x, self.whole)
