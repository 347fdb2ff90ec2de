"""The taps of one step.  Layers call them with the values of their tap points (named places) to read or steer these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from minivllm.core.interfaces.model import StepTaps


class TapsOfStep:
    """The implementation of ``model.StepTaps`` for one step.

    ``steering`` maps a point to vectors [S, width], one for each slot, that are added to the value of the point.
    ``slots`` i64 [T] are the slots of the tokens.  ``keep(point, x)`` is called with the value of each point in
    ``read``, after steering.  ``routes`` maps a point to given experts i32 [T, k], and ``used`` has the points whose
    given experts the model has taken."""

    def __init__(
        self,
        steering: Mapping[str, Tensor],
        slots: Tensor,
        read: frozenset[str],
        keep: Callable[[str, Tensor], Any],
        routes: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.steering = steering
        self.slots = slots
        self.read = read
        self.keep = keep
        self.routes: Mapping[str, Tensor] = {} if routes is None else routes
        self.points = read | steering.keys() | self.routes.keys()
        self.used: set[str] = set()

    def __call__(self, point: str, x: Tensor) -> Tensor:
        if point in self.steering:
            x = x + self.steering[point][self.slots]
        if point in self.read:
            self.keep(point, x)
        return x

    def given(self, point: str) -> Tensor | None:
        """Return the given experts i32 [T, k] of a router, -1 for the router's own choice, or None."""
        self.used.add(point)
        return self.routes.get(point)


class LayerTaps:
    """The taps of one layer.  Its points are named without the prefix ``layers.i.``."""

    def __init__(self, taps: StepTaps, prefix: str) -> None:
        self.taps = taps
        self.prefix = prefix

    def __call__(self, point: str, x: Tensor) -> Tensor:
        return self.taps(self.prefix + point, x)

    def given(self, point: str) -> Tensor | None:
        """Return the given experts of a router, as ``StepTaps.given``."""
        name = self.prefix + point
        return self.taps.given(name) if name in self.taps.points else None
