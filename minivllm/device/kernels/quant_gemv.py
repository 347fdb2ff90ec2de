"""Products of one or two rows with a quantized weight and their epilogue (``products``), without tensor cores.

    short row     grid (P)        program p sums outputs [BN t, BN t + BN) over all inputs, for t = p, p + P, ...
    long row      grid (N / BN)   a program sums BN outputs, BK inputs at a time

The programs of a short row are at most as many as the multiprocessors run at once (P).  Each reads the row once and
keeps it in registers.  Weights are prefetched while earlier ones are multiplied.  With STAGES 0 the first weights are
loaded before the preceding kernel has ended, so that the memory is busy between two kernels.

The weight is read in *elements* of 1, 2, 4 or 8 inputs (``Elements``).  Words of int8 need rows of 16 bits, otherwise
one code is an element.  Words of 4 bits are multiplied as float16 (``quant_float16``), and so are eights of float8 if x
is rounded to float8 too.

TOP > 0 means that every program rounds x to 8 bits by its largest element, as ``scaled.rows`` does.  A long row needs
the largest element before the kernel begins, and 4 bits are faster with it.  A gated product therefore returns the
largest output of each program.  Sums are float32, except for sums of four products in ``quant_float16``.  Their order
depends only on the shapes and the number of multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import gate_rounded
from .eight_bits import TOP, codes_of, divided, rows, size_of, step_of
from .launch import cdiv, kernel, multiprocessors, pdl, power, wait
from .product_epilogue import added
from .products import GATED
from .quant_epilogue import NOTHING, Around, EpilogueProduct, Result, Tile
from .quant_float16 import UNITS, code_products, eight_products, pair_of, power_of, two_of
from .quant_formats import Form, QuantizedWeight, spread, table_pairs, table_words, values_of, word_numbers

FEW = 2  # most rows
SHORT = 4096  # a row of at most this many inputs is short: a program keeps all of them in registers
WIDE = 16384  # from this number of outputs on there are enough programs for large tiles


@dataclass(frozen=True)
class Elements:
    """How a row is multiplied: ``unit`` inputs are an element of the weight, ``top`` is the largest code to which x is
    rounded, or 0, and ``tops`` the number of largest elements of parts of x that are given.

    An element is a code of 8 bits (1), a byte of two codes with a table (2), an int32 of four int8 (4) or of eight
    4-bit codes (8), or an int64 of eight float8 (8).  ``tops_p`` is a power of two of at least ``tops``.
    """

    unit: int
    top: float
    tops: int
    tops_p: int


# ---- products of elements --------------------------------------------------------------------------------------------


@triton.jit
def _fours(x, at, on, step, inverse, like, TOP: tl.constexpr):
    """Load four neighbouring inputs, rounded if TOP is set: four float32 [1, W], and their sum."""
    v0, v1, v2, v3 = values_of(tl.load(x + at, mask=on, other=0), like)
    if TOP > 0:
        v0, v1 = codes_of(v0, step, inverse, TOP, True), codes_of(v1, step, inverse, TOP, True)
        v2, v3 = codes_of(v2, step, inverse, TOP, True), codes_of(v3, step, inverse, TOP, True)
    return v0, v1, v2, v3, (v0 + v1) + (v2 + v3)


@triton.jit
def _eights(wide, at, on, step, inverse, like):
    """Load eight neighbouring inputs, and return them, divided by ``step``, as four pairs of float8."""
    v0, v1, v2, v3 = values_of(tl.load(wide + at, mask=on, other=0), like)
    u0, u1, u2, u3 = values_of(tl.load(wide + at + 1, mask=on, other=0), like)
    p0 = pair_of(divided(v0, step, inverse), divided(v1, step, inverse))
    p1 = pair_of(divided(v2, step, inverse), divided(v3, step, inverse))
    p2 = pair_of(divided(u0, step, inverse), divided(u1, step, inverse))
    p3 = pair_of(divided(u2, step, inverse), divided(u3, step, inverse))
    return p0, p1, p2, p3, p0


@triton.jit
def _inputs(row, at, on, factors, like, F: tl.constexpr, E: tl.constexpr):
    """Return the inputs by which the weights are multiplied, and the value to subtract from their products for zero
    points.

    ``row`` is x and x as int64.  Each form uses some of the results.
    """
    x, wide = row
    _, step, inverse = factors
    if E.unit == 1:
        v0 = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
        if E.top > 0:
            v0 = codes_of(v0, step, inverse, E.top, not F.float8).to(tl.float32)
        v0 = v0[None, :]
        return v0, v0, v0, v0, v0
    elif F.table:
        v0 = tl.load(x + at, mask=on, other=0.0).to(tl.float32)[None, :]
        v1 = tl.load(x + at + 16, mask=on, other=0.0).to(tl.float32)[None, :]
        return v0, v1, v0, v0, v0
    elif F.float8:
        return _eights(wide, at, on, step, inverse, like)
    else:
        v0, v1, v2, v3, low = _fours(wide, at, on, step, inverse, like, E.top)
        if F.bits == 8:
            return v0, v1, v2, v3, -192.0 * low
        else:
            u0, u1, u2, u3, high = _fours(wide, at + 4, on, step, inverse, like, E.top)
            near, far = inverse, inverse / 16
            p0, p1 = two_of(v0 * near, v2 * near), two_of(u0 * far, u2 * far)
            p2, p3 = two_of(v1 * near, v3 * near), two_of(u1 * far, u3 * far)
            return p0, p1, p2, p3, (low + high) * (near / (1 << 24))


@triton.jit
def _products(now, v, words, F: tl.constexpr, E: tl.constexpr):
    """Return the products [BN, W] of ``_weights`` and ``_inputs``; those of one packed word are summed."""
    raw, s, z = now
    if E.unit == 1:
        return raw.to(tl.float32) * v[0]
    elif F.float8:
        return eight_products(raw, v[0], v[1], v[2], v[3])
    elif F.bits == 8:
        n = word_numbers(raw)
        return n[0] * v[0] + (n[1] * v[1] + (n[2] * v[2] + (n[3] * v[3] + v[4])))
    elif F.table:
        low, high = table_pairs(raw, words)
        sums = low.to(tl.float32) * v[0] + high.to(tl.float32) * v[1]
        return spread(s, s.shape[0], s.shape[1], F.group // 2) * sums
    else:
        s = spread(s, s.shape[0], s.shape[1], F.group // 8)
        z = spread(z, s.shape[0], z.shape[1], F.group // 8) if F.zero else 8.0
        return s * (code_products(raw, v[0], v[1], v[2], v[3]) - z * v[4])


@triton.jit
def _weights(of, on, k, there, F: tl.constexpr, E: tl.constexpr, BK: tl.constexpr):
    """Return elements [BN, W] of the weight's rows ``on`` < ``there`` from input k on, and scales and zero points [BN,
    SOME].

    8 bits have one scale per row, [BN].
    """
    weight, scale, zero = of
    word = k // E.unit + tl.arange(0, BK // E.unit)
    at = weight + on.to(tl.int64)[:, None] * (F.k // E.unit) + word[None, :]
    keep = (on < there)[:, None] & (word < F.k // E.unit)[None, :]
    raw = tl.load(at, mask=keep, other=0.0 if F.float8 and E.unit == 1 else 0, eviction_policy="evict_first")
    if F.bits == 4:
        og = tl.arange(0, BK // F.group)
        at = on[:, None] * F.by_row + (k // F.group + og)[None, :] * F.by_group
        keep = (on < there)[:, None] & (k + og * F.group < F.k)[None, :]
        s = tl.load(scale + at, mask=keep, other=0.0)
        z = tl.load(zero + at, mask=keep, other=0.0) if F.zero else s
    else:
        s = tl.load(scale + on, mask=on < there, other=0.0)
        z = s
    return raw, s, z


@triton.jit
def _loaded(of, on, k, F: tl.constexpr, E: tl.constexpr, MODE: tl.constexpr, BK: tl.constexpr):
    """Return ``_weights`` of outputs ``on`` < N; for a gate also those of the second sums, otherwise the same again."""
    now = _weights(of, on, k, F.n, F, E, BK)
    up = now
    if MODE == 1:
        up = _weights(of, tl.where(on < F.n, on + F.n, 2 * F.n), k, 2 * F.n, F, E, BK)
    return now, up


@triton.jit
def both_added(a, b, c, d):
    return a + c, b + d


# ---- factors and epilogue --------------------------------------------------------------------------------------------


@triton.jit
def _steps(x, tops, F: tl.constexpr, E: tl.constexpr, BK: tl.constexpr):
    """Return the scale of a row x that is rounded to 8 bits, and its inverse or a part of that, from the row's largest
    element.

    The largest element is that of ``tops`` if it is given, else of x.
    """
    if E.tops > 0:
        at = tl.arange(0, E.tops_p)
        most = tl.load(tops + at, mask=at < E.tops, other=0)
    else:
        at = tl.arange(0, BK)
        most = tl.zeros([BK], tl.int32)
        K: tl.constexpr = F.k
        for k in tl.static_range(0, K, BK):
            most = tl.maximum(most, size_of(tl.load(x + k + at, mask=k + at < K, other=0.0).to(tl.float32)))
    most = tl.max(most, 0)
    if F.bits == 4:
        return power_of(most)
    else:
        return step_of(most, E.top)


@triton.jit
def _factors(x, tops, by_row, in_squares, eps, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BK: tl.constexpr):
    """Return the factor by which all sums of a row are multiplied, the step in which its inputs are rounded, and the
    inverse.

    The factor combines the step, the row's scale, the division by the last norm, and the units of the products of
    integer words and of ``quant_float16.pair_of``.
    """
    factor, step, inverse = 1.0, 1.0, 1.0
    if F.bits == 8 and E.unit > 1:
        factor = 16.0 if F.float8 else 2.0
    if P.by_row:
        factor *= tl.load(by_row)
    if P.parts > 0:
        op = tl.arange(0, P.parts_p)
        factor *= tl.rsqrt(tl.sum(tl.load(in_squares + op, mask=op < P.parts, other=0.0), 0) / F.k + eps)
    if E.top > 0 or (F.bits == 4 and not F.table):
        step, inverse = _steps(x, tops, F, E, BK)
        factor *= step
    return factor, step, inverse


@triton.jit
def _beside(around, on, N: tl.constexpr, MODE: tl.constexpr):
    """Load the residual and the weight of the next norm at the output columns ``on`` (MODE 2), else return zeros.

    The loads begin before the products, so that both overlap.
    """
    if MODE == 2:
        stream = tl.load(around[2] + on, mask=on < N, other=0.0)
        return stream, tl.load(around[3] + on, mask=on < N, other=0.0).to(tl.float32)
    else:
        return 0.0, 0.0


@triton.jit
def _stored(acc, up, s, up_s, beside, on, factor, around, F: tl.constexpr, P: tl.constexpr):
    """Apply the epilogue P to the sums [BN] of outputs ``on`` and store the result, as ``product_epilogue.finish``.

    Return the squares of the residual stream, or with a gate ``size_of`` the output, [BN].
    """
    y, bias, residual, _ = around
    ok = on < F.n
    acc, up = acc * factor, up * factor
    if F.bits == 8:
        acc, up = acc * s, up * up_s
    elif not F.table:
        acc, up = acc * UNITS, up * UNITS
    if P.bias:
        acc += tl.load(bias + on, mask=ok, other=0.0).to(tl.float32)
        if P.mode == 1:
            up += tl.load(bias + F.n + on, mask=ok, other=0.0).to(tl.float32)
    partials = on * 0
    if P.mode == 1:
        acc = gate_rounded(acc, up, y.dtype.element_ty, P.act)
        partials = tl.where(ok, size_of(acc.to(y.dtype.element_ty).to(tl.float32)), 0)
    if P.mode == 2:
        acc = added(acc, beside[0], residual + on, ok)
        partials = tl.where(ok, acc * acc, 0.0)
        acc = acc * beside[1]
    tl.store(y + on, acc.to(y.dtype.element_ty), mask=ok)
    return partials


@triton.jit
def _short_row(
    x, of, words, place, ahead, factors, around, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a program's tiles, one after another, and return the combined results of ``_stored``."""
    program, oi, word = tl.program_id(0), tl.arange(0, BN), tl.arange(0, BK // E.unit)
    v = _inputs(x, place, word < F.k // E.unit, factors, around[0], F, E)
    partials = tl.zeros([BN], tl.float32 if P.mode == 2 else tl.int32)
    for tile in tl.range(program, (F.n + BN - 1) // BN, PROGRAMS, num_stages=STAGES if STAGES > 0 else 1):
        on = tile * BN + oi
        if STAGES == 0:
            now, up = ahead
            ahead = _loaded(of, on + PROGRAMS * BN, 0, F, E, P.mode, BK)
        else:
            now, up = _loaded(of, on, 0, F, E, P.mode, BK)
        beside = _beside(around, on, F.n, P.mode)
        each = _products(now, v, words, F, E)
        if P.mode == 1:
            # both sums in one reduction, so that the program waits for its warps only once
            acc, other = tl.reduce((each, _products(up, v, words, F, E)), 1, both_added)
        else:
            acc = tl.sum(each, 1)
            other = acc
        found = _stored(acc, other, now[1], up[1], beside, on, factors[0], around, F, P)
        partials = partials + found if P.mode == 2 else tl.maximum(partials, found)
    return partials


@triton.jit
def _long_rows(
    x, of, words, place, ahead, factors, second, around, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute and store the outputs of a program's tile for long rows, and return the result of ``_stored``.

    ``second`` are the factors of a second row, if there is one.
    """
    on, word = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK // E.unit)
    by, up_by = 1.0, 1.0
    if F.bits == 8:
        by = tl.load(of[1] + on, mask=on < F.n, other=0.0)
        up_by = by
        if P.mode == 1:
            up_by = tl.load(of[1] + tl.where(on < F.n, on + F.n, 2 * F.n), mask=on < F.n, other=0.0)
    beside = _beside(around, on, F.n, P.mode)
    acc = tl.zeros([BN, BK // E.unit], tl.float32)
    other = acc  # second sums: those of a gate, or those of a second row
    for k in tl.range(0, F.k, BK, num_stages=STAGES if STAGES > 0 else 1):
        if STAGES == 0:
            now, up = ahead
            ahead = _loaded(of, on, k + BK, F, E, P.mode, BK)
        else:
            now, up = _loaded(of, on, k, F, E, P.mode, BK)
        at, on_x = (k if E.unit < 4 else k // 4) + place, k // E.unit + word < F.k // E.unit
        v = _inputs(x, at, on_x, factors, around[0], F, E)
        acc += _products(now, v, words, F, E)
        if P.mode == 1:
            other += _products(up, v, words, F, E)
        elif ROWS == 2:
            v = _inputs((x[0] + F.k, x[1] + F.k // 4), at, on_x, second, around[0], F, E)
            other += _products(now, v, words, F, E)
    acc, other = tl.sum(acc, 1), tl.sum(other, 1)
    if ROWS == 2:
        next_y = (around[0] + F.n, around[1], around[2], around[3])
        _stored(other, other, by, by, beside, on, second[0], next_y, F, P)
    return _stored(acc, other, by, up_by, beside, on, factors[0], around, F, P)


@kernel()
def _gemv(
    x, wide_x, weight, scale, zero, table, tops, by_row, y, bias, residual, norm, in_squares, out, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PROGRAMS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x [ROWS, K] by the weight, in PROGRAMS programs for a short row, else (0) with BK inputs at a time.

    ``wide_x`` is x as int64 [ROWS, K / 4], with four inputs per element.  The weight, with GATED [2 N, ...], has
    elements of ``E.unit`` inputs.  ``out`` [programs] receives the combined result of ``_stored`` of each program.  BK
    is a power of two, for a short row of at least K.  With STAGES 0 the next weights are loaded to registers, otherwise
    STAGES tiles at a time to shared memory.  Two rows are long and without an epilogue.
    """
    program, word = tl.program_id(0), tl.arange(0, BK // E.unit)
    of, around = (weight, scale, zero), (y, bias, residual, norm)
    # index in x (or in x in groups of four inputs) of the first input of each element of the weight
    place = word * 2 if E.unit == 8 and F.bits == 8 else word
    if F.table:
        place = word // 16 * 32 + word % 16
    elif F.bits == 4:
        place = word // 4 * 8 + word % 4
    ahead = 0
    if STAGES == 0:
        ahead = _loaded(of, program * BN + tl.arange(0, BN), 0, F, E, P.mode, BK)
    words = table_words(table, F.table)
    wait(PDL)
    factors = _factors(x, tops, by_row, in_squares, eps, F, E, P, BK)
    if PROGRAMS > 0:
        partials = _short_row((x, wide_x), of, words, place, ahead, factors, around, F, E, P, BN, BK, PROGRAMS, STAGES)
    else:
        second = factors
        if ROWS == 2:
            second = _factors(x + F.k, tops, by_row + 1, in_squares, eps, F, E, P, BK)
        rows = (x, wide_x)
        partials = _long_rows(rows, of, words, place, ahead, factors, second, around, F, E, P, ROWS, BN, BK, STAGES)
    if P.mode == 1:
        tl.store(out + program, tl.max(partials, 0))
    if P.mode == 2:
        tl.store(out + program, tl.sum(partials, 0))


# ---- launch ----------------------------------------------------------------------------------------------------------


def plain_tile(form: Form, unit: int, rows: int) -> Tile:
    """Return the fastest tile on an H200 of two rows, or of one row without a norm of float8 or of long int8."""
    wide = form.n >= WIDE
    bn, bk, stages, warps = 8, 1024, 3, 4
    if form.table:
        return dict(BN=bn, BK=bk, STAGES=stages, num_warps=warps)
    if form.bits == 4:
        bn, stages = 16, 4
    elif unit == 1 and wide:
        bn, bk, stages = 16, 256, 4
    elif unit == 1 and rows > 1:
        bk, warps = 512, 2
    elif unit > 1 and rows == 1:
        stages, warps = 4, 8
    elif unit > 1 and wide:
        bn, bk = 16, 512
    return dict(BN=bn, BK=bk, STAGES=stages, num_warps=warps)


def gemv_tile(form: Form, gated: bool, unit: int) -> Tile:
    """Return the fastest tile of one row, by benchmarks/quant_layer.py for 4,096 or 14,336 inputs.

    For fewer inputs, programs have more outputs.  Tiles of 8 bits read as words or eights were measured on an H100,
    others on an H200, and short rows of 4 bits in steps of an engine (docs/performance.md).  EACH is the number of
    programs per multiprocessor.  With a gate it is as many as fit, since otherwise some multiprocessors would run more
    programs than others.
    """
    four = form.bits == 4 and not form.table
    warps = 4
    if form.k > SHORT:
        bn, bk, stages = 8, 2048, 0
        if four:
            bn, stages, warps = 16, 3, 8
        elif unit < 4:
            bk, stages = 1024, 3
        if gated:
            bn //= 2
        return dict(BN=bn, BK=bk, STAGES=stages, num_warps=warps)
    stages = 0
    if four:
        bn, each = 8, 3
        # groups of 128 inputs have fewer scales and so need fewer registers, so a program takes more inputs
        if gated and (form.group == 128 or (form.group == 64 and not form.zero)):
            each = 4
    elif form.table:
        bn, each, warps = 4, 2, 8
    elif unit == 1:
        bn, each = 4, 6
        stages = 3 if gated else 2
    elif gated or unit == 8:
        bn, each, warps = 8, 2, 8
    else:
        bn, each = 4, 4
    if gated:
        bn //= 2
    inputs = max(power(form.k), 256)
    bn *= max(1, SHORT // inputs)
    return dict(BN=min(bn, 32), EACH=each, STAGES=stages, num_warps=warps)


def words_fit(x: Tensor, of: QuantizedWeight) -> bool:
    """Return whether x and the weight can be read as words.

    x must have 16 bits per element and be aligned to 8 bytes, and the weight must hold whole numbers and be aligned to
    words.
    """
    form = of.form
    if form.float8 or form.table or x.element_size() != 2:
        return False
    return form.k % 4 == 0 and x.data_ptr() % 8 == 0 and of.weight.data_ptr() % 4 == 0


def gemv_fits(of: QuantizedWeight, x: Tensor) -> bool:
    """Return whether the kernel supports rows x.  With 4 bits they must have 16 bits per element."""
    if len(x) > FEW:
        return False
    form = of.form
    if form.bits == 8 or (form.table and x.element_size() == 2):
        return True
    return words_fit(x, of)


def elements_of(product: EpilogueProduct, x: Tensor) -> tuple[int, Tensor]:
    """Return the number of inputs in an element of the weight, and the weight viewed as such elements."""
    weight = product.of.weight
    form = product.form
    if words_fit(x, product.of):
        return 32 // form.bits, weight.view(torch.int32)
    if form.float8 and product.rounded is not None:
        aligned = x.data_ptr() % 8 == weight.data_ptr() % 8 == 0
        if aligned and form.k % 8 == 0:
            return 8, weight.view(torch.int64)
    return 8 // form.bits, weight


def gemv(
    product: EpilogueProduct,
    x: Tensor,
    around: Around = NOTHING,
    tops: Tensor | None = None,
    tile: Tile | None = None,
    y: Tensor | None = None,
    by_row: Tensor | None = None,
) -> Result:
    """Compute a product with its epilogue for a row x [1, K], or for x [2, K] without epilogue, in ``y`` if it is not
    None.

    ``by_row`` f32 [M] multiplies the rows of a plain product.  With a gate, the second result is int32 [1, P], the bits
    of the largest elements of the output's parts.  A caller may pass them as ``tops`` of x, which is used if x is
    rounded or the weight has 4 bits.
    """
    of = product.of
    form = product.form
    rounded = product.rounded
    four = form.bits == 4 and not form.table
    if rounded is None and not four:
        tops = None
    if rounded is not None and tops is None and form.k > SHORT:
        x, by_row = rows(x, rounded, x.dtype)
    unit, weight = elements_of(product, x)
    if tile is None:
        plain = around is NOTHING and (unit == 1 or (unit == 4 and form.k > SHORT))
        if plain or len(x) > 1:
            tile = plain_tile(form, unit, len(x))
        else:
            tile = gemv_tile(form, product.mode == GATED, unit)
    constants = pdl(x) | tile
    programs = cdiv(form.n, constants["BN"])
    constants["PROGRAMS"] = 0
    if "EACH" in constants:
        running = constants.pop("EACH") * multiprocessors(x.device)
        programs = min(programs, running)
        constants["PROGRAMS"] = programs
        group = form.group if form.bits == 4 else 0
        constants["BK"] = max(power(form.k), 256, group)
    top = 0.0
    if rounded is not None and by_row is None:
        top = TOP[rounded]
    known = 0 if tops is None else tops.shape[1]
    known_p = power(max(known, 1))
    y, partials, tensors, constants["P"] = product.given(x, by_row, around, programs, True, y)
    constants["F"] = form
    constants["E"] = Elements(unit, top, known, known_p)
    constants["ROWS"] = len(x)
    wide = x.view(torch.int64) if unit in (4, 8) else x
    if tops is None:
        tops = x
    operands = (x, wide, weight, of.scale, of.zero, of.table, tops)
    _gemv[(programs,)](*operands, *tensors, **constants)
    return y, partials
