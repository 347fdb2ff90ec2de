"""Products of few rows with a quantized weight, without tensor cores; one row also with its epilogue.

    gemv          1 to 8 rows                a program sums BN outputs, BK inputs at a time
    fused_gemv    one row (``products``)
      short row     grid (P)        program p sums outputs [BN t, BN t + BN) over all inputs, for t = p, p + P, ...
      long row      grid (N / BN)   a program sums BN outputs, BK inputs at a time

Integer weights are read as words if the row has 16 bits per element (``quant_formats``), else in bytes.  In
``fused_gemv`` float8 weights are read one element at a time, or eight if x is rounded to float8 too, and words of 4
bits are multiplied as float16 (``quant_float16``).

The programs of a short row are at most as many as the multiprocessors run at once (P).  Each reads the row once and
keeps it in registers.  Weights are prefetched while earlier ones are multiplied.  With STAGES 0 the first weights are
loaded before the preceding kernel has ended, so that the memory is busy between two kernels.

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

from .activation import activate
from .eight_bits import TOP, codes_of, divided, rows, size_of, step_of
from .launch import capability, kernel, multiprocessors, pdl, wait
from .products import GATED
from .quant_epilogue import Around, EpilogueProduct
from .quant_float16 import UNITS, code_products, eight_products, pair_of, power_of, two_of
from .quant_formats import Form, QuantizedWeight, spread, values_of, word_numbers

SHORT = 4096  # largest number of inputs of a short row, which one program has completely in registers
WIDE = 16384  # number of outputs from which on large tiles give enough programs


# ---- without an epilogue ---------------------------------------------------------------------------------------------


@triton.jit
def _numbers(raw, table, F: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr):
    """Return the numbers of the codes in elements of the weight, in order of their inputs."""
    if WORDS:
        return word_numbers(raw, F.bits, ASM)
    elif F.table:
        return tl.load(table + (raw & 15)), tl.load(table + (raw >> 4))
    elif F.bits == 4:
        return (raw & 15).to(tl.float32), (raw >> 4).to(tl.float32)
    else:
        return raw.to(tl.float32), 0.0


@triton.jit
def _add(acc, x, at, on, n, s, z, like, F: tl.constexpr, WORDS: tl.constexpr):
    """Return acc [BN, W] + the products of a row of x with the numbers ``n`` of W elements of the weight."""
    if WORDS:
        v0, v1, v2, v3 = values_of(tl.load(x + at, mask=on, other=0), like)
        both = (v0 + v1) + (v2 + v3)
        if F.bits == 4:
            u0, u1, u2, u3 = values_of(tl.load(x + at + 4, mask=on, other=0), like)
            high = (u0 + u1) + (u2 + u3)
            off = 128.0 * (both + 16.0 * high) + z * (both + high)
            part = n[0] * v0 + (n[1] * v1 + (n[2] * v2 + (n[3] * v3 - off)))
            part = n[4] * (16.0 * u0) + (n[5] * (16.0 * u1) + (n[6] * (16.0 * u2) + (n[7] * (16.0 * u3) + part)))
            return acc + s * part
        else:
            return n[0] * v0 + (n[1] * v1 + (n[2] * v2 + (n[3] * v3 + (acc - 192.0 * both))))
    else:
        v = tl.load(x + at, mask=on, other=0.0).to(tl.float32)[None, :]
        if F.bits == 4:
            u = tl.load(x + at + 16, mask=on, other=0.0).to(tl.float32)[None, :]
            return acc + s * (n[0] * v + (n[1] * u - z * (v + u)))
        else:
            return acc + n[0] * v


@kernel("M")
def _gemv(
    x, weight, scale, zero, table, by_row, y, M, F: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    BY_ROW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS (1, 2, 4, 8) contiguous rows of x by the weight.

    BY_ROW multiplies each row by ``by_row`` [M] at the end.  With WORDS x is int64 [M, K / 4], with four inputs per
    element, and the weight is int32 [N, K / 4] with four codes per word, or [N, K / 8] with eight.
    """
    wait(PDL)
    PER: tl.constexpr = 32 // F.bits if WORDS else 8 // F.bits  # codes of an element
    IN_X: tl.constexpr = 4 if WORDS else 1  # inputs of an element of x
    SOME: tl.constexpr = BK // F.group if F.bits == 4 else 1
    on, og = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, SOME)
    element = tl.arange(0, BK // PER)
    w_at = weight + on.to(tl.int64)[:, None] * (F.k // PER) + element[None, :]
    first = element
    if F.bits == 4:
        first = element // 4 * 8 + element % 4 if WORDS else element // 16 * 32 + element % 16
    accs = (tl.zeros([BN, BK // PER], tl.float32),)
    for _ in tl.static_range(1, ROWS):
        accs = accs + (tl.zeros([BN, BK // PER], tl.float32),)  # noqa: RUF005
    for k in tl.range(0, F.k, BK, num_stages=STAGES):
        at = k // IN_X + first
        on_x = k // PER + element < F.k // PER if WORDS else at < F.k
        raw = tl.load(w_at + k // PER, mask=(on < F.n)[:, None] & on_x[None, :],
                      other=0.0 if F.float8 else 0, eviction_policy="evict_first")  # fmt: skip
        s, z = 1.0, 0.0
        if F.bits == 4:
            s_at = on[:, None] * F.by_row + (k // F.group + og)[None, :] * F.by_group
            on_s = (on < F.n)[:, None] & (k + og * F.group < F.k)[None, :]
            s, z = spread(tl.load(scale + s_at, mask=on_s, other=0.0), BN, SOME, F.group // PER), 8.0
            if F.zero:
                z = spread(tl.load(zero + s_at, mask=on_s, other=0.0), BN, SOME, F.group // PER)
            if F.table:
                z = 0.0
        numbers = _numbers(raw, table, F, WORDS, ASM)
        found = (_add(accs[0], x, at, on_x, numbers, s, z, y, F, WORDS),)
        for i in tl.static_range(1, ROWS):
            row = x + tl.minimum(i, M - 1) * (F.k // IN_X)
            found = found + (_add(accs[i], row, at, on_x, numbers, s, z, y, F, WORDS),)  # noqa: RUF005
        accs = found
    for i in tl.static_range(ROWS):
        total = tl.sum(accs[i], 1)
        if F.bits == 8:
            total = total * ((2.0 if WORDS else 1.0) * tl.load(scale + on, mask=on < F.n, other=0.0))
        if BY_ROW:
            total = total * tl.load(by_row + i, mask=i < M, other=0.0)
        tl.store(y + i * F.n + on, total.to(y.dtype.element_ty), mask=(on < F.n) & (i < M))


def words_fit(x: Tensor, of: QuantizedWeight) -> bool:
    """Return whether x and the weight can be read as words.

    x must have 16 bits per element and be aligned to 8 bytes, and the weight must hold whole numbers and be aligned to
    words.
    """
    whole = not of.form.float8 and not of.form.table and x.element_size() == 2
    return whole and of.form.k % 4 == 0 and x.data_ptr() % 8 == 0 and of.weight.data_ptr() % 4 == 0


def gemv_tile(form: Form, rows: int, words: bool) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H200 (4,096 inputs, 4,096 or 28,672 outputs), else a
    default.
    """
    wide, four = form.n >= WIDE, form.bits == 4
    if words and not four:
        bn, bk, stages, warps = (16, 512, 3, 4) if wide else (8, 1024, 3, 4)
    elif words and rows == 1 and not wide:
        bn, bk, stages, warps = 16, 2048, 3, 8
    elif words:
        bn, bk, stages, warps = 16, 1024, 3 if wide else 4, 4
    elif rows <= 2 and not four:
        bn, bk, stages, warps = (16, 256, 4, 4) if wide else (8, 1024, 3, 4) if rows == 1 else (8, 512, 3, 2)
    else:
        bn, bk, stages, warps = 4, (512 if rows <= 2 else 256) * 8 // form.bits, 3, 4
    return dict(BN=bn, BK=bk, STAGES=stages, num_warps=warps)


def gemv(
    of: QuantizedWeight,
    x: Tensor,
    y: Tensor | None = None,
    by_row: Tensor | None = None,
    tile: dict[str, int] | None = None,
    words: bool | None = None,
) -> Tensor:
    """Compute y [M, N] of contiguous x [0 to 8, K], times ``by_row`` f32 [M] if it is not None.

    ``words`` None means words if they fit.
    """
    m, words = len(x), words_fit(x, of) if words is None else words
    y = x.new_empty(m, of.form.n) if y is None else y
    tile = tile or gemv_tile(of.form, m, words)
    if m:
        _gemv[(triton.cdiv(of.form.n, tile["BN"]),)](
            x.view(torch.int64) if words else x,
            of.weight.view(torch.int32) if words else of.weight,
            of.scale,
            of.zero,
            of.table,
            of.scale if by_row is None else by_row,
            y,
            m,
            F=of.form,
            WORDS=words,
            ROWS=triton.next_power_of_2(m),
            BY_ROW=by_row is not None,
            ASM=words and capability(x.device) >= 8,
            **tile,
            **pdl(x),
        )
    return y


# ---- with an epilogue ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elements:
    """How a row is multiplied: ``unit`` inputs are an element of the weight, ``top`` is the largest code to which x is
    rounded, or 0, and ``tops`` the number of largest elements of parts of x that are given.

    ``tops_p`` is a power of two of at least ``tops``.
    """

    unit: int
    top: float
    tops: int
    tops_p: int


@triton.jit
def _fours(x, at, on, step, inverse, like, TOP: tl.constexpr):
    """Return four neighbouring inputs, each float32 [1, W], and their sum."""
    v0, v1, v2, v3 = values_of(tl.load(x + at, mask=on, other=0), like)
    if TOP > 0:
        v0, v1 = codes_of(v0, step, inverse, TOP, True), codes_of(v1, step, inverse, TOP, True)
        v2, v3 = codes_of(v2, step, inverse, TOP, True), codes_of(v3, step, inverse, TOP, True)
    return v0, v1, v2, v3, (v0 + v1) + (v2 + v3)


@triton.jit
def _inputs(x, wide, at, on, step, inverse, like, F: tl.constexpr, E: tl.constexpr, ASM: tl.constexpr):
    """Return the factors of the weights, and the value to subtract for zero points.

    Each form uses some of the results.
    """
    if F.float8 and E.unit == 8:
        v0, v1, v2, v3 = values_of(tl.load(wide + at, mask=on, other=0), like)
        u0, u1, u2, u3 = values_of(tl.load(wide + at + 1, mask=on, other=0), like)
        p0 = pair_of(divided(v0, step, inverse), divided(v1, step, inverse), ASM)
        p1 = pair_of(divided(v2, step, inverse), divided(v3, step, inverse), ASM)
        p2 = pair_of(divided(u0, step, inverse), divided(u1, step, inverse), ASM)
        p3 = pair_of(divided(u2, step, inverse), divided(u3, step, inverse), ASM)
        return p0, p1, p2, p3, p0
    elif F.float8:
        v0 = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
        if E.top > 0:
            v0 = codes_of(v0, step, inverse, E.top, False).to(tl.float32)
        v0 = v0[None, :]
        return v0, v0, v0, v0, v0
    else:
        v0, v1, v2, v3, low = _fours(wide, at, on, step, inverse, like, E.top)
        if F.bits == 8:
            return v0, v1, v2, v3, -192.0 * low
        else:
            u0, u1, u2, u3, high = _fours(wide, at + 4, on, step, inverse, like, E.top)
            near, far = inverse, inverse / 16
            p0, p1 = two_of(v0 * near, v2 * near, ASM), two_of(u0 * far, u2 * far, ASM)
            p2, p3 = two_of(v1 * near, v3 * near, ASM), two_of(u1 * far, u3 * far, ASM)
            return p0, p1, p2, p3, (low + high) * (near / (1 << 24))


@triton.jit
def _products(raw, s, z, v, F: tl.constexpr, E: tl.constexpr, ASM: tl.constexpr):
    """Return the products of the elements of ``_weights`` [BN, W] and ``_inputs``, summed for each element."""
    if F.float8 and E.unit == 8:
        return eight_products(raw, v[0], v[1], v[2], v[3], ASM)
    elif F.float8:
        return raw.to(tl.float32) * v[0]
    elif F.bits == 8:
        n = word_numbers(raw, 8, ASM)
        return n[0] * v[0] + (n[1] * v[1] + (n[2] * v[2] + (n[3] * v[3] + v[4])))
    else:
        s = spread(s, s.shape[0], s.shape[1], F.group // 8)
        z = spread(z, s.shape[0], z.shape[1], F.group // 8) if F.zero else 8.0
        return s * (code_products(raw, v[0], v[1], v[2], v[3], ASM) - z * v[4])


@triton.jit
def _weights(weight, scale, zero, on, k, there, F: tl.constexpr, E: tl.constexpr, BK: tl.constexpr):
    """Return elements [BN, W] of the weight's rows ``on`` < ``there`` from input k on, and scales and zero points [BN,
    SOME].

    8 bits have one scale per row, [BN].
    """
    word = k // E.unit + tl.arange(0, BK // E.unit)
    at = weight + on.to(tl.int64)[:, None] * (F.k // E.unit) + word[None, :]
    keep = (on < there)[:, None] & (word < F.k // E.unit)[None, :]
    raw = tl.load(at, mask=keep, other=0.0 if E.unit == 1 else 0, eviction_policy="evict_first")
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
def _loaded(weight, scale, zero, on, k, F: tl.constexpr, E: tl.constexpr, MODE: tl.constexpr, BK: tl.constexpr):
    """Return ``_weights`` of outputs ``on`` < N, and those of the second sum of a gate, which are the same without."""
    raw, s, z = _weights(weight, scale, zero, on, k, F.n, F, E, BK)
    up_raw, up_s, up_z = raw, s, z
    if MODE == 1:
        upper = tl.where(on < F.n, on + F.n, 2 * F.n)
        up_raw, up_s, up_z = _weights(weight, scale, zero, upper, k, 2 * F.n, F, E, BK)
    return raw, s, z, up_raw, up_s, up_z


@triton.jit
def both_added(a, b, c, d):
    return a + c, b + d


@triton.jit
def _steps(x, tops, F: tl.constexpr, E: tl.constexpr, BK: tl.constexpr):
    """Return the factor for the sums of the row, by its largest element, and the inverse or a part of it.

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
def _beside(residual, norm, on, N: tl.constexpr, MODE: tl.constexpr):
    """Load the residual and the weight of the next norm at the output columns ``on`` (MODE 2), else return zeros.

    The loads begin before the products, so that both overlap.
    """
    if MODE == 2:
        stream = tl.load(residual + on, mask=on < N, other=0.0)
        return stream, tl.load(norm + on, mask=on < N, other=0.0).to(tl.float32)
    else:
        return 0.0, 0.0


@triton.jit
def _stored(acc, up, s, up_s, beside, on, factor, y, bias, residual, F: tl.constexpr, P: tl.constexpr):
    """Apply the epilogue P to the sums [BN] of outputs ``on`` and store the result, as ``products._finish``.

    Return the squares of the residual stream, or with a gate ``size_of`` the output, [BN].
    """
    ok = on < F.n
    acc, up = acc * factor, up * factor
    if F.bits == 4:
        acc, up = acc * UNITS, up * UNITS
    else:
        acc, up = acc * s, up * up_s
    if P.bias:
        acc += tl.load(bias + on, mask=ok, other=0.0).to(tl.float32)
        if P.mode == 1:
            up += tl.load(bias + F.n + on, mask=ok, other=0.0).to(tl.float32)
    partials = on * 0
    if P.mode == 1:
        gate = acc.to(y.dtype.element_ty).to(tl.float32)
        acc = activate(gate, P.act) * up.to(y.dtype.element_ty).to(tl.float32)
        partials = tl.where(ok, size_of(acc.to(y.dtype.element_ty).to(tl.float32)), 0)
    if P.mode == 2:
        # Round as two kernels would, first the product, then the sum. The squares are those of the rounded sum.
        stream = (acc.to(y.dtype.element_ty) + beside[0]).to(y.dtype.element_ty)
        tl.store(residual + on, stream, mask=ok)
        acc = stream.to(tl.float32)
        partials = tl.where(ok, acc * acc, 0.0)
        acc = acc * beside[1]
    tl.store(y + on, acc.to(y.dtype.element_ty), mask=ok)
    return partials


@triton.jit
def _factor(by_row, in_squares, eps, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr):
    """Return the factor of all sums of the row.

    It combines the row's scale, the division by the last norm, and the units of the products of integer words and of
    ``quant_float16.pair_of``.
    """
    factor = 1.0
    if F.bits == 8:
        factor = 2.0 if not F.float8 else 16.0 if E.unit == 8 else 1.0
    if P.by_row:
        factor *= tl.load(by_row)
    if P.parts > 0:
        op = tl.arange(0, P.parts_p)
        factor *= tl.rsqrt(tl.sum(tl.load(in_squares + op, mask=op < P.parts, other=0.0), 0) / F.k + eps)
    return factor


@kernel()
def _fused_gemv(
    x, wide_x, weight, scale, zero, tops, by_row, y, bias, residual, norm, in_squares, out, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x [K] by the weight, in PROGRAMS programs for a short row, else (0) with BK inputs at a time.

    ``wide_x`` is x as int64 [K / 4], with four inputs per element.  The weight, with GATED [2 N, ...], has elements of
    ``E.unit`` inputs, which are int32 words, float8, or int64 of eight float8.  ``out`` [programs] receives the
    combined result of ``_stored`` of each program.  BK is a power of two, for a short row of at least K.  With STAGES 0
    the next weights are loaded to registers, otherwise STAGES tiles at a time to shared memory.
    """
    program, oi, word = tl.program_id(0), tl.arange(0, BN), tl.arange(0, BK // E.unit)
    on = program * BN + oi
    # index in x of the first input of each element of the weight, in elements or groups of four
    place = word * 2 if E.unit == 8 and F.bits == 8 else word
    if F.bits == 4:
        place = word // 4 * 8 + word % 4
    LOOPS: tl.constexpr = STAGES if STAGES > 0 else 1
    if STAGES == 0:
        ahead = _loaded(weight, scale, zero, on, 0, F, E, P.mode, BK)
    wait(PDL)
    step, inverse = 1.0, 1.0
    factor = _factor(by_row, in_squares, eps, F, E, P)
    if E.top > 0 or F.bits == 4:
        step, inverse = _steps(x, tops, F, E, BK)
        factor *= step
    if PROGRAMS > 0:
        v = _inputs(x, wide_x, place, word < F.k // E.unit, step, inverse, y, F, E, ASM)
        partials = tl.zeros([BN], tl.float32 if P.mode == 2 else tl.int32)
        for tile in tl.range(program, (F.n + BN - 1) // BN, PROGRAMS, num_stages=LOOPS):
            on = tile * BN + oi
            if STAGES == 0:
                now = ahead
                ahead = _loaded(weight, scale, zero, on + PROGRAMS * BN, 0, F, E, P.mode, BK)
            else:
                now = _loaded(weight, scale, zero, on, 0, F, E, P.mode, BK)
            beside = _beside(residual, norm, on, F.n, P.mode)
            each = _products(now[0], now[1], now[2], v, F, E, ASM)
            if P.mode == 1:
                other = _products(now[3], now[4], now[5], v, F, E, ASM)
                # one reduction for both sums, so that the program waits only once for its warps
                acc, gated = tl.reduce((each, other), 1, both_added)
            else:
                acc = tl.sum(each, 1)
                gated = acc
            of = _stored(acc, gated, now[1], now[4], beside, on, factor, y, bias, residual, F, P)
            partials = partials + of if P.mode == 2 else tl.maximum(partials, of)
    else:
        by, up_by = 1.0, 1.0
        if F.bits == 8:
            by = tl.load(scale + on, mask=on < F.n, other=0.0)
            up_by = by
            if P.mode == 1:
                up_by = tl.load(scale + tl.where(on < F.n, on + F.n, 2 * F.n), mask=on < F.n, other=0.0)
        beside = _beside(residual, norm, on, F.n, P.mode)
        acc = tl.zeros([BN, BK // E.unit], tl.float32)
        gated = acc
        for k in tl.range(0, F.k, BK, num_stages=LOOPS):
            if STAGES == 0:
                now = ahead
                ahead = _loaded(weight, scale, zero, on, k + BK, F, E, P.mode, BK)
            else:
                now = _loaded(weight, scale, zero, on, k, F, E, P.mode, BK)
            first = k if E.unit == 1 else k // 4
            on_x = k // E.unit + word < F.k // E.unit
            v = _inputs(x, wide_x, first + place, on_x, step, inverse, y, F, E, ASM)
            acc += _products(now[0], now[1], now[2], v, F, E, ASM)
            if P.mode == 1:
                gated += _products(now[3], now[4], now[5], v, F, E, ASM)
        acc, gated = tl.sum(acc, 1), tl.sum(gated, 1)
        partials = _stored(acc, gated, by, up_by, beside, on, factor, y, bias, residual, F, P)
    if P.mode == 1:
        tl.store(out + program, tl.max(partials, 0))
    if P.mode == 2:
        tl.store(out + program, tl.sum(partials, 0))


def fused_gemv_tile(form: Form, gated: bool, unit: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_layer.py for 4,096 or 14,336 inputs.

    For fewer inputs, programs have more outputs.  Tiles of 8 bits read as words or eights were measured on an H100,
    others on an H200, and short rows of 4 bits in steps of an engine (docs/performance.md).  EACH is the number of
    programs per multiprocessor.  With a gate it is as many as fit, since otherwise some multiprocessors would run more
    programs than others.
    """
    four, warps = form.bits == 4, 4
    if form.k > SHORT:
        bn, bk, stages, warps = (16, 2048, 3, 8) if four else (8, 1024, 3, 4) if unit == 1 else (8, 2048, 0, 4)
        return dict(BN=bn // 2 if gated else bn, BK=bk, STAGES=stages, num_warps=warps)
    if four:
        many = form.group == 128 or (form.group == 64 and not form.zero)  # fewer scales in registers
        bn, each, stages = (4, 4 if many else 3, 0) if gated else (8, 3, 0)
    elif unit == 1:
        bn, each, stages = (2, 6, 3) if gated else (4, 6, 2)
    elif gated or unit == 8:
        bn, each, stages, warps = (4 if gated else 8), 2, 0, 8
    else:
        bn, each, stages = 4, 4, 0
    bn *= max(1, SHORT // max(triton.next_power_of_2(form.k), 256))
    return dict(BN=min(bn, 32), EACH=each, STAGES=stages, num_warps=warps)


def fused_gemv_fits(product: EpilogueProduct, x: Tensor) -> bool:
    """Return whether the kernel supports a row x in bfloat16."""
    taken = product.form.float8 or words_fit(x, product.of)
    return not product.form.table and capability(x.device) >= 9 and taken


def fused_gemv(
    product: EpilogueProduct, x: Tensor, around: Around, tops: Tensor | None = None, tile: dict[str, int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute a product of one row with its epilogue, for x [1, K].

    With a gate, the second result is int32 [1, P], the bits of the largest elements of the output's parts.  A caller
    may pass them as ``tops`` of x, which is used if x is rounded or the weight has 4 bits.
    """
    of, form, rounded, by_row = product.of, product.form, product.rounded, None
    tops = tops if rounded is not None or form.bits == 4 else None
    if rounded is not None and tops is None and form.k > SHORT:
        x, by_row = rows(x, rounded, x.dtype)
    unit, weight = elements_of(product, x)
    tile = dict(tile or fused_gemv_tile(form, product.mode == GATED, unit))
    programs = triton.cdiv(form.n, tile["BN"])
    tile["PROGRAMS"] = 0
    if "EACH" in tile:
        programs = tile["PROGRAMS"] = min(programs, tile.pop("EACH") * multiprocessors(x.device))
        tile["BK"] = max(triton.next_power_of_2(form.k), 256, form.group if form.bits == 4 else 0)
    top = 0.0 if rounded is None or by_row is not None else TOP[rounded]
    known = 0 if tops is None else tops.shape[1]
    y, partials, tensors, epilogue = product.given(x, by_row, around, programs, tops=True)
    _fused_gemv[(programs,)](
        x,
        x if unit == 1 else x.view(torch.int64),
        weight,
        of.scale,
        of.zero,
        x if tops is None else tops,
        *tensors,
        F=form,
        E=Elements(unit, top, known, triton.next_power_of_2(max(known, 1))),
        P=epilogue,
        ASM=capability(x.device) >= 8,
        **tile,
        **pdl(x),
    )
    return y, partials


def elements_of(product: EpilogueProduct, x: Tensor) -> tuple[int, Tensor]:
    """Return the number of inputs in an element of the weight, and the weight viewed as such elements."""
    weight = product.of.weight
    if not product.form.float8:
        return 32 // product.form.bits, weight.view(torch.int32)
    lies = product.form.k % 8 == 0 and x.data_ptr() % 8 == 0 and weight.data_ptr() % 8 == 0
    return (8, weight.view(torch.int64)) if product.rounded is not None and lies else (1, weight)
