"""Taps: reading and changing values at named points of the model, for one request.

A point is a tensor of the forward pass with one vector per token.  For example, ``layers.10.residual`` is the residual
stream after layer 10.  A model lists its points and their widths (``model.Model.tap_points``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from minivllm.errors import RequestError, shown

# Name of the tap point at the output of the head. It has a vector for each token that is drawn or
# scored (``prompt_logprobs``).
LOGITS = "logits"
# a tap with this name reads no tensor: it returns which tokens stay at each compression of a request
# (``interfaces.compressor``)
KEPT = "compression.kept"
# suffix of the points that hold the ids of the chosen experts; they are read only
EXPERTS = ".experts"


def read_only(point: str) -> bool:
    """Return whether a tap point can be read but not changed."""
    return point == LOGITS or point.endswith(EXPERTS)


@dataclass(frozen=True, eq=False)
class Tap:
    """The use of one tap point (a named tensor of the model) by one request.

    With ``read``, the output of the request contains the values of the point, including the added vector.  ``add`` is a
    vector [width of the point], as a numpy array, torch tensor or list.  ``scale`` times ``add`` is added to the
    point's vector of every token of the request.  If several taps add at a point, their sum is added.  RequestError for
    values of another kind."""

    point: str
    read: bool = False
    add: Any = None  # vector to add, converted to f32 [width], or None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.point, str) or not self.point:
            raise _refused("point", self.point, "the name of a point, such as 'layers.0.residual'")
        if not isinstance(self.read, bool):
            raise _refused("read", self.read, "True or False")
        kinds = (int, float, np.number)
        is_number = isinstance(self.scale, kinds) and not isinstance(self.scale, bool)
        if not is_number or not math.isfinite(self.scale):
            raise _refused("scale", self.scale, "a finite number")
        if self.add is None and self.scale != 1.0:
            raise _refused("scale", self.scale, "no scale in a tap without add")
        if self.add is not None:
            object.__setattr__(self, "add", _vector(self.add))
        elif not self.read:
            problem = f"taps: the tap of {shown(self.point)} neither reads nor adds"
            raise RequestError(f"{problem}; expected read=True, or a vector to add", "taps")

    @property
    def vector(self) -> np.ndarray:
        """Return the vector f32 [width] to add: ``scale`` times ``add``."""
        assert self.add is not None
        with np.errstate(over="ignore"):  # the engine refuses vectors that are not finite
            return self.add * np.float32(self.scale)


def _vector(value: Any) -> np.ndarray:
    """Return the field ``add`` of a tap as a read-only copy f32 [width].

    ``value`` is a list, numpy array or torch tensor.  RequestError if it is empty, if it has not exactly one dimension,
    or if an element is no number or is not finite in float32."""
    if hasattr(value, "detach"):
        # A torch tensor may be on a GPU and of a dtype that numpy does not have.
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # lists of unequal length, or elements that are not numbers
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu" or array.ndim != 1 or not array.size:
        raise _refused(
            "add",
            value,
            "a list, array or tensor with one dimension and as many numbers as the point is wide",
        )
    with np.errstate(over="ignore"):
        vector = array.astype(np.float32)
    if not np.isfinite(vector).all():
        raise _refused("add", value, "finite numbers in the range of float32")
    vector.flags.writeable = False
    return vector


def _refused(name: str, value: Any, expected: str) -> RequestError:
    """Return the error for a wrong value of a tap's field."""
    return RequestError(f"taps: {name}={shown(value)}: expected {expected}", "taps")


def by_point(lines: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (number of a tap point, rows that read it, first token that each row reads) from ``StepPlan.taps`` i32 [n,
    3]."""
    changes = np.flatnonzero(np.diff(lines[:, 0])) + 1
    for begin, end in pairwise((0, *changes.tolist(), len(lines))):
        if begin < end:
            yield int(lines[begin, 0]), lines[begin:end, 1], lines[begin:end, 2]
