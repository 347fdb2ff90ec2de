"""Waiting sequences as columns: what a policy sees of them, and what the device is told when they take a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .interfaces.plan import STOP_IDS, Join
from .interfaces.scheduler import QueueView

if TYPE_CHECKING:
    from .request import Seq
    from .slots import Slots


def queue_view(seqs: list[Seq], cached: np.ndarray | None = None) -> QueueView:
    """The columns of ``QueueView`` for sequences without a slot."""
    n = len(seqs)
    i32 = lambda values: np.fromiter(values, np.int32, n)  # noqa: E731
    f64 = lambda values: np.fromiter(values, np.float64, n)  # noqa: E731
    out = i32(s.request.end - len(s.request.prompt) for s in seqs)
    return QueueView(
        id=np.fromiter((s.id for s in seqs), np.int64, n),
        arrival=f64(s.request.arrival for s in seqs),
        prompt=i32(len(s.request.prompt) for s in seqs),
        known=i32(s.known for s in seqs),
        computed=np.zeros(n, np.int32),
        cached=np.zeros(n, np.int32) if cached is None else cached,
        predicted_out=out,
        max_out=out,
        priority=i32(s.request.params.priority for s in seqs),
        tenant=i32(s.request.tenant for s in seqs),
        ttft_due=f64(_due(s.request.arrival, s.request.params.ttft_ms) for s in seqs),
        tpot_due=np.full(n, np.inf),
        preempted=i32(s.preempted for s in seqs),
        blocks=np.zeros(n, np.int32),
    )


def _due(arrival: float, ms: float | None) -> float:
    return np.inf if ms is None else arrival + ms / 1e3


def join_of(joins: list[tuple[int, Seq]], slots: Slots) -> Join:
    """The columns of ``plan.Join`` for sequences that took a slot since the last plan."""
    at = np.array([slot for slot, _ in joins], np.int32)
    seqs = [seq for _, seq in joins]
    known = [seq.known for seq in seqs]
    stop_ids = np.full((len(seqs), STOP_IDS), -1, np.int32)
    for row, seq in zip(stop_ids, seqs, strict=True):
        ids = seq.request.stop_ids
        row[: len(ids)] = ids
    return Join(
        slot=at,
        known=np.array(known, np.int32),
        computed=slots.computed[at],
        prompt=slots.prompt[at],
        end=slots.end[at],
        seed=np.array([seq.seed for seq in seqs], np.int64),
        sample=np.array([seq.sample for seq in seqs], np.int32),
        min_end=np.array([len(s.request.prompt) + s.request.params.min_tokens for s in seqs], np.int32),
        stop_ids=stop_ids,
        n_eos=np.array([0 if s.request.params.ignore_eos else len(s.request.eos_ids) for s in seqs], np.int32),
        tokens=np.concatenate([seq.tokens[: seq.known] for seq in seqs]).astype(np.int32),
        bound=tuple(
            {i: s.request.rows[p] for i, s in enumerate(seqs) if s.request.rows[p] is not None}
            for p in range(len(seqs[0].request.rows))
        ),
    )
