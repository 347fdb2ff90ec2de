"""Forms of quantized weights, and the conversion of their codes to numbers in registers.

Forms of a weight [N, K], as in ``StoredWeight``::

    int8, float8_e4m3fn [N, K]   w = weight * scale[n]
    uint8 [N, K / 2]             w = (q - zero[n, group]) * scale[n, group]; byte j of the 16 of block b has input
                                 32 b + j in its low half, 32 b + 16 + j in its high half;  with a table f32 [16]
                                 w = table[q] * scale[n, group]

The kernel without tensor cores reads int8 as *words* of 32 bits with four codes.  Two instructions convert a code to
float32: a shift of its word, and a mask that also sets the exponent of 128, so that q at bits 15 to 22 becomes
128 + q / 2.  The part of a sum that comes from the 128 is proportional to the sum of x, and is subtracted once for each
word.  Sums lose 1 bit of float32's 24.

A table is rounded to float16 for x of 16 bits.  Four instructions select a number by its code (``table_pairs``).

Kernels with tensor cores convert two codes at a time to bfloat16.  It has 8 bits of significand, so 128 + q is exact
for q in 0..127, and its bits are 0x4300 | q::

    int8      0x4300 | q & 127 is 128 + the lower bits; 0x4300 | q & 128 is 128, or 256 for a negative q; the
              difference is q
    float8    exponent and significand of e4m3, shifted to those of bfloat16, are 2 ** -120 of the number, also for
              subnormal numbers
    int4      (0x4300 | q) - (128 + z) is q - z for whole zero points z, 8 by default; the scale is a sum of two
              bfloat16, so the number is a product and a multiply-add, and only the second rounds the result

An element of 16 bits has two bytes, so a row has two *planes*, the low and the high bytes of all elements.  Codes of 4
bits form four planes of subnormal float16.  In the lowest bits of a float16 q is 2 ** -24 q, four bits further up 2 **
-20 q, and both are exact::

    plane 0   word & 0x000f000f           inputs j and j + 2         2 ** -24 q
          1   (word >> 8) & 0x000f000f    j + 1 and j + 3            2 ** -24 q
          2   word & 0x00f000f0           j + 16 and j + 18          2 ** -20 q, times a 16th of x
          3   (word >> 8) & 0x00f000f0    j + 17 and j + 19          2 ** -20 q, times a 16th of x
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """The constants of a product with one weight: ``n`` outputs, ``k`` inputs, ``bits`` of a code, and inputs of a
    ``group`` that shares a scale.

    ``by_row`` and ``by_group`` are the strides of the scales.  ``zero`` is 0 without zero points, 2 for whole numbers
    from 0 to 127, which ``int4_pairs`` requires, and 1 for other zero points.  Kernels take a form as one constant.
    """

    n: int
    k: int
    bits: int
    group: int
    by_row: int
    by_group: int
    zero: int = 0
    table: bool = False
    float8: bool = False


class QuantizedWeight:
    """One weight with its scales, and the counters of split sums, which are 0 between launches.

    The scales of groups are [N, groups] with any strides.  With 4 bits the number of inputs must be a multiple of 32,
    and a group must have 32, 64 or 128 inputs.  ValueError for other groups, for which the tiles would give wrong
    products.
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, zero: Tensor | None = None, group: int = 0, table: Tensor | None = None
    ) -> None:
        self.weight = weight
        self.scale = scale
        self.table = scale if table is None else with_words(table)
        self.zero = scale if zero is None else zero
        bits = 4 if weight.dtype == torch.uint8 else 8
        if bits == 4 and group not in (32, 64, 128):
            raise ValueError(f"groups of {group} inputs with 4 bits: expected 32, 64 or 128")
        n, row_bytes = weight.shape
        k = row_bytes * 8 // bits
        if bits == 8:
            group = k
        by_row, by_group = scale.stride() if scale.dim() == 2 else (1, 0)
        zeros = zeros_of(zero)
        float8 = weight.dtype == torch.float8_e4m3fn
        self.form = Form(n, k, bits, group, by_row, by_group, zeros, table is not None, float8)
        self.arrived = torch.zeros(1024, dtype=torch.int32, device=weight.device)


def with_words(table: Tensor) -> Tensor:
    """Return a table f32 [16] with eight words behind it, the lower bytes of the 16 numbers in float16, and then the
    upper bytes.

    ValueError for numbers that are infinite in float16.
    """
    halves = table.to(torch.float16)
    if not table.is_meta and not bool(halves.isfinite().all()):
        raise ValueError(f"a table with the number {float(table.abs().amax())}: expected at most 65504, as in float16")
    bytes_of_halves = halves.view(torch.uint8).view(16, 2)
    words = bytes_of_halves.T.flatten().view(torch.float32)
    return torch.cat((table, words))


def zeros_of(zero: Tensor | None) -> int:
    """Return the value of ``Form.zero`` for a tensor of zero points."""
    if zero is None:
        return 0
    whole = zero == zero.round()
    small = (zero >= 0) & (zero <= 127)
    return 2 if bool((whole & small).all()) else 1


@triton.jit
def spread(s, BN: tl.constexpr, SOME: tl.constexpr, EACH: tl.constexpr):
    """Repeat s [BN, SOME] to [BN, SOME * EACH], once for each element of a group."""
    if SOME == 1:
        return s
    else:
        return tl.reshape(tl.broadcast_to(s[:, :, None], [BN, SOME, EACH]), [BN, SOME * EACH])


@triton.jit
def numbers_of(word, like):
    """Convert the two lowest 16-bit floats of integers, of the dtype that ``like`` points to, to float32."""
    dtype: tl.constexpr = like.dtype.element_ty
    low, high = word.to(tl.int16).to(dtype, bitcast=True), (word >> 16).to(tl.int16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def values_of(four, like):
    """Convert an int64 of four 16-bit floats, of the dtype that ``like`` points to, to four float32 [1, ...]."""
    dtype: tl.constexpr = like.dtype.element_ty
    v0 = four.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    v1 = (four >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    v2 = (four >> 32).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    v3 = (four >> 48).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return v0[None, :], v1[None, :], v2[None, :], v3[None, :]


@triton.jit
def halves_of(pair, like):
    """Return the lower and the upper half of an int32 as numbers of the dtype that ``like`` points to."""
    dtype: tl.constexpr = like.dtype.element_ty
    ptx: tl.constexpr = "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;"
    low, high = tl.inline_asm_elementwise(ptx, "=&r,=r,r,r", [pair], (tl.bfloat16, tl.bfloat16), True, 2)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


# ---- words, for float32 ----------------------------------------------------------------------------------------------


@triton.jit
def number_of(moved):
    """Return 128 + n / 2 as float32, for the number n in bits 15 to 22, by one instruction."""
    lop: tl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xea;"
    found = tl.inline_asm_elementwise(lop, "=r,r,r,r", [moved, 0x7F8000, 0x43000000], tl.int32, True, 1)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def word_numbers(raw):
    """Return 128 + (128 + q) / 2 of the four int8 of an int32."""
    raw = raw ^ -0x7F7F7F80  # each byte becomes 128 + q
    return number_of(raw << 15), number_of(raw << 7), number_of(raw >> 1), number_of(raw >> 9)


# ---- pairs, for bfloat16 ---------------------------------------------------------------------------------------------


@triton.jit
def int8_pairs(q):
    """Convert int8 to bfloat16 in pairs."""
    ptx: tl.constexpr = """{ .reg .b32 p, lo, hi, one;
    cvt.u32.u16 p, $1; prmt.b32 p, p, 0, 0x4140; mov.b32 one, 0x43004300;
    lop3.b32 lo, p, 0x007f007f, one, 0xea; lop3.b32 hi, p, 0x00800080, one, 0xea; sub.rn.bf16x2 $0, lo, hi; }"""
    return tl.inline_asm_elementwise(ptx, "=r,h", [q], tl.bfloat16, True, 2)


@triton.jit
def fp8_pairs(q):
    """Convert the bits of float8_e4m3fn to bfloat16; NaN becomes 480."""
    ptx: tl.constexpr = """{ .reg .b32 p, sign, many;
    cvt.u32.u16 p, $1; prmt.b32 p, p, 0, 0x1404; mov.b32 many, 0x7b807b80;
    and.b32 sign, p, 0x80008000; shr.u32 p, p, 4;
    lop3.b32 p, p, 0x07f007f0, sign, 0xea; mul.rn.bf16x2 $0, p, many; }"""
    return tl.inline_asm_elementwise(ptx, "=r,h", [q], tl.bfloat16, True, 2)


@triton.jit
def bytes_of(raw, dtype: tl.constexpr, ASM: tl.constexpr):
    """Convert 8-bit codes to numbers of ``dtype``, which is bfloat16 with ASM."""
    if ASM and raw.dtype == tl.int8:
        return int8_pairs(raw)
    elif ASM and raw.dtype == tl.float8e4nv:
        return fp8_pairs(raw.to(tl.uint8, bitcast=True))
    else:
        return raw.to(dtype)


@triton.jit
def twice(s):
    """Return an int32 with the bfloat16 nearest to float32 s in both halves."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [s], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def int4_pairs(q, near, rest, middle):
    """Return (low half - zero) * scale and (high half - zero) * scale of bytes with two codes, in bfloat16.

    ``near`` is ``twice`` the scale, ``rest`` is ``twice`` its remainder, and ``middle`` is ``twice`` 128 + zero.
    Neighbouring bytes share scale and zero point.  The zero point is a whole number from 0 to 127.
    """
    ptx: tl.constexpr = """{ .reg .b32 p, v, w, one;
    mov.b32 one, 0x43004300; cvt.u32.u16 p, $2; prmt.b32 p, p, 0, 0x4140;
    lop3.b32 v, p, 0x000f000f, one, 0xea; sub.rn.bf16x2 v, v, $7;
    mul.rn.bf16x2 w, v, $5; fma.rn.bf16x2 $0, v, $3, w; shr.u32 p, p, 4;
    lop3.b32 v, p, 0x000f000f, one, 0xea; sub.rn.bf16x2 v, v, $7;
    mul.rn.bf16x2 w, v, $5; fma.rn.bf16x2 $1, v, $3, w; }"""
    args = [q, near, rest, middle]
    return tl.inline_asm_elementwise(ptx, "=&r,=&r,h,r,r,r,r,r,r", args, (tl.bfloat16, tl.bfloat16), True, 2)


@triton.jit
def table_words(table, THERE: tl.constexpr):
    """Return the eight words of ``table`` (``with_words``) that ``table_pairs`` reads."""
    if THERE:
        at = table.to(tl.pointer_type(tl.int32)) + 16
        low = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        return low + (tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7))  # noqa: RUF005
    else:
        return table


@triton.jit
def table_pairs(raw, words):
    """Return the float16 numbers of the low and of the high codes of bytes by a table.

    An instruction selects four of the lower or upper bytes of eight numbers.
    """
    ptx: tl.constexpr = """{ .reg .b32 p, by, a, b, c, d;
    cvt.u32.u16 p, $2; and.b32 by, p, 0x7777; shr.u32 p, p, 1; lop3.b32 p, p, 0x4444, 0x3210, 0xea;
    prmt.b32 a, $3, $5, by; prmt.b32 b, $7, $9, by; prmt.b32 a, a, b, p;
    prmt.b32 c, $11, $13, by; prmt.b32 d, $15, $17, by; prmt.b32 c, c, d, p;
    prmt.b32 $0, a, c, 0x6240; prmt.b32 $1, a, c, 0x7351; }"""
    inputs: tl.constexpr = "=r,=r,h,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r"
    args = [raw, words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]]
    return tl.inline_asm_elementwise(ptx, inputs, args, (tl.float16, tl.float16), True, 2)


@triton.jit
def nibbles_of(raw, scale, zero, at, keep, dtype: tl.constexpr, BN: tl.constexpr, SOME: tl.constexpr,
               EACH: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, words=None):  # fmt: skip
    """Return the numbers of ``dtype`` of the low and of the high 4-bit codes of bytes [BN, SOME * EACH].

    The scales and zero points [BN, SOME] lie at the indices ``at``, where ``keep`` is true.  EACH is the number of
    bytes of a group.  With ASM 1 in 1,000 numbers differs by a rounding.  ``words`` is the result of ``table_words``,
    None without a table.
    """
    s = tl.load(scale + at, mask=keep, other=0.0)
    if words is not None:
        s = spread(s, BN, SOME, EACH)
        low, high = table_pairs(raw, words)
        return (low.to(tl.float32) * s).to(dtype), (high.to(tl.float32) * s).to(dtype)
    elif ASM and ZERO != 1:
        z = s
        if ZERO:
            z = tl.load(zero + at, mask=keep, other=0.0)
        near = twice(s)
        rest = twice(s - (near & -65536).to(tl.float32, bitcast=True))
        near, rest = spread(near, BN, SOME, EACH), spread(rest, BN, SOME, EACH)
        if ZERO:
            middle = twice(z + 128.0)
        else:
            middle = tl.full(s.shape, 0x43084308, tl.int32)  # 128 + 8
        return int4_pairs(raw, near, rest, spread(middle, BN, SOME, EACH))
    else:
        m = s * 8.0
        if ZERO:
            m = s * tl.load(zero + at, mask=keep, other=0.0)
        s, m = spread(s, BN, SOME, EACH), spread(m, BN, SOME, EACH)
        low = ((raw & 15).to(tl.float32) * s - m).to(dtype)
        return low, ((raw >> 4).to(tl.float32) * s - m).to(dtype)


# ---- planes, for tensor cores with elements of 16 bits ---------------------------------------------------------------


@triton.jit
def byte_planes(w, FLOAT8: tl.constexpr):
    """Return the low and the high byte of an int16, of int8 or float8_e4m3fn, as bfloat16."""
    if FLOAT8:
        ptx: tl.constexpr = """{ .reg .b32 p, sign, many;
        mov.b32 many, 0x7b807b80; shl.b32 p, $2, 8;
        and.b32 sign, p, 0x80008000; shr.u32 p, p, 4;
        lop3.b32 p, p, 0x07f007f0, sign, 0xea; mul.rn.bf16x2 $0, p, many;
        and.b32 sign, $2, 0x80008000; shr.u32 p, $2, 4;
        lop3.b32 p, p, 0x07f007f0, sign, 0xea; mul.rn.bf16x2 $1, p, many; }"""
        return tl.inline_asm_elementwise(ptx, "=&r,=&r,r", [w], (tl.bfloat16, tl.bfloat16), True, 2)
    else:
        ptx: tl.constexpr = """{ .reg .b32 w, lo, hi, one;
        mov.b32 one, 0x43004300;
        lop3.b32 lo, $2, 0x007f007f, one, 0xea; lop3.b32 hi, $2, 0x00800080, one, 0xea; sub.rn.bf16x2 $0, lo, hi;
        shr.u32 w, $2, 8;
        lop3.b32 lo, w, 0x007f007f, one, 0xea; lop3.b32 hi, w, 0x00800080, one, 0xea; sub.rn.bf16x2 $1, lo, hi; }"""
        return tl.inline_asm_elementwise(ptx, "=&r,=&r,r", [w], (tl.bfloat16, tl.bfloat16), True, 2)


@triton.jit
def code_planes(w):
    """Return the codes of an int16 as four planes of float16, times 2 ** -24 in planes 0 and 1, and 2 ** -20 in 2 and
    3.
    """
    ptx: tl.constexpr = """{ .reg .b32 v;
    and.b32 $0, $4, 0x000f000f; and.b32 $2, $4, 0x00f000f0; shr.u32 v, $4, 8;
    and.b32 $1, v, 0x000f000f; and.b32 $3, v, 0x00f000f0; }"""
    return tl.inline_asm_elementwise(
        ptx, "=&r,=&r,=&r,=r,r", [w], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
    )
