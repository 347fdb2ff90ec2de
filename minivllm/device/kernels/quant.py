"""Products x W^T with weights of 8 or 4 bits, which are converted to numbers in registers.

    few     1 to 8 rows     without tensor cores, a program sums BN outputs over all inputs; integer weights are read
                            as 32-bit words for x of 16 bits (``quant_words``)
    dots    any rows        grid (M / BM, N / BN, SK)   y^T [BN, BM] = numbers(W) [BN, K / SK] x^T on the tensor cores
    dense   many rows       a part of the weight is converted to numbers in memory, for the library's product

Forms of a weight [N, K], as in ``StoredWeight``::

    int8, float8_e4m3fn [N, K]   w = weight * scale[n]
    uint8 [N, K / 2]             w = (q - zero[n, group]) * scale[n, group]; byte j of the 16 of block b has input
                                 32 b + j in its low half, 32 b + 16 + j in its high half;  with a table f32 [16]
                                 w = table[q] * scale[n, group]

The kernels read the weight and its scales once, x and y a few times.  Sums are float32, in an order that depends only
on the shapes.  If a sum is split (SK), the program that arrives last adds the parts in their order.  Captured steps
need scratch memory beside y, whose size depends only on the shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import quant_fixed, quant_tiles, quant_words
from .launch import capability, kernel, pdl, wait
from .quant_numbers import (
    drained,
    fp8_pairs,
    halves,
    int4_pairs,
    int8_pairs,
    middles,
    numbers_of,
    spread,
    together,
    zeros_of,
)
from .quant_words import WIDE

SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))  # compute capabilities whose programs have 99 KiB of shared memory
FEW = 8  # rows up to which ``few`` can run
DENSE_AT_ONCE = 1 << 27  # elements of a weight that ``dense`` converts at a time
# rows up to which ``quant_fixed`` and ``quant_tiles`` are used on Hopper, as far as measured on an H100
FIXED_ROWS, TILE_ROWS = 256, 256
# dtype of the weight -> (rows up to which ``few`` is used, rows up to which ``dots`` is used), as measured on an H200
# by benchmarks/quant_kernels.py
SERVES = {torch.int8: (2, 256), torch.float8_e4m3fn: (2, 256), torch.uint8: (2, 128)}


@triton.jit
def _products(acc, x, at, on, low, high, s, z, FORM: tl.constexpr):
    """Return acc [BN, B] + the products of a row of x with ``low`` [BN, B], and of the next 16 inputs with ``high``."""
    v = tl.load(x + at, mask=on, other=0.0).to(tl.float32)[None, :]
    if FORM == 4:
        u = tl.load(x + at + 16, mask=on, other=0.0).to(tl.float32)[None, :]
        return acc + s * (low * v + (high * u - z * (v + u)))
    else:
        return acc + low * v


@triton.jit
def _put(y, row, M, on, acc, scale, by_row, N: tl.constexpr, FORM: tl.constexpr, BY_ROW: tl.constexpr):
    total = tl.sum(acc, 1)
    if FORM == 8:
        total = total * tl.load(scale + on, mask=on < N, other=0.0)
    if BY_ROW:
        total = total * tl.load(by_row + row, mask=row < M, other=0.0)
    tl.store(y + row * N + on, total.to(y.dtype.element_ty), mask=(on < N) & (row < M))


@kernel("M")
def _few(
    x, weight, scale, zero, table, by_row, y, M, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, ROWS: tl.constexpr,
    BY_ROW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS (1, 2, 4, 8) contiguous rows of x by the weight.

    BY_ROW multiplies each row by ``by_row`` [M] at the end.  TABLE maps codes to the numbers of ``table``.
    """
    wait(PDL)
    on = tl.program_id(0) * BN + tl.arange(0, BN)
    ob = tl.arange(0, BK * FORM // 8)
    some: tl.constexpr = BK // GROUP if FORM == 4 else 1
    og = tl.arange(0, some)
    w_at = weight + on.to(tl.int64)[:, None] * (K * FORM // 8) + ob[None, :]
    inputs = ob
    if FORM == 4:
        inputs = ob // 16 * 32 + ob % 16
    a0 = tl.zeros([BN, BK * FORM // 8], tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        at = k + inputs
        on_x = at < K
        raw = tl.load(w_at + k * FORM // 8, mask=(on < N)[:, None] & on_x[None, :],
                      other=0.0 if FORM == 8 else 0, eviction_policy="evict_first")  # fmt: skip
        if FORM == 4:
            s_at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
            on_s = (on < N)[:, None] & (k + og * GROUP < K)[None, :]
            s = spread(tl.load(scale + s_at, mask=on_s, other=0.0), BN, some, GROUP // 2)
            if TABLE:
                z = 0.0
                low, high = tl.load(table + (raw & 15)), tl.load(table + (raw >> 4))
            else:
                z = 8.0
                if ZERO:
                    z = spread(tl.load(zero + s_at, mask=on_s, other=0.0), BN, some, GROUP // 2)
                low, high = (raw & 15).to(tl.float32), (raw >> 4).to(tl.float32)
        else:
            low = raw.to(tl.float32)
            high, s, z = low, 1.0, 0.0
        a0 = _products(a0, x, at, on_x, low, high, s, z, FORM)
        if ROWS > 1:
            a1 = _products(a1, x + tl.minimum(1, M - 1) * K, at, on_x, low, high, s, z, FORM)
        if ROWS > 2:
            a2 = _products(a2, x + tl.minimum(2, M - 1) * K, at, on_x, low, high, s, z, FORM)
            a3 = _products(a3, x + tl.minimum(3, M - 1) * K, at, on_x, low, high, s, z, FORM)
        if ROWS > 4:
            a4 = _products(a4, x + tl.minimum(4, M - 1) * K, at, on_x, low, high, s, z, FORM)
            a5 = _products(a5, x + tl.minimum(5, M - 1) * K, at, on_x, low, high, s, z, FORM)
            a6 = _products(a6, x + tl.minimum(6, M - 1) * K, at, on_x, low, high, s, z, FORM)
            a7 = _products(a7, x + tl.minimum(7, M - 1) * K, at, on_x, low, high, s, z, FORM)
    _put(y, 0, M, on, a0, scale, by_row, N, FORM, BY_ROW)
    if ROWS > 1:
        _put(y, 1, M, on, a1, scale, by_row, N, FORM, BY_ROW)
    if ROWS > 2:
        _put(y, 2, M, on, a2, scale, by_row, N, FORM, BY_ROW)
        _put(y, 3, M, on, a3, scale, by_row, N, FORM, BY_ROW)
    if ROWS > 4:
        _put(y, 4, M, on, a4, scale, by_row, N, FORM, BY_ROW)
        _put(y, 5, M, on, a5, scale, by_row, N, FORM, BY_ROW)
        _put(y, 6, M, on, a6, scale, by_row, N, FORM, BY_ROW)
        _put(y, 7, M, on, a7, scale, by_row, N, FORM, BY_ROW)


@kernel("M")
def _dots(
    x, weight, scale, zero, y, scratch, arrived, M, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr,
    SG: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the weight with tensor cores.

    ASM converts weights to bfloat16 two at a time; 1 in 1,000 int4 numbers then differs by a rounding.
    """
    wait(PDL)
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    some: tl.constexpr = BK // GROUP if FORM == 4 else 1
    inputs, og = tl.arange(0, BK * FORM // 8), tl.arange(0, some)
    w_at = weight + on.to(tl.int64)[:, None] * (K * FORM // 8) + inputs[None, :]
    if FORM == 4:
        inputs = inputs // 16 * 32 + inputs % 16
    x_at = x + om.to(tl.int64)[None, :] * K + inputs[:, None]
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        on_k = k + inputs < K
        on_x = on_k[:, None] & (om < M)[None, :]
        raw = tl.load(w_at + k * FORM // 8, mask=(on < N)[:, None] & on_k[None, :], other=0.0 if FORM == 8 else 0)
        a = tl.load(x_at + k, mask=on_x, other=0.0)
        if FORM == 4:
            b = tl.load(x_at + k + 16, mask=on_x, other=0.0)
            s_at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
            on_s = (on < N)[:, None] & (k + og * GROUP < K)[None, :]
            s = tl.load(scale + s_at, mask=on_s, other=0.0)
            if ASM and ZERO != 1:
                z = s
                if ZERO:
                    z = tl.load(zero + s_at, mask=on_s, other=0.0)
                near, rest = halves(s)
                near, rest = spread(near, BN, some, GROUP // 2), spread(rest, BN, some, GROUP // 2)
                low, high = int4_pairs(raw, near, rest, spread(middles(z, s, ZERO), BN, some, GROUP // 2))
            else:
                m = s * 8.0
                if ZERO:
                    m = s * tl.load(zero + s_at, mask=on_s, other=0.0)
                s, m = spread(s, BN, some, GROUP // 2), spread(m, BN, some, GROUP // 2)
                low = ((raw & 15).to(tl.float32) * s - m).to(x.dtype.element_ty)
                high = ((raw >> 4).to(tl.float32) * s - m).to(x.dtype.element_ty)
            acc = tl.dot(low, a, acc, input_precision="ieee")
            acc = tl.dot(high, b, acc, input_precision="ieee")
        elif ASM and weight.dtype.element_ty == tl.int8:
            acc = tl.dot(int8_pairs(raw), a, acc)
        elif ASM:
            acc = tl.dot(fp8_pairs(raw.to(tl.uint8, bitcast=True)), a, acc)
        else:
            acc = tl.dot(raw.to(x.dtype.element_ty), a, acc, input_precision="ieee")
        acc = drained(acc, PDL)
    acc, last = together(acc, scratch, arrived, row, tile, part, om, on, N, SK)
    if last:
        if FORM == 8:
            acc = acc * tl.load(scale + on, mask=on < N, other=0.0)[:, None]
        at_y = y + om.to(tl.int64)[None, :] * N + on[:, None]
        tl.store(at_y, acc.to(y.dtype.element_ty), mask=(on < N)[:, None] & (om < M)[None, :])


def few_tile(form: int, group: int, rows: int, n: int = 0) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H200 (8 bits, up to 2 rows), else a default."""
    if form == 8 and rows <= 2:
        bn, bk, stages, warps = (16, 256, 4, 4) if n >= WIDE else (8, 1024, 3, 4) if rows == 1 else (8, 512, 3, 2)
        return dict(BN=bn, BK=bk, STAGES=stages, num_warps=warps)
    bk = (512 if rows <= 2 else 256) * 8 // form
    return dict(BN=4, BK=max(bk, group) if form == 4 else bk, STAGES=3, num_warps=4)


def dots_tile(form: int, group: int, rows: int, n: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H200, for 4,096 and 28,672 outputs.

    For fewer outputs, sums are split among as many programs as the device can run at once.
    """
    four, wide = form == 4, n >= WIDE
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 256 if rows > 128 and wide else 128
    bn, bk, sk, stages, warps = {
        (16, False): (64, 256, 4, 4, 4),
        (16, True): (64, 256, 1, 3, 4),
        (32, False): (64, 128, 1 if four else 2, 3, 4),
        (32, True): (128, 128, 1, 3, 8) if four else (64, 128, 1, 3, 4),
        (64, False): (64, 128, 1, 3, 4),
        (64, True): (128, 128, 1, 2 if four else 3, 8),
        (128, False): (64, 128, 2, 3, 4) if four or rows > 128 else (64, 64, 4, 4, 4),
        (128, True): (128, 128, 1, 3, 8) if four else (128, 64, 1, 4, 8),
        (256, True): (128, 128, 1, 3, 8) if four else (128, 64, 1, 4, 8),
    }[bm, wide]
    return dict(BM=bm, BN=bn, BK=max(bk, group if four else 0), SK=sk, STAGES=stages, num_warps=warps)


def described(dtype: torch.dtype, sm: int, table: bool, rounded: torch.dtype | None) -> dict[str, str]:
    """Return for ``minivllm explain`` which kernel serves which numbers of rows of a weight of this dtype.

    ``table`` means codes with a table.  ``rounded`` is the dtype to which rows of x are rounded.
    """
    few, dots = (FEW, 0) if table else SERVES[dtype]
    joins = sm >= 90 and not table
    slim = joins and dtype != torch.uint8
    found = {}
    if joins:
        found["1 in bfloat16"] = "read once by words, without matrix units, with norm and gate in the same kernel"
    if slim:
        found["2 to 8 in bfloat16"] = "tensor cores, with norm and gate in the same kernel"
    elif joins and sm // 10 == 9:
        found["2 to 8 in bfloat16 (2 to 4 in groups of 32)"] = "tensor cores, with norm and gate in the same kernel"
    if rounded is not None:
        found["more" if slim else "any"] = "rows rounded by the norm or gate before, or a kernel; products of 8 bits"
        return found
    found[f"up to {few}"] = "read once, without matrix units"
    hopper = sm // 10 == 9 and not table
    if hopper and dtype == torch.int8:
        found[f"33 to {FIXED_ROWS}, of 16 bits"] = "int8 tensor cores, rows as two numbers of 8 bits by a kernel before"
    elif hopper:
        by_tiles = "tensor cores, tiles by the copy engine"
        if dtype == torch.uint8:
            found[f"17 to {TILE_ROWS}, in bfloat16"] = by_tiles
        else:
            found[f"65 to {TILE_ROWS}, in bfloat16"] = by_tiles
    if dots:
        found[f"up to {dots}, of 16 bits"] = "tensor cores, made numbers of in registers"
    found["more"] = "made numbers of in memory, a part of the weight at a time, then the library's product"
    return found


class Quantized:
    """The kernels of one weight in a form of ``StoredWeight``, and their counters of split sums, 0 between launches.

    The scales of groups are [N, groups] with any strides.  With 4 bits the number of inputs must be a multiple of 32,
    and a group must have 32, 64 or 128 inputs.  ValueError for other groups, for which the tiles would give wrong
    products.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        group: int = 0,
        table: Tensor | None = None,
    ) -> None:
        self.weight, self.scale, self.zero, self.table = weight, scale, zero, table
        self.form = 4 if weight.dtype == torch.uint8 else 8
        if self.form == 4 and group not in (32, 64, 128):
            raise ValueError(f"groups of {group} inputs with 4 bits: expected 32, 64 or 128")
        self.n, self.k = weight.shape[0], weight.shape[1] * 8 // self.form
        self.group = group if self.form == 4 else self.k
        self.serves = SERVES[weight.dtype] if table is None else (FEW, 0)
        self.hopper = table is None and capability(weight.device) == 9 and weight.shape[1] % 16 == 0
        self.arrived = torch.zeros(1024, dtype=torch.int32, device=weight.device)
        strides = scale.stride() if scale.dim() == 2 else (1, 0)
        self._sizes = dict(N=self.n, K=self.k, SN=strides[0], SG=strides[1], FORM=self.form)
        self._sizes.update(GROUP=self.group, ZERO=zeros_of(zero))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute x W^T [M, N] for x [M, K] of any strides, in ``out`` if it is not None.

        Only M and the dtype of x decide the kernel.
        """
        x, m = x.contiguous(), len(x)
        y = out if out is not None and out.is_contiguous() else x.new_empty(m, self.n)
        if m <= self.serves[0]:
            self.few(x, y=y)
        elif self.hopper and x.element_size() == 2 and self._many(x, y):
            pass
        elif m <= self.serves[1] and x.element_size() == 2:
            self.dots(x, y=y)
        else:
            self.dense(x, y=y)
        return y if out is None or y is out else out.copy_(y)

    def _many(self, x: Tensor, y: Tensor) -> bool:
        """Compute the product by a kernel for Hopper and return True, or return False if none supports these rows."""
        m, aligned = len(x), x.data_ptr() % 16 == 0 and self.weight.data_ptr() % 16 == 0
        if self.weight.dtype == torch.int8 and aligned and 32 < m <= FIXED_ROWS:
            quant_fixed.fixed(x, self.weight, self.scale, y)
            return True
        if not aligned or m > TILE_ROWS or x.dtype != torch.bfloat16 or self._sizes["ZERO"] == 1:
            return False  # zero points that are fractions were not measured
        if m <= (16 if self.form == 4 else 64):
            return False
        quant_tiles.tiles(self, x, None, y)
        return True

    def few(
        self, x: Tensor, tile: dict[str, int] | None = None, y: Tensor | None = None, by_row: Tensor | None = None
    ) -> Tensor:
        """Compute y [M, N] of contiguous x [0 to 8, K], times ``by_row`` f32 [M] if it is not None."""
        m = len(x)
        y = x.new_empty(m, self.n) if y is None else y
        if tile is None and m and self.table is None and quant_words.takes(x, self.weight, self.k):
            return self.words(x, None, y, by_row)
        tile, zero = tile or few_tile(self.form, self.group, m, self.n), self.scale if self.zero is None else self.zero
        if m:
            _few[(triton.cdiv(self.n, tile["BN"]),)](
                x,
                self.weight,
                self.scale,
                zero,
                self.scale if self.table is None else self.table,
                self.scale if by_row is None else by_row,
                y,
                m,
                TABLE=self.table is not None,
                ROWS=triton.next_power_of_2(m),
                BY_ROW=by_row is not None,
                **self._sizes,
                **tile,
                **pdl(x),
            )
        return y

    def words(
        self, x: Tensor, tile: dict[str, int] | None = None, y: Tensor | None = None, by_row: Tensor | None = None
    ) -> Tensor:
        """Compute y [M, N] of x [1 to 8, K] for which ``quant_words.takes`` is true, times ``by_row`` f32 [M] if not
        None.
        """
        y = x.new_empty(len(x), self.n) if y is None else y
        return quant_words.words(x, self.weight, self.scale, self.zero, y, self._sizes, tile, by_row)

    def dots(self, x: Tensor, tile: dict[str, int] | None = None, y: Tensor | None = None) -> Tensor:
        """Compute y [M, N] of contiguous x [M, K] with tensor cores."""
        m = len(x)
        y = x.new_empty(m, self.n) if y is None else y
        tile = tile or dots_tile(self.form, self.group, m, self.n)
        if tile["BM"] == 256 and x.is_cuda and torch.cuda.get_device_capability(x.device) in SMALL:
            tile = {**tile, "BM": 128}
        rows, tiles = triton.cdiv(m, tile["BM"]), triton.cdiv(self.n, tile["BN"])
        if tile["SK"] > 1 and rows * tiles > len(self.arrived):
            tile = {**tile, "SK": 1}
        size = tile["SK"] * rows * tile["BM"] * tiles * tile["BN"] if tile["SK"] > 1 else 0
        scratch = torch.empty(size, dtype=torch.float32, device=x.device) if size else y
        zero = self.scale if self.zero is None else self.zero
        packed = x.dtype == torch.bfloat16 and capability(x.device) >= 9
        _dots[(rows, tiles, tile["SK"])](
            x, self.weight, self.scale, zero, y, scratch, self.arrived, m, ASM=packed, **self._sizes, **tile, **pdl(x)
        )
        return y

    def dense(self, x: Tensor, at_once: int = DENSE_AT_ONCE, y: Tensor | None = None) -> Tensor:
        """Compute y [M, N] of x [M, K] with torch's product and parts of the weight that are converted to numbers in
        memory.
        """
        y = x.new_empty(len(x), self.n) if y is None else y
        step = max(1, at_once // self.k)
        for first in range(0, self.n, step):
            rows = slice(first, min(first + step, self.n))
            torch.mm(x, self.numbers(rows, x.dtype).t(), out=y[:, rows])
        return y

    def numbers(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return some rows of the weight as numbers [rows, K]."""
        out = torch.empty((rows.stop - rows.start, self.k), dtype=dtype, device=self.weight.device)
        numbers_of(self.weight, self.scale, self.zero, out, rows.start, self._sizes, self.table)
        return out
