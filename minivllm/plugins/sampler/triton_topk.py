"""Apply top-k up to ``MOST``, with min-p before and top-p after it, to the few logits that can be among the k largest.

    _few    grid (N,)   one program per row with top-k

``_first`` has stored the largest logit of each group of lanes.  The k-th largest of these is a lower bound of the k-th
largest logit, because k groups have a logit that is not smaller.  Only groups that reach the bound are read, and only
logits that reach it are kept: about k logits of k groups.  Both limits are then found by bisection of the bits of the
order of logits (``ordered``), with counts for top-k and whole-number probabilities for top-p.  Noise is computed for
the kept logits only.

If more than ``ROOM`` logits reach the bound, since most of a vocabulary is equal, ``triton_search`` draws the row.

A row takes 8 KB of maxima and k groups of up to 256 bytes.  The reference is ``default._nucleus``.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import kernel, pdl, power, wait

from .spec import SMALL_K as MOST
from .triton_draw import DONE, TILE, WAITS, DrawWork, mass_of, scale_of
from .triton_noise import gumbel_noise, row_keys

ROOM = 4096  # largest number of candidates of a row


@triton.jit
def ordered(x, BITS: tl.constexpr):
    """Return float32 values as uint32 in the same order, with -0 equal to 0.

    BITS=16 returns the bits that differ among values that were bfloat16.
    """
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    flip = tl.where(bits >> 31 != 0, tl.full((), 0xFFFFFFFF, tl.uint32), tl.full((), 0x80000000, tl.uint32))
    return (bits ^ flip) >> (32 - BITS)


@triton.jit
def top_bit(BITS: tl.constexpr):
    """Return a word in which only the highest of the lowest BITS bits is set."""
    return tl.full((), 1 << (BITS - 1), tl.uint32)


@triton.jit
def kth_largest(key, k, BITS: tl.constexpr):
    """Return the largest bound that at least k of ``key`` reach, 0 if there are fewer keys."""
    bound = tl.full((), 0, tl.uint32)
    bit = top_bit(BITS)
    for _ in range(BITS):
        trial = bound | bit
        bound = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= k, trial, bound)
        bit = bit >> 1
    return bound


@triton.jit
def _collect(base, hits, n, bound, value, column, V, GROUP: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr):
    """Write the logits of groups ``hits[:n]`` that reach ``bound``, with their columns, and return their number.

    If more than ROOM logits are found, the search stops and returns the number found so far.
    """
    PART: tl.constexpr = 4096 // GROUP
    found = tl.full((), 0, tl.int32)
    i = tl.full((), 0, tl.int32)
    while (i < n) & (found <= ROOM):
        at = i + tl.arange(0, PART)
        group = tl.load(hits + at, mask=at < n, other=0)
        col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(base + col, mask=(col < V) & (at < n)[:, None], other=float("-inf")).to(tl.float32)
        x = tl.reshape(x, (4096,))
        col = tl.reshape(col, (4096,))
        reaches = (ordered(x, BITS) >= bound) & (x > float("-inf"))
        place = found + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(value + place, x, mask=reaches & (place < ROOM))
        tl.store(column + place, col, mask=reaches & (place < ROOM))
        found += tl.sum(reaches.to(tl.int32), 0)
        i += PART
    return found


@triton.jit
def _edge(key, bound, m, k, p, BITS: tl.constexpr):
    """Return the key of the smallest value that top-p keeps of the ``k`` best, the k-th of which has key ``bound``.

    ``m`` i32 are their probabilities.  Of values equal to the k-th, only as many count as top-k includes.
    """
    room = k - tl.sum((key > bound).to(tl.int32), 0)
    whole = tl.sum(tl.where(key > bound, m, 0).to(tl.int64), 0)
    whole += room.to(tl.int64) * tl.max(tl.where(key == bound, m, 0), 0).to(tl.int64)
    budget = p.to(tl.float64) * whole.to(tl.float64)
    edge = tl.full((), 0, tl.uint32)
    bit = top_bit(BITS)
    for _ in range(BITS):
        trial = edge | bit
        reached = tl.sum(tl.where(key >= trial, m, 0).to(tl.int64), 0)
        edge = tl.where(reached.to(tl.float64) >= budget, trial, edge)
        bit = bit >> 1
    return edge


@kernel("tokens", "slots", "seed", "position", "sample")
def _few(
    logits, top, hits, value, column, known, tokens, state, slots, top_k, seed, position, sample, stride, V,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, ROOM: tl.constexpr, MOST: tl.constexpr,
    BITS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    k = tl.load(top_k + tl.load(slots + row))
    if (tl.load(state + row) == WAITS) & (k <= MOST):
        of = tl.arange(0, G)
        maxima = tl.load(top + row * GROUPS + of, mask=of < GROUPS, other=float("-inf"))
        order = ordered(maxima, BITS)
        least = kth_largest(order, k, BITS)
        hit = (order >= least) & (maxima > float("-inf"))
        tl.store(hits + row * G + tl.cumsum(hit.to(tl.int32), 0) - 1, of, mask=hit)
        tl.debug_barrier()
        values = value + row.to(tl.int64) * ROOM
        columns = column + row.to(tl.int64) * ROOM
        base = logits + row.to(tl.int64) * stride
        n = _collect(base, hits + row * G, tl.sum(hit.to(tl.int32), 0), least, values, columns, V, GROUP, ROOM, BITS)
        tl.debug_barrier()
        if n <= ROOM:
            best, inv, floor = scale_of(known, row)
            at = tl.arange(0, ROOM)
            x = tl.load(values + at, mask=at < n, other=float("-inf"))
            col = tl.load(columns + at, mask=at < n, other=0)
            rel = (x - best) * inv
            key = ordered(x, BITS)
            bound = kth_largest(key, k, BITS)
            alive = (x > float("-inf")) & (rel >= floor) & (key >= bound)
            p = tl.load(known + row * 8 + 3)
            if p < 1:
                alive = alive & (key >= _edge(key, bound, tl.where(alive, mass_of(rel), 0), k, p, BITS))
            a, b = row_keys(tl.load(seed + row), tl.load(position + row), tl.load(sample + row))
            y = tl.where(alive, rel + gumbel_noise(a, b, col.to(tl.uint32), FAST), float("-inf"))
            _, arg = tl.max(y, 0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(tokens + row, tl.load(columns + tl.minimum(arg, n - 1)).to(tl.int64))
            tl.store(state + row, DONE)


def few(logits: Tensor, w: DrawWork, tokens: Tensor) -> None:
    """Draw the rows whose top-k is at most MOST.  A row with too many candidates keeps the state WAITS."""
    n, width = logits.shape
    groups = w.tiles * (TILE // w.group)
    g = power(groups)
    room = min(ROOM, power(width))
    new = partial(torch.empty, dtype=torch.float32, device=logits.device)
    hits = new(n, g, dtype=torch.int32)
    value = new(n, room)
    column = new(n, room, dtype=torch.int32)
    bits = 16 if logits.dtype == torch.bfloat16 else 32
    top_k = w.columns[1]
    work = (w.top, hits, value, column, w.known)
    read = (w.slots, top_k, *w.rows)
    stride = logits.stride(0)
    shape = dict(GROUP=w.group, GROUPS=groups, G=g, ROOM=room, MOST=MOST, BITS=bits, FAST=logits.is_cuda)
    limits = dict(num_warps=8, maxnreg=128)
    launch = _few[(n,)]
    launch(logits, *work, tokens, w.state, *read, stride, width, **shape, **limits, **pdl(logits))
