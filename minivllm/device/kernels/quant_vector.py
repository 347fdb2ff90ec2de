"""Products of one row with a weight of 8 or 4 bits and their epilogue, in one kernel without tensor cores
(``products``).

    short rows   grid (P)        program p sums outputs [BN t, BN t + BN) over all inputs, for t = p, p + P, ...
    long rows    grid (N / BN)   a program sums BN outputs, BK inputs at a time

The programs of short rows are at most as many as the multiprocessors run at once (P).  Each reads the row once and
keeps it in registers.  Weights are prefetched while earlier ones are multiplied.  With STAGES 0 the first weights are
loaded before the preceding kernel has ended, so that the memory is busy between two kernels.

Integer weights of 8 bits are read as words (``quant_words``).  float8 weights are read one element at a time, or eight
if x is rounded to float8 too (``quant_eights``).  Weights of 4 bits are read as words (``quant_fours``).

TOP > 0 means that every program rounds x to 8 bits by its largest element, as ``scaled.rows`` does.  A long row needs
the largest element before the kernel begins, and 4 bits are faster with it.  A gated product therefore returns the
largest output of each program.  Sums are float32, except for sums of four products in ``quant_eights`` and
``quant_fours``.  Their order depends only on the shapes and the number of multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .eight_bits import TOP, codes_of, divided, size_of, step_of
from .launch import capability, kernel, multiprocessors, pdl, wait
from .products import GATED, PLAIN
from .quant import Quantized
from .quant_around import Surrounded
from .quant_eights import eight_products, pair_of
from .quant_fours import UNITS, code_products, power_of, two_of
from .quant_words import _number, _spread, _values, takes
from .scaled import rows

SHORT = 4096  # inputs up to which a row is short, because a program has all of them in registers


@triton.jit
def _fours(x, at, on, step, inverse, like, TOP: tl.constexpr):
    """Return four neighbouring inputs, each float32 [1, W], and their sum."""
    v0, v1, v2, v3 = _values(tl.load(x + at, mask=on, other=0), like)
    if TOP > 0:
        v0, v1 = codes_of(v0, step, inverse, TOP, True), codes_of(v1, step, inverse, TOP, True)
        v2, v3 = codes_of(v2, step, inverse, TOP, True), codes_of(v3, step, inverse, TOP, True)
    return v0, v1, v2, v3, (v0 + v1) + (v2 + v3)


@triton.jit
def _place(word, UNIT: tl.constexpr, FORM: tl.constexpr):
    """Return the index in x of the first input of an element of the weight, in elements or groups of four."""
    if FORM == 4:
        return word // 4 * 8 + word % 4
    else:
        return word * 2 if UNIT == 8 else word


@triton.jit
def _inputs(x, wide, at, on, step, inverse, like, FORM: tl.constexpr, FLOAT8: tl.constexpr, UNIT: tl.constexpr,
            TOP: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the factors of the weights, and the value to subtract for zero points.

    Each form uses some of the results.
    """
    if FLOAT8 and UNIT == 8:
        v0, v1, v2, v3 = _values(tl.load(wide + at, mask=on, other=0), like)
        u0, u1, u2, u3 = _values(tl.load(wide + at + 1, mask=on, other=0), like)
        p0 = pair_of(divided(v0, step, inverse), divided(v1, step, inverse), ASM)
        p1 = pair_of(divided(v2, step, inverse), divided(v3, step, inverse), ASM)
        p2 = pair_of(divided(u0, step, inverse), divided(u1, step, inverse), ASM)
        p3 = pair_of(divided(u2, step, inverse), divided(u3, step, inverse), ASM)
        return p0, p1, p2, p3, p0
    elif FLOAT8:
        v0 = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
        if TOP > 0:
            v0 = codes_of(v0, step, inverse, TOP, False).to(tl.float32)
        v0 = v0[None, :]
        return v0, v0, v0, v0, v0
    else:
        v0, v1, v2, v3, low = _fours(wide, at, on, step, inverse, like, TOP)
        if FORM == 8:
            return v0, v1, v2, v3, -192.0 * low
        else:
            u0, u1, u2, u3, high = _fours(wide, at + 4, on, step, inverse, like, TOP)
            near, far = inverse, inverse / 16
            p0, p1 = two_of(v0 * near, v2 * near, ASM), two_of(u0 * far, u2 * far, ASM)
            p2, p3 = two_of(v1 * near, v3 * near, ASM), two_of(u1 * far, u3 * far, ASM)
            return p0, p1, p2, p3, (low + high) * (near / (1 << 24))


@triton.jit
def _products(raw, s, z, v, BN: tl.constexpr, SOME: tl.constexpr, FORM: tl.constexpr, FLOAT8: tl.constexpr,
              UNIT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the products of ``_weights`` [BN, W] and ``_inputs``, summed for each element."""
    if FLOAT8 and UNIT == 8:
        return eight_products(raw, v[0], v[1], v[2], v[3], ASM)
    elif FLOAT8:
        return raw.to(tl.float32) * v[0]
    elif FORM == 8:
        raw = raw ^ -0x7F7F7F80  # 128 + q of each byte
        n0, n1 = _number(raw << 15, 0x7F8000, ASM), _number(raw << 7, 0x7F8000, ASM)
        n2, n3 = _number(raw >> 1, 0x7F8000, ASM), _number(raw >> 9, 0x7F8000, ASM)
        return n0 * v[0] + (n1 * v[1] + (n2 * v[2] + (n3 * v[3] + v[4])))
    else:
        s = _spread(s, BN, SOME, GROUP // 8)
        z = _spread(z, BN, SOME, GROUP // 8) if ZERO else 8.0
        return s * (code_products(raw, v[0], v[1], v[2], v[3], ASM) - z * v[4])


@triton.jit
def _weights(weight, scale, zero, on, k, there, WIDE: tl.constexpr, W: tl.constexpr, SOME: tl.constexpr,
             SN: tl.constexpr, SG: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr,
             GROUP: tl.constexpr, ZERO: tl.constexpr):  # fmt: skip
    """Return elements [BN, W] of the weight's rows ``on`` < ``there`` from input k on, and scales and zero points [BN,
    SOME].

    A row has WIDE elements.  8 bits have one scale per row, [BN].
    """
    first, og = k // UNIT, tl.arange(0, SOME)
    word = first + tl.arange(0, W)
    at = weight + on.to(tl.int64)[:, None] * WIDE + word[None, :]
    keep = (on < there)[:, None] & (word < WIDE)[None, :]
    raw = tl.load(at, mask=keep, other=0.0 if UNIT == 1 else 0, eviction_policy="evict_first")
    if FORM == 4:
        at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
        keep = (on < there)[:, None] & (k + og * GROUP < K)[None, :]
        s = tl.load(scale + at, mask=keep, other=0.0)
        z = tl.load(zero + at, mask=keep, other=0.0) if ZERO else s
    else:
        s = tl.load(scale + on, mask=on < there, other=0.0)
        z = s
    return raw, s, z


@triton.jit
def _both_added(a, b, c, d):
    return a + c, b + d


@triton.jit
def _steps(most, TOP: tl.constexpr, FORM: tl.constexpr):
    """Return the factor for the sums of a row whose largest element is ``most``, and its inverse or a part of it."""
    if FORM == 4:
        return power_of(most)
    else:
        return step_of(most, TOP)


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
def _stored(acc, up, s, up_s, beside, on, factor, y, bias, residual, N: tl.constexpr, MODE: tl.constexpr,
            BIAS: tl.constexpr, ACT: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """Apply the epilogue to the sums [BN] of outputs ``on`` and store the result, as ``products._finish``.

    Return the squares of the residual stream, or with a gate ``size_of`` the output, [BN].
    """
    ok = on < N
    acc, up = acc * factor, up * factor
    if FORM == 4:
        acc, up = acc * UNITS, up * UNITS
    else:
        acc, up = acc * s, up * up_s
    if BIAS:
        acc += tl.load(bias + on, mask=ok, other=0.0).to(tl.float32)
        if MODE == 1:
            up += tl.load(bias + N + on, mask=ok, other=0.0).to(tl.float32)
    partials = on * 0
    if MODE == 1:
        gate = acc.to(y.dtype.element_ty).to(tl.float32)
        acc = activate(gate, ACT) * up.to(y.dtype.element_ty).to(tl.float32)
        partials = tl.where(ok, size_of(acc.to(y.dtype.element_ty).to(tl.float32)), 0)
    if MODE == 2:
        # Round as two kernels would, first the product, then the sum. The squares are those of the rounded sum.
        stream = (acc.to(y.dtype.element_ty) + beside[0]).to(y.dtype.element_ty)
        tl.store(residual + on, stream, mask=ok)
        acc = stream.to(tl.float32)
        partials = tl.where(ok, acc * acc, 0.0)
        acc = acc * beside[1]
    tl.store(y + on, acc.to(y.dtype.element_ty), mask=ok)
    return partials


@triton.jit
def _factors(by_row, in_squares, eps, K: tl.constexpr, BY_ROW: tl.constexpr, PARTS: tl.constexpr,
             PARTS_P: tl.constexpr, FORM: tl.constexpr, FLOAT8: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Return the factor of all sums of the row.

    It combines the row's scale, the division by the last norm, and the units of the products of integer words and of
    ``quant_eights.pair_of``.
    """
    factor = 1.0
    if FORM == 8:
        factor = 2.0 if not FLOAT8 else 16.0 if UNIT == 8 else 1.0
    if BY_ROW:
        factor *= tl.load(by_row)
    if PARTS > 0:
        op = tl.arange(0, PARTS_P)
        factor *= tl.rsqrt(tl.sum(tl.load(in_squares + op, mask=op < PARTS, other=0.0), 0) / K + eps)
    return factor


@triton.jit
def _largest(x, tops, K: tl.constexpr, STEP: tl.constexpr, TOPS: tl.constexpr, TOPS_P: tl.constexpr):
    """Return the largest ``size_of`` of the elements of x [K].  It is the largest of ``tops`` [TOPS] if TOPS > 0."""
    if TOPS > 0:
        at = tl.arange(0, TOPS_P)
        most = tl.load(tops + at, mask=at < TOPS, other=0)
    else:
        at = tl.arange(0, STEP)
        most = tl.zeros([STEP], tl.int32)
        for k in tl.static_range(0, K, STEP):
            most = tl.maximum(most, size_of(tl.load(x + k + at, mask=k + at < K, other=0.0).to(tl.float32)))
    return tl.max(most, 0)


@kernel()
def _short(
    x, wide_x, weight, scale, zero, tops, by_row, y, bias, residual, norm, in_squares, out, eps,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr, FORM: tl.constexpr,
    FLOAT8: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TOP: tl.constexpr,
    TOPS: tl.constexpr, TOPS_P: tl.constexpr, BY_ROW: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    MODE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, P: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x [K] by the weight, for few inputs.

    ``wide_x`` is x as int64 [K / 4], with four inputs per element.  The weight, with GATED [2 N, ...], has elements of
    UNIT inputs, which are int32 words, float8, or int64 of eight float8.  ``out`` [P] receives the combined result of
    ``_stored`` of each program.  KP is a power of two of at least K.  With STAGES 0 the weights of the next tile are
    loaded to registers, otherwise STAGES tiles at a time to shared memory.
    """
    program = tl.program_id(0)
    wide: tl.constexpr = K // UNIT
    width: tl.constexpr = KP // UNIT
    some: tl.constexpr = KP // GROUP if FORM == 4 else 1
    oi = tl.arange(0, BN)
    if STAGES == 0:
        on = program * BN + oi
        raw, s, z = _weights(weight, scale, zero, on, 0, N, wide, width, some, SN, SG, K, FORM, UNIT, GROUP, ZERO)
        up_raw, up_s, up_z = raw, s, z
        if MODE == 1:
            up_raw, up_s, up_z = _weights(weight, scale, zero, tl.where(on < N, on + N, 2 * N), 0, 2 * N, wide, width,
                                          some, SN, SG, K, FORM, UNIT, GROUP, ZERO)  # fmt: skip
    wait(PDL)
    step, inverse = 1.0, 1.0
    factor = _factors(by_row, in_squares, eps, K, BY_ROW, PARTS, PARTS_P, FORM, FLOAT8, UNIT)
    if TOP > 0 or FORM == 4:
        step, inverse = _steps(_largest(x, tops, K, KP, TOPS, TOPS_P), TOP, FORM)
        factor *= step
    word = tl.arange(0, width)
    v = _inputs(x, wide_x, _place(word, UNIT, FORM), word < wide, step, inverse, y, FORM, FLOAT8, UNIT, TOP,
                ASM)  # fmt: skip
    partials = tl.zeros([BN], tl.float32 if MODE == 2 else tl.int32)
    for tile in tl.range(program, (N + BN - 1) // BN, P, num_stages=STAGES if STAGES > 0 else 1):
        on = tile * BN + oi
        ahead = on
        if STAGES == 0:
            now, now_s, now_z, up, now_us, now_uz = raw, s, z, up_raw, up_s, up_z
            ahead = on + P * BN
        raw, s, z = _weights(weight, scale, zero, ahead, 0, N, wide, width, some, SN, SG, K, FORM, UNIT, GROUP, ZERO)
        up_raw, up_s, up_z = raw, s, z
        if MODE == 1:
            up_raw, up_s, up_z = _weights(weight, scale, zero, tl.where(ahead < N, ahead + N, 2 * N), 0, 2 * N, wide,
                                          width, some, SN, SG, K, FORM, UNIT, GROUP, ZERO)  # fmt: skip
        if STAGES > 0:
            now, now_s, now_z, up, now_us, now_uz = raw, s, z, up_raw, up_s, up_z
        beside = _beside(residual, norm, on, N, MODE)
        each = _products(now, now_s, now_z, v, BN, some, FORM, FLOAT8, UNIT, GROUP, ZERO, ASM)
        if MODE == 1:
            other = _products(up, now_us, now_uz, v, BN, some, FORM, FLOAT8, UNIT, GROUP, ZERO, ASM)
            # one reduction for both sums, so that the program waits for its warps once
            acc, gated = tl.reduce((each, other), 1, _both_added)
        else:
            acc = tl.sum(each, 1)
            gated = acc
        of = _stored(acc, gated, now_s, now_us, beside, on, factor, y, bias, residual, N, MODE, BIAS, ACT, FORM)
        partials = partials + of if MODE == 2 else tl.maximum(partials, of)
    if MODE == 1:
        tl.store(out + program, tl.max(partials, 0))
    if MODE == 2:
        tl.store(out + program, tl.sum(partials, 0))


@kernel()
def _long(
    x, wide_x, weight, scale, zero, tops, by_row, y, bias, residual, norm, in_squares, out, eps,
    N: tl.constexpr, K: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr, FORM: tl.constexpr, FLOAT8: tl.constexpr,
    UNIT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TOP: tl.constexpr, TOPS: tl.constexpr,
    TOPS_P: tl.constexpr,
    BY_ROW: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x [K] by the weight as ``_short``, for many inputs.

    With STAGES 0 the weights of the next inputs are loaded to registers, otherwise to shared memory.
    """
    tile = tl.program_id(0)
    on = tile * BN + tl.arange(0, BN)
    upper = tl.where(on < N, on + N, 2 * N)
    wide: tl.constexpr = K // UNIT
    width: tl.constexpr = BK // UNIT
    some: tl.constexpr = BK // GROUP if FORM == 4 else 1
    word = tl.arange(0, width)
    at = _place(word, UNIT, FORM)
    if STAGES == 0:
        raw, s, z = _weights(weight, scale, zero, on, 0, N, wide, width, some, SN, SG, K, FORM, UNIT, GROUP, ZERO)
        up_raw, up_s, up_z = raw, s, z
        if MODE == 1:
            up_raw, up_s, up_z = _weights(weight, scale, zero, upper, 0, 2 * N, wide, width, some, SN, SG, K, FORM,
                                          UNIT, GROUP, ZERO)  # fmt: skip
    wait(PDL)
    step, inverse = 1.0, 1.0
    factor = _factors(by_row, in_squares, eps, K, BY_ROW, PARTS, PARTS_P, FORM, FLOAT8, UNIT)
    if TOP > 0 or FORM == 4:
        step, inverse = _steps(_largest(x, tops, K, BK, TOPS, TOPS_P), TOP, FORM)
        factor *= step
    by, up_by = 1.0, 1.0
    if FORM == 8:
        by = tl.load(scale + on, mask=on < N, other=0.0)
        up_by = by
        if MODE == 1:
            up_by = tl.load(scale + upper, mask=on < N, other=0.0)
    beside = _beside(residual, norm, on, N, MODE)
    acc = tl.zeros([BN, width], tl.float32)
    gated = acc
    for k in tl.range(0, K, BK, num_stages=STAGES if STAGES > 0 else 1):
        ahead = k
        if STAGES == 0:
            now, now_s, now_z, up, now_us, now_uz = raw, s, z, up_raw, up_s, up_z
            ahead = k + BK
        raw, s, z = _weights(weight, scale, zero, on, ahead, N, wide, width, some, SN, SG, K, FORM, UNIT, GROUP,
                             ZERO)  # fmt: skip
        up_raw, up_s, up_z = raw, s, z
        if MODE == 1:
            up_raw, up_s, up_z = _weights(weight, scale, zero, upper, ahead, 2 * N, wide, width, some, SN, SG, K, FORM,
                                          UNIT, GROUP, ZERO)  # fmt: skip
        if STAGES > 0:
            now, now_s, now_z, up, now_us, now_uz = raw, s, z, up_raw, up_s, up_z
        first = k if UNIT == 1 else k // 4
        v = _inputs(x, wide_x, first + at, k // UNIT + word < wide, step, inverse, y, FORM, FLOAT8, UNIT, TOP, ASM)
        acc += _products(now, now_s, now_z, v, BN, some, FORM, FLOAT8, UNIT, GROUP, ZERO, ASM)
        if MODE == 1:
            gated += _products(up, now_us, now_uz, v, BN, some, FORM, FLOAT8, UNIT, GROUP, ZERO, ASM)
    partials = _stored(tl.sum(acc, 1), tl.sum(gated, 1), by, up_by, beside, on, factor, y, bias, residual, N, MODE,
                       BIAS, ACT, FORM)  # fmt: skip
    if MODE == 1:
        tl.store(out + tile, tl.max(partials, 0))
    if MODE == 2:
        tl.store(out + tile, tl.sum(partials, 0))


def short_tile(of: Quantized, gated: bool, unit: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_layer.py for 4,096 inputs.  For fewer inputs, programs have more
    outputs.

    Tiles of 8 bits read as words or eights were measured on an H100, others on an H200, and tiles of 4 bits in steps of
    an engine (docs/performance.md).  EACH is the number of programs per multiprocessor.  With a gate it is as many as
    fit, since otherwise some multiprocessors would run more programs than others.
    """
    warps = 4
    if of.form == 4:
        many = of.group == 128 or (of.group == 64 and of.zero is None)  # fewer scales in registers
        bn, each, stages = (4, 4 if many else 3, 0) if gated else (8, 3, 0)
    elif unit == 1:
        bn, each, stages = (2, 6, 3) if gated else (4, 6, 2)
    elif gated or unit == 8:
        bn, each, stages, warps = (4 if gated else 8), 2, 0, 8
    else:
        bn, each, stages = 4, 4, 0
    bn *= max(1, SHORT // max(triton.next_power_of_2(of.k), 256))
    return dict(BN=min(bn, 32), EACH=each, STAGES=stages, num_warps=warps)


def long_tile(of: Quantized, gated: bool, unit: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_layer.py for 14,336 inputs."""
    if of.form == 4:
        bn, bk, stages, warps = 16, 2048, 3, 8
    else:
        bn, bk, stages, warps = (8, 1024, 3, 4) if unit == 1 else (8, 2048, 0, 4)
    return dict(BN=bn // 2 if gated else bn, BK=bk, STAGES=stages, num_warps=warps)


class VectorProduct(Surrounded):
    """A product with a weight of 8 or 4 bits for one row."""

    @property
    def by_largest(self) -> bool:
        """Return whether the kernel needs the largest element of x."""
        return self.rounded is not None or self.of.form == 4

    def fits(self, x: Tensor) -> bool:
        """Return whether the kernel supports x.

        float16 is excluded, because the residual stream times the norm's weight, before the division, may overflow it.
        """
        taken = self.float8 or takes(x, self.of.weight, self.k)
        fast = self.of.table is None and capability(x.device) >= 9
        return len(x) == 1 and x.dtype == torch.bfloat16 and x.is_contiguous() and fast and taken

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tile: dict[str, int] | None = None,
        tops: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the product as ``products.Product``, for x [1, K].

        With a gate, the second result is int32 [1, P], the bits of the largest elements of the output's parts.  A
        caller may pass them as ``tops`` of x.
        """
        of, by_row, short = self.of, None, self.k <= SHORT
        tops = tops if self.by_largest else None
        if self.rounded is not None and tops is None and not short:
            x, by_row = rows(x, self.rounded, x.dtype)
        unit, weight = self.elements(x)
        tile = dict(tile or (short_tile if short else long_tile)(of, self.mode == GATED, unit))
        programs = triton.cdiv(self.n, tile["BN"])
        if short:
            programs = min(programs, tile.pop("EACH") * multiprocessors(x.device))
            tile["P"] = programs
            tile["KP"] = max(triton.next_power_of_2(self.k), 256, of.group if of.form == 4 else 0)
        y, partials, around, constants = self.given(x, by_row, squares, eps, residual, norm, programs)
        run = _short if short else _long
        run[(programs,)](
            x,
            x if unit == 1 else x.view(torch.int64),
            weight,
            of.scale,
            of.scale if of.zero is None else of.zero,
            x if tops is None else tops,
            *around,
            TOP=0.0 if self.rounded is None or by_row is not None else TOP[self.rounded],
            TOPS=0 if tops is None else tops.shape[1],
            TOPS_P=1 if tops is None else triton.next_power_of_2(tops.shape[1]),
            UNIT=unit,
            ASM=capability(x.device) >= 8,
            **constants,
            **{**of._sizes, "N": self.n},
            **tile,
            **pdl(x),
        )
        return y, partials

    def elements(self, x: Tensor) -> tuple[int, Tensor]:
        """Return the number of inputs in an element of the weight, and the weight viewed as such elements."""
        weight = self.of.weight
        if not self.float8:
            return 32 // self.of.form, weight.view(torch.int32)
        lies = self.k % 8 == 0 and x.data_ptr() % 8 == 0 and weight.data_ptr() % 8 == 0
        return (8, weight.view(torch.int64)) if self.rounded is not None and lies else (1, weight)

    def partials(self, rows: int, parts: int, device: torch.device) -> Tensor | None:
        """Allocate the second result [rows, parts], for sums of squares or with a gate for bits of largest elements."""
        if self.mode == PLAIN:
            return None
        return torch.empty((rows, parts), dtype=torch.int32 if self.mode == GATED else torch.float32, device=device)
