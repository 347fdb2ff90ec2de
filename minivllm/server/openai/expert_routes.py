"""The field ``routes`` of a request: expert routes that an operator reads, counts, prunes or gives.

"routes": true, or {"read": true, "counts": true, "pruned": [3, 17], "given": {"shape": [..], "dtype": .., "data": ..}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.routes import NAME, RouteParams, count_routes, encode_routes
from minivllm.server.errors import ApiError

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.server.link.routes import ReadRoutes


def check_routes(params: SamplingParams, state: Mapping[str, Any]) -> RouteParams | None:
    """Return the routes of a body's parameters, or None.

    ``state`` contains whether the client is an operator.  ApiError: 403 for other clients, 400 for routes to read
    together with stop strings.
    """
    routes = params.routes
    if not isinstance(routes, RouteParams):
        return None
    if not state.get("operator"):
        text = f"{NAME}: expected the operator's key, over HTTP, on a server with --admin; or omit the field"
        raise ApiError(403, text, NAME)
    if routes.reads and params.stop:
        text = f"{NAME}: routes are read before stop strings are found; expected stop_token_ids, or no read"
        raise ApiError(400, text, NAME)
    return routes


def members(routes: RouteParams, read: ReadRoutes | None) -> dict[str, Any]:
    """Return the members ``routes`` and ``route_counts`` of a choice; a choice that has failed has neither."""
    found: dict[str, Any] = {}
    if read is not None and routes.read:
        found[NAME] = encode_routes(read.routes)
    if read is not None and routes.counts:
        found["route_counts"] = count_routes(read.routes, read.experts).tolist()
    return found
