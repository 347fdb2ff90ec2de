"""Products of 2 to 8 rows with a quantized weight and their epilogue, in one kernel on tensor cores (``products``).

    8 bits   grid (N / BN)   y^T [BN, 8] = W [BN, K] x^T, P times BK inputs at a time, with one warp per BK inputs
    4 bits   grid (P, SK)    y^T [BN, BM] = W [BN, K / SK] x^T, for T tiles of BN outputs one after another

The weight is read as elements of 16 bits, which is the layout that the tensor cores' operand has in shared memory.  A
register holds two elements and is converted to one register per plane (``quant_formats``).  x is read two inputs at a
time, so the factors of each plane are halves of elements of x.  With 8 bits input 2 i of element i is in plane 0, and
input 2 i + 1 in plane 1.  Sums are float32.

4 bits: the grid has about as many programs as the device can run at once.  Each program converts its part of x to an
operand of the tensor cores once, and then reads only weights, by the copy engine, and scales.  x is multiplied by the
power of two that ``quant_float16.power_of`` returns for the largest input of a row in a batch.  As float16 it is then
exact, except for inputs below 2 ** -29 of the largest.  Products are exact.  The sums of a group, minus the zero point
times the sum of x, are multiplied by its scale.

A group of 64 or 128 inputs is a *batch* of the tensor cores' product.  A group of 32 inputs is too small, so two groups
form a batch.  x is then stored twice, without the second group in columns [0, BM), and without the first behind them.
With several parts (SK) the program that arrives last at ``arrived`` adds the parts of its tiles in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .eight_bits import rows as rounded_rows
from .eight_bits import size_of
from .launch import capability, cdiv, kernel, multiprocessors, pdl, power, wait
from .products import ADDED, GATED, PLAIN
from .quant_epilogue import Around, EpilogueProduct, Result, Tile, finish
from .quant_float16 import UNITS, power_of
from .quant_formats import Form, byte_planes, code_planes, halves_of, numbers_of
from .quant_gemv import WIDE, both_added
from .split_sums import scratch_of

ROWS, ROWS_OF_32 = 8, 4  # largest number of rows; with groups of 32 inputs half as many, as each row takes two columns
MOST_INPUTS = 16384  # largest number of inputs of a 4-bit weight for which a program's sums fit in its registers


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _added(acc, w_at, keep, x0, x1, FLOAT8: tl.constexpr):
    """Return acc [P, BN, 8] + the products of tiles of the weight with the inputs of both planes."""
    a, b = byte_planes(tl.load(w_at, mask=keep[:, :, None], other=0, eviction_policy="evict_first"), FLOAT8)
    return tl.dot(b.to(x1.dtype), x1, tl.dot(a.to(x0.dtype), x0, acc))


@kernel("M")
def _small_m8(
    x, weight, scale, by_row, y, bias, residual, norm, in_squares, out_squares, eps, M, F: tl.constexpr,
    E: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x int32 [M, K / 2] by a weight int16 [N, K / 2], with GATED [2 N, ...].

    K is a multiple of BK.  An iteration handles P times BK inputs, the last may handle fewer.
    """
    wait(PDL)
    tile, om, op = tl.program_id(0), tl.arange(0, 8), tl.arange(0, P)
    on, ow = tile * BN + tl.arange(0, BN), tl.arange(0, BK // 2)
    at = op[:, None] * (BK // 2) + ow[None, :]
    w_at = weight + on.to(tl.int64)[None, :, None] * (F.k // 2) + at[:, None, :]
    x_at = x + om[None, None, :] * (F.k // 2) + at[:, :, None]
    acc = tl.zeros([P, BN, 8], tl.float32)
    up = tl.zeros([P, BN, 8], tl.float32)
    for k in tl.range(0, F.k, BK * P, num_stages=STAGES):
        there = k + op * BK < F.k
        on_x = (om < M)[None, None, :] & there[:, None, None] & (ow >= 0)[None, :, None]
        keep = there[:, None] & (on < F.n)[None, :]
        x0, x1 = halves_of(tl.load(x_at + k // 2, mask=on_x, other=0), y)
        acc = _added(acc, w_at + k // 2, keep, x0, x1, F.float8)
        if E.mode == 1:
            up = _added(up, w_at + (F.n * (F.k // 2) + k // 2), keep, x0, x1, F.float8)
    total, total_up = tl.sum(acc, 0) * tl.load(scale + on, mask=on < F.n, other=0.0)[:, None], tl.sum(up, 0)
    if E.mode == 1:
        total_up = total_up * tl.load(scale + F.n + on, mask=on < F.n, other=0.0)[:, None]
    if E.by_row:
        factor = tl.load(by_row + om, mask=om < M, other=0.0)[None, :]
        total, total_up = total * factor, total_up * factor
    around = (y, bias, residual, norm, in_squares, out_squares, eps)
    finish(total, total_up, om, on, tile, around, M, F, E, False)


def _tile8(n: int, gated: bool) -> Tile:
    """Return the fastest tile for 8 bits of benchmarks/quant_kernels.py on an H200, for 4,096 and 28,672 outputs.

    With a gate, a product has half as many outputs, each with a second sum.
    """
    if gated:
        return dict(BN=16, BK=128, P=4, STAGES=3, num_warps=4)
    if n >= WIDE:
        return dict(BN=32, BK=128, P=4, STAGES=3, num_warps=4)
    return dict(BN=16, BK=128, P=4, STAGES=6, num_warps=4)


def _product8(product: EpilogueProduct, x: Tensor, around: Around, tile: Tile | None) -> Result:
    form = product.form
    by_row = None
    if product.rounded is not None:
        x, by_row = rounded_rows(x, product.rounded, x.dtype)
    constants = pdl(x) | (tile or _tile8(form.n, product.mode == GATED))
    constants["F"] = form
    tiles = cdiv(form.n, constants["BN"])
    y, sums, tensors, constants["E"] = product.given(x, by_row, around, tiles)
    pairs = x.view(torch.int32)
    codes = product.of.weight.view(torch.int16)
    _small_m8[(tiles,)](pairs, codes, product.of.scale, *tensors, len(x), **constants)
    return y, sums


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _prefetch(codes, on, first, INPUTS: tl.constexpr, N, K: tl.constexpr, WIDTH: tl.constexpr):
    """Prefetch the weights of outputs ``on`` < N, for INPUTS inputs from ``first`` on, to the second-level cache.

    WIDTH is a power of two of at least INPUTS.  A line has 128 bytes.  Lines outside are replaced by the first.
    """
    # index of the first element of each line of the tile
    ol = tl.arange(0, WIDTH // 256 if WIDTH > 256 else 1) * 64
    ok = (ol + 64 <= INPUTS // 4)[None, :] & (first // 4 + ol + 64 <= K // 4)[None, :] & (on < N)[:, None]
    at = codes + on.to(tl.int64)[:, None] * (K // 4) + (first // 4 + ol)[None, :]
    ptx: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 128; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(ptx, "=r,l", [tl.where(ok, at, codes).to(tl.int64)], tl.int32, False, 1)


@triton.jit
def _scales(scale, zero, on, k, there, N, F: tl.constexpr, SIDES: tl.constexpr, EVEN: tl.constexpr):
    """Return scales and zero points [G, BN] of outputs ``on`` < N for batches at inputs k, and those of their second
    groups.

    EVEN means that no batch and no output is outside of the weight.
    """
    at = on[None, :] * F.by_row + (k // F.group)[:, None] * F.by_group
    keep, other = None, None
    if not EVEN:
        keep, other = there[:, None] & (on < N)[None, :], 0.0
    s = tl.load(scale + at, mask=keep, other=other)
    z, s1, z1 = s, s, s
    if F.zero:
        z = tl.load(zero + at, mask=keep, other=other)
    if SIDES > 1:
        s1 = tl.load(scale + at + F.by_group, mask=keep, other=other)
        if F.zero:
            z1 = tl.load(zero + at + F.by_group, mask=keep, other=other)
    return s, z, s1, z1


@triton.jit
def _sums(planes, x, acc):
    """Return acc [G, BN, C] + the products of four planes with the operands x."""
    for i in tl.static_range(4):
        acc = tl.dot(planes[i], x[i], acc)
    return acc


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
    v0, v1 = numbers_of(tl.load(x_at, mask=keep, other=0), like)
    v2, v3 = numbers_of(tl.load(x_at + 8, mask=keep, other=0), like)
    size = tl.maximum(tl.maximum(size_of(v0), size_of(v1)), tl.maximum(size_of(v2), size_of(v3)))
    step, inverse = power_of(tl.max(size, 1))
    by_near, by_far = inverse[:, None, :], inverse[:, None, :] / 16
    x0, x1 = (v0 * by_near).to(tl.float16), (v1 * by_near).to(tl.float16)
    x2, x3 = (v2 * by_far).to(tl.float16), (v3 * by_far).to(tl.float16)
    # The sums of x are computed as products with the code 1, in the planes of the lower and of the upper half of bytes.
    low = tl.full([G, BN, E], 1.0 / (1 << 24), tl.float16)
    high = tl.full([G, BN, E], 1.0 / (1 << 20), tl.float16)
    planes = (x0, x1, x2, x3)
    of_x = _sums((low, low, high, high), planes, tl.zeros([G, BN, om.shape[0]], tl.float32))
    return planes, of_x, step[:, None, :]


@triton.jit
def _of_side(v, v1, side, SIDES: tl.constexpr):
    """Expand v and v1 [G, BN] to the columns [G, BN, C]: v1 where ``side`` [C] is 1, else v."""
    if SIDES > 1:
        return tl.where(side[None, None, :] == 0, v[:, :, None], v1[:, :, None])
    else:
        return v[:, :, None]


@triton.jit
def _products(w, scales, x, of_x, step, side, SIDES: tl.constexpr, ZERO: tl.constexpr):
    """Return the sums of each group [G, BN, C], multiplied by the scales of ``_scales``."""
    planes = code_planes(w)
    if ZERO:
        acc = _sums(planes, x, tl.zeros(of_x.shape, tl.float32))
        acc = acc - _of_side(scales[1], scales[3], side, SIDES) * of_x
    else:
        acc = _sums(planes, x, of_x * -8.0)
    return _of_side(scales[0], scales[2], side, SIDES) * (acc * step)


@triton.jit
def _rows(total, by, SIDES: tl.constexpr):
    """Multiply sums [BN, C] by ``by`` [C], and add the columns of both groups of a batch: [BN, BM]."""
    total = total * by[None, :]
    if SIDES > 1:
        total = tl.sum(tl.reshape(total, [total.shape[0], SIDES, total.shape[1] // SIDES]), 1)
    return total


@triton.jit
def _factors(in_squares, om, eps, M, K: tl.constexpr, E: tl.constexpr):
    """Return the factor [C] by which the sums of rows ``om`` [C] are multiplied; it includes the norm's division."""
    by = tl.full(om.shape, UNITS, tl.float32)
    if E.parts > 0:
        op = tl.arange(0, E.parts_p)
        at = in_squares + om[:, None] * E.parts + op[None, :]
        squares = tl.load(at, mask=(om < M)[:, None] & (op < E.parts)[None, :], other=0.0)
        by *= tl.rsqrt(tl.sum(squares, 1) / K + eps)
    return by


@triton.jit
def _part_stored(at, total, up, GATE: tl.constexpr):
    """Store this program's part of the sums [BN, BM] at the pointers ``at``; with a gate two sums next to each
    other."""
    if GATE:
        tl.store(at[:, :, None] + tl.arange(0, 2)[None, None, :], tl.join(total, up))
    else:
        tl.store(at, total)


@triton.jit
def _parts_added(parts, outputs, N, STEP: tl.constexpr, BM: tl.constexpr, SK: tl.constexpr, MODE: tl.constexpr):
    """Add the SK parts of the sums [outputs, BM]; with a gate also those of the second sums, which are stored next to
    them."""
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
def _small_m4(
    x, weight, codes, scale, zero, by_row, y, bias, residual, norm, in_squares, out_squares, eps, scratch, arrived, M,
    F: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, T: tl.constexpr, T_P: tl.constexpr,
    G: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x int32 [M, K / 2] by 4-bit ``codes`` int16 [N, K / 4], with GATED [2 N, ...].

    ``weight`` is a descriptor of the codes with blocks [G, BN, BATCH / 4] of batches, outputs and elements, and returns
    0 outside.  A part has at most G batches, and a program at most T tiles.  T_P is a power of two of at least T.
    """
    N: tl.constexpr = F.n
    K: tl.constexpr = F.k
    GATE: tl.constexpr = E.mode == 1
    SIDES: tl.constexpr = 2 if F.group == 32 else 1
    BATCH: tl.constexpr = F.group * SIDES  # inputs
    BATCHES: tl.constexpr = (K + BATCH * SK - 1) // (BATCH * SK)  # number of batches of inputs of each part
    EVEN: tl.constexpr = N % BN == 0 and G == BATCHES and K == BATCH * BATCHES * SK
    program, part = tl.program_id(0), tl.program_id(1)
    og, oc, oi = tl.arange(0, G), tl.arange(0, SIDES * BM), tl.arange(0, BN)
    first = program * T
    at = first * BN + oi
    _prefetch(codes, at, part * BATCHES * BATCH, BATCHES * BATCH, N, K, G * BATCH)
    if GATE:
        upper = tl.where(at < N, at + N, 2 * N)
        _prefetch(codes, upper, part * BATCHES * BATCH, BATCHES * BATCH, 2 * N, K, G * BATCH)
    wait(PDL)
    k = (part * BATCHES + og) * BATCH
    om, side, there = oc % BM, oc // BM, (og < BATCHES) & (k < K)
    planes, of_x, step = _operands(x, k, there, om, side, y, M, K, G, BN, BATCH // 4, SIDES)
    by = _factors(in_squares, om, eps, M, K, E)
    rows = tl.arange(0, BM)
    STEP: tl.constexpr = (N + BN - 1) // BN * BN * BM
    WIDE: tl.constexpr = 2 if GATE else 1  # number of sums for each output
    parts = scratch + rows[None, :] * WIDE
    around = (y, bias, residual, norm, in_squares, out_squares, eps)
    for tile in tl.range(first, tl.minimum(first + T, (N + BN - 1) // BN), num_stages=STAGES):
        on = tile * BN + oi
        w = weight.load([part * BATCHES, tile * BN, 0])
        scales = _scales(scale, zero, on, k, there, N, F, SIDES, EVEN)
        if GATE:
            u = weight.load([part * BATCHES, N + tile * BN, 0])
            upper = on + N if EVEN else tl.where(on < N, on + N, 2 * N)
            up_scales = _scales(scale, zero, upper, k, there, 2 * N, F, SIDES, EVEN)
        each = _products(w, scales, planes, of_x, step, side, SIDES, F.zero)
        if GATE:
            gated = _products(u, up_scales, planes, of_x, step, side, SIDES, F.zero)
            # both sums in one reduction, so that the program waits for its warps only once
            total, up = tl.reduce((each, gated), 0, both_added)
            total, up = _rows(total, by, SIDES), _rows(up, by, SIDES)
        else:
            total = _rows(tl.sum(each, 0), by, SIDES)
            up = total
        if SK > 1:
            _part_stored(parts + part * STEP * WIDE + on[:, None] * (WIDE * BM), total, up, GATE)
        else:
            finish(total, up, rows, on, tile, around, M, F, E, True)
    if SK > 1:
        tl.debug_barrier()  # all of the program's stores come before its arrival
        if tl.atomic_add(arrived + program, 1, sem="acq_rel") == SK - 1:
            of = tl.arange(0, T_P * BN)
            outputs = tl.where(of < T * BN, first * BN + of, N)
            sums, up_sums = _parts_added(parts, outputs, N, STEP, BM, SK, E.mode)
            finish(sums, up_sums, rows, outputs, program, around, M, F, E, True)
            tl.store(arrived + program, 0)


def _tile4(form: Form, mode: int) -> Tile:
    """Return the fastest tile on an H100, for 4,096 and 14,336 inputs.

    EACH is the number of programs per multiprocessor.
    """
    part = 1024  # inputs of a program
    if mode == GATED:
        part, each, stages, warps = (2048, 2, 2, 4) if form.group == 32 else (4096, 1, 3, 8)
    elif form.group == 32:
        each, stages, warps = 4, 3, 4
    elif mode == PLAIN:
        each, stages, warps = 8, 2, 2
    elif form.k <= 8192:
        each, stages, warps = 4, 2, 4
    else:
        each, stages, warps = 6, 3, 2
    split = cdiv(form.k, part)
    return dict(BN=16, EACH=each, SK=split, STAGES=stages, num_warps=warps)


def _product4(product: EpilogueProduct, x: Tensor, around: Around, arrived: Tensor, tile: Tile | None) -> Result:
    of = product.of
    form = product.form
    m = len(x)
    constants = pdl(x) | (tile or _tile4(form, product.mode))
    split = constants["SK"]
    bn = constants["BN"]
    tiles = cdiv(form.n, bn)
    room = constants.pop("EACH") * multiprocessors(x.device)
    turns = cdiv(tiles, max(1, room // split))
    if split > 1 and product.mode == ADDED:
        # a power of two, because a program sums the squares of all its tiles into one number
        turns = power(turns)
    programs = cdiv(tiles, turns)
    y, sums, tensors, epilogue = product.given(x, None, around, programs if split > 1 else tiles)
    columns = 4 if form.group == 32 and m <= 4 else 8
    sums_of_row = tiles * bn
    if product.mode == GATED:
        sums_of_row *= 2
    scratch = scratch_of(y, split, columns * sums_of_row)
    batch = max(form.group, 64)
    batches_of_part = cdiv(form.k, batch * split)
    batches = power(batches_of_part)
    width = batch // 4
    codes = of.weight.view(torch.int16)
    elements = codes.view(of.form.n, form.k // batch, width)
    weight = TensorDescriptor.from_tensor(elements.transpose(0, 1), [batches, bn, width])
    constants["BM"] = columns
    constants["T"] = turns
    constants["T_P"] = power(turns)
    constants["G"] = batches
    constants["F"] = form
    constants["E"] = epilogue
    operands = (x.view(torch.int32), weight, codes, of.scale, of.zero)
    _small_m4[(programs, split)](*operands, *tensors, scratch, arrived, m, **constants)
    return y, sums


# ---- both ------------------------------------------------------------------------------------------------------------


def small_m_rows(product: EpilogueProduct) -> int:
    """Return the largest number of rows that the kernels support, 0 if they do not support the weight."""
    form = product.form
    weight = product.of.weight
    hopper = capability(weight.device)
    if weight.data_ptr() % 16 or form.table:
        return 0
    if form.bits == 8:
        return ROWS if form.k % 128 == 0 and hopper >= 9 else 0
    if hopper != 9 or product.rounded is not None:
        return 0  # the kernel for 4 bits was measured on Hopper only
    whole = form.k % max(form.group, 64) == 0
    if not whole or form.k > MOST_INPUTS:
        return 0
    return ROWS_OF_32 if form.group == 32 else ROWS


def small_m(product: EpilogueProduct, x: Tensor, around: Around, arrived: Tensor, tile: Tile | None = None) -> Result:
    """Compute a product with its epilogue for x [m, K], where m is at most ``small_m_rows``.

    ``arrived`` i32 has a counter for every 16 outputs, zero before and after the call.  ``tile`` has sizes of the
    kernel; None means those that were measured as fast.
    """
    if len(x) > ROWS:
        raise ValueError(f"{len(x)} rows: expected 1 to {ROWS}")
    if product.form.bits == 8:
        return _product8(product, x, around, tile)
    return _product4(product, x, around, arrived, tile)
