"""Draw tokens by Gumbel-max in one pass over the logits, without a sort, and share code with the kernels of the limits.

    _first   grid (N, tiles)   compute the peak of each tile, and score and index of its best token,
                               argmax((x - peak) / T + noise).  For rows with top-k, compute maxima of groups instead
    _pick    grid (N,)         join the tiles by score + (peak - row's peak) / T, and set the state of the row

The logits are read once.  At 256 x 151,936 in bfloat16 they have 78 MB and take 18 us; the noise takes longer.  A row
without a limit is done after ``_pick``. For min-p or top-p the token is a *candidate*: if the limits keep it, it is the
best of all tokens that they keep, and so it is the draw (``triton_nucleus``). ``triton_topk`` handles top-k.

One compiled kernel serves all rows, and sums of probability are sums of whole numbers.  The token of a row therefore
depends neither on other rows nor on the dtype of the logits.  The reference is ``DefaultSampler.draw``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, wait

from .triton_noise import gumbel_noise, row_keys

TILE = 4096
GROUPS = 2048  # largest number of groups of columns whose maxima a program holds
# States of a row while its token is drawn: OPEN (its candidate token must be checked), DONE (drawn), WAITS (not begun,
# because it has top-k).
OPEN, DONE, WAITS = (tl.constexpr(i) for i in range(3))


@triton.jit
def load_row(base, at, V):
    """Load logits at the token ids ``at`` as float32, -inf beyond the vocabulary."""
    return tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def load_tile(base, tile, V, TILE: tl.constexpr):
    """Load the logits of a tile as float32.  Only the last tile needs a mask."""
    at = tile * TILE + tl.arange(0, TILE)
    if tile * TILE + TILE <= V:
        x = tl.load(base + at)
    else:
        x = tl.load(base + at, mask=at < V, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def first_best(y, at):
    """Return the largest ``y``, and the smallest of the token ids ``at`` at which it occurs.  It takes fewer
    instructions than a reduction of pairs."""
    best = tl.max(y, 0)
    return best, tl.min(tl.where(y == best, at, 2147483647), 0)


@triton.jit
def scale_of(known, row):
    """Return the largest logit of a row, 1 / T or 0 for greedy, and the least (logit - largest) / T that min-p
    keeps.
    """
    return tl.load(known + row * 8), tl.load(known + row * 8 + 1), tl.load(known + row * 8 + 2)


@triton.jit
def mass_of(rel):
    """Return exp(rel) for rel <= 0 as a whole number int32, in units of 2**-30."""
    return (tl.exp(rel) * 1073741824.0 + 0.5).to(tl.int32)


@kernel("slots", "seed", "position", "sample")
def _first(
    logits, peak, score, index, top, slots, temperature, top_k, seed, position, sample, stride, V,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    tile = tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    x = load_tile(logits + row.to(tl.int64) * stride, tile, V, TILE)
    highest = tl.max(tl.where(x == x, x, float("inf")), 0)  # inf means that the tile has a NaN
    tl.store(peak + row * TILES + tile, highest)
    slot = tl.load(slots + row)
    if tl.load(top_k + slot) > 0:
        group = tl.max(tl.reshape(x, (TILE // GROUP, GROUP)), 1)
        tl.store(top + (row * TILES + tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP), group)
    else:
        t = tl.load(temperature + slot)
        if t > 0:
            a, b = row_keys(tl.load(seed + row), tl.load(position + row), tl.load(sample + row))
            x = tl.fma(x - highest, 1.0 / t, gumbel_noise(a, b, at.to(tl.uint32), FAST))
        best, token = first_best(x, at)
        tl.store(score + row * TILES + tile, best)
        tl.store(index + row * TILES + tile, token)


@kernel("tokens", "slots")
def _pick(
    logits, peak, score, index, known, tokens, state, slots, temperature, top_k, top_p, min_p, stride, V,
    TILES: tl.constexpr, P: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    if FIRST:
        left = tl.full((), OPEN, tl.int32)
    else:
        left = tl.load(state + row)
    if left == OPEN:
        slot = tl.load(slots + row)
        t = tl.load(temperature + slot)
        least = tl.load(min_p + slot)
        p = tl.load(top_p + slot)
        inv = tl.where(t > 0, 1.0 / t, 0.0)
        floor = tl.where(least > 0, tl.log(least), float("-inf"))
        at = tl.arange(0, P)
        tile = tl.load(peak + row * TILES + at, mask=at < TILES, other=float("-inf"))
        best = tl.max(tile, 0)
        if FIRST:
            tl.store(known + row * 8, best)
            tl.store(known + row * 8 + 1, inv)
            tl.store(known + row * 8 + 2, floor)
            tl.store(known + row * 8 + 3, p)
        if tl.load(top_k + slot) > 0:
            after = tl.full((), WAITS, tl.int32)
            token = tl.full((), 0, tl.int32)
        else:
            s = tl.load(score + row * TILES + at, mask=at < TILES, other=float("-inf"))
            s = tl.where(inv > 0, s + (tile - best) * inv, s)
            s = tl.where(s == s, s, float("-inf"))
            _, arg = tl.max(s, 0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.minimum(tl.load(index + row * TILES + tl.minimum(arg, TILES - 1)), V - 1)
            value = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
            tl.store(known + row * 8 + 4, value)
            after = tl.where((p >= 1) & ((value - best) * inv >= floor), DONE, OPEN)
        # no token can be drawn from a row whose largest logit is infinite, so the engine ends it
        bad = (best == float("inf")) | (best == float("-inf"))
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(state + row, tl.where(bad, DONE, after))


@dataclass
class DrawWork:
    """The tensors that the kernels of a call share, for N rows of V logits in ``tiles`` tiles."""

    peak: Tensor  # f32 [N, tiles] largest logit of each tile, inf if it has a NaN
    score: Tensor  # f32 [N, tiles] score of the best token of each tile; -inf for none
    index: Tensor  # i32 [N, tiles] token id of the best token of each tile
    known: Tensor  # f32 [N, 8]: largest logit, 1 / T, floor of min-p, top_p, logit of the candidate
    state: Tensor  # i32 [N] state of each row: OPEN, DONE or WAITS
    top: Tensor  # f32 [N, groups] largest logit of each group of neighbouring tokens, for rows with top-k
    group: int  # number of neighbouring tokens in a group of ``top``
    rows: tuple[Tensor, ...]  # seed, position, sample i64 [N]
    slots: Tensor  # i64 [N]
    columns: tuple[Tensor, ...]  # temperature f32, top_k i32, top_p f32, min_p f32, each [S]

    @property
    def tiles(self) -> int:
        return self.peak.shape[1]

    @property
    def p(self) -> int:
        return power(self.tiles)


def group_size(width: int) -> int:
    """Return how many neighbouring tokens form a group: a power of two such that a row has at most GROUPS groups."""
    return max(16, power(cdiv(width, GROUPS)))


def first(
    logits: Tensor, slots: Tensor, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...], tokens: Tensor, few: bool
) -> DrawWork:
    """Draw ``tokens`` i64 [N] of the rows without a limit, and candidates of other rows, and return the shared tensors.

    ``logits`` is [N, V] of any dtype.  ``few`` means that a row has top-k.
    """
    n, width = logits.shape
    tiles = cdiv(width, TILE)
    group = group_size(width)
    new = partial(torch.empty, dtype=torch.float32, device=logits.device)
    peak = new(n, tiles)
    score = new(n, tiles)
    index = new(n, tiles, dtype=torch.int32)
    known = new(n, 8)
    state = new(n, dtype=torch.int32)
    top = new(n, tiles * (TILE // group) if few else 1)
    w = DrawWork(peak, score, index, known, state, top, group, rows, slots, columns)
    temperature, top_k, _, _ = columns
    read = (slots, temperature, top_k, *rows)
    stride = logits.stride(0)
    shape = dict(TILE=TILE, TILES=tiles, GROUP=group, FAST=logits.is_cuda)
    launch = _first[(n, tiles)]
    launch(logits, peak, score, index, top, *read, stride, width, **shape, num_warps=8, **pdl(logits))
    pick(logits, w, tokens, True)
    return w


def pick(logits: Tensor, w: DrawWork, tokens: Tensor, first: bool) -> None:
    """Write the candidate of each row that is OPEN, or with ``first`` of all rows, whose ``state`` is then ignored."""
    n, width = logits.shape
    best = (w.peak, w.score, w.index)
    read = (w.slots, *w.columns)
    stride = logits.stride(0)
    shape = dict(TILES=w.tiles, P=w.p, FIRST=first)
    launch = _pick[(n,)]
    launch(logits, *best, w.known, tokens, w.state, *read, stride, width, **shape, num_warps=1, **pdl(logits))
