"""The taps of a request, and the values that its sequences have read at them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .routes import RequestRoutes

FIRST_ROOM = 16 << 20  # most bytes reserved at first for a sequence's values of one point
ROOM = 1 << 30  # rows of a sequence without a bound of its length


@dataclass(frozen=True)
class RequestTaps:
    """The taps of a request, points by their number in ``Capacity.taps``."""

    read: Mapping[int, tuple[str, int]]  # point number -> (name, width) to read, ascending
    steering: Mapping[int, np.ndarray]  # point number -> vector f32 [width] to add, ascending
    logits: int  # number of the point ``logits``
    # expert routes, whose points are also in ``read`` and ``steering``
    routes: RequestRoutes | None = None

    @property
    def salt(self) -> str:
        """Return a digest of the steering vectors and given routes: requests with the same one may share prefixes."""
        digest = hashlib.sha256()
        for number, vector in self.steering.items():
            digest.update(number.to_bytes(4, "little") + vector.tobytes())
        if self.given is not None:
            digest.update(b"given" + self.given.tobytes())
        return f"steered {digest.hexdigest()}"

    @property
    def given(self) -> np.ndarray | None:
        """Return the given routes i32 [positions, layers * k], None if there are none."""
        return None if self.routes is None else self.routes.given

    @property
    def changes(self) -> bool:
        """Return whether the taps change the keys and values of the request's tokens."""
        return bool(self.steering) or self.given is not None


class Growing:
    """An array f32 [n, width] that grows at its end.

    A row is copied when it is added, and again whenever the memory is doubled.
    """

    def __init__(self, width: int, room: int) -> None:
        self.memory = np.empty((max(room, 1), width), np.float32)
        self.n = 0

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
    """Values that a sequence has read at its taps, for the positions [first, upto).  Values of steps in flight still
    arrive.

    Steady steps (see ``steady``) do not advance ``upto``.  The next full step does, or the end of the sequence's stay
    in its slot."""

    first: int
    upto: int
    room: int = ROOM  # most rows
    parts: dict[int, Growing] = field(default_factory=dict)  # values by point number
    # logits of a scored prompt except its last token; only one branch of a request has them in full
    scored: list[np.ndarray] = field(default_factory=list)

    def keep(self, number: int, rows: np.ndarray) -> None:
        """Append values f32 [n, width] of a tap point; the memory of ``rows`` stays the step's own."""
        if number not in self.parts:
            width = rows.shape[1]
            most = max(FIRST_ROOM // (4 * width), len(rows))
            self.parts[number] = Growing(width, min(self.room, most))
        self.parts[number].add(rows)
