"""Functions for all samplers: noise, log-probabilities, stop flags and masks.  They are vectorised over N rows.

The noise is counter-based: there is no generator and no state.  A draw depends only on (logits, seed, position,
sample), so batching, preemption and recomputation cannot change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.plan import EOS, LENGTH, NAN, STOP_ID, STOP_IDS
from minivllm.device.layers.invariant import logsumexp

_WORD = 1 << 32
GROUP = 64  # ``best_of`` divides logits into groups of this size, and compares the largest of each group first
# largest number of sort keys, or of logits of guided rows, that are created at a time, in at most 0.1 GB
KEYS = 1 << 22


def _signed(word: int) -> int:
    """Return the signed 32-bit number with the same bits as the unsigned 32-bit number ``word``."""
    return word - _WORD if word >= _WORD // 2 else word


# The first two constants are from "lowbias32" by Chris Wellons (nullprogram.com/blog/2018/07/31, public domain) and mix
# lanes and rows. The others are odd constants with well spread bits.
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
INIT = 0x9E3779B9
FOLD_A = 0xCC9E2D51
FOLD_B = 0x1B873593


def _xorshift_(x: Tensor, bits: int) -> Tensor:
    """Compute x ^= x >> bits in place, with an unsigned shift although the dtype is int32."""
    mask = (1 << (32 - bits)) - 1
    return x.bitwise_xor_((x >> bits).bitwise_and_(mask))


def _row_keys(seed: Tensor, position: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Return a hash of 64 bits for each row, as two int32 tensors.

    With two words, rows with equal first words still have independent noise.
    """
    fold_a = _signed(FOLD_A)
    fold_b = _signed(FOLD_B)
    mixed = seed.to(torch.int32) ^ _signed(INIT)
    a = mixed.mul_(fold_a)
    _xorshift_(a, 16)
    b = a * fold_b
    for word in (seed >> 32, position, sample):
        mixed = word.to(torch.int32) ^ a
        a = mixed.mul_(fold_a)
        _xorshift_(a, 16)
        b = b.add(a) * fold_b
    return a, _xorshift_(b, 15)


def noise_bits(seed: Tensor, position: Tensor, sample: Tensor, lane: Tensor | int) -> Tensor:
    """Return 32 hashed bits as int32, in the broadcast shape of the arguments.

    The arguments have any integer dtype; 64 bits of ``seed`` are used, and 32 of the others.  The bits are equal on
    every device, because only 32-bit multiply and add with wrap-around, xor and unsigned shift are used::

        a, b = 0x9E3779B9, 0
        for w in (seed & 0xffffffff, seed >> 32, position, sample):
            a = (a ^ w) * 0xCC9E2D51;  a ^= a >> 16;  b = (b + a) * 0x1B873593
        b ^= b >> 15
        x = lane * 0x9E3779B9;  x ^= x >> 15;  x ^= a
        x ^= x >> 16;  x = x * 0x7FEB352D + b;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    """
    a, b = _row_keys(seed, position, sample)
    if not isinstance(lane, Tensor):
        lane = torch.full((), lane, dtype=torch.int32, device=seed.device)
    spread = lane.to(torch.int32) * _signed(INIT)
    x = _xorshift_(spread, 15) ^ a
    _xorshift_(x, 16).mul_(_signed(MIX_1)).add_(b)
    _xorshift_(x, 15).mul_(_signed(MIX_2))
    return _xorshift_(x, 16)


def noise(seed: Tensor, position: Tensor, sample: Tensor, lane: Tensor | int) -> Tensor:
    """Return uniform float32 numbers in (0, 1), in the broadcast shape of the arguments.

    All randomness of the engine comes from here.  u = (bits + 1/2) / 2**31 with 31 bits: the smallest number is 2**-32,
    steps near 0 are 2**-31, and the largest is 1 - 2**-24.  ``gumbel`` uses the lanes below the size of the vocabulary;
    for other draws at the same position use lanes from 2**30 on.
    """
    bits = noise_bits(seed, position, sample, lane)
    u = bits.bitwise_and_(_WORD // 2 - 1).to(torch.float32)
    largest = 1 - 2.0**-24
    return u.add_(0.5).mul_(2.0**-31).clamp_(max=largest)


def gumbel(seed: Tensor, position: Tensor, sample: Tensor, width: int) -> Tensor:
    """Return standard Gumbel noise float32 [N, width] for N rows; argmax(logits + gumbel) draws from softmax(logits).

    Large values come from small u, where float32 has a fine resolution.  All values are between -2.9 and 22.2.
    """
    lane = torch.arange(width, dtype=torch.int32, device=seed.device)
    of_row = (seed[:, None], position[:, None], sample[:, None])
    u = noise(*of_row, lane)
    exponential = u.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def logprobs_of(
    logits: Tensor, chosen: Tensor, topk: int, fuse: bool = False, batch_invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the natural log-softmax of logits [N, V] of any dtype at the tokens ``chosen`` i64 [N] and at the best.

    The result is chosen f32 [N], rank i32 [N] (1 + the number of strictly likelier tokens), top_ids i32 [N, k] and top
    f32 [N, k] in the order of ``best_of``, with k = min(topk, V).  Tokens of probability 0 (-inf) may be at the end.
    ``fuse`` uses kernels, which make no float32 copy of the logits and are always batch invariant.
    """
    if fuse:
        from minivllm.device.kernels import logprobs

        return logprobs.logprobs_of(logits, chosen, topk, best_of)
    logits = logits.float()
    summed = logsumexp if batch_invariant else _logsumexp
    total = summed(logits)
    value = logits.gather(1, chosen[:, None])
    likelier = (logits > value).sum(dim=1, dtype=torch.int32)
    rank = likelier + 1
    k = min(max(topk, 0), logits.shape[1])
    top, top_ids = best_of(logits, k)
    drawn = value - total
    return drawn.squeeze(1), rank, top_ids.to(torch.int32), top - total


def best_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` <= V largest of logits [N, V] of any dtype, as f32 [N, k], and their ids i64 [N, k].

    Larger logits come first; of equal logits the lower id comes first.  So the result for a small k is the beginning
    of the result for a large k.  ``Tensor.topk`` does not guarantee this, because it does not define the order of equal
    values.  The ids of a row with a NaN are undefined.
    """
    rows = max(KEYS // logits.shape[1], 1)
    parts = logits.split(rows)
    best = [_best_of(part.float(), k) for part in parts]
    values, ids = zip(*best, strict=True)
    return torch.cat(values), torch.cat(ids)


def _best_of(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of x f32 [N, V] and their ids, in the order of ``best_of``.

    If there are many groups of GROUP logits, only the k groups with the largest maxima and the logits after the last
    whole group are sorted.  Other groups cannot contain one of the k best: each of the k groups has a logit that comes
    before all of theirs.  Of groups with equal maxima the first is taken."""
    width = x.shape[1]
    ids = torch.arange(width, device=x.device).expand_as(x)
    groups = width // GROUP
    if 2 * k < groups:
        end = groups * GROUP
        grouped = x[:, :end].unflatten(1, (groups, GROUP))
        highest = grouped.amax(dim=2)
        chosen = _in_order(highest, ids[:, :groups], k)
        first = chosen * GROUP
        offsets = torch.arange(GROUP, device=x.device)
        inside = first[:, :, None] + offsets
        behind = ids[:, end:]
        ids = torch.cat([inside.flatten(1), behind], dim=1)
    best = _in_order(x.gather(1, ids), ids, k)
    return x.gather(1, best), best


def _in_order(x: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return the ids i64 [N, k] of the k largest values of ``x`` f32 [N, M]; ``ids`` i64 [N, M] are those of the
    values.

    Larger values come first; of equal values the one with the lower id.

    A value and its id form one integer key, so that no two keys are equal."""
    bits = (x + 0.0).view(torch.int32)  # adding 0 replaces -0 by 0, so that equal values have equal bits
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that have the same order as the floats
    last = _WORD - 1
    keys = (bits.long() << 32) | (last - ids)
    best = keys.topk(k, dim=1).values
    return last - (best & last)


def guide_rows(logits: Tensor, pairs: Tensor, scale: Tensor, batch_invariant: bool = False) -> None:
    """Combine the logits of guided rows with those of their guides, in place, as ``strategy.Guide`` defines.

    ``pairs`` i64 [2, n] holds the guided rows and their guides, as rows of ``logits`` f32 [N, V].  The row becomes
    b + scale * (a - b), where a are its log-probabilities and b those of its guide; ``scale`` is f32 [n]."""
    total = logsumexp if batch_invariant else _logsumexp
    rows = max(KEYS // logits.shape[1], 1)
    factors = scale.split(rows)
    for pair, factor in zip(pairs.split(rows, dim=1), factors, strict=True):
        own, guide = pair
        a = logits[own]
        b = logits[guide]
        a = a - total(a)
        b = b - total(b)
        difference = a.sub_(b)
        logits[own] = difference.mul_(factor[:, None]).add_(b)


def _logsumexp(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, dim=1, keepdim=True)


def bad_rows(logits: Tensor) -> Tensor:
    """Return bool [N], True for rows that allow no draw: they contain a NaN or +inf, or all their logits are -inf."""
    return ~logits.amax(dim=1).isfinite()


def stop_flags(
    tokens: Tensor,
    position: Tensor,
    stop_ids: Tensor,
    n_eos: Tensor,
    min_end: Tensor,
    end: Tensor,
    bad: Tensor | None = None,
) -> Tensor:
    """Return the flags u8 [N] of ``tokens`` [N] that were drawn for index ``position`` [N] of their sequences.

    ``stop_ids`` [N, STOP_IDS] is padded with -1; the first ``n_eos`` [N] ids of a row are end-of-sequence ids and give
    EOS, the others give STOP_ID.  They are ignored while position < ``min_end`` [N].  LENGTH means that the sequence
    has at least ``end`` [N] tokens with this one.  Rows marked in ``bad`` bool [N] get only the flag NAN.
    """
    counts = position >= min_end
    hit = (stop_ids == tokens[:, None]) & counts[:, None]
    number = torch.arange(STOP_IDS, device=tokens.device)
    is_eos = number < n_eos[:, None]
    ends = (hit & is_eos).any(dim=1)
    stops = (hit & ~is_eos).any(dim=1)
    is_last = position + 1 >= end
    flags = ends * EOS + stops * STOP_ID + is_last * LENGTH
    if bad is not None:
        flags = torch.where(bad, NAN, flags)
    return flags.to(torch.uint8)


def suppress_stops(logits: Tensor, position: Tensor, min_end: Tensor, stop_ids: Tensor) -> None:
    """Set the logits of stop ids to -inf, in place, in rows with position < ``min_end`` (the option min_tokens).

    ``logits`` is [N, V], ``stop_ids`` [N, STOP_IDS] padded with -1, ``position`` and ``min_end`` are [N]."""
    early = position < min_end
    is_token = (stop_ids >= 0) & (stop_ids < logits.shape[1])
    on = early[:, None] & is_token
    push = torch.where(on, float("-inf"), 0.0)
    at = torch.where(on, stop_ids, 0)
    # added instead of stored, because all padding entries write to token 0, which may be a stop id
    logits.scatter_add_(1, at.long(), push.to(logits.dtype))


def unpack_bits(mask: Tensor, n: int) -> Tensor:
    """Return bool [rows, n] of a packed mask i32 [rows, ceil(n / 32)].

    Element (j, t) is bit t % 32 of ``mask[j, t // 32]``."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask[:, :, None] >> shifts) & 1
    padded = bits.flatten(1)
    return padded[:, :n] != 0


def apply_mask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Set the logits of tokens whose bit in the mask is 0 to -inf, in place.

    ``mask`` is i32 [n, ceil(V / 32)].  Bit t % 32 of ``mask[j, t // 32]`` belongs to token t in row ``rows[j]`` of
    ``logits`` [N, V].  ``rows`` is i64 [n]; None means row j."""
    banned = ~unpack_bits(mask, logits.shape[1])
    infinity = float("inf")
    if rows is None:
        logits.masked_fill_(banned, -infinity)
    else:
        logits[rows] = logits[rows].masked_fill_(banned, -infinity)
