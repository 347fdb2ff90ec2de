"""The taps of one step.  Layers call them with the values of their tap points, to read or steer these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class TapsOfStep:
    """The implementation of ``model.StepTaps`` for one step.

    ``steering`` maps a point to vectors [S, width], one for each slot, that are added to the value of the point.
    ``slots`` i64 [T] are the slots of the tokens.  ``keep(point, x)`` is called with the value of each point in
    ``read``, after steering."""

    def __init__(
        self,
        steering: Mapping[str, Tensor],
        slots: Tensor,
        read: frozenset[str],
        keep: Callable[[str, Tensor], Any],
    ) -> None:
        self.steering, self.slots, self.read, self.keep = steering, slots, read, keep
        self.points = read | steering.keys()

    def __call__(self, point: str, x: Tensor) -> Tensor:
        if point in self.steering:
            x = x + self.steering[point][self.slots]
        if point in self.read:
            self.keep(point, x)
        return x
