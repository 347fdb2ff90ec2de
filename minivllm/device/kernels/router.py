"""Choice of the experts of each token, and the order in which grouped products process the tokens.

    logits [T, E] ──route──► weights, ids [T, k] ──assign──► order [blocks * BM], expert of each block

A *pair* is a token and one of its k experts, with the number token * k + slot.  ``assign`` gives each expert whole
blocks of ``BM`` pairs, in order of the experts.  The last block of an expert is filled up with the number of pairs.
Unused blocks have the expert -1.  The number of blocks is the largest that can be needed, so that the host needs no
result::

    ids of 3 tokens, k = 2:  (0 2) (2 3) (2 0),  BM = 2
    order                    0 5 | 1 2 | 4 6 | 3 6 | . .
    expert                   0     2     2     3    -1

The reference is ``device.layers.experts``.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .launch import kernel, pdl, power, wait

CHUNK = 2048  # number of (token, expert) pairs that a program reads at a time
SCORES = {"softmax": 0, "chosen_softmax": 1, "sigmoid": 2}


@kernel("stride")
def _route(
    logits, choice_bias, weights, ids, given, stride, scale, E: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, SCORE: tl.constexpr, CHOICE: tl.constexpr, NORMALIZE: tl.constexpr, ROUND: tl.constexpr,
    FLOOR: tl.constexpr, GIVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a token, or take the given ones, and compute their weights."""
    wait(PDL)
    row, at, slot = tl.program_id(0), tl.arange(0, P), tl.arange(0, KP)
    on = at < E
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=on, other=float("-inf")).to(tl.float32)
    if SCORE == 0:
        score = tl.where(on, tl.exp(x - tl.max(x, 0)), 0.0)
        score = score / tl.sum(score, 0)
    elif SCORE == 1:
        score = x
    else:
        score = 1.0 / (1.0 + tl.exp(-x))
    chance = score
    if CHOICE:
        chance = score + tl.load(choice_bias + at, mask=on, other=0.0).to(tl.float32)
    # an expert with a logit of -inf comes after all others, even if their scores are 0 too
    chance = tl.where(on & (chance == chance) & (x != float("-inf")), chance, float("-inf"))
    found = tl.zeros((KP,), tl.int32)
    weight = tl.full((KP,), float("-inf"), tl.float32)
    free = on
    for i in tl.static_range(K):
        most = tl.max(tl.where(free, chance, float("-inf")), 0)
        best = tl.min(tl.where(free & (chance == most), at, P), 0)
        best = tl.minimum(best, E - 1)
        if GIVEN:
            wanted = tl.load(given + row * K + i)
            best = tl.where(wanted >= 0, wanted, best)
        free = free & (at != best)
        found = tl.where(slot == i, best, found)
        weight = tl.where(slot == i, tl.sum(tl.where(at == best, score, 0.0), 0), weight)
    real = slot < K
    if SCORE == 1:
        weight = tl.where(real, tl.exp(weight - tl.max(weight, 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    if NORMALIZE:
        total = tl.sum(tl.where(real, weight, 0.0), 0)
        weight = weight / (total + FLOOR)
    weight = weight * scale
    if ROUND:
        weight = weight.to(logits.dtype.element_ty).to(tl.float32)
    tl.store(weights + row * K + slot, weight, mask=real)
    tl.store(ids + row * K + slot, found, mask=real)


def route(
    logits: Tensor,
    chosen: int,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    choice_bias: Tensor | None = None,
    rounded: bool = True,
    floor: float = 0.0,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights f32 [T, k] and ids i32 [T, k] of the chosen experts for logits [T, E], best first.

    Among equal experts the lower id is first.  Weights are ``rounded`` to the dtype of the logits.  ``score`` is a key
    of SCORES: "softmax" over all experts, "chosen_softmax" over the chosen experts, or "sigmoid". ``choice_bias`` [E]
    affects only the choice.  ``normalize`` divides the weights of a token by their sum plus ``floor``, before ``scale``
    multiplies them.  ``given`` i32 [T, k], contiguous, has experts to use in place of the chosen ones, -1 for none.
    """
    t, e = logits.shape
    weights = torch.empty((t, chosen), dtype=torch.float32, device=logits.device)
    ids = torch.empty((t, chosen), dtype=torch.int32, device=logits.device)
    if not t:
        return weights, ids
    constants = pdl(logits)
    constants["E"] = e
    constants["P"] = power(e)
    constants["K"] = chosen
    constants["KP"] = power(chosen)
    constants["SCORE"] = SCORES[score]
    constants["CHOICE"] = choice_bias is not None
    constants["NORMALIZE"] = normalize
    constants["ROUND"] = rounded
    constants["FLOOR"] = floor
    constants["GIVEN"] = given is not None
    constants["num_warps"] = 1
    # the kernel does not read absent tensors
    if choice_bias is None:
        choice_bias = logits
    if given is None:
        given = ids
    stride = logits.stride(0)
    _route[(t,)](logits, choice_bias, weights, ids, given, stride, scale, **constants)
    return weights, ids


@kernel("pairs", "blocks")
def _assign(
    ids, order, expert, pairs, blocks, E: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
    ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the order and the expert of the blocks of one expert.

    A program counts the pairs of all experts, so it needs no result of other programs.  ONCE means that a chunk has all
    pairs.
    """
    wait(PDL)
    mine, bins, at = tl.program_id(0), tl.arange(0, P), tl.arange(0, CHUNK)
    count = tl.zeros((P,), tl.int32)
    i = tl.load(ids + at, mask=at < pairs, other=-1)
    if ONCE:
        count += tl.histogram(i, P, mask=at < pairs)
    else:
        for start in range(0, pairs, CHUNK):
            real = start + at < pairs
            count += tl.histogram(tl.load(ids + start + at, mask=real, other=0), P, mask=real)
    needed = (count + BM - 1) // BM
    first = tl.sum(tl.where(bins < mine, needed, 0), 0)
    own = tl.sum(tl.where(bins == mine, needed, 0), 0)
    size = tl.sum(tl.where(bins == mine, count, 0), 0)
    done = first * BM
    if ONCE:
        here = (i == mine).to(tl.int32)
        tl.store(order + done + tl.cumsum(here, 0) - 1, at, mask=here > 0)
    else:
        for start in range(0, pairs, CHUNK):
            here = (tl.load(ids + start + at, mask=start + at < pairs, other=-1) == mine).to(tl.int32)
            tl.store(order + done + tl.cumsum(here, 0) - 1, start + at, mask=here > 0)
            done += tl.sum(here, 0)
    rest = tl.arange(0, BM)
    tl.store(order + first * BM + size + rest, tl.zeros((BM,), tl.int32) + pairs, mask=size + rest < own * BM)
    few = tl.arange(0, 64)
    for start in range(0, own, 64):
        tl.store(expert + first + start + few, tl.zeros((64,), tl.int32) + mine, mask=start + few < own)
    if mine == E - 1:
        for start in range(first + own, blocks, 64):
            tl.store(expert + start + few, tl.full((64,), -1, tl.int32), mask=start + few < blocks)


def most_blocks(pairs: int, experts: int, bm: int) -> int:
    """Return the largest number of blocks of ``bm`` pairs that any choice of experts can need."""
    return pairs // bm + min(pairs, experts)


def assign(ids: Tensor, experts: int, bm: int) -> tuple[Tensor, Tensor]:
    """Return order i32 [blocks * bm] and expert i32 [blocks], as at the top of this module, for
    ids i32 [T, k] below ``experts``.
    """
    pairs = ids.numel()
    blocks = most_blocks(pairs, experts, bm)
    order = torch.empty(blocks * bm, dtype=torch.int32, device=ids.device)
    expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    chunk = min(CHUNK, max(128, power(pairs)))
    constants = pdl(ids)
    constants["E"] = experts
    constants["P"] = power(experts)
    constants["BM"] = bm
    constants["CHUNK"] = chunk
    constants["ONCE"] = pairs <= chunk
    constants["num_warps"] = 4 if chunk <= 512 else 8
    _assign[(experts,)](ids, order, expert, pairs, blocks, **constants)
    return order, expert
