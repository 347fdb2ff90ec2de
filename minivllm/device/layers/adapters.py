"""The adapters of a step: which methods change its linear layers and tap points.

    Linear.partial ──► LayerAdapters.added_to(product, x) ──► the change of each active method around the product
    StepTensors.taps = AdaptedTaps ──► at_point of each active method ──► taps of requests

If no row of a step has an adapter, ``ActiveMethods.numbers`` is empty, and the layers run as if there were no adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from minivllm.core.interfaces.adapter import AdapterMemory, LowRank
    from minivllm.core.interfaces.model import StepTaps


class ActiveMethods:
    """The methods that rows of the running step use, by their numbers, and the tokens for which they have begun.

    A model may compute its last products only for some tokens (``StepTensors.logits_indices``); ``keep`` lets the
    methods begin again for these.  ``tokens`` is the number of all tokens of the step."""

    numbers: tuple[int, ...] = ()
    tokens = 0
    keep: Callable[[], None] | None = None

    def match(self, tokens: int) -> None:
        """Begin the methods again if a layer has another number of ``tokens`` than the step."""
        if self.keep is not None and tokens != self.tokens:
            keep, self.keep = self.keep, None
            keep()


class LayerAdapters:
    """The adapters of the linear layer ``name``: the change of each method that changes it, by the method's number."""

    def __init__(self, name: str, active: ActiveMethods, memories: Sequence[AdapterMemory]) -> None:
        self.name = name
        self.active = active
        self.memories = memories
        self.changes: list[tuple[int, Any]] = []
        for number, memory in enumerate(memories):
            change = memory.layer(name)
            if change is not None:
                self.changes.append((number, change))

    def low_rank(self, number: int) -> LowRank | None:
        """Return the adapters of a method as low-rank products, None if they may be something else."""
        memory = self.memories[number]
        defined = "low_rank" in vars(type(memory))
        return memory.low_rank(self.name) if defined else None

    @property
    def on(self) -> bool:
        """Return whether a method of the running step may change the layer."""
        return any(number in self.active.numbers for number, _ in self.changes)

    def gated(
        self, product: Callable[[Tensor], Tensor], x: Tensor, activation: str, following: LayerAdapters | None
    ) -> Tensor | None:
        """Return activation(gate) * up [T, n] of the changed product [T, 2 n] = gate | up for x [T, in], None if the
        method of the running step does not compute both together.

        ``following`` are the adapters of the layer that reads the result.  If the same method is the only one that
        changes it, its ``gated`` receives that change, and may compute a part of its products ahead."""
        number, change = self._only(x)
        if change is None or not hasattr(change, "gated"):
            return None
        after = None
        if following is not None:
            other, after = following._only(x)
            if other != number:
                after = None
        found: Tensor | None = change.gated(product, x, activation, after)
        return found

    def divides(self, product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
        """Return whether ``divided`` computes the changed product of x [T, in]."""
        _, change = self._only(x)
        return hasattr(change, "divides") and change.divides(product, x)

    def divided(
        self,
        product: Callable[[Tensor], Tensor],
        x: Tensor,
        squares: Tensor,
        eps: float,
        activation: str | None = None,
    ) -> Tensor:
        """Return the changed product [T, out] of x [T, in], divided by the root mean square of each row of x.

        ``squares`` f32 [T, parts] are sums of squares of parts of the rows, and ``eps`` is that of the norm.  With
        ``activation`` the product is gate | up, and the result activation(gate) * up [T, out / 2]."""
        _, change = self._only(x)
        y: Tensor = change.divided(product, x, squares, eps, activation)
        return y

    def added(
        self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Add the changed product of x [T, in] to ``residual`` [T, dim] in place; None if no kernel does.

        Return the sum times the weight [dim] of a norm, [T, dim], and sums of squares f32 [T, parts] of parts of its
        rows before the multiplication."""
        _, change = self._only(x)
        if not hasattr(change, "added"):
            return None
        found: tuple[Tensor, Tensor] | None = change.added(product, x, residual, weight)
        return found

    def _only(self, x: Tensor) -> tuple[int, Any]:
        """Return the number of the only method of the running step that may change the layer for x [T, in], and its
        change; (-1, None) if there are none or several."""
        self.active.match(len(x))
        numbers = self.active.numbers
        active = [(number, change) for number, change in self.changes if number in numbers]
        if len(active) != 1:
            return -1, None
        return active[0]

    def added_to(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return product(x) [T, out] as the methods of the running step change it, for x [T, in].

        A token has an adapter of one method, so the order of the methods has no effect."""
        self.active.match(len(x))
        for number, change in self.changes:
            if number in self.active.numbers:
                product = partial(change, product)
        return product(x)


class AdaptedTaps:
    """The taps of a step in which adapters change the values of ``points`` (``model.StepTaps``).

    ``then`` are the taps of requests, which read and change the values after the adapters.
    """

    def __init__(self, memories: Sequence[AdapterMemory], points: Collection[str], then: StepTaps | None) -> None:
        self.memories = memories
        self.adapted = points
        self.then = then
        self.points = frozenset(points)
        if then is not None:
            self.points |= then.points

    def __call__(self, point: str, x: Tensor) -> Tensor:
        if point in self.adapted:
            for memory in self.memories:
                x = memory.at_point(point, x)
        if self.then is None:
            return x
        return self.then(point, x)

    def given(self, point: str) -> Tensor | None:
        """Return the experts that requests set for a router, as ``StepTaps.given``; None without taps of requests."""
        return None if self.then is None else self.then.given(point)
