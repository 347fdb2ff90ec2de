"""Waiting sequences as columns: what a policy sees of them, and what the device is told when they take a slot."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.plan import NO_CHANGE, STOP_IDS, Delta, Join, no_rows
from minivllm.core.interfaces.scheduler import Load, QueueView

if TYPE_CHECKING:
    from collections.abc import Callable

    from .planner import Planner
    from .request import Seq
    from .slots import Slots


DTYPES = {"id": np.int64, **dict.fromkeys(("arrival", "ttft_due", "tpot_due"), np.float64)}
ROW = np.dtype([(f.name, DTYPES.get(f.name, np.int32)) for f in fields(QueueView)], align=True)
NO_VECTORS = no_rows(dtype=np.float32)
COLUMNS = frozenset(f.name for f in fields(QueueView))


class LazyView(QueueView):
    """A view of n sequences whose columns are made by ``column(name)``: a policy pays for what it reads.  (A policy
    that sorts a thousand rows by arrival would else wait for thirteen other columns of them.)"""

    _n: int
    _column: Callable[[str], np.ndarray]

    def __init__(self, n: int, column: Callable[[str], np.ndarray]) -> None:
        self.__dict__.update(_n=n, _column=column)

    def __len__(self) -> int:
        return self._n

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in COLUMNS:
            raise AttributeError(f"a QueueView has no column {name!r}")
        made = self.__dict__[name] = self._column(name)
        return made

    def take(self, index: np.ndarray) -> QueueView:
        n = len(np.arange(self._n)[index])
        return LazyView(n, lambda name: getattr(self, name)[index])


def row_of(seq: Seq) -> bytes:
    """A sequence without a slot as one row of ``QueueView``; it does not change while the sequence waits."""
    r, n = seq.request, len(seq.request.prompt)
    ttft, at = r.params.ttft_ms, r.arrival
    due = np.inf if ttft is None else at + ttft / 1e3
    row = (
        seq.id,
        at,
        n,
        seq.known,
        0,
        0,
        r.expected,
        r.end - n,
        r.params.priority,
        r.tenant,
        due,
        np.inf,
        seq.preempted,
        0,
        seq.finish_reason == "abort",
    )
    return np.array(row, ROW).tobytes()  # rows are joined to a table far faster than tuples are


def queue_view(rows: list[bytes], cached: Callable[[], np.ndarray] | None = None) -> QueueView:
    """The columns of ``QueueView`` for rows of ``row_of``; ``cached`` makes that column, which is else 0."""
    table = np.frombuffer(bytearray().join(rows), ROW)
    return LazyView(
        len(rows), lambda name: cached() if cached and name == "cached" else table[name]
    )


def join_of(joins: list[tuple[int, Seq]], slots: Slots) -> Join:
    """The columns of ``plan.Join`` for sequences that took a slot since the last plan."""
    at = np.array([slot for slot, _ in joins], np.int32)
    seqs = [seq for _, seq in joins]
    known = [seq.known for seq in seqs]
    added = [
        (i, number, vector)
        for i, seq in enumerate(seqs)
        for number, vector in (
            {} if seq.request.tapped is None else seq.request.tapped.steering
        ).items()
    ]
    stop_ids = np.full((len(seqs), STOP_IDS), -1, np.int32)
    for row, seq in zip(stop_ids, seqs, strict=True):
        if ids := seq.request.stops.ids:
            row[: len(ids)] = ids
    return Join(
        slot=at,
        known=np.array(known, np.int32),
        computed=slots.computed[at],
        prompt=slots.prompt[at],
        end=slots.end[at],
        seed=np.array([seq.seed for seq in seqs], np.int64),
        sample=np.array([seq.sample for seq in seqs], np.int32),
        min_end=np.array([s.request.stops.min_end for s in seqs], np.int32),
        stop_ids=stop_ids,
        n_eos=np.array([s.request.stops.n_eos for s in seqs], np.int32),
        tokens=np.concatenate([seq.tokens[: seq.known] for seq in seqs]).astype(np.int32),
        bound=tuple(
            {i: s.request.rows[p] for i, s in enumerate(seqs) if s.request.rows[p] is not None}
            for p in range(len(seqs[0].request.rows))
        ),
        saved=np.array([s.id if s.saved else -1 for s in seqs], np.int64),
        steer=np.array([line[:2] for line in added], np.int32).reshape(-1, 2),
        vectors=np.concatenate([NO_VECTORS, *(vector for *_, vector in added)]),
    )


def delta_of(planner: Planner) -> Delta:
    """Everything that the device has not heard of yet."""
    p, s = planner, planner.slots
    forks = [(parent, slot, b.sample) for parent, slot, b in p.forks if s.seq[slot] is b]
    # preempted perhaps, but the fork copies their columns
    parents = {parent for parent, _, _ in forks}
    joins = [(slot, seq) for slot, seq in p.joins if s.seq[slot] is seq or slot in parents]
    changes: dict[str, Any] = p.cache.changes()
    if joins:
        changes["join"] = join_of(joins, s)
    noted: dict[str, list[Any]] = {"leave": p.left, "fork": forks, "token": p.chosen}
    changes |= {name: np.array(rows, np.int32) for name, rows in noted.items() if rows}
    noted = {"keep": p.keeps, "forget": p.forgotten}
    changes |= {name: np.array(rows, np.int64) for name, rows in noted.items() if rows}
    for told in (p.left, p.chosen, p.joins, p.forks, p.keeps, p.forgotten):
        told.clear()
    return Delta(**changes) if changes else NO_CHANGE


def load_of(planner: Planner, now: float) -> Load:
    """What ``shape`` is told."""
    p, s = planner, planner.slots
    head = p.waiting.head()
    return Load(
        waiting=p.n_waiting,
        running=len(s.running),
        prefilling=int((p.need(s.running) > 1).sum()),
        free_blocks=p.cache.available,
        total_blocks=min(p.total for p in p.cache.pools),
        token_budget=p.max_tokens,
        oldest_wait=0.0 if head is None else max(0.0, now - head.request.arrival),
        tpot_slack=float(s.tpot_due[s.running].min(initial=np.inf)) - now,
    )
