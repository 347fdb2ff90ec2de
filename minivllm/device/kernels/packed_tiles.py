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

from .quant_numbers import fp8_pairs, halves, int4_pairs, int8_pairs, middles


@triton.jit
def _spread(s, BN: tl.constexpr, SOME: tl.constexpr, EACH: tl.constexpr):
    """Repeat s [BN, SOME] to [BN, SOME * EACH]."""
    if SOME == 1:
        return s
    else:
        return tl.reshape(tl.broadcast_to(s[:, :, None], [BN, SOME, EACH]), [BN, SOME * EACH])


@triton.jit
def _whole(raw, dtype: tl.constexpr, ASM: tl.constexpr):
    """Convert bytes to numbers of ``dtype``."""
    if ASM and raw.dtype == tl.int8:
        return int8_pairs(raw)
    elif ASM and raw.dtype == tl.float8e4nv:
        return fp8_pairs(raw.to(tl.uint8, bitcast=True))
    else:
        return raw.to(tl.float32).to(dtype)


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
    s = tl.load(scale + s_at, mask=on_s, other=0.0)
    if FORM == 4:
        if ASM and ZERO != 1:
            z = s
            if ZERO:
                z = tl.load(zero + s_at, mask=on_s, other=0.0)
            near, rest = halves(s)
            near, rest = _spread(near, BN, some, each), _spread(rest, BN, some, each)
            low, high = int4_pairs(raw, near, rest, _spread(middles(z, s, ZERO), BN, some, each))
        else:
            m = s * 8.0
            if ZERO:
                m = s * tl.load(zero + s_at, mask=on_s, other=0.0)
            s, m = _spread(s, BN, some, each), _spread(m, BN, some, each)
            low = ((raw & 15).to(tl.float32) * s - m).to(a.dtype)
            high = ((raw >> 4).to(tl.float32) * s - m).to(a.dtype)
        acc = tl.dot(low, a, acc, input_precision=precision)
        acc = tl.dot(high, b, acc, input_precision=precision)
    elif some == 1 and not ZERO:
        acc += tl.dot(_whole(raw, a.dtype, ASM), a, input_precision=precision) * s
    else:
        steps = raw.to(tl.float32)
        if ZERO:
            steps = steps - _spread(tl.load(zero + s_at, mask=on_s, other=0.0), BN, some, each)
        acc = tl.dot((steps * _spread(s, BN, some, each)).to(a.dtype), a, acc, input_precision=precision)
    return acc
