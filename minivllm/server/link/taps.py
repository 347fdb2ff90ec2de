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

from minivllm.core.engine.taps import TapLimits
from minivllm.core.interfaces.taps import Tap
from minivllm.errors import RequestError
from minivllm.frontend.tap_values import parts_of

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.request import Request, Seq

MEAN, LAST = POOLS = ("mean", "last")
MOST_ADDED = 16 << 20  # bytes of the vectors of a request: it travels in one frame


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

    def check_size(self) -> None:
        """RequestError for vectors that are too large to travel."""
        if self.bytes > MOST_ADDED:
            what = f"taps: the vectors that are added are {self.bytes} bytes as float32; want at most {MOST_ADDED}"
            raise RequestError(f"{what}: add fewer, and vectors as wide as their points", "taps")

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
    """Of a frame: what branches have read."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, number: int, sample: int, values: np.ndarray) -> int:
        """One read of a branch, f32 [width]; how many numbers that are."""
        self.rows.append((number, sample, len(values)))
        self.values.append(values)
        return len(values)

    def columns(self) -> dict[str, np.ndarray]:
        if not self.rows:
            return {}
        return {"tap_rows": np.array(self.rows, np.int64).ravel(), "tap_values": np.concatenate(self.values)}


def pooled(request: Request, reads: Sequence[tuple[str, str]]) -> Iterator[tuple[int, np.ndarray]]:
    """(sample, f32 [width], empty if there are no positions) for each read of each branch that ended well.  What the
    branches share is summed once, not once for each: nobody is served meanwhile."""
    sums: dict[tuple[str, int], Any] = {}
    for seq in request.sequences if reads else ():
        if seq.finish_reason not in ("stop", "length") or (found := parts_of(seq, seq.emitted or None)) is None:
            continue
        for point, how in reads:
            shared, own = found[point]
            count = sum(map(len, shared))
            n = count + sum(map(len, own))
            if not n:
                yield seq.sample, np.empty(0, np.float32)
            elif how == MEAN:
                if (point, count) not in sums:
                    sums[point, count] = _sum(shared)
                yield seq.sample, ((sums[point, count] + _sum(own)) / n).astype(np.float32)
            else:
                yield seq.sample, (own or shared)[-1][-1]


def _sum(parts: Sequence[np.ndarray]) -> Any:
    """f64 [width] of parts f32 [n, width]; 0.0 if there are none."""
    sums = [part.sum(axis=0) for part in parts if len(part) > 1]
    if ones := [part for part in parts if len(part) == 1]:  # of decodes, one each
        sums.append(np.concatenate(ones).sum(axis=0))
    return np.sum(sums, axis=0, dtype=np.float64)


def fault(engine: Engine, seq: Seq) -> tuple[int, str | None, str | None]:
    """(sample, error, param) of a branch that failed; ``param``: the field of the request for whose sake it did."""
    mine = seq.error == TapLimits.of(engine.capacity, engine.wiring).too_many
    return seq.sample, seq.error, "taps" if mine else None


def read_values(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(stream, sample, f32 [width]) of what ``PooledValues.columns`` made."""
    at = 0
    for number, sample, width in columns.get("tap_rows", np.empty(0, np.int64)).reshape(-1, 3).tolist():
        yield number, sample, columns["tap_values"][at : at + width]
        at += width
