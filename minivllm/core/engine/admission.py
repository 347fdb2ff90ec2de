"""Sequences as columns, in the form in which a policy reads them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView

if TYPE_CHECKING:
    from collections.abc import Callable

    from .request import Seq


DTYPES = {"id": np.int64, **dict.fromkeys(("arrival", "ttft_due", "tpot_due"), np.float64)}
ROW = np.dtype([(f.name, DTYPES.get(f.name, np.int32)) for f in fields(QueueView)], align=True)
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
