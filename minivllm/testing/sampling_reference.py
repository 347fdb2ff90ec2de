"""What the standard sampling parameters mean, one row at a time in float64: what processors are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams


def standard_reference(
    reads: frozenset[str], params: SamplingParams, logits: Tensor, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Logits float64 [V] after the standard parameters among ``reads``.

    The penalty of the prompt multiplies a logit above 0 of a token that is in it, and divides another.  Repetition
    (Keskar et al., arXiv:1909.05858) is for tokens of prompt and output: a logit above 0 is divided by the penalty,
    another multiplied.  Presence and frequency count the output only.  A bias is added.  Tokens that are not allowed
    become -inf, and so do the last token of a bad word whose others end the output, and one that would repeat n tokens
    of prompt and output.  A schedule of the temperature divides what is left.
    """
    out = logits.clone()
    penalty = params.repetition_penalty if "repetition_penalty" in reads else 1.0
    presence = params.presence_penalty if "presence_penalty" in reads else 0.0
    frequency = params.frequency_penalty if "frequency_penalty" in reads else 0.0
    likelier = params.encoder_repetition_penalty if "encoder_repetition_penalty" in reads else 1.0
    for token in set(prompt):
        out[token] = out[token] * likelier if out[token] > 0 else out[token] / likelier
    for token in {*prompt, *output}:
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(output):
        out[token] -= frequency * output.count(token) + presence
    for token, bias in (params.logit_bias or {}).items() if "logit_bias" in reads else ():
        out[int(token)] += bias
    for token in banned(reads, params, list(prompt), list(output), len(logits)):
        out[token] = -math.inf
    if "temperature_schedule" in reads and params.temperature_schedule is not None:
        out = out / factor(params, out, len(output))
    return out


def banned(reads: frozenset[str], params: SamplingParams, prompt: list[int], output: list[int], vocab: int) -> set[int]:
    """Tokens that must not come next."""
    gone: set[int] = set()
    if "allowed_token_ids" in reads and params.allowed_token_ids is not None:
        gone |= set(range(vocab)) - set(params.allowed_token_ids)
    for word in (params.bad_words or ()) if "bad_words" in reads else ():
        *before, last = word
        if output[len(output) - len(before) :] == list(map(int, before)) and len(output) >= len(before):
            gone.add(int(last))
    n = params.no_repeat_ngram_size if "no_repeat_ngram_size" in reads else 0
    history = prompt + output
    if n and len(history) >= n - 1:
        begins = tuple(history[len(history) - n + 1 :])
        came = [tuple(history[i : i + n]) for i in range(len(history) - n + 1)]
        gone |= {gram[-1] for gram in came if gram[:-1] == begins}
    return gone


def factor(params: SamplingParams, logits: Tensor, t: int) -> float:
    """What ``temperature_schedule`` multiplies the temperature of output token ``t`` with; logits f64 [V]."""
    given = dict(params.temperature_schedule or {})
    if given["kind"] == "entropy":
        p = torch.softmax(logits, 0)
        p = p[p > 0]
        alive = int((logits > -math.inf).sum())
        share = float(-(p * p.log()).sum()) / math.log(alive) if alive > 1 else 0.0
        return given["low"] + (given["high"] - given["low"]) * max(share, 0.0) ** given.get("exponent", 1.0)
    way = min(t / given["tokens"], 1.0)
    if given["kind"] == "cosine":
        way = (1 - math.cos(math.pi * way)) / 2
    return given["start"] + (given["end"] - given["start"]) * way
