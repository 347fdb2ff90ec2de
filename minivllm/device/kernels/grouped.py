"""Products x W^T for weights of 8 bits whose groups of inputs share a scale.

    dots     up to 256 rows   grid (M / BM, N / BN, SK)   y^T [BN, BM] = W [BN, K / SK] x^T  (``packed_tiles``)
    dense    more             a part of the weight is converted to numbers in memory, for the library's product

Weights are float8 in blocks, or int8 and uint8 in groups.  The kernels read the weight and its scales once, x and y a
few times.  Sums are float32, in an order that depends only on the shapes.  The reference is ``GroupedBytes`` in
``plugins/quantizer/forms.py``, which converts the whole weight to numbers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .launch import capability, cdiv, kernel, pdl, wait
from .packed_tiles import add_tile, inputs_of, load_x
from .split_sums import drained, scratch_of, together
from .weight_products import copied, dense_product, result_of

DOTS = 256  # largest number of rows of x that the kernel ``dots`` multiplies
DENSE_AT_ONCE = 1 << 27  # largest number of elements of a weight that ``dense`` converts at a time
PROGRAMS = (128, 256)  # sums are split until there are this many programs: for up to 16 rows, for more rows
MOST_SPLIT = 8


@kernel("M")
def _dots(
    x, weight, scale, zero, y, scratch, arrived, M, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr,
    IEEE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    wide, inputs = on.to(tl.int64), inputs_of(8, BK)
    x_at = x + om.to(tl.int64)[None, :] * K
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        a, b = load_x(x_at, k, inputs, om < M, K, 8)
        acc = add_tile(acc, a, b, weight, scale, zero, wide, on < N, k, inputs, K, 8, GROUP, ZERO, BN, BK, IEEE, ASM)
        acc = drained(acc, PDL)
    acc, last = together(acc, scratch, arrived, row, tile, part, om, on, N, SK)
    if last:
        at = y + om.to(tl.int64)[None, :] * N + on[:, None]
        tl.store(at, acc.to(y.dtype.element_ty), mask=(on < N)[:, None] & (om < M)[None, :])


@kernel()
def _numbers(
    weight, scale, zero, out, first, K: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Dequantize the weight's rows from ``first`` on to out [rows, K].  A program handles BB elements of a row."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ok = tl.program_id(1) * BB + tl.arange(0, BB)
    on = ok < K
    at = (first + row) * ((K + GROUP - 1) // GROUP) + ok // GROUP
    steps = tl.load(weight + (first + row) * K + ok, mask=on, other=0.0).to(tl.float32)
    if ZERO:
        steps = steps - tl.load(zero + at, mask=on, other=0.0)
    numbers = steps * tl.load(scale + at, mask=on, other=0.0)
    tl.store(out + row * K + ok, numbers.to(out.dtype.element_ty), mask=on)


def dots_tile(rows: int, n: int, k: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/packed_products.py on an H200, of 4,096 and 28,672 outputs of 4,096 inputs.

    Sums are split until there are enough programs for the device.
    """
    bm = next((size for size in (16, 32, 64) if rows <= size), 128)
    programs = cdiv(n, 64) * cdiv(rows, bm)
    enough = PROGRAMS[bm > 16]
    sk = 1
    while programs * sk < enough and sk < MOST_SPLIT and k // (128 * sk) >= 8:
        sk *= 2
    stages = 4 if bm == 64 else 3
    return {"BM": bm, "BN": 64, "BK": 128, "SK": sk, "STAGES": stages, "num_warps": 4}


class GroupedProduct:
    """The product with one weight int8, float8_e4m3fn or uint8 [N, K].

    ``scale`` is f32 [N, K / group], and so is ``zero``, for which None means 0.  All are contiguous.  The object keeps
    the counters of split sums, which are 0 between launches.
    """

    def __init__(self, weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
        self.weight = weight
        self.scale = scale
        self.zero = zero
        self.n, self.k = weight.shape
        self.group = self.k // scale.shape[1]
        self.arrived = torch.zeros(1024, dtype=torch.int32, device=weight.device)
        self._tensors = (weight, scale, scale if zero is None else zero)
        self._sizes = {"K": self.k, "GROUP": self.group}
        self._sizes["ZERO"] = int(zero is not None)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute x W^T [M, N] for x [M, K] of any strides, in ``out`` if it is not None.

        Only M decides the kernel.
        """
        x = x.contiguous()
        y = result_of(x, self.n, out)
        if len(x) <= DOTS and x.element_size() == 2:
            self.dots(x, y=y)
        else:
            self.dense(x, y=y)
        return copied(y, out)

    def dots(self, x: Tensor, tile: dict[str, int] | None = None, y: Tensor | None = None) -> Tensor:
        """Compute y [M, N] for contiguous x [M, K] with tensor cores."""
        m = len(x)
        if y is None:
            y = x.new_empty(m, self.n)
        if not m:
            return y
        constants = pdl(x) | self._sizes | (tile or dots_tile(m, self.n, self.k))
        bm = constants["BM"]
        bn = constants["BN"]
        rows = cdiv(m, bm)
        tiles = cdiv(self.n, bn)
        if rows * tiles > len(self.arrived):
            constants["SK"] = 1
        parts = constants["SK"]
        scratch = scratch_of(y, parts, rows * bm * tiles * bn)
        constants["N"] = self.n
        constants["IEEE"] = x.dtype == torch.float32
        constants["ASM"] = x.dtype == torch.bfloat16 and capability(x.device) >= 9
        _dots[(rows, tiles, parts)](x, *self._tensors, y, scratch, self.arrived, m, **constants)
        return y

    def dense(self, x: Tensor, at_once: int = DENSE_AT_ONCE, y: Tensor | None = None) -> Tensor:
        """Compute y [M, N] for x [M, K] with torch's product and parts of the weight that are converted to numbers in
        memory.
        """
        if y is None:
            y = x.new_empty(len(x), self.n)
        step = max(1, at_once // self.k)
        return dense_product(x, self.numbers, step, y)

    def numbers(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Dequantize some rows of the weight to ``dtype``: [rows, K]."""
        count = rows.stop - rows.start
        out = torch.empty((count, self.k), dtype=dtype, device=self.weight.device)
        grid = (count, cdiv(self.k, 2048))
        _numbers[grid](*self._tensors, out, rows.start, BB=2048, **self._sizes, **pdl(out))
        return out
