"""Conversion of weights of 8 and 4 bits to numbers, in registers or in memory, and code that several kernels share.

Registers are converted two numbers at a time.  bfloat16 has 8 bits of significand, so 128 + q is exact for q in 0..127,
and its bits are 0x4300 | q::

    int8      0x4300 | q & 127 is 128 + the lower bits; 0x4300 | q & 128 is 128, or 256 for a negative q; the
              difference is q
    float8    exponent and significand of e4m3, shifted to those of bfloat16, are 2 ** -120 of the number, also for
              subnormal numbers
    int4      (0x4300 | q) - (128 + z) is q - z for whole zero points z, 8 by default; the scale is a sum of two
              bfloat16, so the number is a product and a multiply-add, and only the second rounds the result
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info

from .launch import kernel, pdl, wait


@triton.jit
def twice(s):
    """Return an int32 with the bfloat16 nearest to float32 s in both halves."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [s], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def halves(s):
    """Return ``twice`` of the bfloat16 nearest to float32 s, and ``twice`` of the remainder."""
    near = twice(s)
    return near, twice(s - (near & -65536).to(tl.float32, bitcast=True))


@triton.jit
def int8_pairs(q):
    """Convert int8 to bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p, lo, hi, one;
        cvt.u32.u16 p, $1;
        prmt.b32 p, p, 0, 0x4140;
        mov.b32 one, 0x43004300;
        lop3.b32 lo, p, 0x007f007f, one, 0xea;
        lop3.b32 hi, p, 0x00800080, one, 0xea;
        sub.rn.bf16x2 $0, lo, hi;
        }""",
        "=r,h",
        [q],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp8_pairs(q):
    """Convert the bits of float8_e4m3fn to bfloat16; NaN becomes 480."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p, sign, many;
        cvt.u32.u16 p, $1;
        prmt.b32 p, p, 0, 0x1404;
        mov.b32 many, 0x7b807b80;
        and.b32 sign, p, 0x80008000;
        shr.u32 p, p, 4;
        lop3.b32 p, p, 0x07f007f0, sign, 0xea;
        mul.rn.bf16x2 $0, p, many;
        }""",
        "=r,h",
        [q],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def int4_pairs(q, near, rest, middle):
    """Return (low half - zero) * scale and (high half - zero) * scale of bytes with two codes, in bfloat16.

    ``near`` and ``rest`` are the ``halves`` of the scales, and ``middle`` is ``twice`` 128 + zero.  Neighbouring bytes
    share scale and zero point.  The zero point is a whole number from 0 to 127.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p, v, w, one;
        mov.b32 one, 0x43004300;
        cvt.u32.u16 p, $2;
        prmt.b32 p, p, 0, 0x4140;
        lop3.b32 v, p, 0x000f000f, one, 0xea;
        sub.rn.bf16x2 v, v, $7;
        mul.rn.bf16x2 w, v, $5;
        fma.rn.bf16x2 $0, v, $3, w;
        shr.u32 p, p, 4;
        lop3.b32 v, p, 0x000f000f, one, 0xea;
        sub.rn.bf16x2 v, v, $7;
        mul.rn.bf16x2 w, v, $5;
        fma.rn.bf16x2 $1, v, $3, w;
        }""",
        "=&r,=&r,h,r,r,r,r,r,r",
        [q, near, rest, middle],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def middles(z, s, ZERO: tl.constexpr):
    """Return ``twice`` 128 + the zero points z.  Without ZERO all zero points are 8, in the shape of the scales s."""
    if ZERO:
        return twice(z + 128.0)
    else:
        return tl.full(s.shape, 0x43084308, tl.int32)


@triton.jit
def spread(s, BN: tl.constexpr, SOME: tl.constexpr, EACH: tl.constexpr):
    """Repeat s [BN, SOME] to [BN, SOME * EACH], once for each byte of a group."""
    if SOME == 1:
        return s
    else:
        return tl.reshape(tl.broadcast_to(s[:, :, None], [BN, SOME, EACH]), [BN, SOME * EACH])


@triton.jit
def drained(acc, PDL: tl.constexpr):
    """Return acc after all products in its sum have ended.  Call it at the end of a loop whose dots have an operand in
    registers.

    On Hopper such a product continues after its instruction.  Triton lets the product of one iteration overlap the next
    iteration, which overwrites its registers before they are read (triton-lang/triton#9433; PTX of
    ``wgmma.mma_async``).  The statement generates no instruction except the wait before acc is used.  PDL is set on
    Hopper and later devices; later devices have other product instructions.
    """
    if PDL and not target_info.cuda_capability_geq(10, 0):
        acc = tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def together(acc, scratch, arrived, row, tile, part, om, on, N: tl.constexpr, SK: tl.constexpr):
    """Store the sums of this program's part, and return the sums [BN, BM] of all parts and whether this program is the
    last.

    Only the program that arrives last adds the parts, in their order; for other programs the sums are their own part.
    """
    last = True
    if SK > 1:
        wide: tl.constexpr = (N + acc.shape[0] - 1) // acc.shape[0] * acc.shape[0]
        at = scratch + om.to(tl.int64)[None, :] * wide + on[:, None]
        step = tl.num_programs(0).to(tl.int64) * acc.shape[1] * wide
        tl.store(at + part * step, acc)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        counter = arrived + row * tl.num_programs(1) + tile
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SK - 1
        if last:
            acc = tl.load(at, cache_modifier=".cg")
            for i in tl.static_range(1, SK):
                acc += tl.load(at + i * step, cache_modifier=".cg")
            tl.store(counter, 0)
    return acc, last


def zeros_of(zero: Tensor | None) -> int:
    """Return the constant ZERO of the kernels.

    0 means no zero points, 2 means whole numbers from 0 to 127, which ``int4_pairs`` requires, and 1 means other
    numbers.
    """
    if zero is None:
        return 0
    return 2 if bool(((zero == zero.round()) & (zero >= 0) & (zero <= 127)).all()) else 1


@kernel()
def _numbers(
    weight, scale, zero, table, out, first, N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, BB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the weight's rows from ``first`` on to out [rows, K].

    A program handles BB bytes of a row.
    """
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ob = tl.program_id(1) * BB + tl.arange(0, BB)
    on = ob < K * FORM // 8
    raw = tl.load(weight + (first + row) * (K * FORM // 8) + ob, mask=on, other=0.0 if FORM == 8 else 0)
    if FORM == 8:
        s = tl.load(scale + first + row)
        tl.store(out + row * K + ob, (raw.to(tl.float32) * s).to(out.dtype.element_ty), mask=on)
    else:
        inputs = ob // 16 * 32 + ob % 16
        at = (first + row) * SN + inputs // GROUP * SG
        s = tl.load(scale + at, mask=on, other=0.0)
        if TABLE:
            low, high = tl.load(table + (raw & 15)), tl.load(table + (raw >> 4))
        else:
            z = 8.0
            if ZERO:
                z = tl.load(zero + at, mask=on, other=0.0)
            low, high = (raw & 15).to(tl.float32) - z, (raw >> 4).to(tl.float32) - z
        to = out + row * K + inputs
        tl.store(to, (low * s).to(out.dtype.element_ty), mask=on)
        tl.store(to + 16, (high * s).to(out.dtype.element_ty), mask=on)


def numbers_of(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    out: Tensor,
    first: int,
    sizes: dict[str, Any],
    table: Tensor | None = None,
) -> None:
    """Write the numbers of the weight's rows from ``first`` on to ``out`` [rows, K].

    ``table`` f32 [16] maps codes of 4 bits to numbers.
    """
    _numbers[len(out), triton.cdiv(weight.shape[1], 2048)](
        weight,
        scale,
        scale if zero is None else zero,
        scale if table is None else table,
        out,
        first,
        TABLE=table is not None,
        BB=2048,
        **sizes,
        **pdl(out),
    )
