"""x W^T for weights of 8 or 4 bits: they are read as they lie and made numbers of in registers.

    few     1 to 8 rows     no matrix units: a program sums BN outputs over all inputs, its weights stream past
    dots    any rows        grid (M / BM, N / BN, SK)   y^T [BN, BM] = numbers(W) [BN, K / SK] x^T on the tensor cores
    dense   many rows       a part of the weight is made numbers of in memory, for the library's product

Forms of a weight [N, K], as in ``StoredWeight``::

    int8, float8_e4m3fn [N, K]   w = weight * scale[n]
    uint8 [N, K / 2]             w = (q - zero[n, group]) * scale[n, group]; byte j of the 16 of block b has input
                                 32 b + j in its low half, 32 b + 16 + j in its high half

Bytes: the weight and its scales once, x and y a few times.  Sums are float32, in an order that goes by the shapes
alone; where a sum is split (SK) the program that arrives last adds the parts in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel, pdl, wait

FEW = 8  # rows up to which ``few`` is there
DENSE_AT_ONCE = 1 << 25  # elements of a weight that ``dense`` has in memory at a time


@triton.jit
def _row(x, w, high, at, on, FORM: tl.constexpr):
    """Sums [BN, chunks] of the products of a row with w [BN, chunks, J], and with ``high`` 16 inputs further on."""
    v = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
    if FORM == 4:
        u = tl.load(x + at + 16, mask=on, other=0.0).to(tl.float32)
        return tl.sum(w * v + high * u, 2)
    else:
        return tl.sum(w * v, 2)


@triton.jit
def _put(y, row, M, on, acc, scale, N: tl.constexpr, FORM: tl.constexpr):
    total = tl.sum(acc, 1)
    if FORM == 8:
        total = total * tl.load(scale + on, mask=on < N, other=0.0)
    tl.store(y + row.to(tl.int64) * N + on, total.to(y.dtype.element_ty), mask=(on < N) & (row < M))


@kernel("M", "x_stride")
def _few(
    x, weight, scale, zero, y, M, x_stride, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS (1, 2, 4, 8) >= M rows; GROUP inputs (of 8 bits: any number) are added up before their scale."""
    wait(PDL)
    on = tl.program_id(0) * BN + tl.arange(0, BN)
    each: tl.constexpr = GROUP // 2 if FORM == 4 else GROUP  # elements of the weight in a chunk
    oc, oj = tl.arange(0, BK // GROUP), tl.arange(0, each)
    inside = oc[:, None] * each + oj[None, :]
    w_at = weight + on.to(tl.int64)[:, None, None] * (K * FORM // 8) + inside[None, :, :]
    inputs = inside
    if FORM == 4:
        inputs = oc[:, None] * GROUP + oj[None, :] // 16 * 32 + oj[None, :] % 16
    inputs = inputs[None, :, :]
    first = tl.zeros([], tl.int32)
    r1, r2, r3 = tl.minimum(first + 1, M - 1), tl.minimum(first + 2, M - 1), tl.minimum(first + 3, M - 1)
    r4, r5, r6 = tl.minimum(first + 4, M - 1), tl.minimum(first + 5, M - 1), tl.minimum(first + 6, M - 1)
    r7 = tl.minimum(first + 7, M - 1)
    a0 = tl.zeros([BN, BK // GROUP], tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        some = k + oc * GROUP < K
        on_x = (k + inputs) < K
        on_w = (on < N)[:, None, None] & on_x
        raw = tl.load(w_at + k * FORM // 8, mask=on_w, other=0.0 if FORM == 8 else 0, eviction_policy="evict_first")
        s = a0
        if FORM == 4:
            at = on[:, None] * SN + (k // GROUP + oc)[None, :] * SG
            s = tl.load(scale + at, mask=(on < N)[:, None] & some[None, :], other=0.0)
            z = 8.0
            if ZERO:
                z = tl.load(zero + at, mask=(on < N)[:, None] & some[None, :], other=0.0)[:, :, None]
            w = (raw & 15).to(tl.float32) - z
            high = (raw >> 4).to(tl.float32) - z
        else:
            w = raw.to(tl.float32)
            high = w
        at_x = k + inputs
        p = _row(x, w, high, at_x, on_x, FORM)
        a0 += p * s if FORM == 4 else p
        if ROWS > 1:
            p = _row(x + r1 * x_stride, w, high, at_x, on_x, FORM)
            a1 += p * s if FORM == 4 else p
        if ROWS > 2:
            p = _row(x + r2 * x_stride, w, high, at_x, on_x, FORM)
            a2 += p * s if FORM == 4 else p
            p = _row(x + r3 * x_stride, w, high, at_x, on_x, FORM)
            a3 += p * s if FORM == 4 else p
        if ROWS > 4:
            p = _row(x + r4 * x_stride, w, high, at_x, on_x, FORM)
            a4 += p * s if FORM == 4 else p
            p = _row(x + r5 * x_stride, w, high, at_x, on_x, FORM)
            a5 += p * s if FORM == 4 else p
            p = _row(x + r6 * x_stride, w, high, at_x, on_x, FORM)
            a6 += p * s if FORM == 4 else p
            p = _row(x + r7 * x_stride, w, high, at_x, on_x, FORM)
            a7 += p * s if FORM == 4 else p
    _put(y, first, M, on, a0, scale, N, FORM)
    if ROWS > 1:
        _put(y, first + 1, M, on, a1, scale, N, FORM)
    if ROWS > 2:
        _put(y, first + 2, M, on, a2, scale, N, FORM)
        _put(y, first + 3, M, on, a3, scale, N, FORM)
    if ROWS > 4:
        _put(y, first + 4, M, on, a4, scale, N, FORM)
        _put(y, first + 5, M, on, a5, scale, N, FORM)
        _put(y, first + 6, M, on, a6, scale, N, FORM)
        _put(y, first + 7, M, on, a7, scale, N, FORM)


@triton.jit
def together(acc, scratch, arrived, row, tile, part, om, on, N: tl.constexpr, SK: tl.constexpr):
    """The sums [BN, BM] of all parts, in their order, for the program that arrives last: (sums, whether it is)."""
    last = True
    if SK > 1:
        wide: tl.constexpr = (N + acc.shape[0] - 1) // acc.shape[0] * acc.shape[0]
        at = scratch + om.to(tl.int64)[None, :] * wide + on[:, None]
        step = tl.num_programs(0).to(tl.int64) * acc.shape[1] * wide
        tl.store(at + part * step, acc)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        counter = arrived + row * tl.num_programs(1) + tile
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SK - 1
        if last:
            acc = tl.load(at, cache_modifier=".cg")
            for i in tl.static_range(1, SK):
                acc += tl.load(at + i * step, cache_modifier=".cg")
            tl.store(counter, 0)
    return acc, last


@triton.jit
def _steps(q, s, m, BN: tl.constexpr, SOME: tl.constexpr, EACH: tl.constexpr):
    """Codes [BN, SOME * EACH], s and m [BN, SOME] -> q * s - m."""
    if SOME == 1:
        return q * s - m
    else:
        w = tl.reshape(q, [BN, SOME, EACH]) * s[:, :, None] - m[:, :, None]
        return tl.reshape(w, [BN, SOME * EACH])


@kernel("M", "x_stride")
def _dots(
    x, weight, scale, zero, y, scratch, arrived, M, x_stride, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr,
    SG: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    held: tl.constexpr = BK * FORM // 8  # bytes of a row in a tile
    some: tl.constexpr = BK // GROUP if FORM == 4 else 1
    ob, og = tl.arange(0, held), tl.arange(0, some)
    w_at = weight + on.to(tl.int64)[:, None] * (K * FORM // 8) + ob[None, :]
    inputs = ob
    if FORM == 4:
        inputs = ob // 16 * 32 + ob % 16
    x_at = x + om.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        on_k = k + inputs < K
        on_x = on_k[:, None] & (om < M)[None, :]
        raw = tl.load(w_at + k * FORM // 8, mask=(on < N)[:, None] & on_k[None, :], other=0.0 if FORM == 8 else 0)
        a = tl.load(x_at + k, mask=on_x, other=0.0)
        if FORM == 4:
            b = tl.load(x_at + k + 16, mask=on_x, other=0.0)
            at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
            on_s = (on < N)[:, None] & (k + og * GROUP < K)[None, :]
            s = tl.load(scale + at, mask=on_s, other=0.0)
            m = s * 8.0
            if ZERO:
                m = s * tl.load(zero + at, mask=on_s, other=0.0)
            low = _steps((raw & 15).to(tl.float32), s, m, BN, some, GROUP // 2).to(x.dtype.element_ty)
            high = _steps((raw >> 4).to(tl.float32), s, m, BN, some, GROUP // 2).to(x.dtype.element_ty)
            acc = tl.dot(low, a, acc, input_precision="ieee" if IEEE else "tf32")
            acc = tl.dot(high, b, acc, input_precision="ieee" if IEEE else "tf32")
        else:
            acc = tl.dot(raw.to(x.dtype.element_ty), a, acc, input_precision="ieee" if IEEE else "tf32")
    acc, last = together(acc, scratch, arrived, row, tile, part, om, on, N, SK)
    if last:
        if FORM == 8:
            acc = acc * tl.load(scale + on, mask=on < N, other=0.0)[:, None]
        at_y = y + om.to(tl.int64)[None, :] * N + on[:, None]
        tl.store(at_y, acc.to(y.dtype.element_ty), mask=(on < N)[:, None] & (om < M)[None, :])


@triton.jit
def _numbers(weight, scale, zero, out, first, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr,
             GROUP: tl.constexpr, ZERO: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """int4 rows from ``first`` on -> out [rows, K]; a program takes BB blocks of 16 bytes of a row."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ob, oj = tl.program_id(1) * BB + tl.arange(0, BB), tl.arange(0, 16)
    on = (ob < K // 32)[:, None]
    raw = tl.load(weight + (first + row) * (K // 2) + ob[:, None] * 16 + oj[None, :], mask=on, other=0)
    at = (first + row) * SN + (ob * 32 // GROUP * SG)[:, None]
    s = tl.load(scale + at, mask=on, other=0.0)
    z = 8.0
    if ZERO:
        z = tl.load(zero + at, mask=on, other=0.0)
    to = out + row * K + ob[:, None] * 32 + oj[None, :]
    tl.store(to, (((raw & 15).to(tl.float32) - z) * s).to(out.dtype.element_ty), mask=on)
    tl.store(to + 16, (((raw >> 4).to(tl.float32) - z) * s).to(out.dtype.element_ty), mask=on)


def few_tile(form: int, group: int, rows: int) -> dict[str, int]:
    """A guess: no device has been asked yet (``benchmarks/quant_kernels.py --tune``)."""
    return dict(BN=4, BK=max(1024 if rows <= 2 else 512, group), STAGES=3, num_warps=4)


def dots_tile(form: int, rows: int, n: int) -> dict[str, int]:
    """Likewise."""
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    bn = 64 if bm <= 32 else 128
    sk = 2 if triton.cdiv(rows, bm) * triton.cdiv(n, bn) < 100 else 1
    return dict(BM=bm, BN=bn, BK=128 if bm <= 64 else 64, SK=sk, STAGES=4, num_warps=8 if bm > 64 else 4)


class Quantized:
    """The kernels for one weight in a form of ``StoredWeight``; keeps the counters of split sums, 0 between launches.

    The scales of groups lie as they come, [N, groups] of any strides; inputs must be a multiple of 32 for 4 bits.
    """

    def __init__(self, weight: Tensor, scale: Tensor, zero: Tensor | None = None, group: int = 0) -> None:
        self.weight, self.scale, self.zero = weight, scale, zero
        self.form = 4 if weight.dtype == torch.uint8 else 8
        self.n, self.k = weight.shape[0], weight.shape[1] * 8 // self.form
        self.group = group if self.form == 4 else 16
        self.arrived = torch.zeros(1024, dtype=torch.int32, device=weight.device)
        strides = scale.stride() if scale.dim() == 2 else (1, 0)
        self._sizes = dict(N=self.n, K=self.k, SN=strides[0], SG=strides[1], FORM=self.form, GROUP=self.group,
                           ZERO=zero is not None)  # fmt: skip

    def few(self, x: Tensor, tile: dict[str, int] | None = None) -> Tensor:
        """x [1 to 8, K], its rows without gaps -> [M, N]."""
        m = len(x)
        y = torch.empty((m, self.n), dtype=x.dtype, device=x.device)
        tile = tile or few_tile(self.form, self.group, m)
        zero = self.scale if self.zero is None else self.zero
        _few[(triton.cdiv(self.n, tile["BN"]),)](
            x, self.weight, self.scale, zero, y, m, x.stride(0), ROWS=triton.next_power_of_2(m), **self._sizes, **tile,
            **pdl(x),
        )  # fmt: skip
        return y

    def dots(self, x: Tensor, tile: dict[str, int] | None = None) -> Tensor:
        """x [M, K], its rows without gaps -> [M, N]."""
        m = len(x)
        y = torch.empty((m, self.n), dtype=x.dtype, device=x.device)
        tile = tile or dots_tile(self.form, m, self.n)
        rows, tiles = triton.cdiv(m, tile["BM"]), triton.cdiv(self.n, tile["BN"])
        if tile["SK"] > 1 and rows * tiles > len(self.arrived):
            tile = {**tile, "SK": 1}
        size = tile["SK"] * rows * tile["BM"] * tiles * tile["BN"] if tile["SK"] > 1 else 0
        scratch = torch.empty(size, dtype=torch.float32, device=x.device) if size else y
        zero = self.scale if self.zero is None else self.zero
        _dots[(rows, tiles, tile["SK"])](
            x, self.weight, self.scale, zero, y, scratch, self.arrived, m, x.stride(0), IEEE=x.dtype == torch.float32,
            **self._sizes, **tile, **pdl(x),
        )  # fmt: skip
        return y

    def dense(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] by the library, of parts of the weight that are made numbers of in memory."""
        y = torch.empty((len(x), self.n), dtype=x.dtype, device=x.device)
        step = max(1, DENSE_AT_ONCE // self.k)
        for first in range(0, self.n, step):
            rows = min(step, self.n - first)
            y[:, first : first + rows] = torch.mm(x, self.numbers(first, rows, x.dtype).t())
        return y

    def numbers(self, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Rows of the weight [rows, K]."""
        if self.form == 8:
            some = slice(first, first + rows)
            return (self.weight[some].float() * self.scale[some, None]).to(dtype)
        out = torch.empty((rows, self.k), dtype=dtype, device=self.weight.device)
        zero, blocks = self.scale if self.zero is None else self.zero, self.k // 32
        _numbers[(rows, triton.cdiv(blocks, 64))](
            self.weight, self.scale, zero, out, first, N=self.n, K=self.k, SN=self._sizes["SN"], SG=self._sizes["SG"],
            GROUP=self.group, ZERO=self.zero is not None, BB=64, **pdl(out),
        )  # fmt: skip
        return out
