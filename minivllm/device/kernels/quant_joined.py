"""``products.Product`` of a quantized weight: whichever kernel takes so many rows together with what surrounds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .activation import LONGEST
from .quant import FEW, Quantized
from .quant_slim import SlimProduct
from .quant_slim_four import SlimFourProduct
from .quant_vector import VectorProduct


class JoinedProduct:
    """One row without matrix units; 2 to 8 with them (``fits``).  Of more, what comes before the product
    rounds the rows, where ``scaled`` is given, a ``ScaledProduct``."""

    def __init__(self, of: Quantized, *around: Any, scaled: Any = None, **more: Any) -> None:
        """As ``quant_around.Surrounded``."""
        self.scaled = scaled
        self.vector = VectorProduct(of, *around, **more)
        slim = SlimProduct if of.form == 8 else SlimFourProduct
        self.each: list[VectorProduct | SlimProduct] = [self.vector, slim(of, *around, **more)]

    @property
    def takes_tops(self) -> bool:
        """Whether one row may come with the largest elements of its parts: where they are asked for."""
        return self.vector.by_largest

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
        tops: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``products.Product``, of x that fits; ``tops``: as ``VectorProduct``, of one row."""
        of = next(one for one in self.each if one.fits(x))
        known = {} if tops is None else {"tops": tops}
        return of(x, squares, eps, residual, norm, **known)

    def rounds(self, rows: int) -> torch.dtype | None:
        """The 8-bit dtype in which so many rows of x should come (``of_rows``); None: as they are."""
        if self.scaled is None or rows <= FEW or not self.scaled.even or self.scaled.weight.shape[1] > LONGEST:
            return None
        return self.scaled.weight.dtype

    def of_rows(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """codes [M, K] times scale [M, 1] -> the plain product [M, N] in ``dtype``; rows as ``rounds`` wants them."""
        y = torch.empty((len(codes), len(self.scaled.weight)), dtype=dtype, device=codes.device)
        return self.scaled.of_rows(codes, scale, y)
