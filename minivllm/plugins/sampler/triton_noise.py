"""Compute noise in kernels, with the hash of ``device.worker.sampling.gumbel`` bit for bit.

A lane takes about 30 instructions, two of them logarithms, which is longer than loading its logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minivllm.device.worker.sampling import FOLD_A, FOLD_B, INIT, MIX_1, MIX_2

_INIT, _A, _B, _M1, _M2 = (tl.constexpr(x) for x in (INIT, FOLD_A, FOLD_B, MIX_1, MIX_2))


@triton.jit
def row_keys(seed, position, sample):
    """Return a hash of seed, position and sample of a row as two 32-bit words, from which its noise is made.

    It equals ``device.worker.sampling.noise_bits``.
    """
    a = tl.full((), _INIT, tl.uint32)
    b = tl.full((), 0, tl.uint32)
    for i in tl.static_range(4):
        if i == 0:
            word = seed.to(tl.uint32)
        elif i == 1:
            word = (seed >> 32).to(tl.uint32)
        elif i == 2:
            word = position.to(tl.uint32)
        else:
            word = sample.to(tl.uint32)
        a = (a ^ word) * tl.full((), _A, tl.uint32)
        a = a ^ (a >> 16)
        b = (b + a) * tl.full((), _B, tl.uint32)
    return a, b ^ (b >> 15)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Return the binary logarithm, by the special function unit (22 bits) if the device has one."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def gumbel_noise(a, b, lane, FAST: tl.constexpr):
    """Return standard Gumbel noise float32 of unsigned 32-bit lanes."""
    x = lane * tl.full((), _INIT, tl.uint32)
    x = (x ^ (x >> 15)) ^ a
    x = (x ^ (x >> 16)) * tl.full((), _M1, tl.uint32) + b
    x = (x ^ (x >> 15)) * tl.full((), _M2, tl.uint32)
    x = x ^ (x >> 16)
    # uniform in (0, 1): (bits + 1/2) / 2 ** 31
    u = tl.fma((x & 0x7FFFFFFF).to(tl.float32), 4.656612873077393e-10, 2.3283064365386963e-10)
    u = tl.minimum(u, 0.99999994)
    # -log(-log1p(-u)) with both logarithms in base 2. The inner factor 1 / ln 2 becomes a constant outside. For small
    # u, where the result is large, a series keeps the digits that 1 - u would lose.
    e = tl.where(u < 0.00390625, u * tl.fma(u, tl.fma(u, 0.48089835, 0.7213475), 1.442695), -_log2(1.0 - u, FAST))
    return tl.fma(_log2(e, FAST), -0.6931471805599453, 0.36651292)
