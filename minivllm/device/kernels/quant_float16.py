"""Sums of eight products of a row with float8 numbers or 4-bit codes, computed as float16, two at a time.

Four products each are summed in float16, and the two sums in float32.

float8: the row is rounded to float8 too.  A product has 8 bits of significand, so float16, which has 11, holds it
exactly.  The rounding error is 2e-4 of a sum of four.  One factor is divided by 16 before, because 4 * 448 * 448
exceeds float16.  Products below 2 ** -14 lose bits by that division, at most 2 ** -38 of the largest product.  NaN
stays NaN.

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
def two_of(v0, v1):
    """Round v0 and v1 float32 to float16, and return them in an int32 with v0 in the low half."""
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [v0, v1], tl.int32, True, 1)


@triton.jit
def code_products(word, p0, p1, p2, p3):
    """Return the sum, float32, of the products of eight codes in an int32 with four results of ``two_of``, times 2 **
    -24.

    The pairs are the inputs 0 and 2, a 16th of 16 and 18, 1 and 3, and a 16th of 17 and 19.
    """
    ptx: tl.constexpr = """{
    .reg .b16 a, b; .reg .b32 w, v, sum; .reg .f32 even, odd;
    and.b32 v, $1, 0x000f000f; mul.rn.f16x2 sum, v, $2;
    and.b32 v, $1, 0x00f000f0; fma.rn.f16x2 sum, v, $3, sum; shr.u32 w, $1, 8;
    and.b32 v, w, 0x000f000f; fma.rn.f16x2 sum, v, $4, sum;
    and.b32 v, w, 0x00f000f0; fma.rn.f16x2 sum, v, $5, sum;
    mov.b32 {a, b}, sum; cvt.f32.f16 even, a; cvt.f32.f16 odd, b; add.f32 $0, even, odd;
    }"""
    return tl.inline_asm_elementwise(ptx, "=f,r,r,r,r,r", [word, p0, p1, p2, p3], tl.float32, True, 1)


@triton.jit
def pair_of(v0, v1):
    """Round v0 and v1 float32 to float8, and return an int32 of two float16, each divided by 16, with v0 in the low
    half.
    """
    ptx: tl.constexpr = """{
    .reg .b16 codes; .reg .b32 pair, small;
    cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1; cvt.rn.f16x2.e4m3x2 pair, codes;
    mov.b32 small, 0x2c002c00; mul.rn.f16x2 $0, pair, small;
    }"""
    return tl.inline_asm_elementwise(ptx, "=r,f,f", [v0, v1], tl.int32, True, 1)


@triton.jit
def eight_products(raw, p0, p1, p2, p3):
    """Return the sum, float32, of the products of eight float8 numbers in an int64 with four results of ``pair_of``."""
    ptx: tl.constexpr = """{
    .reg .b16 a, b, c, d; .reg .b32 low, high, v, sum; .reg .f32 even, odd;
    mov.b64 {low, high}, $1; mov.b32 {a, b}, low; mov.b32 {c, d}, high;
    cvt.rn.f16x2.e4m3x2 v, a; mul.rn.f16x2 sum, v, $2;
    cvt.rn.f16x2.e4m3x2 v, b; fma.rn.f16x2 sum, v, $3, sum;
    cvt.rn.f16x2.e4m3x2 v, c; fma.rn.f16x2 sum, v, $4, sum;
    cvt.rn.f16x2.e4m3x2 v, d; fma.rn.f16x2 sum, v, $5, sum;
    mov.b32 {a, b}, sum; cvt.f32.f16 even, a; cvt.f32.f16 odd, b; add.f32 $0, even, odd;
    }"""
    return tl.inline_asm_elementwise(ptx, "=f,l,r,r,r,r", [raw, p0, p1, p2, p3], tl.float32, True, 1)
