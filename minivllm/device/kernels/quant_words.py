"""Products of a few rows with a weight of 8 or 4 bits that is read as 32-bit words, without tensor cores.

Two instructions convert a code in 0..15 or 0..255 to a float32.  The first shifts its word.  The second masks the code
and sets the exponent of 128, so that the result is 128 plus a multiple of q::

    q at bits 16 to 19      128 + q
    q at bits 12 to 15      128 + q / 16
    q at bits 15 to 22      128 + q / 2

The third instruction is the multiply-add with x.  The part of a sum that comes from the 128 and the zero point is
proportional to the sum of x.  It is subtracted once for each word of 4 or 8 weights.  Sums lose 1 bit with weights of 8
bits and 8 bits with weights of 4 bits, of float32's 24.  x is bfloat16 or float16, which have fewer bits than the 16
that remain.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import capability, kernel, pdl, wait

WIDE = 16384  # outputs from which on there are enough programs for large tiles


@triton.jit
def _values(four, like):
    """Convert an int64 of four 16-bit floats, of the dtype that ``like`` points to, to four float32 [1, ...]."""
    dtype: tl.constexpr = like.dtype.element_ty
    v0 = four.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    v1 = (four >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    v2 = (four >> 32).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    v3 = (four >> 48).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return v0[None, :], v1[None, :], v2[None, :], v3[None, :]


@triton.jit
def _number(moved, MASK: tl.constexpr, ASM: tl.constexpr):
    """Return the number in the masked bits plus 128, as float32.  ASM uses one instruction instead of two."""
    if ASM:
        found = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,r,r", [moved, MASK, 0x43000000], tl.int32, True, 1
        )
    else:
        found = (moved & MASK) | 0x43000000
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _add(acc, x, at, on, n0, n1, n2, n3, h0, h1, h2, h3, s, z, like, FORM: tl.constexpr):
    """Return acc [BN, W] + the products of a row of x with the numbers of W words.  8 bits use half of the numbers."""
    v0, v1, v2, v3 = _values(tl.load(x + at, mask=on, other=0), like)
    both = (v0 + v1) + (v2 + v3)
    if FORM == 4:
        u0, u1, u2, u3 = _values(tl.load(x + at + 4, mask=on, other=0), like)
        high = (u0 + u1) + (u2 + u3)
        off = 128.0 * (both + 16.0 * high) + z * (both + high)
        part = n0 * v0 + (n1 * v1 + (n2 * v2 + (n3 * v3 - off)))
        part = h0 * (16.0 * u0) + (h1 * (16.0 * u1) + (h2 * (16.0 * u2) + (h3 * (16.0 * u3) + part)))
        return acc + s * part
    else:
        return n0 * v0 + (n1 * v1 + (n2 * v2 + (n3 * v3 + (acc - 192.0 * both))))


@triton.jit
def _put(y, row, M, on, acc, scale, by_row, N: tl.constexpr, FORM: tl.constexpr, BY_ROW: tl.constexpr):
    total = tl.sum(acc, 1)
    if FORM == 8:
        total = total * (2.0 * tl.load(scale + on, mask=on < N, other=0.0))
    if BY_ROW:
        total = total * tl.load(by_row + row, mask=row < M, other=0.0)
    tl.store(y + row * N + on, total.to(y.dtype.element_ty), mask=(on < N) & (row < M))


@triton.jit
def _spread(s, BN: tl.constexpr, SOME: tl.constexpr, EACH: tl.constexpr):
    """Repeat s [BN, SOME] to [BN, SOME * EACH], once for each word of a group."""
    if SOME == 1:
        return s
    else:
        return tl.reshape(tl.broadcast_to(s[:, :, None], [BN, SOME, EACH]), [BN, SOME * EACH])


@kernel("M")
def _words(
    x, weight, scale, zero, by_row, y, M, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr, BY_ROW: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS (1, 2, 4, 8) rows by the weight.

    BY_ROW multiplies each row by ``by_row`` [M] at the end.  x is int64 [M, K / 4] with four inputs per element.  The
    weight is int32 [N, K / 4] with four codes per word, or [N, K / 8] with eight.
    """
    wait(PDL)
    on = tl.program_id(0) * BN + tl.arange(0, BN)
    wide: tl.constexpr = K * FORM // 32
    word = tl.arange(0, BK * FORM // 32)
    some: tl.constexpr = BK // GROUP if FORM == 4 else 1
    og = tl.arange(0, some)
    w_at = weight + on.to(tl.int64)[:, None] * wide + word[None, :]
    fours = word
    if FORM == 4:
        fours = word // 4 * 8 + word % 4
    a0 = tl.zeros([BN, BK * FORM // 32], tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        on_x = k * FORM // 32 + word < wide
        at = k // 4 + fours
        raw = tl.load(w_at + k * FORM // 32, mask=(on < N)[:, None] & on_x[None, :], other=0,
                      eviction_policy="evict_first")  # fmt: skip
        if FORM == 4:
            s_at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
            on_s = (on < N)[:, None] & (k + og * GROUP < K)[None, :]
            s = _spread(tl.load(scale + s_at, mask=on_s, other=0.0), BN, some, GROUP // 8)
            z = 8.0
            if ZERO:
                z = _spread(tl.load(zero + s_at, mask=on_s, other=0.0), BN, some, GROUP // 8)
            n0, n1 = _number(raw << 16, 0xF0000, ASM), _number(raw << 8, 0xF0000, ASM)
            n2, n3 = _number(raw, 0xF0000, ASM), _number(raw >> 8, 0xF0000, ASM)
            h0, h1 = _number(raw << 8, 0xF000, ASM), _number(raw, 0xF000, ASM)
            h2, h3 = _number(raw >> 8, 0xF000, ASM), _number(raw >> 16, 0xF000, ASM)
        else:
            raw = raw ^ -0x7F7F7F80  # 128 + q of each byte
            n0, n1 = _number(raw << 15, 0x7F8000, ASM), _number(raw << 7, 0x7F8000, ASM)
            n2, n3 = _number(raw >> 1, 0x7F8000, ASM), _number(raw >> 9, 0x7F8000, ASM)
            h0, h1, h2, h3, s, z = n0, n0, n0, n0, 1.0, 0.0
        wide_x: tl.constexpr = K // 4
        a0 = _add(a0, x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
        if ROWS > 1:
            a1 = _add(a1, x + tl.minimum(1, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
        if ROWS > 2:
            a2 = _add(a2, x + tl.minimum(2, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
            a3 = _add(a3, x + tl.minimum(3, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
        if ROWS > 4:
            a4 = _add(a4, x + tl.minimum(4, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
            a5 = _add(a5, x + tl.minimum(5, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
            a6 = _add(a6, x + tl.minimum(6, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
            a7 = _add(a7, x + tl.minimum(7, M - 1) * wide_x, at, on_x, n0, n1, n2, n3, h0, h1, h2, h3, s, z, y, FORM)
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


def takes(x: Tensor, weight: Tensor, k: int) -> bool:
    """Return whether ``words`` supports x and the weight.

    x must have 16 bits per element and be aligned to 8 bytes, and the weight must hold whole numbers and be aligned to
    words.
    """
    whole = weight.dtype in (torch.int8, torch.uint8) and x.element_size() == 2
    return whole and k % 4 == 0 and x.data_ptr() % 8 == 0 and weight.data_ptr() % 4 == 0


def words_tile(form: int, group: int, rows: int, n: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H200 (4,096 inputs, 4,096 or 28,672 outputs)."""
    if form == 8:
        bn, bk, warps = (16, 512, 4) if n >= WIDE else (8, 1024, 4)
        return dict(BN=bn, BK=bk, STAGES=3, num_warps=warps)
    if n < WIDE and rows == 1:
        return dict(BN=16, BK=2048, STAGES=3, num_warps=8)
    return dict(BN=16, BK=max(1024, group), STAGES=3 if n >= WIDE else 4, num_warps=4)


def words(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    y: Tensor,
    sizes: dict[str, Any],
    tile: dict[str, int] | None = None,
    by_row: Tensor | None = None,
) -> Tensor:
    """Compute y [M, N] in x's dtype, of contiguous x [1 to 8, K] and the weight [N, K], with 4 bits [N, K / 2].

    ``sizes`` has N, K, SN and SG (strides of the scales), FORM (bits), GROUP and ZERO.  ``by_row`` f32 [M] multiplies
    the rows of y.
    """
    m = len(x)
    tile = tile or words_tile(sizes["FORM"], sizes["GROUP"], m, sizes["N"])
    _words[(triton.cdiv(sizes["N"], tile["BN"]),)](
        x.view(torch.int64),
        weight.view(torch.int32),
        scale,
        scale if zero is None else zero,
        scale if by_row is None else by_row,
        y,
        m,
        ROWS=triton.next_power_of_2(m),
        BY_ROW=by_row is not None,
        ASM=capability(x.device) >= 8,
        **sizes,
        **tile,
        **pdl(x),
    )
    return y
