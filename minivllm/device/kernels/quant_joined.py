"""``products.Product`` of a quantized weight, which chooses the kernel by the number of rows."""

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
    """A product with an epilogue for few rows.

    One row runs without tensor cores, 2 to 8 rows with them (``fits``).  For more rows the operation before the product
    rounds the rows, if ``scaled``, a ``ScaledProduct``, is given.
    """

    def __init__(self, of: Quantized, *around: Any, scaled: Any = None, **more: Any) -> None:
        """Store the products of one row and of few rows; the arguments are those of ``quant_around.Surrounded``."""
        self.scaled = scaled
        self.vector = VectorProduct(of, *around, **more)
        slim = SlimProduct if of.form == 8 else SlimFourProduct
        self.each: list[VectorProduct | SlimProduct] = [self.vector, slim(of, *around, **more)]

    @property
    def takes_tops(self) -> bool:
        """Return whether the caller may pass the largest elements of parts of the row."""
        return self.vector.by_largest

    def fits(self, x: Tensor) -> bool:
        """Return whether a kernel supports x."""
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
        """Compute the product as ``products.Product``, for x that fits.

        ``tops`` is the argument of ``VectorProduct`` for one row.
        """
        of = next(one for one in self.each if one.fits(x))
        known = {} if tops is None else {"tops": tops}
        return of(x, squares, eps, residual, norm, **known)

    def rounds(self, rows: int) -> torch.dtype | None:
        """Return the 8-bit dtype to which rows of x should be rounded for ``of_rows``, None if they stay unrounded."""
        if self.scaled is None or rows <= FEW or not self.scaled.even or self.scaled.weight.shape[1] > LONGEST:
            return None
        return self.scaled.weight.dtype

    def of_rows(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the product [M, N] in ``dtype`` of codes [M, K] times scale [M, 1], the result of ``rows`` in the
        dtype of ``rounds``.
        """
        y = torch.empty((len(codes), len(self.scaled.weight)), dtype=dtype, device=codes.device)
        return self.scaled.of_rows(codes, scale, y)
