"""The shared part of kernels that multiply by a quantized weight and apply an epilogue (``products.Product``)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .activation import NUMBER
from .products import ADDED, GATED, PLAIN
from .quant import Quantized


class Surrounded:
    """A product with an epilogue, which is a bias, a gate, or a residual addition with the next norm.

    ``rounded`` is an 8-bit dtype to which each row of x is rounded before the product, by its largest element.
    """

    def __init__(
        self,
        of: Quantized,
        bias: Tensor | None = None,
        mode: int = PLAIN,
        activation: str = "silu",
        rounded: torch.dtype | None = None,
    ) -> None:
        self.of, self.bias, self.mode, self.activation, self.rounded = of, bias, mode, activation, rounded
        self.k, self.n = of.k, of.n // (2 if mode == GATED else 1)
        self.float8 = of.weight.dtype == torch.float8_e4m3fn

    def given(
        self,
        x: Tensor,
        by_row: Tensor | None,
        squares: Tensor | None,
        eps: float,
        residual: Tensor | None,
        norm: Tensor | None,
        parts: int,
    ) -> tuple[Tensor, Tensor | None, tuple[Any, ...], dict[str, Any]]:
        """Return y [M, N], the second result for ``parts`` parts, the kernel's arguments behind the weight, and its
        constants.
        """
        y, unused = x.new_empty(len(x), self.n), self.of.scale
        partials = self.partials(len(x), parts, x.device)
        before = 0 if squares is None else squares.shape[1]
        around = (
            unused if by_row is None else by_row,
            y,
            y if self.bias is None else self.bias,
            y if residual is None else residual,
            y if norm is None else norm,
            unused if squares is None else squares,
            y if partials is None else partials,
            eps,
        )
        constants = {
            "FLOAT8": self.float8,
            "BY_ROW": by_row is not None,
            "PARTS": before,
            "PARTS_P": triton.next_power_of_2(max(before, 1)),
            "MODE": self.mode,
            "BIAS": self.bias is not None,
            "ACT": NUMBER[self.activation],
        }
        return y, partials, around, constants

    def partials(self, rows: int, parts: int, device: torch.device) -> Tensor | None:
        """Allocate f32 [rows, parts] for the sums of squares of each row, which the next norm reads; None without a
        norm.
        """
        return torch.empty((rows, parts), dtype=torch.float32, device=device) if self.mode == ADDED else None
