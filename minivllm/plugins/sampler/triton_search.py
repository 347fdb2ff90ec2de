"""Draw the rows that the faster kernels have left, with one program per row.  These rows are rare.

    _search   grid (N,)   rows that are not DONE

They are rows with a top-k above ``triton_topk.MOST``, with a top-k at which too many logits are equal, or with a
candidate that top-p rejected ``triton_nucleus.ROUNDS`` times.  Top-k bisects the bits of the k-th largest logit, with a
pass over the row per bit.  Top-p uses the rejection of ``triton_nucleus`` in rounds.  Each round raises the bound and
the best token is always kept, so the loop ends.  Loops of data-dependent length are allowed in a captured graph.

The row's logits (300 KB, in L2) are read 16 times (bfloat16) or 32 times for top-k, and twice per round.  The reference
is ``default._nucleus``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import kernel, pdl, power, wait

from .triton_draw import DONE, OPEN, DrawWork, load_row, mass_of, scale_of
from .triton_noise import gumbel_noise, row_keys
from .triton_topk import ordered, top_bit

CHUNK = 4096


@triton.jit
def _kth(base, k, V, CHUNK: tl.constexpr, BITS: tl.constexpr):
    """Return the bound that at least k logits of a row reach, as ``triton_topk.kth_largest`` does for fewer values."""
    lane = tl.arange(0, CHUNK)
    bound = tl.full((), 0, tl.uint32)
    bit = top_bit(BITS)
    for _ in range(BITS):
        trial = bound | bit
        n = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, V, CHUNK):
            n += (ordered(load_row(base, start + lane, V), BITS) >= trial).to(tl.int32)
        bound = tl.where(tl.sum(n, 0) >= k, trial, bound)
        bit = bit >> 1
    return bound


@triton.jit
def _top_k(base, k, best, inv, floor, V, CHUNK: tl.constexpr, BITS: tl.constexpr):
    """Return the largest logit that is not among the k largest (-inf if there is none), and the sum int64 of the
    probabilities of the k largest."""
    lane = tl.arange(0, CHUNK)
    bound = _kth(base, k, V, CHUNK, BITS)
    n = tl.zeros((CHUNK,), tl.int32)
    edge = tl.zeros((CHUNK,), tl.int32)
    whole = tl.zeros((CHUNK,), tl.int64)
    below = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(0, V, CHUNK):
        x = load_row(base, start + lane, V)
        key = ordered(x, BITS)
        rel = (x - best) * inv
        m = tl.where(rel >= floor, mass_of(rel), 0)
        n += (key > bound).to(tl.int32)
        whole += tl.where(key > bound, m, 0).to(tl.int64)
        edge = tl.maximum(edge, tl.where(key == bound, m, 0))
        below = tl.maximum(below, tl.where(key < bound, x, float("-inf")))
    room = k - tl.sum(n, 0)  # count of the logits equal to the k-th largest that belong to the k largest
    return tl.max(below, 0), tl.sum(whole, 0) + room.to(tl.int64) * tl.max(edge, 0).to(tl.int64)


@triton.jit
def _masses(base, cut, best, inv, floor, V, CHUNK: tl.constexpr):
    """Return two sums int64 of the probabilities that min-p keeps: of the logits above ``cut``, and of all logits."""
    lane = tl.arange(0, CHUNK)
    above = tl.zeros((CHUNK,), tl.int64)
    whole = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, V, CHUNK):
        x = load_row(base, start + lane, V)
        rel = (x - best) * inv
        m = tl.where(rel >= floor, mass_of(rel), 0).to(tl.int64)
        above += tl.where(x > cut, m, 0)
        whole += m
    return tl.sum(above, 0), tl.sum(whole, 0)


@triton.jit
def _best_above(base, cut, best, inv, floor, a, b, V, CHUNK: tl.constexpr, FAST: tl.constexpr):
    """Return the best-scored token int32 among the logits above ``cut`` that min-p keeps."""
    lane = tl.arange(0, CHUNK)
    score = tl.full((CHUNK,), float("-inf"), tl.float32)
    index = tl.zeros((CHUNK,), tl.int32) + lane
    for start in range(0, V, CHUNK):
        at = start + lane
        x = load_row(base, at, V)
        rel = (x - best) * inv
        y = rel + gumbel_noise(a, b, at.to(tl.uint32), FAST)
        y = tl.where((x > cut) & (rel >= floor), y, float("-inf"))
        index = tl.where(y > score, at, index)
        score = tl.maximum(score, y)
    top = tl.max(score, 0)
    return tl.minimum(tl.min(tl.where(score == top, index, V - 1), 0), V - 1)


@kernel("tokens", "slots", "seed", "position", "sample")
def _search(
    logits, known, tokens, state, slots, top_k, seed, position, sample, stride, V,
    CHUNK: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    left = tl.load(state + row)
    if left != DONE:
        base = logits + row.to(tl.int64) * stride
        best, inv, floor = scale_of(known, row)
        a, b = row_keys(tl.load(seed + row), tl.load(position + row), tl.load(sample + row))
        k = tl.load(top_k + tl.load(slots + row))
        if left == OPEN:
            token = tl.load(tokens + row).to(tl.int32)
            few = tl.full((), 0, tl.int64)
        else:
            cut, few = _top_k(base, k, best, inv, floor, V, CHUNK, BITS)
            token = _best_above(base, cut, best, inv, floor, a, b, V, CHUNK, FAST)
        p = tl.load(known + row * 8 + 3)
        searching = (p < 1).to(tl.int32)
        while searching != 0:
            value = tl.load(base + token).to(tl.float32)
            above, whole = _masses(base, value, best, inv, floor, V, CHUNK)
            whole = tl.where(k > 0, few, whole)
            if (above <= 0) | (above.to(tl.float64) < p.to(tl.float64) * whole.to(tl.float64)):
                searching = tl.full((), 0, tl.int32)
            else:
                token = _best_above(base, value, best, inv, floor, a, b, V, CHUNK, FAST)
        tl.store(tokens + row, token.to(tl.int64))


def search(logits: Tensor, w: DrawWork, tokens: Tensor) -> None:
    """Draw all rows that are not DONE; ``tokens`` holds the candidates of rows that are OPEN."""
    n, width = logits.shape
    chunk = min(CHUNK, power(width))
    bits = 16 if logits.dtype == torch.bfloat16 else 32
    top_k = w.columns[1]
    read = (w.slots, top_k, *w.rows)
    stride = logits.stride(0)
    shape = dict(CHUNK=chunk, BITS=bits, FAST=logits.is_cuda)
    launch = _search[(n,)]
    launch(logits, w.known, tokens, w.state, *read, stride, width, **shape, num_warps=16, **pdl(logits))
