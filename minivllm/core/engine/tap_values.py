"""The taps of a request, and the values that its sequences have read at them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

FIRST_ROOM = 16 << 20  # bytes that a sequence's values of a point have before they grow, at most
ROOM = 1 << 30  # rows of a sequence whose length has no bound


@dataclass(frozen=True)
class RequestTaps:
    """The taps of a request, points by their number in ``Capacity.taps``."""

    read: Mapping[int, tuple[str, int]]  # name and width of the points that it reads, ascending
    steering: Mapping[int, np.ndarray]  # f32 [width] what it adds, likewise
    logits: int  # the number of that point

    @property
    def salt(self) -> str:
        """Return a digest of the steering vectors: requests with the same one may share prefixes."""
        digest = hashlib.sha256()
        for number, vector in self.steering.items():
            digest.update(number.to_bytes(4, "little") + vector.tobytes())
        return f"steered {digest.hexdigest()}"


class Growing:
    """An array f32 [n, width] that grows at its end, in memory of its own.

    A value is copied once when it is added, and again whenever the room is doubled."""

    def __init__(self, width: int, room: int) -> None:
        self.memory, self.n = np.empty((max(room, 1), width), np.float32), 0

    def add(self, rows: np.ndarray) -> None:
        """Append rows f32 [m, width]."""
        n = self.n + len(rows)
        if n > len(self.memory):
            old = self.memory[: self.n]
            self.memory = np.empty((max(n, 2 * len(self.memory)), old.shape[1]), np.float32)
            self.memory[: self.n] = old
        self.memory[self.n : n] = rows
        self.n = n

    @property
    def rows(self) -> np.ndarray:
        """Return the rows that were added, without a copy."""
        return self.memory[: self.n]


@dataclass(eq=False)
class TapValues:
    """The values that a sequence has read, at the positions [first, upto); values of steps in flight are still to come.

    ``upto`` stays behind in steps that were made from the one before (see ``steady``), until the next that was not, or
    until the sequence leaves its slot."""

    first: int
    upto: int
    room: int = ROOM  # rows that there may be
    parts: dict[int, Growing] = field(default_factory=dict)  # by point
    # logits at the tokens of a scored prompt but the last, which one branch of a request has whole
    scored: list[np.ndarray] = field(default_factory=list)

    def keep(self, number: int, rows: np.ndarray) -> None:
        """Append values f32 [n, width] of a point; the memory of ``rows`` stays the step's own."""
        if number not in self.parts:
            width = rows.shape[1]
            most = max(FIRST_ROOM // (4 * width), len(rows))
            self.parts[number] = Growing(width, min(self.room, most))
        self.parts[number].add(rows)
