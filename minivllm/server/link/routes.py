"""Expert routes on the link between engine and client: columns of a frame with the routes of branches that have ended.

route_rows   (stream, sample, positions, layers, k, experts), one row for each branch
routes       i16, the routes [positions, layers, k] of these branches, concatenated
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minivllm.core.interfaces.routes import RouteParams, smallest
from minivllm.frontend.tap_values import routes_of

if TYPE_CHECKING:
    from minivllm.core.engine.request import Request

WIDTH = 6  # number of integers in a row of ``route_rows``


class ReadRoutes(NamedTuple):
    """The routes of a branch, integers [positions, layers, k], and the number of experts of a layer."""

    routes: np.ndarray
    experts: int


@dataclass
class RouteColumns:
    """The expert routes in a frame, as columns."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, number: int, sample: int, read: ReadRoutes) -> int:
        """Add the routes of a branch of stream ``number``, and return their weight in a frame, in values of 4 bytes."""
        self.rows.append((number, sample, *read.routes.shape, read.experts))
        self.values.append(read.routes.ravel())
        return read.routes.size // 2

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the frame by name, {} if no routes were added."""
        if not self.rows:
            return {}
        return {"route_rows": np.array(self.rows, np.int64).ravel(), "routes": np.concatenate(self.values)}


def routes_read(request: Request) -> Iterator[tuple[int, ReadRoutes]]:
    """Yield (sample, routes) of each branch that has ended well, if the request reads or counts routes."""
    params, tapped = request.params.routes, request.tapped
    if not isinstance(params, RouteParams) or not params.reads or tapped is None or tapped.routes is None:
        return
    experts = tapped.routes.layers[0].experts
    for seq in request.sequences:
        found = routes_of(seq, seq.emitted or None) if seq.finish_reason in ("stop", "length") else None
        if found is not None:
            yield seq.sample, ReadRoutes(found.astype(np.int16), experts)


def read_columns(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, ReadRoutes]]:
    """Yield (stream, sample, routes) for each branch in the columns of ``RouteColumns``."""
    if "route_rows" not in columns:
        return
    at = 0
    for number, sample, n, layers, k, experts in columns["route_rows"].reshape(-1, WIDTH).tolist():
        end = at + n * layers * k
        yield number, sample, ReadRoutes(smallest(columns["routes"][at:end].reshape(n, layers, k), experts), experts)
        at = end
