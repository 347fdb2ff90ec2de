"""The taps of one step, as the layers of a model call them with the values of their points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class TapsOfStep:
    """``model.StepTaps``: ``steering`` [S, width] by point, ``slots`` i64 [T] of the tokens; ``keep(point, x)`` is
    called with the value of each point in ``read``."""

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
