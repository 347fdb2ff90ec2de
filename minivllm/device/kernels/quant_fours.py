"""Sums of eight products of 4-bit codes, computed as float16.

One instruction computes two products of float16.  A mask turns a code into a number, because q in the lowest bits of a
float16 is 2 ** -24 q, and four bits further up 2 ** -20 q.  Both are subnormal and exact::

    word & 0x000f000f              inputs j and j + 2         2 ** -24 q
    word & 0x00f000f0              j + 16 and j + 18          2 ** -20 q, times a 16th of x
    (word >> 8) & 0x000f000f       j + 1 and j + 3            2 ** -24 q
    (word >> 8) & 0x00f000f0       j + 17 and j + 19          2 ** -20 q, times a 16th of x

A row of x is multiplied by a power of two such that its largest element is at least 2 ** 15 and below 2 ** 16.  This
avoids overflow and underflow.  The conversion of bfloat16 to float16 is exact except for elements below 2 ** -29 of the
largest.  A product is a multiple of 2 ** -24.  Four products each are summed in float16, and the two sums in float32.
The part of the zero point is the zero point times the sum of x, in float32.

The error is relative to the sums of q x, which are larger than the sums of (q - zero) x.  For normally distributed x it
is 1.1e-3 of the outputs' root mean square; rounding outputs to bfloat16 makes 1.8e-3.  For x whose elements are all
equal to a number of 8 bits it is 1.1e-2.  If one element is 10,000 times the others, outputs whose code of it is the
zero point have an error of up to 3e-2.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(512.0)  # the unit of sums besides the power of two of their row, 2 ** (24 - 15)


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
        return tl.inline_asm_elementwise(
            """{
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
            }""",
            "=f,r,r,r,r,r",
            [word, p0, p1, p2, p3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return (_both(word, 0, p0) + _both(word, 4, p1)) + (_both(word, 8, p2) + _both(word, 12, p3))
