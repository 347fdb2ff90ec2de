"""Compute the effect of the standard sampling parameters on one row of logits in float64, as a reference for
processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams

OFF = {  # penalty -> value without effect
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "encoder_repetition_penalty": 1.0,
}  # fmt: skip


def standard_reference(
    reads: frozenset[str], params: SamplingParams, logits: Tensor, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Return logits f64 [V] after the standard parameters among ``reads``, applied in the order of this text.

    The encoder penalty makes tokens of the prompt likelier: it multiplies a logit above 0 and divides any other.  The
    repetition penalty (Keskar et al., arXiv:1909.05858) is for tokens of prompt and output: it divides a logit above 0
    and multiplies any other.  Presence and frequency penalties count the output only.  A bias is added.  Banned tokens
    become -inf (see ``banned``).  A schedule of the temperature divides all logits.
    """
    out = logits.clone()
    penalties = {}
    for name, off in OFF.items():
        penalties[name] = getattr(params, name) if name in reads else off
    likelier = penalties["encoder_repetition_penalty"]
    repetition = penalties["repetition_penalty"]
    for token in set(prompt):
        _scale(out, token, likelier)
    for token in {*prompt, *output}:
        _scale(out, token, 1 / repetition)
    for token in set(output):
        out[token] -= penalties["frequency_penalty"] * output.count(token) + penalties["presence_penalty"]
    if "logit_bias" in reads:
        biases = params.logit_bias or {}
        for token, bias in biases.items():
            out[int(token)] += bias
    for token in banned(reads, params, list(prompt), list(output), len(logits)):
        out[token] = -math.inf
    if "temperature_schedule" in reads and params.temperature_schedule is not None:
        out = out / factor(params, out, len(output))
    return out


def _scale(logits: Tensor, token: int, factor: float) -> None:
    """Multiply a logit above 0 by a factor, and divide any other logit by it."""
    if logits[token] > 0:
        logits[token] *= factor
    else:
        logits[token] /= factor


def banned(reads: frozenset[str], params: SamplingParams, prompt: list[int], output: list[int], vocab: int) -> set[int]:
    """Return the token ids that must not come next.

    These are tokens that are not allowed, the last token of a bad word whose other tokens end the output, and a token
    that would complete an n-gram that prompt and output already have.
    """
    tokens: set[int] = set()
    if "allowed_token_ids" in reads and params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        tokens |= set(range(vocab)) - allowed
    if "bad_words" in reads:
        for word in params.bad_words or ():
            *before, last = map(int, word)
            start = len(output) - len(before)
            if start >= 0 and output[start:] == before:
                tokens.add(last)
    n = params.no_repeat_ngram_size if "no_repeat_ngram_size" in reads else 0
    history = prompt + output
    if n and len(history) >= n - 1:
        start = len(history) - n + 1
        tail = history[start:]
        for i in range(start):
            *before, last = history[i : i + n]
            if before == tail:
                tokens.add(last)
    return tokens


def factor(params: SamplingParams, logits: Tensor, t: int) -> float:
    """Return the factor of ``temperature_schedule`` on the temperature of output token ``t``; logits f64 [V]."""
    schedule = dict(params.temperature_schedule or {})
    if schedule["kind"] == "entropy":
        return _entropy_factor(schedule, logits)
    share = min(t / schedule["tokens"], 1.0)
    if schedule["kind"] == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    span = schedule["end"] - schedule["start"]
    return schedule["start"] + span * share


def _entropy_factor(schedule: Mapping[str, float], logits: Tensor) -> float:
    """Return a factor from ``low`` to ``high``, which grows with the entropy of the distribution.

    The entropy is taken relative to the largest one that the possible tokens could have.
    """
    p = torch.softmax(logits, 0)
    p = p[p > 0]
    possible = int((logits > -math.inf).sum())
    share = 0.0
    if possible > 1:
        sum_of_logs = (p * p.log()).sum()
        entropy = -float(sum_of_logs)
        share = max(entropy / math.log(possible), 0.0)
    span = schedule["high"] - schedule["low"]
    exponent = schedule.get("exponent", 1.0)
    return schedule["low"] + span * share**exponent
