"""Apply min-p and top-p by rejection.

A candidate that the limits keep is the draw.  A rejected candidate excludes itself and all tokens that are not larger.
The best-scored of the remaining tokens, with the same noise, is the next candidate.

    _check    grid (stripes, N)   sum the probability above the candidate and of all, of ``TILES_A_STRIPE`` tiles
    _redraw   grid (stripes, N)   end the row if its candidate is kept, else find the best larger token of each tile
    ``triton_draw._pick``         choose the next candidate

Top-p keeps a value if the probability of all larger values is less than top_p of the whole.  A candidate's place in the
distribution is uniform between 0 and the last rejected candidate's, so the number of rejections is Poisson with mean
log(1 / top_p): 0.05 at 0.95, 0.7 at 0.5. After ``ROUNDS`` rounds over all rows ``triton_search`` ends the other rows.
Programs of rows that are done return at once.

Each kernel reads the logits of open rows once.  The reference is ``default._nucleus``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, wait

from .triton_draw import DONE, OPEN, TILE, DrawWork, load_row, mass_of, pick, scale_of
from .triton_noise import gumbel_noise, row_keys

ROUNDS = 3
TILES_A_STRIPE = 4


@triton.jit
def _check(
    logits, known, mass, state, stride, V, TILE: tl.constexpr, S: tl.constexpr, STRIPES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait(PDL)
    stripe = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(state + row) == OPEN:
        base = logits + row.to(tl.int64) * stride
        best, inv, floor = scale_of(known, row)
        value = tl.load(known + row * 8 + 4)
        above = tl.full((), 0, tl.int64)
        whole = tl.full((), 0, tl.int64)
        for i in range(S):
            x = load_row(base, (stripe * S + i) * TILE + tl.arange(0, TILE), V)
            rel = (x - best) * inv
            m = tl.where(rel >= floor, mass_of(rel), 0).to(tl.int64)
            above += tl.sum(tl.where(x > value, m, 0), 0)
            whole += tl.sum(m, 0)
        tl.store(mass + (row * STRIPES + stripe) * 2, above)
        tl.store(mass + (row * STRIPES + stripe) * 2 + 1, whole)


@kernel("seed", "position", "sample")
def _redraw(
    logits, peak, score, index, known, mass, state, seed, position, sample, stride, V,
    TILE: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr, STRIPES: tl.constexpr, P: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    stripe = tl.program_id(0)
    row = tl.program_id(1)
    # the program of stripe 0 may end the row in the meantime; the other programs then have no work
    if tl.load(state + row) == OPEN:
        best, inv, floor = scale_of(known, row)
        p = tl.load(known + row * 8 + 3)
        value = tl.load(known + row * 8 + 4)
        at = tl.arange(0, P)
        above = tl.sum(tl.load(mass + (row * STRIPES + at) * 2, mask=at < STRIPES, other=0), 0)
        whole = tl.sum(tl.load(mass + (row * STRIPES + at) * 2 + 1, mask=at < STRIPES, other=0), 0)
        inside = (p >= 1) | (above.to(tl.float64) < p.to(tl.float64) * whole.to(tl.float64))
        if inside & ((value - best) * inv >= floor):
            if stripe == 0:
                tl.store(state + row, DONE)
        else:
            base = logits + row.to(tl.int64) * stride
            a, b = row_keys(tl.load(seed + row), tl.load(position + row), tl.load(sample + row))
            for i in range(S):
                tile = stripe * S + i
                lane = tile * TILE + tl.arange(0, TILE)
                x = load_row(base, lane, V)
                highest = tl.load(peak + row * TILES + tile, mask=tile < TILES, other=0.0)
                y = tl.fma(x - highest, inv, gumbel_noise(a, b, lane.to(tl.uint32), FAST))
                y = tl.where((x > value) & ((x - best) * inv >= floor), y, float("-inf"))
                top, arg = tl.max(y, 0, return_indices=True, return_indices_tie_break_left=True)
                tl.store(score + row * TILES + tile, top, mask=tile < TILES)
                tl.store(index + row * TILES + tile, tile * TILE + arg, mask=tile < TILES)


def nucleus(logits: Tensor, w: DrawWork, tokens: Tensor) -> None:
    """Check and redraw the candidates of ``first``.  Rows that are still OPEN then have their next candidate."""
    n, width = logits.shape
    stripes = cdiv(w.tiles, TILES_A_STRIPE)
    mass = torch.empty(n, stripes, 2, dtype=torch.int64, device=logits.device)  # units of 2**-30
    stride = logits.stride(0)
    best = (w.peak, w.score, w.index)
    shape = dict(TILE=TILE, S=TILES_A_STRIPE, STRIPES=stripes, num_warps=8, **pdl(logits))
    size = power(stripes)
    more = dict(TILES=w.tiles, P=size, FAST=logits.is_cuda, maxnreg=80)
    check = _check[(stripes, n)]
    redraw = _redraw[(stripes, n)]
    for _ in range(ROUNDS):
        check(logits, w.known, mass, w.state, stride, width, **shape)
        redraw(logits, *best, w.known, mass, w.state, *w.rows, stride, width, **more, **shape)
        pick(logits, w, tokens, False)
