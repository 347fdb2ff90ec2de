"""``products.Product`` of a quantized weight, which chooses the kernel by the number of rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .activation import LONGEST
from .quant_epilogue import Around, EpilogueProduct
from .quant_gemv import fused_gemv, fused_gemv_fits
from .quant_small_m import ROWS, small_m, small_m_rows


class FusedProduct(EpilogueProduct):
    """A product with an epilogue for few rows.

    One row runs without tensor cores, 2 to 8 rows with them (``fits``).  For more rows the operation before the product
    rounds the rows, if ``scaled``, a ``ScaledProduct``, is given.
    """

    def __init__(self, *given: Any, scaled: Any = None, **more: Any) -> None:
        """Store the arguments of ``EpilogueProduct`` and ``scaled``."""
        super().__init__(*given, **more)
        self.scaled, self.rows = scaled, small_m_rows(self)
        self.arrived = torch.zeros(triton.cdiv(self.form.n, 16), dtype=torch.int32, device=self.of.weight.device)

    @property
    def takes_tops(self) -> bool:
        """Return whether the caller may pass the largest elements of parts of the row."""
        return self.rounded is not None or self.form.bits == 4

    def fits(self, x: Tensor) -> bool:
        """Return whether a kernel supports x.

        float16 is excluded, because the residual stream times the norm's weight, before the division, may overflow it.
        """
        if x.dtype != torch.bfloat16 or not x.is_contiguous():
            return False
        if len(x) == 1:
            return fused_gemv_fits(self, x)
        return 2 <= len(x) <= self.rows and x.data_ptr() % 16 == 0

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tops: Tensor | None = None,
        tile: dict[str, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the product as ``products.Product``, for x that fits.

        ``tops`` is the argument of ``fused_gemv`` for one row.
        """
        around = Around(squares, eps, residual, norm)
        if len(x) == 1:
            return fused_gemv(self, x, around, tops, tile)
        return small_m(self, x, around, self.arrived, tile)

    def rounds(self, rows: int) -> torch.dtype | None:
        """Return the 8-bit dtype to which rows of x should be rounded for ``of_rows``, None if they stay unrounded."""
        if self.scaled is None or rows <= ROWS or not self.scaled.even or self.scaled.weight.shape[1] > LONGEST:
            return None
        return self.scaled.weight.dtype

    def of_rows(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the product [M, N] in ``dtype`` of codes [M, K] times scale [M, 1], the result of ``rows`` in the
        dtype of ``rounds``.
        """
        y = torch.empty((len(codes), len(self.scaled.weight)), dtype=dtype, device=codes.device)
        return self.scaled.of_rows(codes, scale, y)
