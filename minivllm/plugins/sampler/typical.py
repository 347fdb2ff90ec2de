"""Sample from locally typical tokens, in addition to the restrictions of the default sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Draw, Row, Rows, State
from minivllm.errors import RequestError

from .default import CHUNK, MIN_TEMPERATURE, DefaultSampler, last_kept
from .mass import masses, mean
from .spec import TYPICAL as TYPICAL_SPEC

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

# bit of ``Row.variant`` that is set for a row with ``typical_p``; the default sampler uses lower bits
TYPICAL = 1 << 40


class TypicalSampler(DefaultSampler):
    """The sampler of requests with ``typical_p`` (Meister et al., arXiv:2202.00666).

    It keeps the tokens whose surprise -log p is nearest to its mean, the entropy, until they reach this probability.
    This happens after temperature and before min-p, top-k and top-p, which see only the kept tokens.  Tokens equal to
    the last kept token are kept too.  The value 1 means the default sampler.

    The distance of a token is -log p - H = mean(x) - x for logits x, so the order needs no logarithm.  A single number
    per row decides, the largest distance that is kept.
    """

    keeps_logits = False
    reads = DefaultSampler.reads | TYPICAL_SPEC.reads

    def columns(self) -> Columns:
        return {**super().columns(), "typical_p": Column(fill=1.0)}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row:
        row = super().bind(params, prompt_len)
        if params.typical_p == 1 or params.temperature < MIN_TEMPERATURE:
            return row
        for name in ("choose_fn", "beam_width"):
            if getattr(params, name) is not None:
                what = f"typical_p={params.typical_p}: expected no {name} beside it, which draws nothing"
                raise RequestError(what, "typical_p")
        return Row({**row.values, "typical_p": params.typical_p}, row.variant | TYPICAL)

    def draw(self, logits: Tensor, rows: Rows, state: State, out: Draw) -> None:
        super().draw(logits, _leave(logits, rows, state), state, out)
        out.peaks = None  # After the exclusion, the largest logits do not show whether an excluded one is finite.

    def drawn_from(self, logits: Tensor, rows: Rows, state: State) -> Tensor:
        if rows.variant & TYPICAL:
            logits = logits.float().clone()
        return super().drawn_from(logits, _leave(logits, rows, state), state)


def _leave(logits: Tensor, rows: Rows, state: State) -> Rows:
    """Exclude untypical tokens of typical rows, in place, and return the rows for the default sampler."""
    if rows.variant & TYPICAL:
        n, width = logits.shape
        chunk = max(CHUNK // width, 1)
        temperature = state["temperature"][rows.slots]
        typical_p = state["typical_p"][rows.slots]
        for i in range(0, n, chunk):
            part = slice(i, i + chunk)
            _restrict(logits[part], temperature[part], typical_p[part])
    return replace(rows, variant=rows.variant & (TYPICAL - 1))


def _restrict(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> None:
    """Set the tokens of ``logits`` [N, V] that are not typical to -inf, in place.  Rows with a NaN keep it."""
    x, mass = masses(logits, temperature)
    center = mean(x, mass)[:, None]
    far = (x - center).abs()
    near = far.nan_to_num(torch.inf).sort(dim=1)
    inside = mass.gather(1, near.indices)
    after = inside.cumsum(dim=1)
    before = after - inside
    total = after[:, -1:].double()
    budget = total * typical_p.double()[:, None]
    last = last_kept(before.double() < budget)
    edge = near.values.gather(1, last)
    limited = typical_p[:, None] < 1
    edge = torch.where(limited, edge, torch.inf)
    logits.masked_fill_(far > edge, float("-inf"))
