"""Captures that are made while the engine serves, so that it is ready before all sizes are captured.

    start      decode steps of 1, 8, 64, 256 and the most rows, and a few mixed steps ──► ready
    a step     runs in a larger capture; after some steps its own size is captured   (``Graphs._is_due``)
    idle turn  the next capture of the queue, smallest first                          (the verb "captures")

Their kernels are compiled ahead (``served_kernels``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from minivllm.core.interfaces.attention import GraphKey
from minivllm.device.layers.captured_sizes import first_decode, is_first_mixed

from .captured import Drawn, SampleOperations

Shape = GraphKey | Drawn


class Captures(Protocol):
    """The attributes of a runner's captures (``graphs.Graphs``) that this module uses."""

    sizes: list[int]  # numbers of rows for which decode steps are captured, ascending
    coarse: list[int]  # numbers of rows for which mixed steps are captured, ascending
    forwards: dict[GraphKey, Any]
    samples: dict[tuple[int, SampleOperations], Any]
    refused: set[GraphKey]

    def capture_shape(self, shape: Shape) -> None: ...
    def unmeasured(self, key: GraphKey) -> bool: ...


def size_of(shape: Shape) -> tuple[int, int]:
    """Return (tokens, rows) of a capture, by which the queue is sorted ascending: small steps are the most frequent."""
    tokens = shape.rows if isinstance(shape, Drawn) else shape.tokens
    return tokens, shape.rows


class LaterCaptures:
    """The queue of captures that are made while the engine serves.  Without ``gradual`` it stays empty."""

    def __init__(self, graphs: Captures, gradual: bool) -> None:
        self.graphs = graphs
        self.gradual = gradual
        self.begun = False  # whether the captures of the engine's start are finished
        self.queue: deque[Shape] = deque()

    def divide(self, decodes: Sequence[GraphKey], draws: Sequence[Drawn]) -> tuple[list[Shape], list[Shape]]:
        """Divide shapes of decode steps and of draws into those to capture at the start and those to capture later.

        The draws at the start have the rows of its decode steps, and the fewest and the most rows of mixed steps.
        """
        graphs = self.graphs
        every: list[Shape] = [*decodes, *draws]
        if not self.gradual:
            return every, []
        steps = first_decode(graphs.sizes)
        rows = steps | {graphs.coarse[0], graphs.coarse[-1]}
        now = [one for one in every if one.rows in (rows if isinstance(one, Drawn) else steps)]
        early = set(now)
        return now, [one for one in every if one not in early]

    def divide_mixed(self, shapes: Iterable[GraphKey]) -> tuple[list[GraphKey], list[GraphKey]]:
        """Divide shapes of mixed steps into those to capture at the start and those to capture later."""
        keys = list(shapes)
        if not self.gradual:
            return keys, []
        sizes = [(key.rows, key.tokens) for key in keys]
        now = [key for key in keys if is_first_mixed((key.rows, key.tokens), sizes)]
        early = set(now)
        return now, [key for key in keys if key not in early]

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Note that the captures of the start are finished, and queue ``shapes`` for later."""
        self.begun = True
        self.queue.extend(sorted(shapes, key=lambda one: (*size_of(one), isinstance(one, Drawn))))

    def capture(self) -> bool:
        """Make the next capture of the queue; return False if none is left."""
        while self.queue and self._needless(self.queue[0]):
            self.queue.popleft()
        if not self.queue:
            return False
        with torch.inference_mode():
            self.graphs.capture_shape(self.queue.popleft())
        return True

    def _needless(self, shape: Shape) -> bool:
        """Return whether a capture need not be made: it exists or has failed, or its size was removed."""
        graphs = self.graphs
        if isinstance(shape, Drawn):
            return shape in graphs.samples or shape.rows not in {*graphs.sizes, *graphs.coarse}
        removed = shape.kind == "decode" and not shape.shared and shape.rows not in graphs.sizes
        made = shape in graphs.forwards and not graphs.unmeasured(shape)
        return made or shape in graphs.refused or removed
