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
from .launch import power
from .product_epilogue import ADDED, GATED, PLAIN, ahead, weight_of
from .product_epilogue import finish as finish_product
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
    """Apply ``product_epilogue.finish`` to sums [BN, BM] of outputs ``on`` and rows ``om``, without the norm if NORMED.

    ``around`` has y, bias, residual, norm, squares of x, squares of the result, and epsilon.
    """
    PARTS: tl.constexpr = 0 if NORMED else P.parts
    y, bias, residual, norm, in_squares, out_squares, eps = around
    factor, stream = ahead(om, on, residual, in_squares, eps, M, F.n, F.k, PARTS, P.parts_p, P.mode)
    after = weight_of(norm, on, F.n, P.mode)
    finish_product(tl.trans(acc), tl.trans(up), om, on, tile, factor, stream, after, y, bias, residual, out_squares, M,
                   F.n, PARTS, P.mode, P.bias, P.act)  # fmt: skip


NOTHING = Around()
Tile = dict[str, int]  # constants of a launch that were measured to be fast
Result = tuple[Tensor, Tensor | None]  # y and partial sums or largest elements, as in ``EpilogueProduct.given``


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
        self.of = of
        self.bias = bias
        self.mode = mode
        self.activation = activation
        self.rounded = rounded
        outputs = of.form.n
        self.form = replace(of.form, n=outputs // 2 if mode == GATED else outputs)

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
        if y is None:
            y = x.new_empty(len(x), self.form.n)
        mode = self.mode
        bias = self.bias
        partials = None
        if mode == ADDED:
            partials = torch.empty((len(x), parts), dtype=torch.float32, device=x.device)
        elif tops and mode == GATED:
            partials = torch.empty((len(x), parts), dtype=torch.int32, device=x.device)
        squares, eps, residual, norm = around
        before = 0 if squares is None else squares.shape[1]
        before_p = power(max(before, 1))
        act = NUMBER[self.activation]
        epilogue = Epilogue(mode, bias is not None, act, by_row is not None, before, before_p)
        scale = self.of.scale
        given = (by_row, y, bias, residual, norm, squares, partials)
        unused = (scale, y, y, y, y, scale, y)  # the kernels do not read absent tensors
        tensors = [other if one is None else one for one, other in zip(given, unused, strict=True)]
        return y, partials, (*tensors, eps), epilogue
