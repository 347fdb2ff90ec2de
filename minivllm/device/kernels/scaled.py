"""Products with 8 bits on both sides: rows of x are quantized by a kernel, and the sums are scaled at the end.

    rows      x [M, K] -> q [M, K] int8 or float8_e4m3fn, scale [M] = the largest of a row / 127 or 448
    product   y [M, N] = (q W^T) * scale[m] * (scale of the weight)[n], grid (N / BN * M / BM, SK)

A sum may be split into SK parts; the program that arrives last adds them in their order.  int8 has exact int32 sums,
float8 has float32 sums.  The tensor cores keep only 14 bits of significand in a float8 sum.  So they sum 128 inputs at
a time, which are then added in float32.  With more than 64 rows and bfloat16 results, which have fewer bits anyway, all
inputs are summed in the tensor cores (FAST).

Up to 64 rows a product waits for memory.  The tensor cores compute 64 lines of one side and at least 8 columns of the
other.  With TURNED the weight is on the side of the lines, so no row is padded to 64.  With AHEAD each program
prefetches its first weights before the preceding kernel has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .eight_bits import divided, rows, size_of, step_of
from .launch import capability, cdiv, kernel, pdl, power, wait
from .quant import Quantized
from .quant_epilogue import EpilogueProduct
from .quant_gemv import FEW, WIDE, gemv
from .weight_products import copied, result_of

MULTIPROCESSORS = 132  # number of multiprocessors of the GPU on which tiles were measured
DEFAULTS = {"TURNED": 0, "AHEAD": 0, "FAST": 0}  # of a tile


@kernel()
def _rounded(x, y, threshold, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ok = tl.arange(0, BK)
    most = tl.zeros([BK], tl.int32)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.where(tl.abs(v) >= threshold, 0, size_of(v)))
    step, inverse = step_of(tl.max(most, 0), 127.0)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)
        q = (divided(v, step, inverse) + 12582912.0) - 12582912.0  # round to the nearest whole number, ties to even
        v = tl.where(tl.abs(v) >= threshold, v, q * step)
        tl.store(y + row * K + k + ok, v.to(y.dtype.element_ty), mask=k + ok < K)


def rounded_but_large(x: Tensor, threshold: float) -> Tensor:
    """Round each row of contiguous x [M, K] to 127 steps on both sides of 0.

    The largest element below the threshold defines the step.  Elements that reach the threshold are unchanged.
    """
    m, k = x.shape
    y = torch.empty_like(x)
    if m:
        block = min(power(k), 8192)
        warps = 8 if block > 2048 else 4
        _rounded[(m,)](x, y, threshold, K=k, BK=block, num_warps=warps, **pdl(x))
    return y


@triton.jit
def _all_parts(acc, scratch, arrived, at, part, BM: tl.constexpr, BN: tl.constexpr, SK: tl.constexpr):
    """Return the sums [BM, BN] of all parts of tile ``at``, and whether this program arrived last and has them."""
    size: tl.constexpr = BM * BN
    here = scratch + at.to(tl.int64) * (SK * size) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(here + part * size, acc)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    last = tl.atomic_add(arrived + at, 1, sem="acq_rel") == SK - 1
    if last:
        acc = tl.load(here, cache_modifier=".cg")
        for i in tl.static_range(1, SK):
            acc += tl.load(here + i * size, cache_modifier=".cg")
        tl.store(arrived + at, 0)
    return acc, last


@triton.jit
def _ask(at):
    """Prefetch 256 bytes at each of the pointers ``at``, which are divisible by 16, to the second-level cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@kernel("M")
def _product(
    x, weight, codes, x_scale, w_scale, y, scratch, arrived, M, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, TURNED: tl.constexpr,
    AHEAD: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows of 8 bits by a weight of 8 bits.

    WHOLE means int8. ``x`` and ``weight`` are descriptors with blocks [BM, BK] and [BN, BK], which return 0 outside the
    tensors.  ``codes`` points to the weight.  TURNED means that sums are [BN, BM]. AHEAD is the number of inputs of the
    weight to prefetch, a multiple of 256 and at most K. FAST keeps the sums of float8 in the tensor cores.
    """
    # Programs of eight neighbouring row tiles run one after another, because they read the same weights.
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    at, wide = tl.program_id(0), 8 * tiles_n
    first = at // wide * 8
    many = tl.minimum(tiles_m - first, 8)
    row, tile = first + at % wide % many, at % wide // many
    lines: tl.constexpr = BN if TURNED else BM
    columns: tl.constexpr = BM if TURNED else BN
    acc = tl.zeros([lines, columns], tl.int32 if WHOLE else tl.float32)
    begin, end = 0, K
    if SK > 1:
        each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
        begin = tl.program_id(1) * each
        end = tl.minimum(begin + each, K)
    if AHEAD > 0:
        outputs = tl.minimum(tile * BN + tl.arange(0, BN), N - 1).to(tl.int64)
        for i in tl.static_range(0, AHEAD, 256):
            _ask(codes + outputs * K + tl.minimum(begin + i, K - 256))
    wait(PDL)
    for k in tl.range(begin, end, BK, num_stages=STAGES):
        if TURNED:
            a, b = weight.load([tile * BN, k]), x.load([row * BM, k]).T
        else:
            a, b = x.load([row * BM, k]), weight.load([tile * BN, k]).T
        if WHOLE:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        elif FAST:
            acc = tl.dot(a, b, acc)
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BK if BK < 128 else 128)
    last = True
    if SK > 1:
        acc, last = _all_parts(acc, scratch, arrived, at, tl.program_id(1), lines, columns, SK)
    if last:
        total = tl.trans(acc) if TURNED else acc
        om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
        by_row = tl.load(x_scale + om, mask=om < M, other=0.0)
        by_column = tl.load(w_scale + on, mask=on < N, other=0.0)
        out = total.to(tl.float32) * by_row[:, None] * by_column[None, :]
        at_y = y + om.to(tl.int64)[:, None] * N + on[None, :]
        tl.store(at_y, out.to(y.dtype.element_ty), mask=(om < M)[:, None] & (on < N)[None, :])


def product_tile(m: int, n: int, k: int, whole: bool) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H100 for x [m, k] and a weight of n outputs.

    The shapes were 4,096 inputs with 4,096, 6,144 and 28,672 outputs, and 14,336 inputs with 4,096 outputs.  For up to
    64 rows a multiprocessor runs one program with many loads in flight, or several programs.
    """
    if m <= 64:
        return _tile_of_few(m, n, k, whole)
    bm, bn, bk, sk, stages, warps = 128, 256, 128, 1, 4, 8
    if m <= 128 and n >= WIDE:
        bn, warps = 128, 4
        stages = 3 if whole else 6
    elif m <= 128:
        bn, stages, warps = 64, 8, 4
        if whole and n <= 4096 and k >= 1024:
            sk = 2
    elif m <= 256 and n >= WIDE:
        bm, bn = 256, 128
    elif m <= 256 and n > 4096:
        bn, stages, warps = 128, 6, 4
    elif m <= 256 and whole:
        bm, bn, stages, warps = 64, 128, 8, 4
    elif m <= 256:
        bn, bk, warps = 64, 256, 4
    tile = {"BM": bm, "BN": bn, "BK": bk, "SK": sk, "STAGES": stages, "num_warps": warps}
    tile["AHEAD"] = 256 if m <= 256 else 0
    tile["FAST"] = int(not whole)
    return tile


def _tile_of_few(m: int, n: int, k: int, whole: bool) -> dict[str, int]:
    """Return the tile of up to 64 rows, as ``product_tile``."""
    sk = 1
    if n <= 4096:
        most = max(1, k // 1024)
        sk = 4 if m <= 32 else 1 if whole else 2
        sk = min(sk, most)
    bm = max(16, power(m))
    stages, ahead = 3, 256
    if cdiv(n, 64) * sk <= MULTIPROCESSORS:  # a program is alone on its multiprocessor
        stages, ahead = 6, 512
    elif m <= 32:
        stages = 4
    return {"BM": bm, "BN": 64, "BK": 256, "SK": sk, "STAGES": stages, "num_warps": 4, "TURNED": 1, "AHEAD": ahead}


def product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    y: Tensor,
    tile: dict[str, int] | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Compute y [M, N] of x [M, K] and weight [N, K] of the same 8-bit dtype, with x_scale [M, 1] and scale [N] f32.

    K must be a multiple of 16. ``arrived`` i32 has a counter for each tile, zero before and after the call.  Without it
    no sum is split.
    """
    m, k = x.shape
    n = len(weight)
    whole = x.dtype == torch.int8
    constants = pdl(x) | DEFAULTS | (tile or product_tile(m, n, k, whole))
    # only for bfloat16: results of other dtypes have more significant bits than the sums of the tensor cores
    constants["FAST"] &= int(y.dtype == torch.bfloat16)
    if constants["AHEAD"] > k or capability(x.device) < 9:
        constants["AHEAD"] = 0
    bm = constants["BM"]
    bn = constants["BN"]
    bk = constants["BK"]
    tiles = cdiv(m, bm) * cdiv(n, bn)
    if arrived is None or tiles > len(arrived):
        constants["SK"] = 1
    parts = constants["SK"]
    scratch = y
    if parts > 1:
        kept = torch.int32 if whole else torch.float32
        scratch = torch.empty(tiles * parts * bm * bn, dtype=kept, device=x.device)
    constants["N"] = n
    constants["K"] = k
    constants["WHOLE"] = whole
    inputs = TensorDescriptor.from_tensor(x, [bm, bk])
    outputs = TensorDescriptor.from_tensor(weight, [bn, bk])
    counters = y if arrived is None else arrived
    arguments = (inputs, outputs, weight, x_scale, scale, y, scratch, counters, m)
    _product[(tiles, parts)](*arguments, **constants)
    return y


def library(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Compute the product of float8 with torch's function, in y bfloat16; the outputs must be a multiple of 16 too.

    Its sums have the 14 bits of the tensor cores.  They are off by up to 1.6e-3 with 3,584 inputs and by less than 5e-3
    with 14,336. Rounding to bfloat16 adds up to 4e-3, and rounding to float8 3e-2 of a product.
    """
    inputs = (x, weight.t(), x_scale, scale[None])
    return torch._scaled_mm(*inputs, out_dtype=y.dtype, use_fast_accum=True, out=y)


def by_library(m: int, n: int) -> bool:
    """Return whether torch's float8 product of m rows and n outputs is faster than the kernel, as measured on an
    H100."""
    if n >= WIDE:
        return m > 64
    return m > (128 if n > 4096 else 256)


class ScaledProduct:
    """Product x W^T for a weight [N, K] of int8 or float8_e4m3fn with ``scale`` f32 [N].

    Each row of x is quantized separately, so its codes do not depend on the other rows.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight = weight
        self.scale = scale
        n, k = weight.shape
        self.wide = Quantized(weight, scale)  # the product with x that is not rounded to 8 bits
        self.even = k % 16 == 0  # whether the copy engine can load rows, which must have a multiple of 16 elements
        self.library = weight.dtype == torch.float8_e4m3fn and self.even and n % 16 == 0

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the product [M, N] of x [M, K] of any strides, in ``out`` if it is not None."""
        m = len(x)
        dtype = self.weight.dtype
        if not self.even:
            q, scale = rows(x.contiguous(), dtype)
            rounded = (q.float() * scale).to(x.dtype)
            return self.wide(rounded, out)
        y = result_of(x, len(self.weight), out)
        if 0 < m <= FEW:  # few rows are limited by reading the weight, which the kernel without rounding reads faster
            q, scale = rows(x.contiguous(), dtype, x.dtype)
            gemv(EpilogueProduct(self.wide), q, y=y, by_row=scale)
        elif m:
            q, scale = rows(x.contiguous(), dtype)
            self.of_rows(q, scale, y)
        return copied(y, out)

    def of_rows(self, q: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        """Compute y [M, N] of quantized rows q [M, K] with scale [M, 1], for M >= 1 and K a multiple of 16."""
        weight = self.weight
        if self.library and y.dtype == torch.bfloat16 and by_library(len(q), len(weight)):
            return library(q, scale, weight, self.scale, y)
        return product(q, scale, weight, self.scale, y, arrived=self.wide.arrived)
