"""Log-probabilities of the chosen token and of the k best tokens, without a float32 copy of the logits or a sort.

    _parts   grid (N, tiles)   the largest logit of each tile, the sum of exp, the number of logits above the chosen
                               one; for each group of lanes the largest logit
    _total   grid (N,)         combines the tiles
    _best    grid (N,)         finds the k best in the k groups with the largest maxima, the first among equal ones

The k best logits are in these groups, because each of the groups holds a logit that ranks before all logits of the
other groups.  k is the largest that a row of the step needs.  The bits of a row must not depend on it, so all values
are computed by kernels with one variant for all k.

The logits are read once, and k groups of a few hundred bytes again.  256 x 151,936 logits in bfloat16 are 78 MB and
take 18 us.  The reference is ``device.worker.sampling.logprobs_of``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from .launch import cdiv, kernel, pdl, power, wait
from .peaks import TILE

MOST = 32  # largest number k of best tokens that the kernels find
GROUPS = 2048  # largest number of groups into which the logits of a row are divided


@kernel("chosen", "k")
def _parts(
    logits, chosen, part, top, stride, V, k,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
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
    # float32 counts exactly, because the count is at most TILE
    tl.store(out + 2, tl.sum((x > value).to(tl.int32), 0).to(tl.float32))
    if k > 0:
        groups: tl.constexpr = TILE // GROUP
        highest = tl.max(tl.reshape(x, (groups, GROUP)), 1)
        tl.store(top + (row * TILES + tile) * groups + tl.arange(0, groups), highest)


@kernel("chosen")
def _total(
    logits, chosen, part, total, value, rank, stride, TILES: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, P)
    here = part + (row * TILES + at) * 3
    peaks = tl.load(here, mask=at < TILES, other=float("-inf"))
    peak = tl.max(peaks, 0)
    share = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak))
    whole = peak + tl.log(tl.sum(tl.load(here + 1, mask=at < TILES, other=0.0) * share, 0))
    larger = tl.sum(tl.load(here + 2, mask=at < TILES, other=0.0).to(tl.int32), 0)
    score = tl.load(logits + row.to(tl.int64) * stride + tl.load(chosen + row)).to(tl.float32)
    tl.store(total + row, whole)
    tl.store(value + row, score - whole)
    tl.store(rank + row, larger + 1)


@kernel("total", "k")
def _best(
    logits, top, total, ids, best, stride, V, k,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    whole = tl.load(total + row)
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
        tl.store(best + row * k + i, m - whole)


def logprobs_of(
    logits: Tensor, chosen: Tensor, topk: int, best_of: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``device.worker.sampling.logprobs_of`` with the same order.

    ``best_of`` of that module finds the best tokens if there are more than MOST. The log-probabilities have the same
    bits in both cases.
    """
    n, width = logits.shape
    k = min(max(topk, 0), width)
    few = k if k <= MOST else 0
    tiles = cdiv(width, TILE)
    columns = power(cdiv(width, GROUPS))
    group = max(16, columns)
    groups = tiles * (TILE // group)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    part = make(n, tiles, 3)
    top = make(n, groups)
    total = make(n)
    value = make(n)
    rank = make(n, dtype=torch.int32)
    stride = logits.stride(0)
    sizes = {"TILE": TILE, "TILES": tiles, "GROUP": group}
    _parts[(n, tiles)](logits, chosen, part, top, stride, width, few, num_warps=8, **sizes, **pdl(logits))
    constants = pdl(logits)
    constants["TILES"] = tiles
    constants["P"] = power(tiles)
    constants["num_warps"] = 1
    _total[(n,)](logits, chosen, part, total, value, rank, stride, **constants)
    if k > MOST:
        best, found = best_of(logits, k)
        return value, rank, found.to(torch.int32), best - total[:, None]
    ids = make(n, k, dtype=torch.int32)
    best = make(n, k)
    if k:
        _launch_best(logits, top, total, ids, best, group)
    return value, rank, ids, best


def _launch_best(logits: Tensor, top: Tensor, total: Tensor, ids: Tensor, best: Tensor, group: int) -> None:
    """Launch the kernel ``_best``; ``top`` f32 [N, groups] has the largest logit of each ``group`` columns."""
    n, width = logits.shape
    k = ids.shape[1]
    groups = top.shape[1]
    constants = pdl(logits)
    constants["GROUP"] = group
    constants["GROUPS"] = groups
    constants["G"] = power(groups)
    constants["K"] = power(k)
    constants["num_warps"] = 8
    stride = logits.stride(0)
    _best[(n,)](logits, top, total, ids, best, stride, width, k, **constants)
