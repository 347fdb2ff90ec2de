"""Route a request to the replica that is expected to start it first, by cached prefixes and load.

The router remembers the block keys of the prompts that it sent to each replica, as many as the replica's cache has
blocks, the latest use last.  The cost of a replica is

    tokens of the prompt that are not remembered  +  balance x waiting tokens  +  spread x requests of the replica

in tokens.  Waiting tokens are the prompt tokens of requests without a token yet.  The last part keeps decoding spread:
without it, all requests with a short common prefix would run on one replica.  Among replicas of equal cost the one with
the fewest tokens is chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from minivllm.core.interfaces.router import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext


class Prefix(ReplicaRouter):
    """Routes requests by cached prefixes and load; the remembered block keys of each replica are in the order of their
    last use.
    """

    def __init__(self, options: Any, ctx: RouterContext) -> None:
        super().__init__(options, ctx)
        self.most = max(1, int(options.remember * ctx.blocks))
        self.known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(ctx.replicas)]

    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        best = loads[0]
        best_order = self._order(request, best)
        for load in loads[1:]:
            order = self._order(request, load)
            if order < best_order:
                best = load
                best_order = order
        return best.number

    def _order(self, request: RoutedRequest, load: ReplicaLoad) -> tuple[float, int, int]:
        """Return the sort key of a replica for a request; the replica with the smallest key is chosen."""
        cost = self._cost(request, load)
        return cost, load.tokens, load.number

    def _cost(self, request: RoutedRequest, load: ReplicaLoad) -> float:
        """Return the cost of a replica for a request, in tokens."""
        options = self.options
        blocks = self.matched(request.keys, load.number)
        left = request.tokens - self.ctx.block * blocks
        queue = options.balance * load.waiting
        decoding = options.spread * load.requests
        return left + queue + decoding

    def matched(self, keys: Sequence[int], number: int) -> int:
        """Return the number of leading block keys that are remembered for the replica ``number``."""
        known = self.known[number]
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)

    def sent(self, request: RoutedRequest, number: int) -> None:
        known = self.known[number]
        # keys are used in reverse, so that the last blocks of prompts are forgotten first
        for key in reversed(request.keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.most:
            known.popitem(last=False)

    def emptied(self, number: int) -> None:
        self.known[number].clear()
