"""Sums of eight products of float8 numbers, computed as float16.

The product of two float8 numbers has 8 bits of significand, so float16, which has 11, holds it exactly.  One
instruction computes two products of float16.  Four products each are summed in float16, and the two sums in float32;
the rounding error is 2e-4 of such a sum.  One factor is divided by 16 before, because 4 * 448 * 448 exceeds float16.
Products below 2 ** -14 lose bits by that division, at most 2 ** -38 of the largest product.  With ``ASM`` NaN stays
NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_of(v0, v1, ASM: tl.constexpr):
    """Round v0 and v1 float32 to float8, and return an int32 of two float16, each divided by 16, with v0 in the low
    half.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 codes;
            .reg .b32 pair, small;
            mov.b32 small, 0x2c002c00;
            cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1;
            cvt.rn.f16x2.e4m3x2 pair, codes;
            mul.rn.f16x2 $0, pair, small;
            }""",
            "=r,f,f",
            [v0, v1],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
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
        return tl.inline_asm_elementwise(
            """{
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
            }""",
            "=f,l,r,r,r,r",
            [raw, p0, p1, p2, p3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = _two(raw, p0, 0), _two(raw, p1, 16), _two(raw, p2, 32), _two(raw, p3, 48)
        return ((a[0] + b[0]) + (c[0] + d[0])) + ((a[1] + b[1]) + (c[1] + d[1]))
