"""Products of many rows with a quantized weight on tensor cores.

    matmul      grid (M / BM, N / BN, SK)   y^T [BN, BM] = numbers(W) [BN, K / SK] x^T
    int8_large  grid (N / BN, M / BM)       x as whole numbers of 15 bits, int8 products with exact sums

The numbers of a tile of the weight are made in registers, because that operand of the product may be there.  The same
product with numbers in shared memory takes 1.1 to 1.4 times as long (H100, 256 rows).  Sums are float32, in an order
that depends only on the shapes.  If a sum is split (SK), the program that arrives last adds the parts in their order.

With TMA Hopper's copy engine loads the tiles, without instructions of the program.  A byte holds two codes of 4 bits,
16 inputs apart, so x is then stored in *halves*: the first 16 of each 32 inputs in the left half of the row, the others
in the right half.

``int8_large`` multiplies the two int8 parts of a row of x (``eight_bits.halved_rows``) by the weight, which is not
converted, in the time of one bfloat16 product.  The error of an output is below a fourth of the error that rounding the
weight to int8 made, for every row, because that error is proportional to the row's norm, which is at least its largest
element.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .eight_bits import halved_rows
from .launch import capability, cdiv, kernel, pdl, wait
from .quant_formats import Form, QuantizedWeight, bytes_of, nibbles_of, table_words
from .quant_gemv import WIDE
from .split_sums import drained, scratch_of, together

SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))  # compute capabilities whose programs have 99 KiB of shared memory
# without TMA: (most rows, whether at least WIDE outputs) -> BN, BK, SK, stages, warps; 256 means any number of rows
FOUR_BITS = {
    (16, False): (64, 256, 4, 4, 4),
    (16, True): (64, 256, 1, 3, 4),
    (32, False): (64, 128, 1, 3, 4),
    (32, True): (128, 128, 1, 3, 8),
    (64, False): (64, 128, 1, 3, 4),
    (64, True): (128, 128, 1, 2, 8),
    (128, False): (64, 128, 2, 3, 4),
    (128, True): (128, 128, 1, 3, 8),
    (256, False): (64, 128, 2, 3, 4),
    (256, True): (128, 128, 1, 3, 8),
}
EIGHT_BITS = {
    (16, False): (64, 256, 4, 4, 4),
    (16, True): (64, 256, 1, 3, 4),
    (32, False): (64, 128, 2, 3, 4),
    (32, True): (64, 128, 1, 3, 4),
    (64, False): (64, 128, 1, 3, 4),
    (64, True): (128, 128, 1, 3, 8),
    (128, False): (64, 64, 4, 4, 4),
    (128, True): (128, 64, 1, 4, 8),
    (256, False): (64, 128, 2, 3, 4),
    (256, True): (128, 64, 1, 4, 8),
}


@kernel()
def _halves(x, y, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """Reorder BK inputs of a row into halves, which are the inputs of the low and of the high codes."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.load(x + row * K + at, mask=at < K, other=0.0)
    to = at // 32 * 16 + at % 16 + tl.where(at % 32 < 16, 0, K // 2)
    tl.store(y + row * K + to, v, mask=at < K)


def halves(x: Tensor) -> Tensor:
    """Return x [M, K], K a multiple of 32, with each row in halves."""
    m, k = x.shape
    y = torch.empty_like(x)
    if m:
        grid = (m, cdiv(k, 4096))
        _halves[grid](x, y, K=k, BK=4096, **pdl(x))
    return y


@kernel("M")
def _matmul(
    x, weight, scale, zero, table, y, scratch, arrived, M, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the weight.

    With TMA ``x`` is a descriptor with blocks [BM, BK], of 4 bits [BM, BK / 2] in halves, and ``weight`` one with
    blocks [BN, BK] bytes, or half as many.  Both return 0 outside the tensors.  ASM converts weights to bfloat16 two at
    a time.
    """
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    words = table_words(table, F.table)
    wait(PDL)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    K: tl.constexpr = F.k
    BYTES: tl.constexpr = BK * F.bits // 8
    SOME: tl.constexpr = BK // F.group if F.bits == 4 and F.group < BK else 1
    og = tl.arange(0, SOME)
    if not TMA:
        inputs = tl.arange(0, BYTES)
        w_at = weight + on.to(tl.int64)[:, None] * (K * F.bits // 8) + inputs[None, :]
        if F.bits == 4:
            inputs = inputs // 16 * 32 + inputs % 16
        x_at = x + om.to(tl.int64)[None, :] * K + inputs[:, None]
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        if TMA:
            raw = weight.load([tile * BN, k * F.bits // 8])
            a = x.load([row * BM, k // 2 if F.bits == 4 else k]).T
            b = x.load([row * BM, K // 2 + k // 2]).T if F.bits == 4 else a
        else:
            on_k = k + inputs < K
            on_x = on_k[:, None] & (om < M)[None, :]
            raw = tl.load(w_at + k * F.bits // 8, mask=(on < F.n)[:, None] & on_k[None, :],
                          other=0 if F.bits == 4 else 0.0)  # fmt: skip
            a = tl.load(x_at + k, mask=on_x, other=0.0)
            b = tl.load(x_at + k + 16, mask=on_x, other=0.0) if F.bits == 4 else a
        if F.bits == 4:
            s_at = on[:, None] * F.by_row + (k // F.group + og)[None, :] * F.by_group
            on_s = (on < F.n)[:, None] & (k + og * F.group < K)[None, :]
            low, high = nibbles_of(raw, scale, zero, s_at, on_s, y.dtype.element_ty, BN, SOME, BYTES // SOME, F.zero,
                                   ASM, words if F.table else None)  # fmt: skip
            acc = tl.dot(low, a, acc, input_precision="ieee")
            acc = tl.dot(high, b, acc, input_precision="ieee")
        else:
            acc = tl.dot(bytes_of(raw, y.dtype.element_ty, ASM), a, acc, input_precision="ieee")
        acc = drained(acc, PDL)
    acc, last = together(acc, scratch, arrived, row, tile, part, om, on, F.n, SK)
    if last:
        if F.bits == 8:
            acc = acc * tl.load(scale + on, mask=on < F.n, other=0.0)[:, None]
        at_y = y + om.to(tl.int64)[None, :] * F.n + on[:, None]
        tl.store(at_y, acc.to(y.dtype.element_ty), mask=(on < F.n)[:, None] & (om < M)[None, :])


def matmul_tile(form: Form, rows: int, tma: bool) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py for the shapes of Llama-3.1-8B.

    Tiles with TMA for more than 64 rows or 8 bits were measured on an H100, others on an H200.  Sums are split among as
    many programs as the device can run at once.
    """
    four = form.bits == 4
    wide = form.n >= WIDE
    if tma:
        return _tma_tile(form, rows, wide and not four)
    most = next((size for size in (16, 32, 64, 128) if rows <= size), 256)
    table = FOUR_BITS if four else EIGHT_BITS
    bn, bk, sk, stages, warps = table[most, wide]
    bm = min(most, 256 if wide else 128)
    if four:
        bk = max(bk, form.group)
    return {"BM": bm, "BN": bn, "BK": bk, "SK": sk, "STAGES": stages, "num_warps": warps}


def _tma_tile(form: Form, rows: int, large: bool) -> dict[str, int]:
    """Return the tile with TMA; ``large`` means 8 bits and at least WIDE outputs."""
    if rows > 128 and large:
        return {"BM": 256, "BN": 64, "BK": 64, "SK": 1, "STAGES": 3, "num_warps": 4}
    bm, stages, most = 128, 3, 264
    if rows <= 32:
        bm, stages, most = 32, 5, 384
    elif rows <= 64:
        bm, stages = 64, 4
    programs = cdiv(rows, bm) * cdiv(form.n, 64)
    sk = next((parts for parts in (4, 2) if programs * parts <= most), 1)
    return {"BM": bm, "BN": 64, "BK": 128, "SK": sk, "STAGES": stages, "num_warps": 4}


def matmul(
    of: QuantizedWeight, x: Tensor, y: Tensor | None = None, tile: dict[str, int] | None = None, tma: bool = False
) -> Tensor:
    """Compute y [M, N] of contiguous x [M, K], which is bfloat16 with ``tma``."""
    m = len(x)
    form = of.form
    if y is None:
        y = x.new_empty(m, form.n)
    if not m:
        return y
    constants = pdl(y) | (tile or matmul_tile(form, m, tma))
    bm = constants["BM"]
    if not tma and bm == 256 and x.is_cuda and torch.cuda.get_device_capability(x.device) in SMALL:
        bm = 128
    bn = constants["BN"]
    bk = constants["BK"]
    rows = cdiv(m, bm)
    tiles = cdiv(form.n, bn)
    parts = constants["SK"] if rows * tiles <= len(of.arrived) else 1
    scratch = scratch_of(y, parts, rows * bm * tiles * bn)
    weight = of.weight
    if tma:
        bytes_of_tile = bk * form.bits // 8
        weight = TensorDescriptor.from_tensor(weight, [bn, bytes_of_tile])
        if form.bits == 4:
            x = halves(x)
            bk //= 2
        x = TensorDescriptor.from_tensor(x, [bm, bk])
    constants["BM"] = bm
    constants["SK"] = parts
    constants["F"] = form
    constants["TMA"] = tma
    constants["ASM"] = y.dtype == torch.bfloat16 and capability(y.device) >= 9
    given = (x, weight, of.scale, of.zero, of.table, y, scratch, of.arrived, m)
    _matmul[(rows, tiles, parts)](*given, **constants)
    return y


# ---- int8 on both sides ----------------------------------------------------------------------------------------------


@kernel("M")
def _int8_large(
    x, weight, x_scale, w_scale, y, M, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply parts of rows by an int8 weight with integer sums.

    ``x`` and ``weight`` are descriptors with blocks [BM, BK] and [BN, BK], which return 0 outside the tensors.
    """
    wait(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    high, low = tl.zeros([BM, BN], tl.int32), tl.zeros([BM, BN], tl.int32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        w = weight.load([tile * BN, k]).T
        high = tl.dot(x.load([row * BM, k]), w, high, out_dtype=tl.int32)
        low = tl.dot(x.load([M + row * BM, k]), w, low, out_dtype=tl.int32)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    by_row = tl.load(x_scale + om, mask=om < M, other=0.0)
    by_column = tl.load(w_scale + on, mask=on < N, other=0.0)
    out = (high.to(tl.float32) * 128.0 + low.to(tl.float32)) * by_row[:, None] * by_column[None, :]
    at_y = y + om.to(tl.int64)[:, None] * N + on[None, :]
    tl.store(at_y, out.to(y.dtype.element_ty), mask=(om < M)[:, None] & (on < N)[None, :])


def int8_large_tile(n: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H100, for 64 to 256 rows."""
    if n > 4096:
        return dict(BM=64, BN=128, BK=128, STAGES=3, num_warps=4)
    return dict(BM=64, BN=64, BK=128, STAGES=4, num_warps=4)


def int8_large(
    x: Tensor, weight: Tensor, scale: Tensor, y: Tensor | None = None, tile: dict[str, int] | None = None
) -> Tensor:
    """Compute y [M, N] of contiguous x [M, K] and an int8 weight [N, K] with scale f32 [N].

    K must be a multiple of 16.
    """
    m, k = x.shape
    n = len(weight)
    if y is None:
        y = x.new_empty(m, n)
    if not m:
        return y
    q, by_row = halved_rows(x)
    constants = pdl(x) | (tile or int8_large_tile(n))
    bm = constants["BM"]
    bn = constants["BN"]
    bk = constants["BK"]
    rows = TensorDescriptor.from_tensor(q, [bm, bk])
    columns = TensorDescriptor.from_tensor(weight, [bn, bk])
    grid = (cdiv(m, bm), cdiv(n, bn))
    _int8_large[grid](rows, columns, by_row, scale, y, m, N=n, K=k, **constants)
    return y
