"""Waiting or running sequences as columns of numbers, one element per sequence, for the scheduling policy."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.scheduler import ABSENT, QueueView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .request import Seq


DTYPES = {
    **dict.fromkeys(("id", "session", "turn", "parent"), np.int64),
    **dict.fromkeys(("arrival", "ttft_due", "tpot_due", "next_s", "deadline"), np.float64),
}
ROW = np.dtype([(f.name, DTYPES.get(f.name, np.int32)) for f in fields(QueueView)], align=True)
COLUMNS = frozenset(f.name for f in fields(QueueView))


class LazyView(QueueView):
    """Columns (``QueueView``) of n sequences.  ``column(name)`` computes a column when it is first read.

    So a policy that only reads the arrival times does not wait for thirteen other columns."""

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
    """Return a sequence without a slot as one row (bytes) of ``QueueView``.  The row stays valid while the sequence
    waits."""
    r = seq.request
    n = len(seq.request.prompt)
    ttft = r.params.ttft_ms
    at = r.arrival
    due = np.inf if ttft is None else at + ttft / 1e3
    facts: list[Any] = list(ABSENT.values())
    if r.turn is not None:
        facts = [getattr(r.turn, name) for name in ABSENT]
    row = (
        seq.id,
        at,
        n,
        seq.known,
        0,
        0,
        r.expected,
        r.most_out,
        r.params.priority,
        r.tenant,
        due,
        np.inf,
        seq.preempted,
        0,
        seq.finish_reason == "abort",
        *facts,
    )
    # joining the bytes of rows to a table is far faster than joining tuples
    return np.array(row, ROW).tobytes()


def queue_view(rows: list[bytes], cached: Callable[[], np.ndarray] | None = None) -> QueueView:
    """Return the columns of ``QueueView`` for rows of ``row_of``.  ``cached`` computes the column of cached tokens,
    which is 0 if it is None."""
    table = np.frombuffer(bytearray().join(rows), ROW)
    return LazyView(
        len(rows), lambda name: cached() if cached and name == "cached" else table[name]
    )


def session_column(seqs: Sequence[Seq], name: str) -> np.ndarray:
    """Return one element per sequence of the ``QueueView`` column ``name``, which describes the session of a request.
    Sequences without a session have the value of ``ABSENT``."""
    absent = ABSENT[name]
    dtype = np.int32 if name == "budget" else np.dtype(type(absent))
    column = np.full(len(seqs), absent, dtype)
    for i, seq in enumerate(seqs):
        turn = seq.request.turn
        if turn is not None:
            column[i] = getattr(turn, name)
    return column
