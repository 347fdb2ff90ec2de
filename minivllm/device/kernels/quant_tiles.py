"""Products of many rows with weights of 4 or 8 bits on tensor cores, in tiles that Hopper's copy engine loads.

    halves    x [M, K] -> [M, K], the first 16 of each 32 inputs in the left half of the row, the others in the right
    tiles     grid (M / BM, N / BN, SK)   y^T [BN, BM] = numbers(W) [BN, K / SK] x^T, as ``quant``'s dots

They serve 17 to 256 rows with 4 bits and 65 to 256 rows with 8 bits.  The numbers of a tile of the weight are made in
registers, because that operand of the product may be there.  The copy engine loads tiles without instructions of the
program.  A byte holds two codes of 4 bits, 16 inputs apart (``StoredWeight``).  In ``halves`` the inputs of the low
codes are adjacent, and so are those of the high codes.  The same product with numbers in shared memory takes 1.1 to 1.4
times as long (H100, 256 rows).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import capability, kernel, pdl, wait
from .quant_numbers import drained, fp8_pairs, int4_pairs, int8_pairs, middles, spread, together
from .quant_numbers import halves as scale_halves
from .quant_words import WIDE


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
    (m, k), y = x.shape, torch.empty_like(x)
    if m:
        _halves[(m, triton.cdiv(k, 4096))](x, y, K=k, BK=4096, **pdl(x))
    return y


@kernel("M")
def _tiles(
    x, weight, scale, zero, y, scratch, arrived, M, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr,
    SG: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the weight in large tiles.

    ``x`` is a descriptor with blocks [BM, BK], of 4 bits [BM, BK / 2] in halves.  ``weight`` is a descriptor with
    blocks [BN, BK] bytes, or half as many.  Both return 0 outside the tensors.
    """
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    some: tl.constexpr = BK // GROUP if FORM == 4 and BK > GROUP else 1
    each_half: tl.constexpr = (GROUP if BK > GROUP else BK) // 2
    og = tl.arange(0, some)
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        raw = weight.load([tile * BN, k * FORM // 8])
        if FORM == 4:
            a, b = x.load([row * BM, k // 2]).T, x.load([row * BM, K // 2 + k // 2]).T
            s_at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
            on_s = (on < N)[:, None] & (k + og * GROUP < K)[None, :]
            s = tl.load(scale + s_at, mask=on_s, other=0.0)
            if ASM and ZERO != 1:
                z = s
                if ZERO:
                    z = tl.load(zero + s_at, mask=on_s, other=0.0)
                near, rest = scale_halves(s)
                near, rest = spread(near, BN, some, each_half), spread(rest, BN, some, each_half)
                low, high = int4_pairs(raw, near, rest, spread(middles(z, s, ZERO), BN, some, each_half))
            else:
                m = s * 8.0
                if ZERO:
                    m = s * tl.load(zero + s_at, mask=on_s, other=0.0)
                s, m = spread(s, BN, some, each_half), spread(m, BN, some, each_half)
                low = ((raw & 15).to(tl.float32) * s - m).to(y.dtype.element_ty)
                high = ((raw >> 4).to(tl.float32) * s - m).to(y.dtype.element_ty)
            acc = tl.dot(low, a, acc, input_precision="ieee")
            acc = tl.dot(high, b, acc, input_precision="ieee")
        else:
            a = x.load([row * BM, k]).T
            if ASM and weight.dtype == tl.int8:
                w = int8_pairs(raw)
            elif ASM:
                w = fp8_pairs(raw.to(tl.uint8, bitcast=True))
            else:
                w = raw.to(y.dtype.element_ty)
            acc = tl.dot(w, a, acc, input_precision="ieee")
        acc = drained(acc, PDL)
    acc, last = together(acc, scratch, arrived, row, tile, part, om, on, N, SK)
    if last:
        if FORM == 8:
            acc = acc * tl.load(scale + on, mask=on < N, other=0.0)[:, None]
        at_y = y + om.to(tl.int64)[None, :] * N + on[:, None]
        tl.store(at_y, acc.to(y.dtype.element_ty), mask=(on < N)[:, None] & (om < M)[None, :])


def tile_of(form: int, rows: int, n: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py for the shapes of Llama-3.1-8B.

    Tiles for up to 64 rows with 4 bits were measured on an H200, others on an H100.  Sums are split among as many
    programs as the device can run at once.
    """
    if rows > 128 and form == 8 and n >= WIDE:
        return dict(BM=256, BN=64, BK=64, SK=1, STAGES=3, num_warps=4)
    bm, stages, most = (32, 5, 384) if rows <= 32 else (64, 4, 264) if rows <= 64 else (128, 3, 264)
    programs = triton.cdiv(rows, bm) * triton.cdiv(n, 64)
    sk = next((parts for parts in (4, 2) if programs * parts <= most), 1)
    return dict(BM=bm, BN=64, BK=128, SK=sk, STAGES=stages, num_warps=4)


def tiles(of: Any, x: Tensor, tile: dict[str, int] | None = None, y: Tensor | None = None) -> Tensor:
    """Compute x W^T [M, N] of contiguous x bf16 [M, K] and a ``Quantized``, in ``y`` if it is not None."""
    m = len(x)
    y = x.new_empty(m, of.n) if y is None else y
    if not m:
        return y
    tile = tile or tile_of(of.form, m, of.n)
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
