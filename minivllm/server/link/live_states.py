"""Collect the states of the engine for open pages.  Pages that may see the same share one request to the engine.

Without an open page no state is collected.  A page that reads slowly misses states, and delays no other page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic_core import to_json

from minivllm.errors import EngineDeadError
from minivllm.server.errors import ApiError

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

    from .client import EngineClient

AGAIN = 1.0  # seconds between questions to an engine that does not run
Offer = Callable[[str], None]  # receives each state as JSON text


class LiveStates:
    """The readers of the engine's state by scope, and a task for each scope that has a reader.

    A scope is the owner whose requests are shown; None means all requests.
    """

    def __init__(self, client: EngineClient, server: ServerConfig) -> None:
        self._client = client
        self._interval = server.live_interval
        self._most = server.max_live_sockets
        self._readers: dict[str | None, set[Offer]] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}

    @property
    def count(self) -> int:
        """Return the number of readers of all scopes."""
        return sum(map(len, self._readers.values()))

    def join(self, scope: str | None, offer: Offer) -> None:
        """Add a reader.  ApiError (429) if there are too many."""
        if self.count >= self._most:
            text = f"{self._most} pages receive the state of the engine; expected at most {self._most}: close one"
            raise ApiError(429, text)
        self._readers.setdefault(scope, set()).add(offer)
        if scope not in self._tasks:
            self._tasks[scope] = asyncio.create_task(self._collect(scope))

    def leave(self, scope: str | None, offer: Offer) -> None:
        """Remove a reader.  The last one of a scope ends its task."""
        readers = self._readers.get(scope, set())
        readers.discard(offer)
        if not readers and scope in self._tasks:
            self._readers.pop(scope, None)
            self._tasks.pop(scope).cancel()

    async def close(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, scope: str | None) -> None:
        """Collect the state of the engine repeatedly, and offer each to the readers of a scope."""
        steps = ended = 0
        while True:
            try:
                found = await self._client.snapshot(scope, steps, ended)
            except EngineDeadError as error:
                why = str(error) if scope is None else "the engine does not run"
                state = {"type": "down", "why": why, "restarting": self._client.restarting}
                steps = ended = 0
                wait = AGAIN
            else:
                state = {"type": "state", **found}
                steps = found.get("steps", {}).get("count", 0)
                ended = found["count"]
                wait = self._interval
            text = to_json(state).decode()
            for offer in tuple(self._readers.get(scope, ())):
                offer(text)
            await asyncio.sleep(wait)
