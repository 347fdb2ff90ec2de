"""Routers that look at neither prompts nor sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.core.interfaces.router import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext, least_loaded


class RoundRobin(ReplicaRouter):
    """Chooses the replicas in turn.  Replicas that accept no requests are passed over."""

    def __init__(self, options: Any, ctx: RouterContext) -> None:
        super().__init__(options, ctx)
        self.last = -1

    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        numbers = [load.number for load in loads]
        later = [number for number in numbers if number > self.last]
        self.last = min(later or numbers)
        return self.last


class LeastTokens(ReplicaRouter):
    """Chooses the replica with the fewest prompt tokens of requests that have not ended."""

    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        return least_loaded(loads)
