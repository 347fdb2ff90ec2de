"""Captures that are made while the engine serves, so that it is ready before all sizes are captured.

    start      decode steps of 1, 8, 64, 256 and the most rows, and a few mixed steps ──► ready
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
from .start import ALL, READY

if TYPE_CHECKING:
    from .start import Rehearsals

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
    def rehearse(self, shape: Shape) -> None: ...


def size_of(shape: Shape) -> tuple[int, int]:
    """Return (tokens, rows) of a capture, by which the queue is sorted ascending: small steps are the most frequent."""
    tokens = shape.rows if isinstance(shape, Drawn) else shape.tokens
    return tokens, shape.rows


class LaterCaptures:
    """The queue of captures that are made while the engine serves.  Without ``gradual`` it stays empty."""

    def __init__(self, graphs: Captures, rehearsals: Rehearsals, gradual: bool) -> None:
        self.graphs = graphs
        self.rehearsals = rehearsals
        self.gradual = gradual
        self.begun = False  # whether the captures of the engine's start are finished
        self.queue: deque[Shape] = deque()
        # shape of a capture -> running compilations of its kernels
        self.jobs: dict[Shape, Sequence[Future[None]]] = {}

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
        self.rehearsals.done(READY if shapes else ALL)

    def compiled(self, shape: Shape) -> bool:
        """Return whether the kernels of a capture are compiled.  The first call starts to compile them if they are
        not."""
        if not self.rehearsals.active:
            return True
        if shape not in self.jobs:
            self.jobs[shape] = self.rehearsals.start(partial(self.graphs.rehearse, shape))
        return all(job.done() for job in self.jobs[shape])

    def capture(self) -> bool:
        """Make the next capture of the queue, or start to compile its kernels if they are not compiled.

        Return False if nothing can be done before a compilation ends.
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
        """Return whether a capture need not be made: it exists or has failed, or its size was removed."""
        graphs = self.graphs
        if isinstance(shape, Drawn):
            return shape in graphs.samples or shape.rows not in {*graphs.sizes, *graphs.coarse}
        removed = shape.kind == "decode" and not shape.shared and shape.rows not in graphs.sizes
        made = shape in graphs.forwards and not graphs.unmeasured(shape)
        return made or shape in graphs.refused or removed
