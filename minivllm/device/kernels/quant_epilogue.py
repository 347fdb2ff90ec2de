"""Code that the kernels for products with a quantized weight share: the tensors and the epilogue
(``products.Product``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import NUMBER
from .products import ADDED, GATED, PLAIN, _finish
from .quant_formats import QuantizedWeight


@dataclass(frozen=True)
class Epilogue:
    """The constants of an epilogue, which kernels take as one: the mode, whether there is a bias, the number of the
    activation, and whether sums are multiplied by a factor of their row.

    ``parts`` is the number of sums of squares of a row of x, and ``parts_p`` a power of two of at least that.
    """

    mode: int
    bias: bool
    act: int
    by_row: bool
    parts: int
    parts_p: int


class Around(NamedTuple):
    """The tensors around a product, as in ``products.Product``: the sums of squares of x, the epsilon of its norm, the
    residual stream, and the weight of the next norm.
    """

    squares: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    norm: Tensor | None = None


@triton.jit
def finish(acc, up, om, on, tile, around, M, F: tl.constexpr, P: tl.constexpr, NORMED: tl.constexpr):
    """Apply ``products._finish`` to sums [BN, BM] of outputs ``on`` and rows ``om``, without the norm if NORMED.

    ``around`` has y, bias, residual, norm, squares of x, squares of the result, and epsilon.
    """
    PARTS: tl.constexpr = 0 if NORMED else P.parts
    y, bias, residual, norm, in_squares, out_squares, eps = around
    _finish(tl.trans(acc), tl.trans(up), om, on, tile, y, bias, residual, norm, in_squares, out_squares, eps, M, F.n,
            F.k, PARTS, P.parts_p, P.mode, P.bias, P.act)  # fmt: skip


NOTHING = Around()


class EpilogueProduct:
    """A product with an epilogue, which is a bias, a gate, or a residual addition with the next norm.

    ``rounded`` is an 8-bit dtype to which each row of x is rounded before the product, by its largest element.
    """

    def __init__(
        self,
        of: QuantizedWeight,
        bias: Tensor | None = None,
        mode: int = PLAIN,
        activation: str = "silu",
        rounded: torch.dtype | None = None,
    ) -> None:
        self.of, self.bias, self.mode, self.activation, self.rounded = of, bias, mode, activation, rounded
        self.form = replace(of.form, n=of.form.n // (2 if mode == GATED else 1))

    def given(
        self,
        x: Tensor,
        by_row: Tensor | None,
        around: Around,
        parts: int,
        tops: bool = False,
        y: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, tuple[Any, ...], Epilogue]:
        """Return y [M, N], the second result, the kernel's arguments behind the weight, and the epilogue's constants.

        The second result [M, parts] has f32 sums of squares, which the next norm reads, or with a gate and ``tops``
        int32 bits of largest elements.  Otherwise it is None.
        """
        y, partials, before = x.new_empty(len(x), self.form.n) if y is None else y, None, 0
        if self.mode == ADDED or (tops and self.mode == GATED):
            dtype = torch.float32 if self.mode == ADDED else torch.int32
            partials = torch.empty((len(x), parts), dtype=dtype, device=x.device)
        if around.squares is not None:
            before = around.squares.shape[1]
        given = (by_row, y, self.bias, around.residual, around.norm, around.squares, partials, around.eps)
        unused = (self.of.scale, y, y, y, y, self.of.scale, y, 0.0)
        tensors = tuple(other if one is None else one for one, other in zip(given, unused, strict=True))
        parts_p, act = triton.next_power_of_2(max(before, 1)), NUMBER[self.activation]
        epilogue = Epilogue(self.mode, self.bias is not None, act, by_row is not None, before, parts_p)
        return y, partials, tensors, epilogue
