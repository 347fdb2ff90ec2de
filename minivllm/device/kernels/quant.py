"""Products x W^T with weights of 8 or 4 bits, which are converted to numbers in registers (``quant_formats``).

    gemv         1 to 8 rows   without tensor cores                                              (``quant_gemv``)
    matmul       any rows      tensor cores, with TMA or without                                 (``quant_large_m``)
    int8_large   many rows     int8 tensor cores, for int8 weights                               (``quant_large_m``)
    dense        more rows     a part of the weight is converted to numbers in memory, for the library's product

Products with an epilogue are in ``quant_fused``.  The kernels read the weight and its scales once, x and y a few times.
Sums are float32, in an order that depends only on the shapes.  Captured steps need scratch memory beside y, whose size
depends only on the shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import capability, kernel, pdl, wait
from .quant_formats import QuantizedWeight
from .quant_gemv import gemv
from .quant_large_m import int8_large, matmul

FEW = 8  # largest number of rows of ``gemv``
DENSE_AT_ONCE = 1 << 27  # elements of a weight that ``dense`` converts at a time
# largest numbers of rows for which ``int8_large`` and ``matmul`` with TMA run on Hopper, as measured on an H100
INT8_ROWS, TMA_ROWS = 256, 256
# dtype of the weight -> (largest rows of ``gemv``, largest rows of ``matmul``), measured on an H200 by
# benchmarks/quant_kernels.py
SERVES = {torch.int8: (2, 256), torch.float8_e4m3fn: (2, 256), torch.uint8: (2, 128)}


@kernel()
def _numbers(weight, scale, zero, table, out, first, F: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr):
    """Write the numbers of the weight's rows from ``first`` on to out [rows, K].

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
            z = 8.0
            if F.zero:
                z = tl.load(zero + at, mask=on, other=0.0)
            low, high = (raw & 15).to(tl.float32) - z, (raw >> 4).to(tl.float32) - z
        to = out + row * F.k + inputs
        tl.store(to, (low * s).to(out.dtype.element_ty), mask=on)
        tl.store(to + 16, (high * s).to(out.dtype.element_ty), mask=on)


def described(dtype: torch.dtype, sm: int, table: bool, rounded: torch.dtype | None) -> dict[str, str]:
    """Return for ``minivllm explain`` which kernel serves which numbers of rows of a weight of this dtype.

    ``table`` means codes with a table.  ``rounded`` is the dtype to which rows of x are rounded.
    """
    few, dots = (FEW, 0) if table else SERVES[dtype]
    joins = sm >= 90 and not table
    small = joins and dtype != torch.uint8
    found = {}
    if joins:
        found["1 in bfloat16"] = "read once by words, without matrix units, with norm and gate in the same kernel"
    if small:
        found["2 to 8 in bfloat16"] = "tensor cores, with norm and gate in the same kernel"
    elif joins and sm // 10 == 9:
        found["2 to 8 in bfloat16 (2 to 4 in groups of 32)"] = "tensor cores, with norm and gate in the same kernel"
    if rounded is not None:
        found["more" if small else "any"] = "rows rounded by the norm or gate before, or a kernel; products of 8 bits"
        return found
    found[f"up to {few}"] = "read once, without matrix units"
    hopper = sm // 10 == 9 and not table
    if hopper and dtype == torch.int8:
        found[f"33 to {INT8_ROWS}, of 16 bits"] = "int8 tensor cores, rows as two numbers of 8 bits by a kernel before"
    elif hopper:
        by_tiles = "tensor cores, tiles by the copy engine"
        if dtype == torch.uint8:
            found[f"17 to {TMA_ROWS}, in bfloat16"] = by_tiles
        else:
            found[f"65 to {TMA_ROWS}, in bfloat16"] = by_tiles
    if dots:
        found[f"up to {dots}, of 16 bits"] = "tensor cores, made numbers of in registers"
    found["more"] = "made numbers of in memory, a part of the weight at a time, then the library's product"
    return found


class Quantized(QuantizedWeight):
    """The products with one weight, whose kernel depends on the number of rows."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute x W^T [M, N] for x [M, K] of any strides, in ``out`` if it is not None.

        Only M and the dtype of x decide the kernel.
        """
        x, m = x.contiguous(), len(x)
        y = out if out is not None and out.is_contiguous() else x.new_empty(m, self.form.n)
        few, some = (FEW, 0) if self.form.table else SERVES[self.weight.dtype]
        kind = self._hopper(x) if m > few else ""
        if m <= few:
            gemv(self, x, y)
        elif kind == "int8":
            int8_large(x, self.weight, self.scale, y)
        elif kind == "tma" or (m <= some and x.element_size() == 2):
            matmul(self, x, y, tma=kind == "tma")
        else:
            self.dense(x, y=y)
        return y if out is None or y is out else out.copy_(y)

    def _hopper(self, x: Tensor) -> str:
        """Return which kernel for Hopper computes many rows x: "int8", "tma", or "" for none."""
        m, form = len(x), self.form
        aligned = x.data_ptr() % 16 == 0 and self.weight.data_ptr() % 16 == 0 and self.weight.shape[1] % 16 == 0
        if form.table or not aligned or x.element_size() != 2 or capability(x.device) != 9:
            return ""
        if self.weight.dtype == torch.int8 and 32 < m <= INT8_ROWS:
            return "int8"
        # zero points that are fractions were not measured
        measured = (16 if form.bits == 4 else 64) < m <= TMA_ROWS and form.zero != 1
        return "tma" if measured and x.dtype == torch.bfloat16 else ""

    def dense(self, x: Tensor, at_once: int = DENSE_AT_ONCE, y: Tensor | None = None) -> Tensor:
        """Compute y [M, N] of x [M, K] with torch's product and parts of the weight that are converted to numbers in
        memory.
        """
        n = self.form.n
        y, step = x.new_empty(len(x), n) if y is None else y, max(1, at_once // self.form.k)
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            torch.mm(x, self.numbers(rows, x.dtype).t(), out=y[:, rows])
        return y

    def numbers(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return some rows of the weight as numbers [rows, K]."""
        out = torch.empty((rows.stop - rows.start, self.form.k), dtype=dtype, device=self.weight.device)
        grid = (len(out), triton.cdiv(self.weight.shape[1], 2048))
        _numbers[grid](
            self.weight, self.scale, self.zero, self.table, out, rows.start, F=self.form, BB=2048, **pdl(out)
        )
        return out
