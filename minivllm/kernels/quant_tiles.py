"""65 to 256 rows times a weight of 8 or 4 bits on the tensor cores, whose tiles come by the copy engine of a Hopper.

    halves    x [M, K] -> [M, K], of each 32 inputs the first 16 in the left half of the row, the others in the right
    tiles     grid (M / BM, N / BN, SK)   y [BM, BN] = x [BM, K / SK] numbers(W) [BN, K / SK]^T

A tile of the weight is made numbers of in registers and put back into shared memory, where it is multiplied at once:
two programs on a multiprocessor take turns at the two.  4 bits come two in a byte, 16 inputs apart (``StoredWeight``):
x in halves has the inputs of each side of the bytes one beside another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import capability, kernel, pdl, wait
from .quant import Quantized, _spread
from .quant_numbers import fp8_pairs, int4_pairs, int8_pairs
from .quant_numbers import halves as scale_halves

LEAST_ROWS = 65


@kernel()
def _halves(x, y, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """A program takes BK inputs of a row."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.load(x + row * K + at, mask=at < K, other=0.0)
    to = at // 32 * 16 + at % 16 + tl.where(at % 32 < 16, 0, K // 2)
    tl.store(y + row * K + to, v, mask=at < K)


def halves(x: Tensor) -> Tensor:
    """x [M, K], K a multiple of 32 -> the same with each row in halves."""
    (m, k), y = x.shape, torch.empty_like(x)
    if m:
        _halves[(m, triton.cdiv(k, 4096))](x, y, K=k, BK=4096, **pdl(x))
    return y


@triton.jit
def _together(acc, scratch, arrived, row, tile, part, om, on, N: tl.constexpr, SK: tl.constexpr):
    """The sums [BM, BN] of all parts, in their order, for the program that arrives last: (sums, whether it is)."""
    last = True
    if SK > 1:
        wide: tl.constexpr = (N + acc.shape[1] - 1) // acc.shape[1] * acc.shape[1]
        at = scratch + om.to(tl.int64)[:, None] * wide + on[None, :]
        step = tl.num_programs(0).to(tl.int64) * acc.shape[0] * wide
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
def _grouped(raw, scale, zero, on, k, like, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr,
             GROUP: tl.constexpr, ZERO: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Bytes of 4 bits [BN, BK / 2] from input k on -> the numbers of their low and of their high halves."""
    some: tl.constexpr = BK // GROUP if BK > GROUP else 1
    each: tl.constexpr = (GROUP if BK > GROUP else BK) // 2
    og = tl.arange(0, some)
    at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
    keep = (on < N)[:, None] & (k + og * GROUP < K)[None, :]
    s = tl.load(scale + at, mask=keep, other=0.0)
    if ASM and not ZERO:
        near, rest = scale_halves(s)
        near, rest = _spread(near, raw.shape[0], some, each), _spread(rest, raw.shape[0], some, each)
        low, high = int4_pairs(raw, near, rest)
    else:
        m = s * 8.0
        if ZERO:
            m = s * tl.load(zero + at, mask=keep, other=0.0)
        s, m = _spread(s, raw.shape[0], some, each), _spread(m, raw.shape[0], some, each)
        low = ((raw & 15).to(tl.float32) * s - m).to(like.dtype.element_ty)
        high = ((raw >> 4).to(tl.float32) * s - m).to(like.dtype.element_ty)
    return low, high


@kernel("M")
def _tiles(
    x, weight, scale, zero, y, scratch, arrived, M, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr,
    SG: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``x`` is a descriptor with blocks [BM, BK], in halves and [BM, BK / 2] of 4 bits; ``weight`` one with blocks
    [BN, BK] bytes, or half as many; outside of the tensors they give 0."""
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        raw = weight.load([tile * BN, k * FORM // 8])
        if FORM == 4:
            a, b = x.load([row * BM, k // 2]), x.load([row * BM, K // 2 + k // 2])
            low, high = _grouped(raw, scale, zero, on, k, y, N, K, SN, SG, GROUP, ZERO, BK, ASM)
            acc = tl.dot(a, low.T, acc, input_precision="ieee")
            acc = tl.dot(b, high.T, acc, input_precision="ieee")
        else:
            a = x.load([row * BM, k])
            if ASM and weight.dtype == tl.int8:
                w = int8_pairs(raw)
            elif ASM:
                w = fp8_pairs(raw.to(tl.uint8, bitcast=True))
            else:
                w = raw.to(y.dtype.element_ty)
            acc = tl.dot(a, w.T, acc, input_precision="ieee")
    acc, last = _together(acc, scratch, arrived, row, tile, part, om, on, N, SK)
    if last:
        if FORM == 8:
            acc = acc * tl.load(scale + on, mask=on < N, other=0.0)[None, :]
        at_y = y + om.to(tl.int64)[:, None] * N + on[None, :]
        tl.store(at_y, acc.to(y.dtype.element_ty), mask=(on < N)[None, :] & (om < M)[:, None])


def tile_of(form: int, group: int, rows: int, n: int) -> dict[str, int]:
    """Not measured yet."""
    bm = 64 if rows <= 64 else 128
    programs = triton.cdiv(n, 128) * triton.cdiv(rows, bm)
    sk = 4 if programs <= 66 else 2 if programs <= 132 else 1
    return dict(BM=bm, BN=128, BK=64, SK=sk, STAGES=4, num_warps=8)


def takes(of: Quantized, x: Tensor) -> bool:
    """Whether the copy engine takes both: rows of a multiple of 16 bytes."""
    aligned = of.k % 32 == 0 and x.data_ptr() % 16 == 0 and of.weight.data_ptr() % 16 == 0
    return aligned and of.table is None and x.dtype == torch.bfloat16 and capability(x.device) >= 9


def tiles(of: Quantized, x: Tensor, tile: dict[str, int] | None = None, y: Tensor | None = None) -> Tensor:
    """x [M, K] without gaps, that ``takes`` -> x W^T [M, N], in ``y`` if that is given."""
    m = len(x)
    y = x.new_empty(m, of.n) if y is None else y
    if not m:
        return y
    tile = tile or tile_of(of.form, of.group, m, of.n)
    rows, wide = triton.cdiv(m, tile["BM"]), triton.cdiv(of.n, tile["BN"])
    if tile["SK"] > 1 and rows * wide > len(of.arrived):
        tile = {**tile, "SK": 1}
    size = tile["SK"] * rows * tile["BM"] * wide * tile["BN"] if tile["SK"] > 1 else 0
    scratch = torch.empty(size, dtype=torch.float32, device=x.device) if size else y
    four = of.form == 4
    _tiles[(rows, wide, tile["SK"])](
        TensorDescriptor.from_tensor(halves(x) if four else x, [tile["BM"], tile["BK"] // (2 if four else 1)]),
        TensorDescriptor.from_tensor(of.weight, [tile["BN"], tile["BK"] * of.form // 8]),
        of.scale,
        of.scale if of.zero is None else of.zero,
        y,
        scratch,
        of.arrived,
        m,
        ASM=x.dtype == torch.bfloat16 and capability(x.device) >= 9,
        **of._sizes,
        **tile,
        **pdl(x),
    )
    return y
