"""Taps on the link between client and engine: vectors to add and values to read at named places in the model.

    client   {"taps": [[point, scale, width], ...], "reads": [[point, "mean" or "last"], ...]}, column ``vectors``
    engine   columns ``tap_rows`` (stream, sample, width), one row for each read of each branch, and ``tap_values``

The values of a branch are pooled over its positions in the engine's process once the branch has ended.  So each read
sends one vector.
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
MOST_ADDED = 16 << 20  # largest size in bytes of the vectors of a request, which is sent in one frame


@dataclass(frozen=True)
class PooledTaps:
    """The taps of a request.

    ``adds`` are taps with a vector.  ``reads`` are pairs of a point and the pooling of its values over the positions
    ("mean" or "last"), in the order of the answer.
    """

    adds: tuple[Tap, ...] = ()
    reads: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.adds or self.reads)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Return the taps for the engine, one for each vector and one for each point that is read."""
        points = dict.fromkeys(point for point, _ in self.reads)
        return (*self.adds, *(Tap(point, read=True) for point in points))

    @property
    def bytes(self) -> int:
        """Return the size of the vectors, which are sent for each prompt of a request."""
        return sum(tap.add.nbytes for tap in self.adds)

    def check_size(self) -> None:
        """Raise RequestError if the vectors are too large for a frame."""
        if self.bytes > MOST_ADDED:
            problem = (
                f"taps: the vectors that are added are {self.bytes} bytes as float32; expected at most {MOST_ADDED}"
            )
            raise RequestError(f"{problem}: add fewer vectors, each as wide as its point", "taps")

    def header(self) -> dict[str, Any]:
        """Return the fields about taps of the header of a request's frame."""
        taps = [[tap.point, tap.scale, len(tap.add)] for tap in self.adds]
        return {"taps": taps, "reads": list(self.reads)}

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns about taps of a request's frame: the added vectors, none without any."""
        if not self.adds:
            return {}
        return {"vectors": np.concatenate([tap.add for tap in self.adds])}

    @classmethod
    def of(cls, taps: Sequence[Sequence[Any]], reads: Sequence[Sequence[str]], vectors: np.ndarray) -> PooledTaps:
        """Return the taps of a request's frame: ``taps`` and ``reads`` are fields of its header (see ``header``), and
        ``vectors`` is its column."""
        adds = []
        at = 0
        for point, scale, width in taps:
            adds.append(Tap(point, add=vectors[at : at + width], scale=scale))
            at += width
        return cls(tuple(adds), tuple((point, pooling) for point, pooling in reads))


NOTHING = PooledTaps()


@dataclass
class PooledValues:
    """The pooled values in a frame, one vector for each read of each branch."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, number: int, sample: int, values: np.ndarray) -> int:
        """Add the values of a read of a branch, f32 [width], and return their number."""
        self.rows.append((number, sample, len(values)))
        self.values.append(values)
        return len(values)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the pooled values as columns of a frame: ``tap_rows`` and ``tap_values``; empty if there are none."""
        if not self.rows:
            return {}
        rows = np.array(self.rows, np.int64).ravel()
        return {"tap_rows": rows, "tap_values": np.concatenate(self.values)}


def pooled(request: Request, reads: Sequence[tuple[str, str]]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (sample, pooled values) for each read of each branch that has ended well.

    ``sample`` is the number of the branch.  The values are f32 [width], empty if there are no positions.
    Positions that the branches share are summed once for all of them, because the engine's loop waits meanwhile.
    """
    if not reads:
        return
    # (point, number of shared positions) -> sum of the values over these positions
    sums: dict[tuple[str, int], Any] = {}
    for seq in request.sequences:
        if seq.finish_reason not in ("stop", "length"):
            continue
        found = parts_of(seq, seq.emitted or None)
        if found is None:
            continue
        for point, pooling in reads:
            shared, own = found[point]
            count = sum(map(len, shared))
            n = count + sum(map(len, own))
            if not n:
                yield seq.sample, np.empty(0, np.float32)
            elif pooling == MEAN:
                if (point, count) not in sums:
                    sums[point, count] = _sum(shared)
                total = sums[point, count] + _sum(own)
                yield seq.sample, (total / n).astype(np.float32)
            else:
                yield seq.sample, (own or shared)[-1][-1]


def embedded(request: Request) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (sample, embedding f32 [hidden]) of a request for an embedding that has ended well."""
    if request.pooling is not None and request.pooling.embedding is not None:
        yield 0, request.pooling.embedding


def _sum(parts: Sequence[np.ndarray]) -> Any:
    """Return the sum f64 [width] over the rows of all parts f32 [n, width], or 0.0 if there are none."""
    sums = [part.sum(axis=0) for part in parts if len(part) > 1]
    singles = [part for part in parts if len(part) == 1]  # from decode steps
    if singles:
        sums.append(np.concatenate(singles).sum(axis=0))
    return np.sum(sums, axis=0, dtype=np.float64)


def fault(engine: Engine, seq: Seq) -> tuple[int, str | None, str | None]:
    """Return (sample, error, param) of a branch that failed.

    ``param`` is the request's field at fault: "taps" if the request reads more values than the engine keeps, a field
    that contradicts another one if together they allow no token, else None.
    """
    if seq.error == TapLimits.of(engine.capacity, engine.wiring).too_many:
        return seq.sample, seq.error, "taps"
    contradiction = seq.contradiction()
    if contradiction is not None and seq.error == contradiction[0]:
        return seq.sample, *contradiction
    return seq.sample, seq.error, None


def read_values(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (stream, sample, values f32 [width]) for each read in the columns of ``PooledValues``."""
    if "tap_rows" not in columns:
        return
    at = 0
    for number, sample, width in columns["tap_rows"].reshape(-1, 3).tolist():
        yield number, sample, columns["tap_values"][at : at + width]
        at += width
