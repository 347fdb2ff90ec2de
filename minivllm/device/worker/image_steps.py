"""Captured steps that compute parts of images: the memory through which a replay gets features and rotary rows.

    host:    parts of images ──► features copied behind one another, one table of the step's tokens ──►
    device:  FORWARD[mixed, rows, tokens]   rows of the table in place of positions, features where the table has a mark

Each image has features in memory of its own, but a replay reads fixed memory, so they are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .images import EMBEDDING, layer_point
from .state import staged

if TYPE_CHECKING:
    from minivllm.core.interfaces.model import StepTensors
    from minivllm.core.interfaces.plan import StepPlan

    from .build import Worker
    from .images import ImageState

MOST_TOKENS = 2048  # most tokens of a captured step with images; longer steps compute longer than their launches take


def image_steps(images: ImageState | None, worker: Worker) -> ImageSteps | None:
    """Return the memory of captured steps with images; None if such steps are not captured."""
    if images is None or images.facts.span:
        return None  # tokens that attend to later tokens of their image need the exact lengths of rows
    return ImageSteps(images, worker.hidden_size, worker.parts.dtype)


class ImageSteps:
    """The memory from which captured steps with images read features and rotary positions."""

    def __init__(self, images: ImageState, hidden: int, dtype: torch.dtype) -> None:
        self.images = images
        self.most_tokens = MOST_TOKENS  # largest number of tokens of a captured step
        device = images.state.device
        shape = images.facts.levels, self.most_tokens, hidden
        self.features = torch.zeros(shape, dtype=dtype, device=device)
        # i64 [2, tokens]: row in the rotary tables, -1 for the row of the token's position; 1 for tokens with features
        self.table = torch.zeros(2, self.most_tokens, dtype=torch.int64, device=device)
        self.table[0] = -1

    def takes(self, plan: StepPlan) -> bool:
        """Return whether a step with images can be captured: all its images have features, and it has at most
        ``most_tokens`` tokens."""
        if int(plan.q_len.sum()) > self.most_tokens:
            return False
        images = self.images
        return not any(images.why_lost(piece.span) for piece in images.pieces(plan))

    def fill(self, plan: StepPlan, tokens: int) -> None:
        """Copy the features and the rotary rows of a step to the fixed memory, for a replay of ``tokens`` tokens."""
        images = self.images
        pieces = list(images.pieces(plan))
        table = np.zeros((2, tokens), np.int64)
        table[0] = -1
        for piece in pieces:
            end = piece.at + piece.length
            last = piece.first + piece.length
            table[1, piece.at : end] = 1
            features = images.features[piece.span.number]
            self.features[:, piece.at : end].copy_(features[:, piece.first : last])
        if images.axes is not None:
            where, rows = images.rotary_rows(plan, pieces, [])
            table[0, where] = rows
        self.table[:, :tokens].copy_(staged(table, images.state.device), non_blocking=True)

    def enter(self, read: StepTensors) -> None:
        """Set the inputs ``read`` of a captured step to the fixed memory of positions and features, which ``fill``
        writes."""
        tokens = len(read.ids)
        rows = self.table[0, :tokens]
        marks = self.table[1, :tokens]
        read.meta.position = torch.where(rows >= 0, rows, read.meta.position)
        read.taps = FixedFeatures((marks > 0)[:, None], self.features[:, :tokens])


class FixedFeatures:
    """Insert features of images into the values at tap points of a captured step (``model.StepTaps``).

    ``mask`` bool [T, 1] marks the tokens of images, and ``values`` [levels, T, hidden] has their features."""

    def __init__(self, mask: Tensor, values: Tensor) -> None:
        self.mask = mask
        self.values = values
        self.levels = {layer_point(level): level for level in range(1, len(values))}
        self.points = frozenset({EMBEDDING, *self.levels})

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """Return the value ``x`` of a tap point with the features of image tokens."""
        if point == EMBEDDING:
            return torch.where(self.mask, self.values[0], x)
        level = self.levels.get(point)
        return x if level is None else torch.where(self.mask, x + self.values[level], x)

    def given(self, point: str) -> Tensor | None:
        """Return None, because requests set no experts in captured steps with images."""
        return None
