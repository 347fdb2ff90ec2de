"""Read and change the values at tap points (named values in a model) during a step.

Layers call the objects of this module with the value of each of their tap points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from minivllm.core.interfaces.model import StepTaps


class TapsOfStep:
    """Reads and changes the values at tap points in one step (``model.StepTaps``).

    ``steering`` maps a tap point to vectors [S, width], one for each slot, that are added to the value of the point.
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
            vectors = self.steering[point]
            x = x + vectors[self.slots]
        if point in self.read:
            self.keep(point, x)
        return x

    def given(self, point: str) -> Tensor | None:
        """Return the experts i32 [T, k] that requests set for a router, or None if no request of the step sets any.

        An entry of -1 leaves the choice to the router.
        """
        self.used.add(point)
        return self.routes.get(point)


class LayerTaps:
    """The taps of a step for one layer.  Its tap points are named without the prefix ``layers.i.``."""

    def __init__(self, taps: StepTaps, prefix: str) -> None:
        self.taps = taps
        self.prefix = prefix

    def __call__(self, point: str, x: Tensor) -> Tensor:
        return self.taps(self.prefix + point, x)

    def given(self, point: str) -> Tensor | None:
        """Return the experts that requests set for the router ``point`` of this layer, as ``StepTaps.given``.

        None if the step has no such tap point.
        """
        name = self.prefix + point
        if name not in self.taps.points:
            return None
        return self.taps.given(name)
