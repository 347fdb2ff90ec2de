"""Route all requests of a session to the same replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from minivllm.core.interfaces.router import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext, least_loaded


class SessionRouter(ReplicaRouter):
    """Routes a session to the same replica.

    A session whose replica accepts no requests moves to another replica and stays there.
    """

    def __init__(self, options: Any, ctx: RouterContext) -> None:
        super().__init__(options, ctx)
        # session -> number of its replica; the session that was used last comes last
        self.homes: OrderedDict[str, int] = OrderedDict()

    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        home = self.homes.get(request.session)
        offered = [load.number for load in loads]
        if home in offered:
            return home
        return least_loaded(loads)

    def sent(self, request: RoutedRequest, number: int) -> None:
        if not request.session:
            return
        self.homes[request.session] = number
        self.homes.move_to_end(request.session)
        if len(self.homes) > self.options.sessions:
            self.homes.popitem(last=False)
