"""Eight products of codes of 4 bits at a time, as float16.

Two products of float16 are one instruction, and a code needs no other than a mask to be a number: at the lowest bits of
a float16 q is 2 ** -24 q, four bits further up 2 ** -20 q, both subnormal and both exact::

    word & 0x000f000f         inputs j and j + 2     2 ** -24 q
    word & 0x00f000f0         j + 16 and j + 18      2 ** -20 q, times a 16th of x
    word >> 8, likewise       j + 1 and j + 3, j + 17 and j + 19

So that nothing is too large or too small, x is multiplied by the power of two that brings the largest element of its
row to 2 ** 15 or more, and less than 2 ** 16.  bfloat16 has fewer bits than float16 has: x is still exact, but for what
is 2 ** -29 of the largest.  A product is a multiple of 2 ** -24, so what it is off by is that of x by 2 ** -16 of the
largest element, divided by the code.  Of the 8 products four and four are added up in float16, the two sums in float32.
What a zero point brings goes by the sum of x, in float32.

What this rounds is a part of the sums of q x, which are larger than those of (q - zero) x: of normal x 1.1e-3 of the
outputs' root mean square, where rounding them to bfloat16 makes 1.8e-3, and 1.1e-2 of x that are all the same number of
8 bits.  An element that is 10,000 times the others leaves of these 3e-2 to outputs whose code of it is the zero point.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(512.0)  # what sums are smaller, beside the step of their row: 2 ** (24 - 15)


@triton.jit
def power_of(most):
    """Return the largest power of two in a number with ``eight_bits.size_of`` ``most``, and the factor for x.

    The power is at least 2 ** -100, so rows of smaller elements stay small.
    """
    exponent = tl.minimum(tl.maximum((most >> 23) - 127, -100), 127)
    up, down = exponent + 127, 127 + 15 - exponent
    return (up << 23).to(tl.float32, bitcast=True), (down << 23).to(tl.float32, bitcast=True)


@triton.jit
def two_of(v0, v1, ASM: tl.constexpr):
    """Return an int32 of two float16 of v0 and v1 float32, v0 low."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [v0, v1], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = v0.to(tl.float16).to(tl.int16, bitcast=True), v1.to(tl.float16).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _both(word, AT: tl.constexpr, pair):
    """Return the sum of the products, float32, of the codes at bits AT and AT + 16 with the pair, in units of 2 **
    -24.
    """
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
