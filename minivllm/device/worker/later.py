"""Captures that are made while the engine serves, so that it is ready before all sizes are captured.

    start      decode steps of 1, 8 and the most rows, and a few mixed steps ──► ready
    a step     runs in a larger capture; after some steps its own size is captured   (``Graphs._is_due``)
    idle turn  the next capture of the queue, smallest first                          (the verb "captures")

Before a capture its kernels are compiled in other threads, if an earlier start has not compiled them.  So a turn takes
the time of one capture, and no turn waits for the compiler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minivllm.core.interfaces.attention import GraphKey
from minivllm.device.layers.captured_sizes import first_decode, is_first_mixed

from .captured import Drawn, SampleOperations
from .start import ALL, FIRST

if TYPE_CHECKING:
    from .start import Rehearsals

Shape = GraphKey | Drawn


class Captures(Protocol):
    """The captures of a runner (``graphs.Graphs``), as far as this module uses them."""

    sizes: list[int]  # rows of decode steps
    coarse: list[int]  # rows of mixed steps
    forwards: dict[GraphKey, Any]
    samples: dict[tuple[int, SampleOperations], Any]
    refused: set[GraphKey]

    def capture_shape(self, shape: Shape) -> None: ...
    def rehearse(self, shape: Shape) -> None: ...


def size_of(shape: Shape) -> tuple[int, int]:
    """Return (tokens, rows) of a capture, the sort key of the queue.  Steps of few tokens occur most often."""
    tokens = shape.rows if isinstance(shape, Drawn) else shape.tokens
    return tokens, shape.rows


class LaterCaptures:
    """The captures that are left for later.  Without ``gradual`` there are none."""

    def __init__(self, graphs: Captures, rehearsals: Rehearsals, gradual: bool) -> None:
        self.graphs = graphs
        self.rehearsals = rehearsals
        self.gradual = gradual
        self.begun = False  # the start is over
        self.queue: deque[Shape] = deque()
        # compilations of the kernels of a capture that was rehearsed
        self.jobs: dict[Shape, Sequence[Future[None]]] = {}

    def divide(self, decodes: Sequence[GraphKey], draws: Sequence[Drawn]) -> tuple[list[Shape], list[Shape]]:
        """Divide the decode steps and draws into those captured at the start and those captured later.

        The draws at the start are those of its decode steps, and of mixed steps with the fewest and the most rows.
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
        """Divide the mixed steps into the ones that are captured at the start, and the later ones."""
        keys = list(shapes)
        if not self.gradual:
            return keys, []
        sizes = [(key.rows, key.tokens) for key in keys]
        now = [key for key in keys if is_first_mixed((key.rows, key.tokens), sizes)]
        early = set(now)
        return now, [key for key in keys if key not in early]

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Record that the captures of the start are made, and queue the others."""
        self.begun = True
        self.queue.extend(sorted(shapes, key=lambda one: (*size_of(one), isinstance(one, Drawn))))
        self.rehearsals.done(FIRST if shapes else ALL)

    def compiled(self, shape: Shape) -> bool:
        """Return whether the kernels of a capture are compiled.  If not, start to compile them at the first call."""
        if not self.rehearsals.active:
            return True
        if shape not in self.jobs:
            self.jobs[shape] = self.rehearsals.start(partial(self.graphs.rehearse, shape))
        return all(job.done() for job in self.jobs[shape])

    def capture(self) -> bool:
        """Make the next capture of the queue, or rehearse it if its kernels may not be compiled.

        Return False if the compiler must finish first.
        """
        while self.queue and self._needless(self.queue[0]):
            self.queue.popleft()
        if not self.queue:
            return False
        new = None
        if self.rehearsals.active:
            new = next((one for one in self.queue if one not in self.jobs), None)
        with torch.inference_mode():
            if new is not None and (self.queue[0] not in self.jobs or not self.compiled(self.queue[0])):
                self.compiled(new)
                return True
            if not self.compiled(self.queue[0]):
                return False
            self.graphs.capture_shape(self.queue.popleft())
        if not self.queue:
            self.rehearsals.done(ALL)
        return True

    def _needless(self, shape: Shape) -> bool:
        """Return whether a capture exists already, has failed, or is of a size that was removed."""
        graphs = self.graphs
        if isinstance(shape, Drawn):
            return shape in graphs.samples or shape.rows not in {*graphs.sizes, *graphs.coarse}
        removed = shape.kind == "decode" and not shape.shared and shape.rows not in graphs.sizes
        return shape in graphs.forwards or shape in graphs.refused or removed
