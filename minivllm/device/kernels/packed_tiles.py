"""Product of a tile of a quantized weight with a tile of x on tensor cores, for kernels over one weight or many.

The forms are those of ``StoredWeight`` with scales of groups of inputs, [rows, K / GROUP] for [rows, K]::

    FORM 4   uint8 [rows, K / 2]                        w = (q - zero) * scale
    FORM 8   int8, float8_e4m3fn, uint8 [rows, K]       w = (q - zero) * scale; zero is 0 without zero points

Numbers of 8 bits are exact in bfloat16.  If a tile's inputs share a scale and there are no zero points, the codes are
multiplied and their sums are scaled.  Otherwise each number is scaled and rounded to x's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quant_formats import bytes_of, nibbles_of, spread


@triton.jit
def inputs_of(FORM: tl.constexpr, BK: tl.constexpr):
    """Return the index among BK inputs of each byte of a tile.  Bytes of FORM 4 also hold the input 16 further on."""
    at = tl.arange(0, BK * FORM // 8)
    if FORM == 4:
        at = at // 16 * 32 + at % 16
    return at


@triton.jit
def load_x(x_at, k, inputs, real, K: tl.constexpr, FORM: tl.constexpr):
    """Load x [bytes, BM] of the inputs of the bytes, and for FORM 4 also of their second inputs.

    ``x_at`` [1, BM] points to columns of x^T, of which those in ``real`` [BM] exist.
    """
    on = (k + inputs < K)[:, None] & real[None, :]
    a = tl.load(x_at + (k + inputs)[:, None], mask=on, other=0.0)
    b = a
    if FORM == 4:
        b = tl.load(x_at + (k + inputs + 16)[:, None], mask=on, other=0.0)
    return a, b


@triton.jit
def add_tile(
    acc, a, b, weight, scale, zero, row, there, k, inputs, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IEEE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return acc [BN, BM] + W[row, k to k + BK] x.

    ``row`` is i64 [BN], ``there`` marks rows that exist.  ``a`` and ``b`` are results of ``load_x``.  ASM converts to
    bfloat16 by instructions for two numbers at a time.
    """
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    some: tl.constexpr = BK // GROUP if BK > GROUP else 1
    each: tl.constexpr = BK * FORM // 8 // some
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    at = weight + row[:, None] * (K * FORM // 8) + (k * FORM // 8 + tl.arange(0, BK * FORM // 8))[None, :]
    raw = tl.load(at, mask=there[:, None] & (k + inputs < K)[None, :],
                  other=0 if FORM == 4 else 0.0)  # fmt: skip
    og = k // GROUP + tl.arange(0, some)
    s_at, on_s = row[:, None] * groups + og[None, :], there[:, None] & (og < groups)[None, :]
    if FORM == 4:
        low, high = nibbles_of(raw, scale, zero, s_at, on_s, a.dtype, BN, some, each, ZERO, ASM)
        acc = tl.dot(low, a, acc, input_precision=precision)
        acc = tl.dot(high, b, acc, input_precision=precision)
    elif some == 1 and not ZERO:
        s = tl.load(scale + s_at, mask=on_s, other=0.0)
        acc += tl.dot(bytes_of(raw, a.dtype, ASM), a, input_precision=precision) * s
    else:
        s = tl.load(scale + s_at, mask=on_s, other=0.0)
        steps = raw.to(tl.float32)
        if ZERO:
            steps = steps - spread(tl.load(zero + s_at, mask=on_s, other=0.0), BN, some, each)
        acc = tl.dot((steps * spread(s, BN, some, each)).to(a.dtype), a, acc, input_precision=precision)
    return acc
