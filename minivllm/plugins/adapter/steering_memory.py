"""The memory of steering vectors.

vectors[point]  [places + 1, width]    a vector for each place; the last row, of tokens without an adapter, is zero
x [T, width]  ──►  x + vectors[point][place of each token]
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterMemory, AdapterSource, adapter_refusal
from minivllm.errors import PluginError, shown, suggest

from .peft_config import finite_number


class SteeringMemory(AdapterMemory):
    """The vectors of all loaded adapters, at each of the chosen tap points (named tensors of the model)."""

    def __init__(self, model: AdaptedModel, places: int, patterns: Sequence[str]) -> None:
        """Allocate the vectors of the tap points whose names match ``patterns``.  PluginError if none matches."""
        self.model = model
        self.none = places
        options: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        self.vectors: dict[str, torch.Tensor] = {}
        for point, width in model.points.items():
            if any(fnmatchcase(point, pattern) for pattern in patterns):
                self.vectors[point] = torch.zeros(places + 1, width, **options)
        if not self.vectors:
            first = list(model.points)[:3]
            some = ", ".join(first) or "none"
            raise PluginError(f"steering: no tap point of this model matches points={list(patterns)}; it has {some}")
        self.rows: Tensor | None = None  # i64 [T] index of the row of the vectors for each token of the step

    def read(self, source: AdapterSource) -> dict[str, Tensor]:
        scale = finite_number(source.folder, "scale", source.config.get("scale", 1.0))
        found: dict[str, Tensor] = {}
        if not source.names:
            raise adapter_refusal(source.folder, "its file of weights has no tensors")
        for point in source.names:
            found[point] = self._vector(source, point, scale)
        return found

    def _vector(self, source: AdapterSource, point: str, scale: float) -> Tensor:
        """Return the vector [width] of a point times ``scale``, in host memory.  RequestError if it does not fit."""
        if point not in self.vectors:
            known = "is no tap point that this engine steers"
            if point in self.model.points:
                known = "is left out by the option points of the method steering"
            hint = suggest(point, self.vectors)
            raise adapter_refusal(source.folder, f"tensor {shown(point)} {known}.{hint}")
        width = self.model.points[point]
        shape = source.shape(point)
        if shape != (width,):
            what = f"{point} has shape {list(shape)}, expected [{width}]; it was made for another model"
            raise adapter_refusal(source.folder, what)
        vector = self.model.zeros(width, self.model.dtype)
        vector.copy_(source.tensor(point).float() * scale)
        if not torch.isfinite(vector).all():
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise adapter_refusal(source.folder, f"{point}, with its scale, is not finite in {dtype}")
        return vector

    def points(self, loaded: dict[str, Tensor]) -> Sequence[str]:
        return tuple(loaded)

    def store(self, place: int, loaded: dict[str, Tensor]) -> None:
        for point, vectors in self.vectors.items():
            if point in loaded:
                vectors[place].copy_(loaded[point], non_blocking=True)
            else:
                vectors[place].zero_()

    def begin(self, tokens: Tensor) -> None:
        self.rows = torch.where(tokens < 0, self.none, tokens).long()

    def at_point(self, point: str, x: Tensor) -> Tensor:
        if self.rows is None or point not in self.vectors:
            return x
        return x + self.vectors[point][self.rows]

    def end(self) -> None:
        self.rows = None
