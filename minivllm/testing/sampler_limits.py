"""What the limits of a sampler leave of a distribution, in float64, and how far float32 may differ from that.

Each function gives two masks bool [V]: tokens that must be drawable, and tokens that may be.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams

NEAR = 1e-4  # masses so close to top_p or min_p may fall on either side: float32 has no opinion

LIMITS: tuple[dict[str, Any], ...] = (
    *({"top_k": k} for k in (1, 2, 3, 11, 12, 13)), *({"top_p": x} for x in (0.01, 0.3, 0.5, 0.97, 0.99999)),
    *({"min_p": x} for x in (0.6, 0.75, 0.9, 1.0)), *({"typical_p": x} for x in (0.05, 0.4, 0.9)),
    *({"mirostat_tau": x} for x in (1.6, 1.75, 1.9)),
    {"temperature": 2.0, "top_p": 0.5}, {"temperature": 0.1, "top_p": 0.5}, {"temperature": 2.0, "min_p": 0.9},
    {"temperature": 0.1, "min_p": 0.3}, {"top_k": 4, "top_p": 0.6}, {"min_p": 0.8, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.7, "min_p": 0.8},
)  # fmt: skip


def kept(prob: Tensor, p: SamplingParams, least_p: float, mass_p: float, wide: bool) -> tuple[Tensor, Tensor]:
    """Masks bool [V] of what min-p, then top-k, then top-p leave of probabilities f64 [V], as in vLLM.

    The first keeps what ties with the last one kept, the second drops all that tie if not all of them are kept.
    ``wide``: top-p counts the mass of what ties at the edge of top-k.
    """
    alive = (prob >= min(least_p, 1.0) * prob.max()) & (prob > 0)
    order = torch.argsort(torch.where(alive, prob, -1.0), descending=True, stable=True)[: int(alive.sum())]
    if 0 < p.top_k < len(order):
        edge = prob[order[p.top_k - 1]]
        order = order[: int((prob[order] >= edge).sum()) if wide else p.top_k]
    if p.top_p < 1:
        mass = prob[order] / prob[order].sum()
        order = order[: max(int((mass.cumsum(0) - mass < mass_p).sum()), 1)]
    last = prob[order[-1]]
    ties = alive & (prob >= last)
    return ties, ties if int(ties.sum()) == len(order) else alive & (prob > last)


def nearest(prob: Tensor, mass_p: float) -> tuple[Tensor, Tensor]:
    """Masks bool [V] of what locally typical sampling leaves of probabilities f64 [V]: (surely, maybe).

    Of the tokens whose surprise -log p is nearest to the entropy as many as have that mass together; what is as far as
    the last one, to float32, may stay or go.
    """
    alive = prob > 0
    logp = torch.where(alive, prob, 1.0).log()
    far = torch.where(alive, (-logp - -(prob * logp).sum()).abs(), torch.inf)
    order = torch.argsort(far, stable=True)[: int(alive.sum())]
    mass = prob[order]
    edge = far[order[max(int((mass.cumsum(0) - mass < mass_p).sum()), 1) - 1]]
    may, inner = alive & (far <= edge + NEAR), alive & (far < edge - NEAR)
    return (may, may) if int(may.sum()) == int(inner.sum()) + 1 else (inner, may)


def surprising(prob: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The same of mirostat's first draw: at most 2 tau bits of surprise, and the best in any case."""
    bits = -prob.log2()
    inner, may = ((bits <= 2 * params.mirostat_tau + by) & (prob > 0) for by in (-NEAR, NEAR))
    best = prob == prob.max()
    return inner | (best if best.sum() == 1 else best & ~best), may | best


def supports(prob: Tensor, p: SamplingParams) -> tuple[Tensor, Tensor]:
    """(tokens that must be drawable, tokens that may be): they differ by ties and by masses within NEAR of a limit."""
    must, may = prob > 0, prob < 0
    for a, b, wide in itertools.product((-NEAR, 0.0, NEAR), (-NEAR, 0.0, NEAR), (True, False)):
        ties, sure = kept(prob, p, p.min_p * (1 - a), p.top_p + b, wide)
        must, may = must & sure, may | ties
    return must, may
