"""Compute in float64 which tokens the limits of a sampler (such as top_p) keep, within the rounding of float32.

Each function returns two masks bool [V]: tokens that must be drawable, and tokens that may be.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams

# probability masses within this distance of top_p or min_p may count as above or below, because float32 cannot
# distinguish them
NEAR = 1e-4
TINY = 1e-300  # added to a sum so that it is not 0

_ALONE = {
    "top_k": (1, 2, 3, 11, 12, 13), "top_p": (0.01, 0.3, 0.5, 0.97, 0.99999), "min_p": (0.6, 0.75, 0.9, 1.0),
    "typical_p": (0.05, 0.4, 0.9), "mirostat_tau": (1.6, 1.75, 1.9),
}  # fmt: skip
_TOGETHER = (
    {"temperature": 2.0, "top_p": 0.5}, {"temperature": 0.1, "top_p": 0.5}, {"temperature": 2.0, "min_p": 0.9},
    {"temperature": 0.1, "min_p": 0.3}, {"top_k": 4, "top_p": 0.6}, {"min_p": 0.8, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.7, "min_p": 0.8},
)  # fmt: skip
LIMITS: list[dict[str, Any]] = [{name: value} for name, values in _ALONE.items() for value in values]
LIMITS += _TOGETHER


def top_mass(mass: Tensor, most: float) -> int:
    """Return how many of the first tokens reach a total probability ``most``, at least one.

    ``mass`` f64 [n] has the probabilities in order.  The count includes the token that crosses the total.
    """
    before = mass.cumsum(0) - mass
    return max(int((before < most).sum()), 1)


def kept(prob: Tensor, p: SamplingParams, least_p: float, mass_p: float, wide: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens that min-p, then top-k, then top-p keep of probabilities f64 [V], as in vLLM.

    In the first mask, all tokens are kept that tie with the last kept one.  In the second, none of them are kept
    unless all are.  ``wide`` makes top-p count the mass of all tokens that tie at the edge of top-k.
    """
    least = min(least_p, 1.0) * prob.max()
    alive = (prob >= least) & (prob > 0)
    ranks = torch.where(alive, prob, -1.0)
    ranked = torch.argsort(ranks, descending=True, stable=True)
    order = ranked[: int(alive.sum())]
    if 0 < p.top_k < len(order):
        edge = prob[order[p.top_k - 1]]
        if wide:
            count = int((prob[order] >= edge).sum())
        else:
            count = p.top_k
        order = order[:count]
    if p.top_p < 1:
        mass = prob[order] / prob[order].sum()
        order = order[: top_mass(mass, mass_p)]
    last = prob[order[-1]]
    ties = alive & (prob >= last)
    if int(ties.sum()) == len(order):
        return ties, ties
    return ties, alive & (prob > last)


def nearest(prob: Tensor, mass_p: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that locally typical sampling keeps of probabilities f64 [V]: (surely, maybe).

    It keeps the tokens whose surprise -log p is nearest to the entropy, until they have the mass ``mass_p`` together.
    Tokens whose distance equals that of the last one, to float32, may be kept or not.
    """
    alive = prob > 0
    logp = torch.where(alive, prob, 1.0).log()
    entropy = -(prob * logp).sum()
    far = torch.where(alive, (-logp - entropy).abs(), torch.inf)
    order = torch.argsort(far, stable=True)
    order = order[: int(alive.sum())]
    edge = far[order[top_mass(prob[order], mass_p) - 1]]
    may = alive & (far <= edge + NEAR)
    inner = alive & (far < edge - NEAR)
    if int(may.sum()) == int(inner.sum()) + 1:
        return may, may
    return inner, may


def surprising(prob: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the tokens that mirostat may draw first: those with at most 2 tau bits of surprise, and the best token."""
    possible = prob > 0
    bits = -prob.log2()
    most = 2 * params.mirostat_tau
    must = possible & (bits <= most - NEAR)
    may = possible & (bits <= most + NEAR)
    best = prob == prob.max()
    if best.sum() == 1:
        must = must | best
    return must, may | best


def supports(prob: Tensor, p: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the tokens that min-p, top-k and top-p keep: (surely, maybe).

    The masks differ by ties and by masses within ``NEAR``.
    """
    must = prob > 0
    may = prob < 0
    for a, b, wide in itertools.product((-NEAR, 0.0, NEAR), (-NEAR, 0.0, NEAR), (True, False)):
        least_p = p.min_p * (1 - a)
        ties, sure = kept(prob, p, least_p, p.top_p + b, wide)
        must = must & sure
        may = may | ties
    return must, may


def typical_supports(prob: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the tokens that typical-p, then min-p, top-k and top-p keep of f64 [V]: (surely, maybe)."""
    must = prob > 0
    may = prob < 0
    for by in (-NEAR, 0.0, NEAR):
        for tokens in nearest(prob, params.typical_p + by):
            if not tokens.any():
                must = tokens
                continue
            rest = torch.where(tokens, prob, 0.0)
            total = rest.sum().clamp(min=TINY)
            sure, maybe = supports(rest / total, params)
            must = must & sure
            may = may | maybe
    return must, may
