"""Conversion of keys and values of one byte to float16 in registers, four at a time.

float16 has 11 bits of significand and exponents down to 2 ** -24, so every int8 and every e4m3 number is exact in it::

    int8      0x6400 | u is 1024 + u for a byte u; with u = q + 128, subtracting 1152 gives q
    float8    one instruction converts two

Keys are needed along the head, which is their order in memory.  Values are needed along the tokens, which no
instruction reads from shared memory byte by byte at speed.  So they are read as words of four elements of the head of
one token, and the words of two tokens become four pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def numbers(q, ASM: tl.constexpr):
    """Convert int8 or float8 to float16."""
    if not ASM:
        return q.to(tl.float16)
    elif q.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, k;
            xor.b32 u, $2, 0x80808080;
            mov.b32 k, 0x64646464;
            prmt.b32 $0, u, k, 0x4140;
            prmt.b32 $1, u, k, 0x4342;
            mov.b32 k, 0x64806480;
            sub.rn.f16x2 $0, $0, k;
            sub.rn.f16x2 $1, $1, k;
            }""",
            "=&r,=&r,r",
            [q],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r",
            [q],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _byte(word, PLACE: tl.constexpr, FLOAT8: tl.constexpr):
    found = (word >> (8 * PLACE)).to(tl.int8)
    if FLOAT8:
        found = found.to(tl.float8e4nv, bitcast=True)
    return found.to(tl.float16)


@triton.jit
def quarters(words, FLOAT8: tl.constexpr, ASM: tl.constexpr):
    """Return the first, second, third and fourth int8 or float8 of int32 words, in float16."""
    if not ASM:
        first, second = _byte(words, 0, FLOAT8), _byte(words, 1, FLOAT8)
        third, fourth = _byte(words, 2, FLOAT8), _byte(words, 3, FLOAT8)
        return first, second, third, fourth
    elif FLOAT8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 p;
            .reg .b16 low, high;
            prmt.b32 p, $4, $5, 0x5140;
            mov.b32 {low, high}, p;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            prmt.b32 p, $4, $5, 0x7362;
            mov.b32 {low, high}, p;
            cvt.rn.f16x2.e4m3x2 $2, low;
            cvt.rn.f16x2.e4m3x2 $3, high;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, w, p, k;
            xor.b32 u, $4, 0x80808080;
            xor.b32 w, $5, 0x80808080;
            mov.b32 k, 0x64646464;
            prmt.b32 p, u, w, 0x5140;
            prmt.b32 $0, p, k, 0x4140;
            prmt.b32 $1, p, k, 0x4342;
            prmt.b32 p, u, w, 0x7362;
            prmt.b32 $2, p, k, 0x4140;
            prmt.b32 $3, p, k, 0x4342;
            mov.b32 k, 0x64806480;
            sub.rn.f16x2 $0, $0, k;
            sub.rn.f16x2 $1, $1, k;
            sub.rn.f16x2 $2, $2, k;
            sub.rn.f16x2 $3, $3, k;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def together(a, b, c, d, W: tl.constexpr, N: tl.constexpr):
    """Join the four [W, N] parts that ``quarters`` returns to [4 W, N]."""
    return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [0, 2, 3, 1]), [4 * W, N])
