"""Taps on their way over the link: what a request adds at points of the model, and what it reads there, pooled.

    client   {"taps": [[point, scale, width], ...], "reads": [[point, "mean" or "last"], ...]}, column ``vectors``
    engine   columns ``tap_rows`` (stream, sample, width) of each read of each branch, in order, and ``tap_values``

A branch's values are pooled in the engine's process once it has ended, so that a vector a read is all that travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.engine.taps import values_of
from minivllm.core.interfaces.taps import Tap

if TYPE_CHECKING:
    from minivllm.core.engine.request import Request

MEAN, LAST = POOLS = ("mean", "last")


@dataclass(frozen=True)
class PooledTaps:
    """Of one request: ``adds`` are taps with vectors, ``reads`` points and how their values are pooled over the
    positions, in the order of the answer."""

    adds: tuple[Tap, ...] = ()
    reads: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.adds or self.reads)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """As the engine takes them."""
        return (*self.adds, *(Tap(point, read=True) for point in dict.fromkeys(point for point, _ in self.reads)))

    @property
    def bytes(self) -> int:
        """Of the vectors, which travel for each prompt of a request."""
        return sum(tap.add.nbytes for tap in self.adds)

    def header(self) -> dict[str, Any]:
        return {"taps": [[tap.point, tap.scale, len(tap.add)] for tap in self.adds], "reads": list(self.reads)}

    def columns(self) -> dict[str, np.ndarray]:
        return {"vectors": np.concatenate([tap.add for tap in self.adds])} if self.adds else {}

    @classmethod
    def of(cls, taps: Sequence[Sequence[Any]], reads: Sequence[Sequence[str]], vectors: np.ndarray) -> PooledTaps:
        """What ``header`` and ``columns`` said."""
        adds, at = [], 0
        for point, scale, width in taps:
            adds.append(Tap(point, add=vectors[at : at + width], scale=scale))
            at += width
        return cls(tuple(adds), tuple((point, how) for point, how in reads))


NOTHING = PooledTaps()


@dataclass
class PooledValues:
    """What the branches that end in a turn have read."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, number: int, request: Request, reads: Sequence[tuple[str, str]]) -> int:
        """Of the branches of a request that ended well.  Returns how many numbers these are."""
        before = len(self.values)
        for seq in request.sequences if reads else ():
            if seq.finish_reason not in ("stop", "length") or (found := values_of(seq, seq.emitted or None)) is None:
                continue
            for point, how in reads:
                part = pooled(found[point], how)
                self.rows.append((number, seq.sample, len(part)))
                self.values.append(part)
        return sum(map(len, self.values[before:]))

    def columns(self) -> dict[str, np.ndarray]:
        if not self.rows:
            return {}
        return {"tap_rows": np.array(self.rows, np.int64).ravel(), "tap_values": np.concatenate(self.values)}


def pooled(values: np.ndarray, how: str) -> np.ndarray:
    """f32 [width] of [positions, width]; empty if there are no positions."""
    if not len(values):
        return np.empty(0, np.float32)
    return values.mean(axis=0, dtype=np.float32) if how == MEAN else values[-1]


def read_values(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(stream, sample, f32 [width]) of what ``PooledValues.columns`` made."""
    at = 0
    for number, sample, width in columns.get("tap_rows", np.empty(0, np.int64)).reshape(-1, 3).tolist():
        yield number, sample, columns["tap_values"][at : at + width]
        at += width
