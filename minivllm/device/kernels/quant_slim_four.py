"""Products of 2 to 8 rows with a 4-bit weight and their epilogue, in one kernel whose rows stay in registers.

    grid (P, SK)    y^T [BN, BM] = W [BN, K / SK] x^T on the tensor cores, for T tiles of BN outputs one after another

The grid has about as many programs as the device can run at once.  Each program converts its part of x to an operand of
the tensor cores once, and then reads only weights, by the copy engine, and scales.  A register holds two elements of 16
bits, which are eight codes.  Masks and one shift convert it to four registers (*planes*) of two subnormal float16 as in
``quant_fours``::

    element e = 2 i, of word i          inputs j, j + 1, j + 16, j + 17          j = i // 4 * 32 + i % 4 * 4
            e = 2 i + 1                 inputs j + 2, j + 3, j + 18, j + 19
    plane 0   word & 0x000f000f           the first input, as 2 ** -24 q
          1   (word >> 8) & 0x000f000f    the second
          2   word & 0x00f000f0           the third, as 2 ** -20 q, times a 16th of x
          3   (word >> 8) & 0x00f000f0    the fourth

x is read two inputs at a time, so the factors of each plane are halves of elements of x.  They are multiplied by the
power of two that ``quant_fours.power_of`` returns for the largest input of a row in a batch.  As float16 they are then
exact, except for inputs below 2 ** -29 of the largest.  Products are exact and sums are float32.  The sums of a group,
minus the zero point times the sum of x, are multiplied by its scale.

A group of 64 or 128 inputs is a *batch* of the tensor cores' product.  A group of 32 inputs is too small, so two groups
form a batch.  x is then stored twice, without the second group in columns [0, BM), and without the first behind them.
With several parts (SK) the program that arrives last at ``arrived`` adds the parts of its tiles in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .eight_bits import size_of
from .launch import capability, kernel, multiprocessors, pdl, wait
from .products import ADDED, GATED, PLAIN, _finish
from .quant import Quantized
from .quant_fours import UNITS, power_of
from .quant_slim import ROWS, SlimProduct, _halves
from .quant_vector import _both_added

ROWS_OF_32 = 4  # rows at most for groups of 32 inputs, because each row takes two columns
MOST_INPUTS = 16384  # with more inputs a program's parts of sums would not fit in its registers


@triton.jit
def _planes(w, ASM: tl.constexpr):
    """Return the codes of an int16 as four planes of float16, times 2 ** -24 in planes 0 and 1, and 2 ** -20 in 2 and
    3.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 v;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $2, $4, 0x00f000f0;
            shr.u32 v, $4, 8;
            and.b32 $1, v, 0x000f000f;
            and.b32 $3, v, 0x00f000f0;
            }""",
            "=&r,=&r,=&r,=r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        unit: tl.constexpr = 1.0 / (1 << 24)
        a, b = (w & 15).to(tl.float32) * unit, ((w >> 8) & 15).to(tl.float32) * unit
        c, d = (w & 0xF0).to(tl.float32) * unit, ((w >> 8) & 0xF0).to(tl.float32) * unit
        return a.to(tl.float16), b.to(tl.float16), c.to(tl.float16), d.to(tl.float16)


@triton.jit
def _prefetch(at, ok, base):
    """Prefetch 128 bytes at each pointer of ``at`` to the second-level cache.

    Where ``ok`` is false, ``base`` is used.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 128; mov.u32 $0, 0;",
        "=r,l",
        [tl.where(ok, at, base).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_weights(weight, on, first, inputs: tl.constexpr, N, K: tl.constexpr, WIDE: tl.constexpr):
    """Prefetch the weights of outputs ``on`` < N, for ``inputs`` inputs from ``first`` on.

    WIDE is a power of two of at least ``inputs``.
    """
    ol = tl.arange(0, WIDE // 256 if WIDE > 256 else 1) * 64  # index of the first element of each line of 128 bytes
    ok = (ol + 64 <= inputs // 4)[None, :] & (first // 4 + ol + 64 <= K // 4)[None, :] & (on < N)[:, None]
    _prefetch(weight + on.to(tl.int64)[:, None] * (K // 4) + (first // 4 + ol)[None, :], ok, weight)


@triton.jit
def _scales(scale, zero, on, k, there, N, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr, GROUP: tl.constexpr,
            SIDES: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Return scales and zero points [G, BN] of outputs ``on`` < N for batches at inputs k, and those of their second
    groups.

    EVEN means that no batch and no output is outside of the weight.
    """
    at = on[None, :] * SN + (k // GROUP)[:, None] * SG
    if EVEN:
        s = tl.load(scale + at)
        z, s1, z1 = s, s, s
        if ZERO:
            z = tl.load(zero + at)
        if SIDES > 1:
            s1 = tl.load(scale + at + SG)
            if ZERO:
                z1 = tl.load(zero + at + SG)
    else:
        keep = there[:, None] & (on < N)[None, :]
        s = tl.load(scale + at, mask=keep, other=0.0)
        z, s1, z1 = s, s, s
        if ZERO:
            z = tl.load(zero + at, mask=keep, other=0.0)
        if SIDES > 1:
            s1 = tl.load(scale + at + SG, mask=keep, other=0.0)
            if ZERO:
                z1 = tl.load(zero + at + SG, mask=keep, other=0.0)
    return s, z, s1, z1


@triton.jit
def _sums(a, b, c, d, x0, x1, x2, x3, acc):
    """Return acc [G, BN, C] + the products of four planes."""
    acc = tl.dot(a, x0, acc)
    acc = tl.dot(b, x1, acc)
    acc = tl.dot(c, x2, acc)
    return tl.dot(d, x3, acc)


@triton.jit
def _operands(x, k, there, om, side, like, M, K: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
              SIDES: tl.constexpr):  # fmt: skip
    """Return the operands of each plane float16 [G, E, C], the sums of x [G, BN, C] in the unit of the products, and
    the power of two [G, 1, C] of each column.

    The batches begin at inputs k [G], and the columns hold the rows ``om`` [C].
    """
    oe = tl.arange(0, E)
    pairs = (k // 2)[:, None] + (oe // 8 * 16 + oe % 8)[None, :]
    keep = (there[:, None] & (pairs < K // 2))[:, :, None] & (om < M)[None, None, :]
    if SIDES > 1:
        keep = keep & ((oe // 8)[None, :, None] == side[None, None, :])
    x_at = x + om[None, None, :] * (K // 2) + pairs[:, :, None]
    v0, v1 = _halves(tl.load(x_at, mask=keep, other=0), like, False)
    v0, v1 = v0.to(tl.float32), v1.to(tl.float32)
    v2, v3 = _halves(tl.load(x_at + 8, mask=keep, other=0), like, False)
    v2, v3 = v2.to(tl.float32), v3.to(tl.float32)
    size = tl.maximum(tl.maximum(size_of(v0), size_of(v1)), tl.maximum(size_of(v2), size_of(v3)))
    step, inverse = power_of(tl.max(size, 1))
    by_near, by_far = inverse[:, None, :], inverse[:, None, :] / 16
    x0, x1 = (v0 * by_near).to(tl.float16), (v1 * by_near).to(tl.float16)
    x2, x3 = (v2 * by_far).to(tl.float16), (v3 * by_far).to(tl.float16)
    # The sums of x are its products with code 1, in planes of the lower and of the upper half of bytes.
    low = tl.full([G, BN, E], 1.0 / (1 << 24), tl.float16)
    high = tl.full([G, BN, E], 1.0 / (1 << 20), tl.float16)
    of_x = _sums(low, low, high, high, x0, x1, x2, x3, tl.zeros([G, BN, om.shape[0]], tl.float32))
    return x0, x1, x2, x3, of_x, step[:, None, :]


@triton.jit
def _of_side(v, v1, side, SIDES: tl.constexpr):
    """Expand v and v1 [G, BN] to [G, BN, C], with v1 where ``side`` [C] is 1."""
    if SIDES > 1:
        return tl.where(side[None, None, :] == 0, v[:, :, None], v1[:, :, None])
    else:
        return v[:, :, None]


@triton.jit
def _products(w, s, z, s1, z1, x0, x1, x2, x3, of_x, step, side, SIDES: tl.constexpr, ZERO: tl.constexpr,
              ASM: tl.constexpr):  # fmt: skip
    """Return the sums of each group [G, BN, C], multiplied by the scales."""
    a, b, c, d = _planes(w, ASM)
    if ZERO:
        acc = _sums(a, b, c, d, x0, x1, x2, x3, tl.zeros(of_x.shape, tl.float32))
        acc = acc - _of_side(z, z1, side, SIDES) * of_x
    else:
        acc = _sums(a, b, c, d, x0, x1, x2, x3, of_x * -8.0)
    return _of_side(s, s1, side, SIDES) * (acc * step)


@triton.jit
def _rows(total, by, SIDES: tl.constexpr):
    """Multiply [BN, C] by ``by`` [C], and add both sides to [BN, BM]."""
    total = total * by[None, :]
    if SIDES > 1:
        total = tl.sum(tl.reshape(total, [total.shape[0], SIDES, total.shape[1] // SIDES]), 1)
    return total


@triton.jit
def _parts_added(parts, outputs, N, STEP: tl.constexpr, BM: tl.constexpr, SK: tl.constexpr, MODE: tl.constexpr):
    """Add the SK parts of the sums [outputs, BM], and with a gate of the sums that lie beside them."""
    inside = (outputs < N)[:, None]
    at = parts + outputs[:, None] * (2 * BM if MODE == 1 else BM)
    sums = tl.zeros([outputs.shape[0], BM], tl.float32)
    up = sums
    for i in tl.static_range(SK):
        if MODE == 1:
            both = (at + i * STEP * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
            one, two = tl.split(tl.load(both, mask=inside[:, :, None], other=0.0, cache_modifier=".cg"))
            sums += one
            up += two
        else:
            sums += tl.load(at + i * STEP, mask=inside, other=0.0, cache_modifier=".cg")
    return sums, up


@kernel("M")
def _slim_four(
    x, weight, codes, scale, zero, by_row, y, bias, residual, norm, in_squares, out_squares, eps, scratch, arrived, M,
    N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FLOAT8: tl.constexpr, BY_ROW: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    MODE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, T: tl.constexpr,
    T_P: tl.constexpr, G: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x int32 [M, K / 2] by 4-bit ``codes`` int16 [N, K / 4], with GATED [2 N, ...].

    ``weight`` is a descriptor of the codes with blocks [G, BN, E] of batches, outputs and elements, and returns 0
    outside.  A part has at most G batches, and a program at most T tiles.  T_P is a power of two of at least T.
    """
    SIDES: tl.constexpr = 2 if GROUP == 32 else 1
    BATCH: tl.constexpr = GROUP * SIDES  # inputs
    E: tl.constexpr = BATCH // 4
    BATCHES: tl.constexpr = (K + BATCH * SK - 1) // (BATCH * SK)  # batches of a part
    EVEN: tl.constexpr = N % BN == 0 and G == BATCHES and K == BATCH * BATCHES * SK
    program, part = tl.program_id(0), tl.program_id(1)
    og, oc, oi = tl.arange(0, G), tl.arange(0, SIDES * BM), tl.arange(0, BN)
    first = program * T
    if ASM:
        at = first * BN + oi
        _prefetch_weights(codes, at, part * BATCHES * BATCH, BATCHES * BATCH, N, K, G * BATCH)
        if MODE == 1:
            _prefetch_weights(codes, tl.where(at < N, at + N, 2 * N), part * BATCHES * BATCH, BATCHES * BATCH, 2 * N, K,
                         G * BATCH)  # fmt: skip
    wait(PDL)
    k = (part * BATCHES + og) * BATCH
    om, side, there = oc % BM, oc // BM, (og < BATCHES) & (k < K)
    x0, x1, x2, x3, of_x, step = _operands(x, k, there, om, side, y, M, K, G, BN, E, SIDES)
    by = tl.full([SIDES * BM], UNITS, tl.float32)
    if PARTS > 0:
        op = tl.arange(0, PARTS_P)
        squares = tl.load(in_squares + om[:, None] * PARTS + op[None, :],
                          mask=(om < M)[:, None] & (op < PARTS)[None, :], other=0.0)  # fmt: skip
        by *= tl.rsqrt(tl.sum(squares, 1) / K + eps)
    rows = tl.arange(0, BM)
    STEP: tl.constexpr = (N + BN - 1) // BN * BN * BM
    parts = scratch + rows[None, :] * (2 if MODE == 1 else 1)
    for tile in tl.range(first, tl.minimum(first + T, (N + BN - 1) // BN), num_stages=STAGES):
        on = tile * BN + oi
        w = weight.load([part * BATCHES, tile * BN, 0])
        s, z, s1, z1 = _scales(scale, zero, on, k, there, N, K, SN, SG, GROUP, SIDES, ZERO, EVEN)
        if MODE == 1:
            u = weight.load([part * BATCHES, N + tile * BN, 0])
            upper = on + N if EVEN else tl.where(on < N, on + N, 2 * N)
            us, uz, us1, uz1 = _scales(scale, zero, upper, k, there, 2 * N, K, SN, SG, GROUP, SIDES, ZERO, EVEN)
        each = _products(w, s, z, s1, z1, x0, x1, x2, x3, of_x, step, side, SIDES, ZERO, ASM)
        if MODE == 1:
            gated = _products(u, us, uz, us1, uz1, x0, x1, x2, x3, of_x, step, side, SIDES, ZERO, ASM)
            # one reduction for both sums, so that the program waits for its warps once
            total, up = tl.reduce((each, gated), 0, _both_added)
            total, up = _rows(total, by, SIDES), _rows(up, by, SIDES)
        else:
            total = _rows(tl.sum(each, 0), by, SIDES)
            up = total
        if SK > 1 and MODE == 1:
            to = parts + part * STEP * 2 + on[:, None] * (2 * BM)
            tl.store(to[:, :, None] + tl.arange(0, 2)[None, None, :], tl.join(total, up))
        elif SK > 1:
            tl.store(parts + part * STEP + on[:, None] * BM, total)
        else:
            _finish(tl.trans(total), tl.trans(up), rows, on, tile, y, bias, residual, norm, in_squares, out_squares,
                    eps, M, N, K, 0, 1, MODE, BIAS, ACT)  # fmt: skip
    if SK > 1:
        tl.debug_barrier()  # all of the program's stores come before its arrival
        if tl.atomic_add(arrived + program, 1, sem="acq_rel") == SK - 1:
            of = tl.arange(0, T_P * BN)
            outputs = tl.where(of < T * BN, first * BN + of, N)
            sums, up_sums = _parts_added(parts, outputs, N, STEP, BM, SK, MODE)
            _finish(tl.trans(sums), tl.trans(up_sums), rows, outputs, program, y, bias, residual, norm, in_squares,
                    out_squares, eps, M, N, K, 0, 1, MODE, BIAS, ACT)  # fmt: skip
            tl.store(arrived + program, 0)


def slim_four_tile(of: Quantized, mode: int) -> dict[str, int]:
    """Return the fastest tile on an H100, for 4,096 and 14,336 inputs.

    EACH is the number of programs per multiprocessor.
    """
    if mode == GATED:
        part, each, stages, warps = (2048, 2, 2, 4) if of.group == 32 else (4096, 1, 3, 8)
    elif of.group == 32:
        part, each, stages, warps = 1024, 4, 3, 4
    elif mode == PLAIN:
        part, each, stages, warps = 1024, 8, 2, 2
    else:
        part, each, stages, warps = (1024, 4, 2, 4) if of.k <= 8192 else (1024, 6, 3, 2)
    return dict(BN=16, EACH=each, SK=triton.cdiv(of.k, part), STAGES=stages, num_warps=warps)


class SlimFourProduct(SlimProduct):
    """A product with a weight of 4 bits for 2 to 8 rows that are not rounded."""

    def __init__(self, of: Quantized, *around: Any, **more: Any) -> None:
        super().__init__(of, *around, **more)
        self.batch = max(of.group, 64)  # inputs of a batch
        whole = of.weight.data_ptr() % 16 == 0 and of.k % self.batch == 0 and of.k <= MOST_INPUTS and of.table is None
        most = ROWS_OF_32 if of.group == 32 else ROWS
        served = whole and self.rounded is None and capability(of.weight.device) == 9  # other GPUs were not measured
        self.rows = most if served else 0
        self.arrived = torch.zeros(triton.cdiv(self.n, 16), dtype=torch.int32, device=of.weight.device)

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tile: dict[str, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the product as ``products.Product``, for x [1 to 8, K]."""
        of, m = self.of, len(x)
        if m > ROWS:
            raise ValueError(f"{m} rows: expected 1 to {ROWS}")
        tile = dict(tile or slim_four_tile(of, self.mode))
        split, bn = tile["SK"], tile["BN"]
        tiles, room = triton.cdiv(self.n, bn), tile.pop("EACH") * multiprocessors(x.device)
        turns = triton.cdiv(tiles, max(1, room // split))
        if split > 1 and self.mode == ADDED:
            # a power of two, because a program returns one sum of squares for its tiles
            turns = triton.next_power_of_2(turns)
        programs, batches = triton.cdiv(tiles, turns), triton.next_power_of_2(triton.cdiv(self.k, self.batch * split))
        y, sums, around, constants = self.given(x, None, squares, eps, residual, norm, programs if split > 1 else tiles)
        columns = 4 if of.group == 32 and m <= 4 else 8
        size = split * columns * (2 if self.mode == GATED else 1) * tiles * bn if split > 1 else 0
        codes = of.weight.view(torch.int16)
        elements = codes.view(of.n, self.k // self.batch, self.batch // 4).transpose(0, 1)
        _slim_four[(programs, split)](
            x.view(torch.int32),
            TensorDescriptor.from_tensor(elements, [batches, bn, self.batch // 4]),
            codes,
            of.scale,
            of.scale if of.zero is None else of.zero,
            *around,
            torch.empty(size, dtype=torch.float32, device=x.device) if size else y,
            self.arrived,
            m,
            BM=columns,
            T=turns,
            T_P=triton.next_power_of_2(turns),
            G=batches,
            ASM=x.dtype == torch.bfloat16,
            **constants,
            **{**of._sizes, "N": self.n},
            **tile,
            **pdl(x),
        )
        return y, sums
