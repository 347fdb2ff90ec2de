"""``products.Product`` of a quantized weight: whichever kernel takes so many rows together with what surrounds them."""

from __future__ import annotations

import torch
from torch import Tensor

from .products import PLAIN
from .quant import Quantized
from .quant_slim import SlimProduct
from .quant_vector import VectorProduct


class JoinedProduct:
    """One row without matrix units; 2 to 8 with them, of weights of 8 bits.  ``rounded``: rows of x are rounded to
    that dtype before, each by its largest element."""

    def __init__(
        self,
        of: Quantized,
        bias: Tensor | None = None,
        mode: int = PLAIN,
        activation: str = "silu",
        rounded: torch.dtype | None = None,
    ) -> None:
        self.each: list[VectorProduct | SlimProduct] = [VectorProduct(of, bias, mode, activation, rounded)]
        if of.form == 8:
            self.each.append(SlimProduct(of, bias, mode, activation, rounded))

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
