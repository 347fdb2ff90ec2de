"""Sums of eight products of a row with float8 numbers or 4-bit codes, computed as float16, two at a time.

Four products each are summed in float16, and the two sums in float32.

float8: the row is rounded to float8 too.  A product has 8 bits of significand, so float16, which has 11, holds it
exactly.  The rounding error is 2e-4 of a sum of four.  One factor is divided by 16 before, because 4 * 448 * 448
exceeds float16.  Products below 2 ** -14 lose bits by that division, at most 2 ** -38 of the largest product.  With
``ASM`` NaN stays NaN.

4 bits: masks turn the codes of a word into planes of subnormal float16 (``quant_formats``).  A row is multiplied by a
power of two such that its largest element is at least 2 ** 15 and below 2 ** 16.  This avoids overflow and underflow.
The conversion of bfloat16 to float16 is exact except for elements below 2 ** -29 of the largest.  A product is a
multiple of 2 ** -24.  The part of the zero point is the zero point times the sum of x, in float32.  The error is
relative to the sums of q x, which are larger than the sums of (q - zero) x.  For normally distributed x it is 1.1e-3 of
the outputs' root mean square; rounding outputs to bfloat16 makes 1.8e-3.  For x whose elements are all equal to a
number of 8 bits it is 1.1e-2.  If one element is 10,000 times the others, outputs whose code of it is the zero point
have an error of up to 3e-2.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(512.0)  # unit of the sums apart from the power of two of their row: 2 ** (24 - 15)


@triton.jit
def power_of(most):
    """Return the largest power of two that is at most the number whose ``eight_bits.size_of`` is ``most``, and the
    factor for x.

    The power is at least 2 ** -100, so rows of smaller elements stay small.
    """
    exponent = tl.minimum(tl.maximum((most >> 23) - 127, -100), 127)
    up, down = exponent + 127, 127 + 15 - exponent
    return (up << 23).to(tl.float32, bitcast=True), (down << 23).to(tl.float32, bitcast=True)


@triton.jit
def two_of(v0, v1, ASM: tl.constexpr):
    """Round v0 and v1 float32 to float16, and return them in an int32 with v0 in the low half."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [v0, v1], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = v0.to(tl.float16).to(tl.int16, bitcast=True), v1.to(tl.float16).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _both(word, AT: tl.constexpr, pair):
    """Return the sum, float32, of the products of the codes at bits AT and AT + 16 with the pair."""
    low, high = ((word >> AT) & 15).to(tl.float32), ((word >> (AT + 16)) & 15).to(tl.float32)
    x0, x1 = pair.to(tl.int16).to(tl.float16, bitcast=True), (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    unit: tl.constexpr = 1.0 / (1 << 20) if AT % 8 else 1.0 / (1 << 24)
    return (low * x0.to(tl.float32) + high * x1.to(tl.float32)) * unit


@triton.jit
def code_products(word, p0, p1, p2, p3, ASM: tl.constexpr):
    """Return the sum, float32, of the products of eight codes in an int32 with four results of ``two_of``, times 2 **
    -24.

    The pairs are the inputs 0 and 2, a 16th of 16 and 18, 1 and 3, and a 16th of 17 and 19.
    """
    if ASM:
        ptx: tl.constexpr = """{
        .reg .b16 a, b;
        .reg .b32 w, v, sum;
        .reg .f32 even, odd;
        and.b32 v, $1, 0x000f000f;
        mul.rn.f16x2 sum, v, $2;
        and.b32 v, $1, 0x00f000f0;
        fma.rn.f16x2 sum, v, $3, sum;
        shr.u32 w, $1, 8;
        and.b32 v, w, 0x000f000f;
        fma.rn.f16x2 sum, v, $4, sum;
        and.b32 v, w, 0x00f000f0;
        fma.rn.f16x2 sum, v, $5, sum;
        mov.b32 {a, b}, sum;
        cvt.f32.f16 even, a;
        cvt.f32.f16 odd, b;
        add.f32 $0, even, odd;
        }"""
        return tl.inline_asm_elementwise(ptx, "=f,r,r,r,r,r", [word, p0, p1, p2, p3], tl.float32, True, 1)
    else:
        return (_both(word, 0, p0) + _both(word, 4, p1)) + (_both(word, 8, p2) + _both(word, 12, p3))


@triton.jit
def pair_of(v0, v1, ASM: tl.constexpr):
    """Round v0 and v1 float32 to float8, and return an int32 of two float16, each divided by 16, with v0 in the low
    half.
    """
    if ASM:
        ptx: tl.constexpr = """{
        .reg .b16 codes;
        .reg .b32 pair, small;
        mov.b32 small, 0x2c002c00;
        cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1;
        cvt.rn.f16x2.e4m3x2 pair, codes;
        mul.rn.f16x2 $0, pair, small;
        }"""
        return tl.inline_asm_elementwise(ptx, "=r,f,f", [v0, v1], tl.int32, True, 1)
    else:
        low = (v0.to(tl.float8e4nv).to(tl.float32) / 16).to(tl.float16).to(tl.int16, bitcast=True)
        high = (v1.to(tl.float8e4nv).to(tl.float32) / 16).to(tl.float16).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _two(raw, pair, at: tl.constexpr):
    """Return two products, float32, of the float8 codes in bits ``at`` to at + 15 with the pair.  NaN counts as 480."""
    low, high = (raw >> at).to(tl.int16), (raw >> (at + 8)).to(tl.int16)
    v0 = (((low & 0x80) << 8) | ((low & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256
    v1 = (((high & 0x80) << 8) | ((high & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256
    x0, x1 = pair.to(tl.int16).to(tl.float16, bitcast=True), (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return v0 * x0.to(tl.float32), v1 * x1.to(tl.float32)


@triton.jit
def eight_products(raw, p0, p1, p2, p3, ASM: tl.constexpr):
    """Return the sum, float32, of the products of eight float8 numbers in an int64 with four results of ``pair_of``."""
    if ASM:
        ptx: tl.constexpr = """{
        .reg .b16 a, b, c, d;
        .reg .b32 low, high, v, sum;
        .reg .f32 even, odd;
        mov.b64 {low, high}, $1;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.rn.f16x2.e4m3x2 v, a;
        mul.rn.f16x2 sum, v, $2;
        cvt.rn.f16x2.e4m3x2 v, b;
        fma.rn.f16x2 sum, v, $3, sum;
        cvt.rn.f16x2.e4m3x2 v, c;
        fma.rn.f16x2 sum, v, $4, sum;
        cvt.rn.f16x2.e4m3x2 v, d;
        fma.rn.f16x2 sum, v, $5, sum;
        mov.b32 {a, b}, sum;
        cvt.f32.f16 even, a;
        cvt.f32.f16 odd, b;
        add.f32 $0, even, odd;
        }"""
        return tl.inline_asm_elementwise(ptx, "=f,l,r,r,r,r", [raw, p0, p1, p2, p3], tl.float32, True, 1)
    else:
        a, b, c, d = _two(raw, p0, 0), _two(raw, p1, 16), _two(raw, p2, 32), _two(raw, p3, 48)
        return ((a[0] + b[0]) + (c[0] + d[0])) + ((a[1] + b[1]) + (c[1] + d[1]))
