"""``products.Product`` of a quantized weight: whichever kernel takes so many rows together with what surrounds them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .quant import Quantized
from .quant_slim import SlimProduct
from .quant_vector import VectorProduct


class JoinedProduct:
    """One row without matrix units; 2 to 8 with them, of weights of 8 bits."""

    def __init__(self, of: Quantized, *around: Any, **more: Any) -> None:
        """As ``quant_around.Surrounded``."""
        self.each: list[VectorProduct | SlimProduct] = [VectorProduct(of, *around, **more)]
        if of.form == 8:
            self.each.append(SlimProduct(of, *around, **more))

    def fits(self, x: Tensor) -> bool:
        """Whether to use it for x."""
        return any(one.fits(x) for one in self.each)

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``products.Product``, of x that fits."""
        return next(one for one in self.each if one.fits(x))(x, squares, eps, residual, norm)
