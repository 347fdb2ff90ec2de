"""One row times a weight of 8 or 4 bits, and what surrounds it, in one kernel: ``products`` without matrix units.

    grid (N / BN)     a program sums BN outputs over all inputs, BK at a time; the first of its weights is asked for
                      before the kernel in front has ended, so that the memory is never without work between two

Weights of whole numbers are read by words (``quant_words``), float8 an element at a time.  ``TOP``: x is rounded to 8
bits by its largest element, as ``scaled.rows`` does it; every program does that for itself, which takes less than a
kernel of its own up to ``OWN`` inputs.  Sums are float32, in an order that goes by the shapes alone.  Two rows are
possible and not faster than by the kernels one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import capability, kernel, pdl, wait
from .products import GATED, _finish
from .quant import Quantized
from .quant_around import Surrounded
from .quant_words import _number, _spread, _values, takes
from .scaled import TOP, rows

ROWS = 1  # up to which it is the fastest
OWN = 8192
SHORT = 4096  # inputs that a program has in registers at once


@triton.jit
def _rounded(v, step, inverse, WHOLE: tl.constexpr):
    """The nearest multiple of ``step`` that int8 (WHOLE) or float8 has, in steps: v / step is rounded once, as a
    division is."""
    r = v * inverse
    r = tl.fma(tl.fma(-r, step, v), inverse, r)
    if WHOLE:
        r = (r + 12582912.0) - 12582912.0  # the nearest whole number, of two the even one
    else:
        r = r.to(tl.float8e4nv).to(tl.float32)
    return r


@triton.jit
def _step(x, row, K: tl.constexpr, KP: tl.constexpr, TOP: tl.constexpr):
    """(the largest element of a row of x / TOP, its inverse)."""
    at = tl.arange(0, KP)
    most = tl.max(tl.abs(tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)), 0)
    step = tl.where(most > 1e-30, tl.div_rn(most, TOP), 1.0)  # the inverse of a smaller one is no number
    return step, tl.div_rn(1.0, step)


@triton.jit
def _fours(x, at, on, step, inverse, like, TOP: tl.constexpr):
    """Four neighbouring inputs of a row, each float32 [1, W], and their sum."""
    v0, v1, v2, v3 = _values(tl.load(x + at, mask=on, other=0), like)
    if TOP > 0:
        v0, v1 = _rounded(v0, step, inverse, True), _rounded(v1, step, inverse, True)
        v2, v3 = _rounded(v2, step, inverse, True), _rounded(v3, step, inverse, True)
    return v0, v1, v2, v3, (v0 + v1) + (v2 + v3)


@triton.jit
def _inputs(x, wide, row, at, on, step, inverse, like, K: tl.constexpr, FORM: tl.constexpr, FLOAT8: tl.constexpr,
            TOP: tl.constexpr):  # fmt: skip
    """What a row of x is multiplied by: 8 values, and two sums, of which a form uses its own."""
    if FLOAT8:
        v0 = tl.load(x + row * K + at, mask=on, other=0.0).to(tl.float32)
        if TOP > 0:
            v0 = _rounded(v0, step, inverse, False)
        v0 = v0[None, :]
        return v0, v0, v0, v0, v0, v0, v0, v0, v0, v0
    else:
        v0, v1, v2, v3, low = _fours(wide + row * (K // 4), at, on, step, inverse, like, TOP)
        if FORM == 8:
            return v0, v1, v2, v3, v0, v1, v2, v3, -192.0 * low, low
        else:
            u0, u1, u2, u3, high = _fours(wide + row * (K // 4), at + 4, on, step, inverse, like, TOP)
            off = 128.0 * (low + 16.0 * high)
            return v0, v1, v2, v3, 16.0 * u0, 16.0 * u1, 16.0 * u2, 16.0 * u3, off, low + high


@triton.jit
def _numbers(raw, FORM: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr):
    """The numbers of words, or of float8 elements, as ``_inputs`` has what they are multiplied by."""
    if FLOAT8:
        n0 = raw.to(tl.float32)
        return n0, n0, n0, n0, n0, n0, n0, n0
    elif FORM == 8:
        raw = raw ^ -0x7F7F7F80  # 128 + q of each byte
        n0, n1 = _number(raw << 15, 0x7F8000, ASM), _number(raw << 7, 0x7F8000, ASM)
        n2, n3 = _number(raw >> 1, 0x7F8000, ASM), _number(raw >> 9, 0x7F8000, ASM)
        return n0, n1, n2, n3, n0, n1, n2, n3
    else:
        a, b, c, d = raw << 16, raw << 8, raw >> 8, raw >> 16
        n0, n1 = _number(a, 0xF0000, ASM), _number(b, 0xF0000, ASM)
        n2, n3 = _number(raw, 0xF0000, ASM), _number(c, 0xF0000, ASM)
        h0, h1 = _number(b, 0xF000, ASM), _number(raw, 0xF000, ASM)
        h2, h3 = _number(c, 0xF000, ASM), _number(d, 0xF000, ASM)
        return n0, n1, n2, n3, h0, h1, h2, h3


@triton.jit
def _add(acc, n, v, s, z, FORM: tl.constexpr, FLOAT8: tl.constexpr):
    """acc [BN, W] + the products of ``_numbers`` with ``_inputs``."""
    if FLOAT8:
        return acc + n[0] * v[0]
    elif FORM == 8:
        return n[0] * v[0] + (n[1] * v[1] + (n[2] * v[2] + (n[3] * v[3] + (acc + v[8]))))
    else:
        part = n[0] * v[0] + (n[1] * v[1] + (n[2] * v[2] + (n[3] * v[3] - (v[8] + z * v[9]))))
        part = n[4] * v[4] + (n[5] * v[5] + (n[6] * v[6] + (n[7] * v[7] + part)))
        return acc + s * part


@triton.jit
def _weights(weight, on, k, there, wide, word, FORM: tl.constexpr, FLOAT8: tl.constexpr):
    """[BN, W] of the weight's rows ``on``, from input k on."""
    at = weight + on.to(tl.int64)[:, None] * wide + word[None, :]
    first = k if FLOAT8 else k * FORM // 32
    keep = (on < there)[:, None] & (first + word < wide)[None, :]
    return tl.load(at + first, mask=keep, other=0.0 if FLOAT8 else 0, eviction_policy="evict_first")


@triton.jit
def _scales(scale, zero, on, k, there, SN: tl.constexpr, SG: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr,
            GROUP: tl.constexpr, ZERO: tl.constexpr, SOME: tl.constexpr):  # fmt: skip
    """Scales and zero points [BN, SOME] of the groups from input k on; 8 bits have one for all, which comes later."""
    if FORM == 4:
        og = tl.arange(0, SOME)
        at = on[:, None] * SN + (k // GROUP + og)[None, :] * SG
        keep = (on < there)[:, None] & (k + og * GROUP < K)[None, :]
        s = tl.load(scale + at, mask=keep, other=0.0)
        z = s
        if ZERO:
            z = tl.load(zero + at, mask=keep, other=0.0)
        return s, z
    else:
        return 1.0, 0.0


@triton.jit
def _both(a, b, ROWS: tl.constexpr):
    """Sums of one or two rows -> [ROWS, BN]."""
    if ROWS == 1:
        return tl.sum(a, 1)[None, :]
    else:
        return tl.trans(tl.join(tl.sum(a, 1), tl.sum(b, 1)))


@kernel()
def _vector(
    x, wide_x, weight, scale, zero, by_row, y, bias, residual, norm, in_squares, out_squares, eps,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SN: tl.constexpr, SG: tl.constexpr, FORM: tl.constexpr,
    FLOAT8: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TOP: tl.constexpr, BY_ROW: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [ROWS, K], ``wide_x`` the same as int64 [ROWS, K / 4] of four inputs an element; weight int32 words, or float8
    elements (GATED: [2 N, ...]); BY_ROW: sums of a row are multiplied by ``by_row`` [ROWS].  STAGES 0: weights go to
    registers, the first before the wait, each while the one before is multiplied; else a pipelined loop."""
    tile = tl.program_id(0)
    on = tile * BN + tl.arange(0, BN)
    wide: tl.constexpr = K if FLOAT8 else K * FORM // 32
    some: tl.constexpr = BK // GROUP if FORM == 4 else 1
    word = tl.arange(0, BK if FLOAT8 else BK * FORM // 32)
    second = N if MODE == 1 else 0
    if STAGES == 0:
        raw = _weights(weight, on, 0, N, wide, word, FORM, FLOAT8)
        s, z = _scales(scale, zero, on, 0, N, SN, SG, K, FORM, GROUP, ZERO, some)
        up_raw, up_s, up_z = raw, s, z
        if MODE == 1:
            up_raw = _weights(weight, on + second, 0, 2 * N, wide, word, FORM, FLOAT8)
            up_s, up_z = _scales(scale, zero, on + second, 0, 2 * N, SN, SG, K, FORM, GROUP, ZERO, some)
    wait(PDL)
    step0, inverse0, step1, inverse1 = 1.0, 1.0, 1.0, 1.0
    if TOP > 0:
        step0, inverse0 = _step(x, 0, K, KP, TOP)
        if ROWS > 1:
            step1, inverse1 = _step(x, 1, K, KP, TOP)
    fours = word
    if FORM == 4:
        fours = word // 4 * 8 + word % 4
    a0 = tl.zeros([BN, BK if FLOAT8 else BK * FORM // 32], tl.float32)
    a1, b0, b1 = a0, a0, a0
    for k in tl.range(0, K, BK, num_stages=STAGES if STAGES > 0 else 1):
        if STAGES > 0:
            now = _weights(weight, on, k, N, wide, word, FORM, FLOAT8)
            now_s, now_z = _scales(scale, zero, on, k, N, SN, SG, K, FORM, GROUP, ZERO, some)
            up, now_us, now_uz = now, now_s, now_z
            if MODE == 1:
                up = _weights(weight, on + second, k, 2 * N, wide, word, FORM, FLOAT8)
                now_us, now_uz = _scales(scale, zero, on + second, k, 2 * N, SN, SG, K, FORM, GROUP, ZERO, some)
        else:
            now, now_s, now_z, up, now_us, now_uz = raw, s, z, up_raw, up_s, up_z
            if K > BK:
                raw = _weights(weight, on, k + BK, N, wide, word, FORM, FLOAT8)
                if MODE == 1:
                    up_raw = _weights(weight, on + second, k + BK, 2 * N, wide, word, FORM, FLOAT8)
                if FORM == 4:
                    s, z = _scales(scale, zero, on, k + BK, N, SN, SG, K, FORM, GROUP, ZERO, some)
                    if MODE == 1:
                        up_s, up_z = _scales(
                            scale, zero, on + second, k + BK, 2 * N, SN, SG, K, FORM, GROUP, ZERO, some
                        )
        at = k + fours if FLOAT8 else k // 4 + fours
        on_x = k + word < K if FLOAT8 else k * FORM // 32 + word < wide
        if FORM == 4:
            now_s, now_us = _spread(now_s, BN, some, GROUP // 8), _spread(now_us, BN, some, GROUP // 8)
            if ZERO:
                now_z, now_uz = _spread(now_z, BN, some, GROUP // 8), _spread(now_uz, BN, some, GROUP // 8)
            else:
                now_z, now_uz = 8.0, 8.0
        n = _numbers(now, FORM, FLOAT8, ASM)
        v = _inputs(x, wide_x, 0, at, on_x, step0, inverse0, y, K, FORM, FLOAT8, TOP)
        a0 = _add(a0, n, v, now_s, now_z, FORM, FLOAT8)
        w = v
        if ROWS > 1:
            w = _inputs(x, wide_x, 1, at, on_x, step1, inverse1, y, K, FORM, FLOAT8, TOP)
            a1 = _add(a1, n, w, now_s, now_z, FORM, FLOAT8)
        if MODE == 1:
            n = _numbers(up, FORM, FLOAT8, ASM)
            b0 = _add(b0, n, v, now_us, now_uz, FORM, FLOAT8)
            if ROWS > 1:
                b1 = _add(b1, n, w, now_us, now_uz, FORM, FLOAT8)
    acc, gated = _both(a0, a1, ROWS), _both(b0, b1, ROWS)
    if FORM == 8:
        times: tl.constexpr = 1.0 if FLOAT8 else 2.0
        acc = acc * (times * tl.load(scale + on, mask=on < N, other=0.0))[None, :]
        if MODE == 1:
            gated = gated * (times * tl.load(scale + N + on, mask=on < N, other=0.0))[None, :]
    om = tl.arange(0, ROWS)
    if TOP > 0:
        steps = tl.where(om == 0, step0, step1)[:, None]
        acc, gated = acc * steps, gated * steps
    if BY_ROW:
        steps = tl.load(by_row + om)[:, None]
        acc, gated = acc * steps, gated * steps
    _finish(acc, gated, om, on, tile, y, bias, residual, norm, in_squares, out_squares, eps, ROWS, N, K, PARTS,
            PARTS_P, MODE, BIAS, ACT)  # fmt: skip


def vector_tile(of: Quantized, n: int, gated: bool, rounded: bool) -> dict[str, int]:
    """The fastest of benchmarks/quant_layer.py on an H100, of 4,096 and 14,336 inputs."""
    four, eighth = of.form == 4, of.weight.dtype == torch.float8_e4m3fn
    if of.k > SHORT:
        bn, bk, stages, warps = (16, 2048, 3, 8) if four else (8, 1024, 3, 4) if eighth else (8, 1024, 0, 2)
        return dict(BN=bn // 2 if gated else bn, BK=bk, STAGES=stages, num_warps=warps)
    bk = max(triton.next_power_of_2(of.k), 256, of.group if four else 0)
    bn, warps = 4, 4
    if four:
        bn, warps = (4, 4) if gated else (16, 8 if n <= SHORT else 4)
    elif gated:
        bn, warps = (2, 4) if eighth else (4, 8)
    elif rounded:
        bn, warps = 4, 8
    return dict(BN=min(bn * max(1, SHORT // bk), 32), BK=bk, STAGES=0, num_warps=warps)


class VectorProduct(Surrounded):
    """Of a weight of 8 or 4 bits."""

    def fits(self, x: Tensor) -> bool:
        """Whether to use it for x.  float16 is left out: the stream times the norm's weight, before it is divided, may
        be too large for that."""
        taken = (
            self.of.table is None and capability(x.device) >= 9 and (self.float8 or takes(x, self.of.weight, self.k))
        )
        return 1 <= len(x) <= ROWS and x.dtype == torch.bfloat16 and x.is_contiguous() and taken

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tile: dict[str, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``products.Product``."""
        of, m, by_row = self.of, len(x), None
        if self.rounded is not None and self.k > OWN:
            x, by_row = rows(x, self.rounded, x.dtype)
        own = self.rounded is not None and by_row is None
        tile = tile or vector_tile(of, self.n, self.mode == GATED, own)
        y, sums, around, constants = self.given(x, by_row, squares, eps, residual, norm, tile["BN"])
        sizes = {**of._sizes, "N": self.n}
        _vector[(triton.cdiv(self.n, tile["BN"]),)](
            x,
            x if self.float8 else x.view(torch.int64),
            of.weight if self.float8 else of.weight.view(torch.int32),
            of.scale,
            of.scale if of.zero is None else of.zero,
            *around,
            KP=triton.next_power_of_2(self.k),
            TOP=TOP[self.rounded] if own else 0.0,
            ROWS=m,
            ASM=capability(x.device) >= 8,
            **constants,
            **sizes,
            **tile,
            **pdl(x),
        )
        return y, sums
