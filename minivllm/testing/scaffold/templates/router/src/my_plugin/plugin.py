"""Choose the replica with the fewest requests.  Change ``cost`` to make another policy.

``request.keys`` are the keys of the blocks of the prompt, and ``request.session`` is the name of its session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.plugin import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext


class MyPlugin(ReplicaRouter):
    """A router by numbers of requests."""

    def __init__(self, options: Any, ctx: RouterContext) -> None:
        super().__init__(options, ctx)
        self.turn = 0  # number of requests that were sent
        self.used = [0] * ctx.replicas  # turn of the last request of each replica

    def cost(self, request: RoutedRequest, load: ReplicaLoad) -> Any:
        """Return the cost of a replica for a request.  The replica with the smallest one is chosen."""
        return load.requests, self.used[load.number]

    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        best = min(loads, key=lambda load: self.cost(request, load))
        return best.number

    def sent(self, request: RoutedRequest, number: int) -> None:
        self.turn += 1
        self.used[number] = self.turn
