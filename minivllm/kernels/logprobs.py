"""Log-probabilities of the chosen token and of the k best, without a float32 copy of the logits or a sort.

    _parts   grid (N, tiles)   of each tile: largest logit, sum of exp, how many exceed the chosen one's; the largest of
                               each group of lanes
    _join    grid (N,)         joins the tiles; the k best are in the k groups whose largest logits are the best (of
                               equal ones the first), because each of these holds a logit that ranks before all others'

Bytes: the logits once, k groups of a few hundred bytes.  At 256 x 151,936 in bfloat16: 78 MB, 18 us.
Reference: ``core.sampling.logprobs_of``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel, pdl, wait
from .peaks import TILE

MOST = 32  # of the best that the kernels give
GROUPS = 2048  # of lanes in a row, at most


@kernel("chosen")
def _parts(
    logits, chosen, part, top, stride, V,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    base = logits + row.to(tl.int64) * stride
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32)
    value = tl.load(base + tl.load(chosen + row)).to(tl.float32)
    best = tl.max(x, 0)
    e = tl.where(x == float("-inf"), 0.0, tl.exp(x - best))
    out = part + (row * TILES + tile) * 3
    tl.store(out, best)
    tl.store(out + 1, tl.sum(e, 0))
    tl.store(out + 2, tl.sum((x > value).to(tl.int32), 0).to(tl.float32))  # at most TILE: exact
    if TOP:
        groups: tl.constexpr = TILE // GROUP
        highest = tl.max(tl.reshape(x, (groups, GROUP)), 1)
        tl.store(top + (row * TILES + tile) * groups + tl.arange(0, groups), highest)


@kernel("chosen", "k")
def _join(
    logits, chosen, part, top, value, rank, ids, best, stride, V, k,
    TILES: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    at = tl.arange(0, P)
    here = part + (row * TILES + at) * 3
    peaks = tl.load(here, mask=at < TILES, other=float("-inf"))
    peak = tl.max(peaks, 0)
    share = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak))
    total = peak + tl.log(tl.sum(tl.load(here + 1, mask=at < TILES, other=0.0) * share, 0))
    larger = tl.sum(tl.load(here + 2, mask=at < TILES, other=0.0).to(tl.int32), 0)
    tl.store(value + row, tl.load(base + tl.load(chosen + row)).to(tl.float32) - total)
    tl.store(rank + row, larger + 1)
    if K > 0:
        of, slot = tl.arange(0, G), tl.arange(0, K)
        highest = tl.load(top + row * GROUPS + of, mask=of < GROUPS, other=float("-inf"))
        free = of < tl.cdiv(V, GROUP)
        picked = tl.zeros((K,), tl.int32)
        for i in range(k):
            m = tl.max(tl.where(free, highest, float("-inf")), 0)
            g = tl.min(tl.where(free & (highest == m), of, G - 1), 0)
            picked = tl.where(slot == i, g, picked)
            free = free & (of != g)
        column = picked[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        left = (column < V) & (slot < k)[:, None]
        x = tl.load(base + column, mask=left, other=float("-inf")).to(tl.float32)
        for i in range(k):
            m = tl.max(tl.max(tl.where(left, x, float("-inf")), 1), 0)
            c = tl.min(tl.min(tl.where(left & (x == m), column, 2147483647), 1), 0)
            left = left & (column != c)
            tl.store(ids + row * k + i, tl.minimum(c, V - 1))
            tl.store(best + row * k + i, m - total)


def logprobs_of(logits: Tensor, chosen: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``core.sampling.logprobs_of``; ``topk`` at most MOST.  Of equal logits the first come first."""
    n, width = logits.shape
    k = min(max(topk, 0), width)
    if k > MOST:
        raise ValueError(f"logprobs of the {k} best tokens: want at most {MOST} of these kernels")
    tiles = triton.cdiv(width, TILE)
    group = max(16, triton.next_power_of_2(triton.cdiv(width, GROUPS)))
    groups = tiles * (TILE // group)
    make = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=logits.device)  # noqa: E731
    part, top = make(n, tiles, 3), make(n, groups if k else 1)
    value, rank, ids, best = make(n), make(n, dtype=torch.int32), make(n, k, dtype=torch.int32), make(n, k)
    _parts[(n, tiles)](
        logits, chosen, part, top, logits.stride(0), width,
        TILE=TILE, TILES=tiles, GROUP=group, TOP=k > 0, num_warps=8, **pdl(logits),
    )  # fmt: skip
    _join[(n,)](
        logits, chosen, part, top, value, rank, ids, best, logits.stride(0), width, k,
        TILES=tiles, P=triton.next_power_of_2(tiles), GROUP=group, GROUPS=groups, G=triton.next_power_of_2(groups),
        K=triton.next_power_of_2(k) if k else 0, num_warps=8 if k else 1, **pdl(logits),
    )  # fmt: skip
    return value, rank, ids, best
