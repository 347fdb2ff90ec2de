"""The largest logit of each tile of the vocabulary, for samplers that do not return it.  A NaN gives NaN.

    _best   grid (N, tiles)   reads the logits once, writes 4 bytes a tile

The reference is ``Tensor.amax``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, pdl, wait

TILE = 4096


@triton.jit
def _best(logits, best, stride, V, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    bad = tl.max((x != x).to(tl.int32), 0) != 0  # max skips NaN
    tl.store(best + row * TILES + tile, tl.where(bad, float("nan"), peak))


def best_of_tiles(logits: Tensor) -> Tensor:
    """Return the largest logit of each tile, float32 [N, tiles], NaN for a tile with a NaN; logits are [N, V] of
    any dtype.
    """
    n, width = logits.shape
    tiles = cdiv(width, TILE)
    best = torch.empty(n, tiles, dtype=torch.float32, device=logits.device)
    _best[(n, tiles)](logits, best, logits.stride(0), width, TILE=TILE, TILES=tiles, num_warps=8, **pdl(logits))
    return best
