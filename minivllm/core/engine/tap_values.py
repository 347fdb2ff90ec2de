"""The taps of a request (named tensors of the model that it reads or changes), and the values that its sequences have
read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .routes import RequestRoutes

# bytes that are reserved at first for a sequence's values at one tap point, at most
FIRST_ROOM = 16 << 20
ROOM = 1 << 30  # used as the number of rows if the length of a sequence is not limited


@dataclass(frozen=True)
class RequestTaps:
    """The checked taps of a request.  Tap points are numbered as in ``Capacity.taps``."""

    # number of a tap point to read -> (name, width), in ascending order
    read: Mapping[int, tuple[str, int]]
    # number of a tap point -> vector f32 [width] that is added there, in ascending order
    steering: Mapping[int, np.ndarray]
    logits: int  # number of the tap point ``logits``
    # expert routes of the request, whose tap points are also in ``read`` and ``steering``
    routes: RequestRoutes | None = None

    @property
    def salt(self) -> str:
        """Return a digest of the steering vectors and of the expert ids that the client sets.  Only requests with an
        equal digest share cached prefixes."""
        digest = hashlib.sha256()
        for number, vector in self.steering.items():
            digest.update(number.to_bytes(4, "little") + vector.tobytes())
        if self.given is not None:
            digest.update(b"given" + self.given.tobytes())
        return f"steered {digest.hexdigest()}"

    @property
    def given(self) -> np.ndarray | None:
        """Return the expert ids i32 [positions, layers * k] that the client sets, None if it sets none."""
        return None if self.routes is None else self.routes.given

    @property
    def changes(self) -> bool:
        """Return whether the taps change the keys and values of the tokens, so that prefixes are not shared with other
        requests."""
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
        """Return the rows f32 [n, width] that were appended so far, without a copy."""
        return self.memory[: self.n]


@dataclass(eq=False)
class TapValues:
    """The values that a sequence has read at its taps, for the positions [first, upto).  Values of steps in flight are
    added later.

    Steps that repeat the last one (see ``steady``) do not advance ``upto``.  The next step that is planned in full
    does, or the end of the sequence's stay in its slot."""

    first: int
    upto: int
    room: int = ROOM  # most rows
    parts: dict[int, Growing] = field(default_factory=dict)  # number of a tap point -> values
    # Logits of a scored prompt, without its last token. Only one branch of a request has them in
    # full.
    scored: list[np.ndarray] = field(default_factory=list)

    def keep(self, number: int, rows: np.ndarray) -> None:
        """Append values f32 [n, width] of a tap point.  They are copied, because the memory of ``rows`` belongs to the
        step."""
        if number not in self.parts:
            width = rows.shape[1]
            most = max(FIRST_ROOM // (4 * width), len(rows))
            self.parts[number] = Growing(width, min(self.room, most))
        self.parts[number].add(rows)
