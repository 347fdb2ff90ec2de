"""Taps: what a request reads from named points of the model, and what it adds there.

A point is a tensor of the forward pass, one vector a token: ``layers.10.residual`` is the residual stream behind layer
10.  A model names its points and their widths (``model.Model.tap_points``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from minivllm.errors import RequestError, shown

# the point behind the head: there is a vector for each token that is drawn, or scored (``prompt_logprobs``)
LOGITS = "logits"
EXPERTS = ".experts"  # what points of chosen experts end with: ids as numbers, which are read only


def read_only(point: str) -> bool:
    """Whether nothing can be added at a point."""
    return point == LOGITS or point.endswith(EXPERTS)


@dataclass(frozen=True, eq=False)
class Tap:
    """One point of the model, for one request.  ``read``: the point's values come back with the output, what is added
    here included.  ``add``: numbers [width of the point] that are added to the vector of each of the request's tokens,
    times ``scale``: numpy, torch or a list; several at one point add up.  RequestError for values of another kind.
    """

    point: str
    read: bool = False
    add: Any = None  # f32 [width] from then on, or None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.point, str) or not self.point:
            raise _refused("point", self.point, "the name of a point, such as 'layers.0.residual'")
        if not isinstance(self.read, bool):
            raise _refused("read", self.read, "True or False")
        number = isinstance(self.scale, (int, float, np.number)) and not isinstance(
            self.scale, bool
        )
        if not number or not math.isfinite(self.scale):
            raise _refused("scale", self.scale, "a finite number")
        if self.add is None and self.scale != 1.0:
            raise _refused("scale", self.scale, "no scale where nothing is added")
        if self.add is not None:
            object.__setattr__(self, "add", _vector(self.add))
        elif not self.read:
            what = f"taps: nothing is asked of the point {shown(self.point)}"
            raise RequestError(f"{what}; want read=True, or a vector to add", "taps")

    @property
    def vector(self) -> np.ndarray:
        """f32 [width] what is added: ``scale`` times ``add``."""
        assert self.add is not None
        with np.errstate(over="ignore"):  # the engine refuses what is not finite
            return self.add * np.float32(self.scale)


def _vector(given: Any) -> np.ndarray:
    """f32 [width], a copy that cannot be written to."""
    if hasattr(
        given, "detach"
    ):  # a tensor, perhaps on a device and of a dtype that numpy does not have
        given = given.detach().cpu().double().numpy()
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):  # lists of unequal length, objects that are no numbers
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu" or array.ndim != 1 or not array.size:
        raise _refused("add", given, "one list of numbers, as many as the point is wide")
    with np.errstate(over="ignore"):
        vector = array.astype(np.float32)
    if not np.isfinite(vector).all():
        raise _refused("add", given, "finite numbers in the range of float32")
    vector.flags.writeable = False
    return vector


def _refused(name: str, value: Any, want: str) -> RequestError:
    return RequestError(f"taps: {name}={shown(value)}: want {want}", "taps")


def by_point(lines: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(number of a point, its rows, the first token of each that is read) of ``StepPlan.taps`` i32 [n, 3]."""
    changes = np.flatnonzero(np.diff(lines[:, 0])) + 1
    for begin, end in pairwise((0, *changes.tolist(), len(lines))):
        if begin < end:
            yield int(lines[begin, 0]), lines[begin:end, 1], lines[begin:end, 2]
