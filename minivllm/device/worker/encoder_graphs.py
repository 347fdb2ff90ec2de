"""The captures of an image encoder: one CUDA graph for each frequent shape of images.

The vision tower of an image is hundreds of short kernels.  Launched one by one they take longer than they run, and the
steps behind them wait.  Captures share one memory pool, because they run one after another.  It is not the pool of
captured steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.errors import describe_error

from .capture import GraphRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
SIGHTS = 2  # a shape of images is captured at this call; a capture takes as long as three calls
GRAPHS = 32  # largest number of captures; images of further shapes run as separate launches
SHAPES = 4096  # largest number of shapes for which calls are counted
# Size of an image in bytes from which the encoder runs longer than its launches take, so that a capture gains little.
MOST_BYTES = 16 << 20

ShapeKey = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _Capture(NamedTuple):
    graph: Any
    values: Tensor  # the input, which each replay reads
    features: Tensor  # the output, which each replay overwrites


class EncoderGraphs:
    """Calls ``encode(values, shape)``, in a captured graph if the shape is frequent."""

    def __init__(self, encode: Callable[[Tensor, tuple[int, int, int]], Tensor]) -> None:
        self.encode = encode
        self.recorder = GraphRecorder()
        self.captures: dict[ShapeKey, _Capture] = {}
        self.seen: Counter[ShapeKey] = Counter()
        self.refused: set[ShapeKey] = set()  # shapes of images whose capture failed

    def __call__(self, values: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return the features of ``values``, which no later call changes."""
        key = tuple(shape), tuple(values.shape), values.dtype
        capture = self.captures.get(key)
        if capture is None and self._due(key, values):
            capture = self._captured(key, values, shape)
        if capture is None:
            return self.encode(values, shape)
        capture.values.copy_(values)
        capture.graph.replay()
        return capture.features.clone()

    def _due(self, key: ShapeKey, values: Tensor) -> bool:
        """Count an image of a shape, and return whether to capture the encoder for this shape now."""
        if values.nbytes > MOST_BYTES or key in self.refused or len(self.captures) >= GRAPHS:
            return False
        if len(self.seen) >= SHAPES:
            self.seen.clear()
        self.seen[key] += 1
        return self.seen[key] > SIGHTS

    def _captured(self, key: ShapeKey, values: Tensor, shape: tuple[int, int, int]) -> _Capture | None:
        """Capture the encoder for images of a shape, and return the capture; None if that fails."""
        fixed = values.clone()
        try:
            graph, features = self.recorder.capture(lambda: self.encode(fixed, shape))
        except Exception as exc:  # the plug-in waits for the device, or there is too little memory
            self.refused.add(key)
            log.warning("images of a shape are encoded by separate launches: %s", describe_error(as_exception(exc)))
            return None
        self.captures[key] = capture = _Capture(graph, fixed, features)
        return capture
