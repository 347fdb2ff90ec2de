"""What kernels that draw have in common: the largest logit of each tile of the vocabulary, and the noise.

    _best           grid (N, tiles): reads the logits once, writes 4 bytes a tile
    row_keys        two words of key a row, once a program
    gumbel_noise    about 30 instructions a lane, two of them logarithms: more than its logit takes to come from memory

The noise is ``core.sampling.gumbel``, bit for bit in its hash.  References: ``Tensor.amax``, ``core.sampling.gumbel``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.sampling import FOLD_A, FOLD_B, INIT, MIX_1, MIX_2

from .launch import pdl, wait

TILE = 4096
_INIT, _A, _B, _M1, _M2 = (tl.constexpr(x) for x in (INIT, FOLD_A, FOLD_B, MIX_1, MIX_2))


@triton.jit
def _best(logits, best, stride, V, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    bad = tl.max((x != x).to(tl.int32), 0) != 0  # max skips NaN
    tl.store(best + row * TILES + tile, tl.where(bad, float("nan"), peak))


@triton.jit
def row_keys(seed, position, sample):
    """Two 32-bit words of a row; see ``core.sampling.noise_bits``."""
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
    """The special function unit's logarithm (22 bits) where there is one."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def gumbel_noise(a, b, lane, FAST: tl.constexpr):
    """Standard Gumbel noise float32 of unsigned 32-bit lanes."""
    x = lane * tl.full((), _INIT, tl.uint32)
    x = (x ^ (x >> 15)) ^ a
    x = (x ^ (x >> 16)) * tl.full((), _M1, tl.uint32) + b
    x = (x ^ (x >> 15)) * tl.full((), _M2, tl.uint32)
    x = x ^ (x >> 16)
    u = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    u = tl.minimum(u, 0.99999994)
    # -log(-log1p(-u)); small u, which give the large values, keep by a series what 1 - u would round away
    e = tl.where(u < 0.00390625, u + u * u * (0.5 + u * 0.33333334), -0.6931471805599453 * _log2(1.0 - u, FAST))
    return -0.6931471805599453 * _log2(e, FAST)


def best_of_tiles(logits: Tensor) -> Tensor:
    """The largest logit of each tile, float32 [N, tiles], NaN where a tile holds one; logits [N, V] of any dtype."""
    n, width = logits.shape
    tiles = triton.cdiv(width, TILE)
    best = torch.empty(n, tiles, dtype=torch.float32, device=logits.device)
    _best[(n, tiles)](logits, best, logits.stride(0), width, TILE=TILE, TILES=tiles, num_warps=8, **pdl(logits))
    return best
