"""What every sampler shares: the noise, log-probabilities, stop flags and masks.  All of it is vectorised over N rows.

The noise is counter-based: no generator, no state.  A draw is a function of (logits, seed, position, sample) alone, so
batching, preemption and recomputation cannot change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.plan import EOS, LENGTH, NAN, STOP_ID, STOP_IDS
from minivllm.device.layers.invariant import logsumexp

_WORD = 1 << 32
GROUP = 64  # logits of which the largest is looked at first, where the best are looked for
# sort keys, or logits of guided rows, that are made at a time: bounds temporary memory to 0.1 GB
KEYS = 1 << 22


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit constant."""
    return word - _WORD if word >= _WORD // 2 else word


# "lowbias32" by Chris Wellons (nullprogram.com/blog/2018/07/31, public domain) mixes lanes and rows; the others are odd
# constants with well spread bits.
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
INIT, FOLD_A, FOLD_B = 0x9E3779B9, 0xCC9E2D51, 0x1B873593


def _xorshift_(x: Tensor, bits: int) -> Tensor:
    """x ^= x >> bits, the shift being unsigned although the dtype is int32."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _row_keys(seed: Tensor, position: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """64 bits of key per row: two words, so that two rows of equal first word still get unrelated noise."""
    words = (
        seed.to(torch.int32),
        (seed >> 32).to(torch.int32),
        position.to(torch.int32),
        sample.to(torch.int32),
    )
    a: Tensor | None = None
    b: Tensor | None = None
    for word in words:
        a = (word ^ (_signed(INIT) if a is None else a)).mul_(_signed(FOLD_A))
        _xorshift_(a, 16)
        b = (a if b is None else b.add(a)) * _signed(FOLD_B)
    return a, _xorshift_(b, 15)


def noise_bits(seed: Tensor, position: Tensor, sample: Tensor, lane: Tensor | int) -> Tensor:
    """32 hashed bits as int32, of the broadcast shape of the arguments (any integer dtype; ``seed`` counts 64 bits, the
    others 32).  Equal bits on every device: only wrapping 32-bit multiply, add, xor and unsigned shift are used::

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
    x = _xorshift_(lane.to(torch.int32) * _signed(INIT), 15) ^ a
    _xorshift_(x, 16).mul_(_signed(MIX_1)).add_(b)
    _xorshift_(x, 15).mul_(_signed(MIX_2))
    return _xorshift_(x, 16)


def noise(seed: Tensor, position: Tensor, sample: Tensor, lane: Tensor | int) -> Tensor:
    """Uniform float32 in (0, 1), of the broadcast shape of the arguments; the engine's only randomness.

    31 bits, u = (bits + 1/2) / 2**31: the smallest is 2**-32 and steps near 0 are 2**-31, the largest is 1 - 2**-24.
    Lanes below the vocabulary's size belong to ``gumbel``; who needs other draws at the same position takes lanes from
    2**30 on.
    """
    u = noise_bits(seed, position, sample, lane).bitwise_and_(_WORD // 2 - 1).to(torch.float32)
    return u.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def gumbel(seed: Tensor, position: Tensor, sample: Tensor, width: int) -> Tensor:
    """Standard Gumbel noise float32 [N, width] for rows [N]; argmax(logits + gumbel) draws from softmax(logits).

    Small u become the large values, where float32 resolves u finely.  Finite: between -2.9 and 22.2.
    """
    lane = torch.arange(width, dtype=torch.int32, device=seed.device)
    u = noise(seed[:, None], position[:, None], sample[:, None], lane)
    return u.neg_().log1p_().neg_().log_().neg_()


def logprobs_of(
    logits: Tensor, chosen: Tensor, topk: int, fuse: bool = False, batch_invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Natural log-softmax of raw logits [N, V], of any dtype, at ``chosen`` i64 [N], and the ``topk`` best.

    Returns chosen f32 [N], rank i32 [N] (1 + how many tokens are strictly likelier), top_ids i32 [N, k] and top f32
    [N, k], in the order of ``best_of``, k = min(topk, V).  Tokens without any probability (-inf) may stand at the end.
    ``fuse``: by the kernels, which make no float32 copy (and are batch invariant anyway).
    """
    if fuse:
        from minivllm.device.kernels import logprobs

        return logprobs.logprobs_of(logits, chosen, topk, best_of)
    logits = logits.float()
    total = logsumexp(logits) if batch_invariant else _logsumexp(logits)
    value = logits.gather(1, chosen[:, None])
    rank = (logits > value).sum(dim=1, dtype=torch.int32) + 1
    top, top_ids = best_of(logits, min(max(topk, 0), logits.shape[1]))
    return (value - total).squeeze(1), rank, top_ids.to(torch.int32), top - total


def best_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` <= V best of logits [N, V], of any dtype: f32 [N, k] and their ids i64 [N, k].

    The order is total: the larger logit first, of equal ones the lower id.  So the best few of a row are the first of
    its best many, which is not so of ``Tensor.topk``, whose choice among equals is left open.  Of a row with a NaN any
    ids may come.
    """
    rows = max(KEYS // logits.shape[1], 1)
    values, ids = zip(*(_best_of(part.float(), k) for part in logits.split(rows)), strict=True)
    return torch.cat(values), torch.cat(ids)


def _best_of(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best are in the k groups whose largest logits are the best (of equal ones the first), because each of these
    holds a logit that ranks before all those of the other groups; and in what is left over behind the last group."""
    width = x.shape[1]
    ids = torch.arange(width, device=x.device).expand_as(x)
    groups = width // GROUP
    if 2 * k < groups:
        highest = x[:, : groups * GROUP].unflatten(1, (groups, GROUP)).amax(dim=2)
        first = _in_order(highest, ids[:, :groups], k) * GROUP
        inside = (first[:, :, None] + torch.arange(GROUP, device=x.device)).flatten(1)
        ids = torch.cat([inside, ids[:, groups * GROUP :]], dim=1)
    best = _in_order(x.gather(1, ids), ids, k)
    return x.gather(1, best), best


def _in_order(x: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ``ids`` i64 [N, M] of the k best of ``x`` f32 [N, M].  Both make one integer, so that no two are equal."""
    bits = (x + 0.0).view(torch.int32)  # -0 becomes the 0 that it is equal to
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the order of the floats, as integers
    keys = (bits.long() << 32) | (_WORD - 1 - ids)
    return _WORD - 1 - (keys.topk(k, dim=1).values & (_WORD - 1))


def guide_rows(logits: Tensor, pairs: Tensor, scale: Tensor, batch_invariant: bool = False) -> None:
    """Rows ``pairs[0]`` i64 [n] of logits f32 [N, V] become, in place, what ``strategy.Guide`` says of them and their
    guides, rows ``pairs[1]``, with ``scale`` f32 [n]."""
    total = logsumexp if batch_invariant else _logsumexp
    rows = max(KEYS // logits.shape[1], 1)
    for (own, other), by in zip(pairs.split(rows, dim=1), scale.split(rows), strict=True):
        a, b = logits[own], logits[other]
        a, b = a - total(a), b - total(b)
        logits[own] = a.sub_(b).mul_(by[:, None]).add_(b)


def _logsumexp(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, dim=1, keepdim=True)


def bad_rows(logits: Tensor) -> Tensor:
    """bool [N]: rows that nothing can be drawn from, because they hold a NaN or +inf or are -inf throughout."""
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
    """Flags u8 [N] (EOS, STOP_ID, LENGTH, NAN) of ``tokens`` [N] drawn for index ``position`` [N] of their sequences.

    ``stop_ids`` [N, STOP_IDS], -1 = none, the first ``n_eos`` [N] of a row are end-of-sequence ids; none of them counts
    while position < ``min_end`` [N].  LENGTH: with this token the sequence has ``end`` [N] tokens.  A row of ``bad``
    bool [N] has the flag NAN and no other.
    """
    hit = (stop_ids == tokens[:, None]) & (position >= min_end)[:, None]
    is_eos = torch.arange(STOP_IDS, device=tokens.device) < n_eos[:, None]
    flags = (hit & is_eos).any(dim=1) * EOS + (hit & ~is_eos).any(dim=1) * STOP_ID + (position + 1 >= end) * LENGTH
    if bad is not None:
        flags = torch.where(bad, NAN, flags)
    return flags.to(torch.uint8)


def suppress_stops(logits: Tensor, position: Tensor, min_end: Tensor, stop_ids: Tensor) -> None:
    """min_tokens: ``stop_ids`` [N, STOP_IDS] become -inf in ``logits`` [N, V], in place, where position < min_end."""
    on = (position < min_end)[:, None] & (stop_ids >= 0) & (stop_ids < logits.shape[1])
    push = torch.where(on, float("-inf"), 0.0).to(logits.dtype)
    # added, not stored: the padding entries all fall on token 0, which may itself be a stop id
    logits.scatter_add_(1, torch.where(on, stop_ids, 0).long(), push)


def unpack_bits(mask: Tensor, n: int) -> Tensor:
    """bool [rows, n]: bit t % 32 of ``mask[j, t // 32]``, i32 [rows, ceil(n / 32)], for each t below n."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return bits.flatten(1)[:, :n] != 0


def apply_mask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Tokens whose bit is 0 become -inf, in place: bit t % 32 of ``mask[j, t // 32]``, i32 [n, ceil(V / 32)], is that
    of token t in row ``rows[j]`` (i64 [n]; None: in row j)."""
    banned = ~unpack_bits(mask, logits.shape[1])
    if rows is None:
        logits.masked_fill_(banned, float("-inf"))
    else:
        logits[rows] = logits[rows].masked_fill_(banned, float("-inf"))
