"""Sample with mirostat 2.0, which keeps the surprise of tokens at a target."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Draw, Row, Rows, State
from minivllm.errors import RequestError

from .default import MASS_SCALE, MIN_TEMPERATURE, DefaultSampler
from .mass import masses, totals
from .spec import MIROSTAT as MIROSTAT_SPEC

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

# bit of ``Row.variant`` that is set for a row with ``mirostat_tau``; the default sampler uses lower bits
MIROSTAT = 1 << 40
RESTRICTIONS = ("top_k", "top_p", "min_p")
CHOOSERS = ("choose_fn", "beam_width")


class MirostatSampler(DefaultSampler):
    """The sampler of requests with ``mirostat_tau``, a target surprise in bits (Basu et al., arXiv:2007.14966,
    algorithm 2).

    Tokens whose surprise -log2 p is above mu are excluded, except the best.  After each token, mu -= ``mirostat_eta`` *
    (surprise of the token - tau). p is the model's probability after temperature and before all restrictions, as in the
    paper.  mu starts at 2 tau.  Requests without ``mirostat_tau`` use the default sampler.  Requests with it may not
    set top-k, top-p or min-p.

    Column ``mu`` is kept when a row is preempted, because it cannot be computed from the accepted tokens.  Column
    ``error`` is surprise - tau of the drawn token from ``draw`` to the ``commit`` that accepts it, and otherwise 0.
    """

    keeps_logits = False
    reads = DefaultSampler.reads | MIROSTAT_SPEC.reads

    def columns(self) -> Columns:
        columns = dict(super().columns())
        for name in ("tau", "eta", "error"):
            columns[name] = Column()
        columns["mu"] = Column(fill=math.inf, kept=True)
        return columns

    def bind(self, params: SamplingParams, prompt_len: int) -> Row:
        row = super().bind(params, prompt_len)
        tau = params.mirostat_tau
        eta = params.mirostat_eta
        if tau is None:
            if "mirostat_eta" in params.extra:
                raise RequestError(f"mirostat_eta={eta}: set mirostat_tau too, which turns it on", "mirostat_eta")
            return row
        names = params.changed_parameters()
        clash: list[str] = [name for name in RESTRICTIONS if name in names]
        clash += [name for name in CHOOSERS if getattr(params, name) is not None]
        if clash or params.temperature < MIN_TEMPERATURE:
            what = f"no {clash[0]}" if clash else "temperature above 0"
            text = f"mirostat_tau={tau}: expected {what} beside it: it chooses among tokens"
            raise RequestError(text, "mirostat_tau")
        values = {**row.values, "tau": tau, "eta": eta, "mu": 2 * tau}
        return Row(values, row.variant | MIROSTAT)

    def draw(self, logits: Tensor, rows: Rows, state: State, out: Draw) -> None:
        plain = _plain(rows)
        if not rows.variant & MIROSTAT:
            return super().draw(logits, plain, state, out)
        surprise = _leave(logits, rows, state)
        super().draw(logits, plain, state, out)
        out.peaks = None  # After the exclusion, the largest logits do not show whether an excluded one is finite.
        tau = state["tau"][rows.slots]
        tokens = out.tokens.clamp(0, logits.shape[1] - 1)
        observed = surprise.gather(1, tokens[:, None]).squeeze(1)
        error = observed - tau
        state["error"][rows.slots] = torch.where(tau > 0, error, 0.0)

    def drawn_from(self, logits: Tensor, rows: Rows, state: State) -> Tensor:
        if rows.variant & MIROSTAT:
            logits = logits.float().clone()
            _leave(logits, rows, state)
        return super().drawn_from(logits, _plain(rows), state)

    def commit(self, tokens: Tensor, count: Tensor, rows: Rows, state: State) -> None:
        slots = rows.slots
        error = state["error"][slots]
        mu = state["mu"][slots]
        eta = state["eta"][slots]
        accepted = count > 0
        moved = mu - eta * error
        moves = accepted & (error != 0)
        state["mu"][slots] = torch.where(moves, moved, mu)
        state["error"][slots] = torch.where(accepted, 0.0, error)


def _plain(rows: Rows) -> Rows:
    """Return ``rows`` without the mirostat bit in the variants, for the default sampler."""
    return replace(rows, variant=rows.variant & (MIROSTAT - 1))


def _leave(logits: Tensor, rows: Rows, state: State) -> Tensor:
    """Set the logits [N, V] of tokens that are too surprising to -inf, in place, and return the surprise of all tokens,
    -log2 p in bits, f32 [N, V]."""
    x, mass = masses(logits, state["temperature"][rows.slots])
    total = totals(mass) / MASS_SCALE
    best = x == 0
    normal = total.log().float()
    surprise = x.sub_(normal[:, None]).mul_(-1 / math.log(2))
    mu = state["mu"][rows.slots][:, None]
    excluded = surprise > mu
    excluded &= ~best
    logits.masked_fill_(excluded, float("-inf"))
    return surprise
