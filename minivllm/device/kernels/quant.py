"""Products x W^T with weights of 8 or 4 bits, whose kernel depends on the number of rows.

    gemv         1 or 2 rows   without tensor cores, one row also with an epilogue                 (``quant_gemv``)
    small_m      2 to 8 rows   tensor cores, with an epilogue                                      (``quant_small_m``)
    matmul       any rows      tensor cores, with TMA or without                                   (``quant_large_m``)
    int8_large   many rows     int8 tensor cores, for int8 weights                                 (``quant_large_m``)
    dense        more rows     a part of the weight is converted to numbers in memory, for the library's product

The kernels read the weight and its scales once, x and y a few times, and convert codes in registers
(``quant_formats``).  Sums are float32, in an order that depends only on the shapes.  Captured steps need scratch memory
beside y, whose size depends only on the shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .activation import LONGEST
from .launch import capability, cdiv, kernel, pdl, wait
from .quant_epilogue import Around, EpilogueProduct, Result, Tile
from .quant_formats import QuantizedWeight
from .quant_gemv import FEW, gemv, gemv_fits
from .quant_large_m import int8_large, matmul
from .quant_small_m import ROWS, small_m, small_m_rows
from .weight_products import copied, dense_product, result_of

DENSE_AT_ONCE = 1 << 27  # largest number of elements of a weight that ``dense`` converts at a time
# largest numbers of rows for which ``int8_large`` and ``matmul`` with TMA run on Hopper, as measured on an H100
INT8_ROWS, TMA_ROWS = 256, 256
# dtype of the weight -> largest number of rows for which ``matmul`` is used (measured, benchmarks/quant_kernels.py)
MATMUL_ROWS = {torch.int8: 256, torch.float8_e4m3fn: 256, torch.uint8: 128}
# largest numbers of rows for ``matmul`` with a table of codes, without and with TMA
TABLE_ROWS, TABLE_TMA_ROWS = 16, 64


@kernel()
def _numbers(weight, scale, zero, table, out, first, F: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr):
    """Dequantize the weight's rows from ``first`` on to out [rows, K].

    A program handles BB bytes of a row.
    """
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ob = tl.program_id(1) * BB + tl.arange(0, BB)
    on = ob < F.k * F.bits // 8
    raw = tl.load(weight + (first + row) * (F.k * F.bits // 8) + ob, mask=on, other=0.0 if F.bits == 8 else 0)
    if F.bits == 8:
        s = tl.load(scale + first + row)
        tl.store(out + row * F.k + ob, (raw.to(tl.float32) * s).to(out.dtype.element_ty), mask=on)
    else:
        inputs = ob // 16 * 32 + ob % 16
        at = (first + row) * F.by_row + inputs // F.group * F.by_group
        s = tl.load(scale + at, mask=on, other=0.0)
        if F.table:
            low, high = tl.load(table + (raw & 15)), tl.load(table + (raw >> 4))
        else:
            z = tl.load(zero + at, mask=on, other=0.0) if F.zero else 8.0
            low, high = (raw & 15).to(tl.float32) - z, (raw >> 4).to(tl.float32) - z
        to = out + row * F.k + inputs
        tl.store(to, (low * s).to(out.dtype.element_ty), mask=on)
        tl.store(to + 16, (high * s).to(out.dtype.element_ty), mask=on)


def described(
    dtype: torch.dtype, sm: int, table: bool, rounded: torch.dtype | None, rounds_rows: bool = True
) -> dict[str, str]:
    """Return for ``minivllm explain`` which kernel serves which numbers of rows of a weight of this dtype.

    ``table`` means codes with a table.  ``rounded`` is the dtype to which rows of x are rounded.  ``rounds_rows`` is
    that of ``Quantized``.
    """
    joins = sm >= 90
    hopper = sm // 10 == 9
    small = joins and dtype != torch.uint8
    found = {}
    with_norm = ", with norm and gate in the same kernel"
    if joins:
        found["1 in bfloat16"] = f"read once, without matrix units{with_norm}"
    if small:
        found["2 to 8 in bfloat16"] = f"tensor cores{with_norm}"
    elif hopper and not table:
        found["2 to 8 in bfloat16 (2 to 4 in groups of 32)"] = f"tensor cores{with_norm}"
    if rounded is not None:
        found["more" if small else "any"] = "rows rounded by the norm or gate before, or a kernel; products of 8 bits"
        return found
    found[f"up to {FEW}"] = "read once, without matrix units"
    if hopper and dtype == torch.int8:
        if rounds_rows:
            found[f"33 to {INT8_ROWS}, of 16 bits"] = (
                "int8 tensor cores, rows as two numbers of 8 bits by a kernel before"
            )
    elif hopper:
        least = 17 if dtype == torch.uint8 else 65
        most = TABLE_TMA_ROWS if table else TMA_ROWS
        found[f"{least} to {most}, in bfloat16"] = "tensor cores, tiles by the copy engine"
    dots = TABLE_ROWS if table else MATMUL_ROWS[dtype]
    found[f"up to {dots}, of 16 bits"] = "tensor cores, made numbers of in registers"
    found["more"] = "made numbers of in memory, a part of the weight at a time, then the library's product"
    return found


class Quantized(QuantizedWeight):
    """The products x W^T with one quantized weight, by a kernel that is chosen by the number of rows."""

    rounds_rows = True  # whether the int8 kernel for many rows, which rounds the rows of x, may be used

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute x W^T [M, N] for x [M, K] of any strides, in ``out`` if it is not None.

        Only M and the dtype of x decide the kernel.
        """
        x = x.contiguous()
        m = len(x)
        y = result_of(x, self.form.n, out)
        kind = self._hopper(x)
        dots = TABLE_ROWS if self.form.table else MATMUL_ROWS[self.weight.dtype]
        if m and gemv_fits(self, x):
            gemv(EpilogueProduct(self), x, y=y)
        elif kind == "int8":
            int8_large(x, self.weight, self.scale, y)
        elif kind == "tma" or (m <= dots and x.element_size() == 2):
            matmul(self, x, y, tma=kind == "tma")
        else:
            self.dense(x, y=y)
        return copied(y, out)

    def _hopper(self, x: Tensor) -> str:
        """Return the name of the kernel for Hopper that multiplies many rows x: "int8", "tma", or "" for none."""
        m = len(x)
        form = self.form
        weight = self.weight
        if x.element_size() != 2 or capability(x.device) != 9:
            return ""
        aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        if not aligned or weight.shape[1] % 16:
            return ""
        if weight.dtype == torch.int8 and 32 < m <= INT8_ROWS:
            return "int8" if self.rounds_rows else ""
        # these kernels were not measured with zero points that are no whole numbers
        if form.zero == 1 or x.dtype != torch.bfloat16:
            return ""
        few = 16 if form.bits == 4 else 64
        most = TABLE_TMA_ROWS if form.table else TMA_ROWS
        return "tma" if few < m <= most else ""

    def dense(self, x: Tensor, at_once: int = DENSE_AT_ONCE, y: Tensor | None = None) -> Tensor:
        """Compute y [M, N] of x [M, K] with torch's product and parts of the weight that are converted to numbers in
        memory.
        """
        if y is None:
            y = x.new_empty(len(x), self.form.n)
        step = max(1, at_once // self.form.k)
        return dense_product(x, self.numbers, step, y)

    def numbers(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Dequantize some rows of the weight to ``dtype``: [rows, K]."""
        count = rows.stop - rows.start
        out = torch.empty((count, self.form.k), dtype=dtype, device=self.weight.device)
        grid = (count, cdiv(self.weight.shape[1], 2048))
        tensors = (self.weight, self.scale, self.zero, self.table)
        _numbers[grid](*tensors, out, rows.start, F=self.form, BB=2048, **pdl(out))
        return out


class FusedProduct(EpilogueProduct):
    """A product with an epilogue for few rows (``fits``), with the interface of ``products.Product``.

    ``scaled`` is a ``ScaledProduct`` for more rows of x, which the operation before the product rounds to 8 bits.  None
    means that rows are not rounded.
    """

    def __init__(self, *given: Any, scaled: Any = None, **more: Any) -> None:
        """Store the arguments of ``EpilogueProduct`` and the kernels for many rows, ``scaled``, and allocate counters
        for tiles.
        """
        super().__init__(*given, **more)
        self.scaled = scaled
        self.rows = small_m_rows(self)
        counters = cdiv(self.form.n, 16)
        self.arrived = torch.zeros(counters, dtype=torch.int32, device=self.of.weight.device)

    @property
    def takes_tops(self) -> bool:
        """Return whether a call accepts ``tops``, the largest elements of parts of a row x."""
        return self.rounded is not None or (self.form.bits == 4 and not self.form.table)

    def fits(self, x: Tensor) -> bool:
        """Return whether a kernel with this epilogue, for one row or for a few, supports x [M, K].

        x may be the residual stream times the weight of its norm, not yet divided by its root mean square.  Such values
        may overflow float16, so only bfloat16 is supported.
        """
        if x.dtype != torch.bfloat16 or not x.is_contiguous():
            return False
        if len(x) == 1:
            return capability(x.device) >= 9 and gemv_fits(self.of, x)
        return 2 <= len(x) <= self.rows and x.data_ptr() % 16 == 0

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tops: Tensor | None = None,
        tile: Tile | None = None,
    ) -> Result:
        """Compute the product of x, for which ``fits`` is True, and its epilogue, by the kernel for one row or for a
        few.

        The arguments before ``tops`` are the fields of ``Around``.  ``tops`` is the argument of ``gemv`` for one row.
        """
        around = Around(squares, eps, residual, norm)
        if len(x) == 1:
            return gemv(self, x, around, tops, tile)
        return small_m(self, x, around, self.arrived, tile)

    def rounds(self, rows: int) -> torch.dtype | None:
        """Return the 8-bit dtype to which rows of x should be rounded for ``of_rows``, None if they stay unrounded."""
        if self.scaled is None or rows <= ROWS:
            return None
        weight = self.scaled.weight
        if not self.scaled.even or weight.shape[1] > LONGEST:
            return None
        return weight.dtype

    def of_rows(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the product [M, N] in ``dtype`` of codes [M, K] times scale [M, 1].

        The codes are rows of x that were rounded to the dtype of ``rounds``.
        """
        outputs = len(self.scaled.weight)
        y = torch.empty((len(codes), outputs), dtype=dtype, device=codes.device)
        return self.scaled.of_rows(codes, scale, y)
