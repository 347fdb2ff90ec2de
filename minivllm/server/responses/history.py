"""Read the items of earlier responses: a conversation that goes on, and items that an input refers to."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import shown
from minivllm.server.errors import ApiError, wrong
from minivllm.server.openai import JsonObject
from minivllm.server.response_store import KeyResponses, ResponseStore, StoredResponse

from .items import REFERENCE

if TYPE_CHECKING:
    from minivllm.server.openai.generate import Service

NOT_FOUND = "previous_response_not_found"
ITEM = re.compile(r"[a-z]{2,5}_([A-Za-z0-9-]{1,160})_i?\d{1,5}")  # ids of items that this server makes


class History:
    """The responses that one client can refer to, because they have its key or belong to its connection.

    ``local`` has the responses of a WebSocket that are not stored.
    """

    def __init__(self, service: Service, identity: str, owner: str, local: LocalStore | None = None) -> None:
        self.service, self.identity, self.owner, self.local = service, identity, owner, local
        self._read: dict[str, dict[Any, JsonObject]] = {}  # id of a response -> (id -> item)
        self._left = service.server.max_body_bytes  # bytes of earlier items that this request may still read

    @property
    def store(self) -> ResponseStore:
        """Return the store of the server."""
        return self.service.responses

    async def find(self, ident: str) -> StoredResponse | None:
        """Return a response, or None if the client has none with this id."""
        found = None if self.local is None else self.local.get(ident)
        return found or await self.store.get(self.identity, ident)

    async def previous(self, ident: str) -> StoredResponse:
        """Return the response that a request continues.  ApiError (400) if there is none."""
        found = await self.find(ident)
        if found is None:
            text = f"Previous response with id {shown(ident)} not found."
            raise ApiError(400, text, "previous_response_id", code=NOT_FOUND)
        return found

    async def keep(self, stored: StoredResponse, to_store: bool) -> None:
        """Keep a response, in the store or only for the connection."""
        if to_store:
            await self.store.put(self.identity, stored)
        elif self.local is not None:
            self.local.put(stored)

    async def items(self, turns: Sequence[bytes]) -> list[JsonObject]:
        """Return the items of turns.  ApiError (400) if a request reads more than the largest body has."""
        self._left -= sum(map(len, turns))
        if self._left < 0:
            most = self.service.server.max_body_bytes
            text = f"the conversation has more than {most} bytes (max_body_bytes): begin another one"
            raise ApiError(400, text, "previous_response_id")
        body: list[bytes | memoryview] = [b'{"input":[']
        for turn in turns:
            if turn != b"[]":
                body += [b"," if len(body) > 1 else b"", memoryview(turn)[1:-1]]
        return (await self.service.bodies.parse([*body, b"]}"], self.owner))["input"]

    async def resolve(self, items: list[JsonObject]) -> list[JsonObject]:
        """Return items with each reference replaced by the item.  ApiError (404) for an unknown one."""
        found = []
        for number, item in enumerate(items):
            if item["type"] == REFERENCE:
                item = await self._item(item["id"], f"input[{number}]")
            found.append(item)
        return found

    async def _item(self, ident: str, at: str) -> JsonObject:
        """Return the item with an id from an earlier response.  ApiError (404) if there is none."""
        match = ITEM.fullmatch(ident)
        response = f"resp_{match[1]}" if match else ""
        if match and response not in self._read:
            stored = await self.find(response)
            items = [] if stored is None else await self.items(stored.turns[-2:])
            self._read[response] = {item.get("id"): item for item in items}
        item = self._read.get(response, {}).get(ident)
        if item is None:
            raise ApiError(404, f"{at}: Item with id {shown(ident)} not found.", at)
        return item


class LocalStore:
    """The latest responses of one WebSocket connection that are not stored, at most ``most``.

    Their size counts towards the limit for all connections of the same API key (``of_key``)."""

    def __init__(self, most: int, of_key: KeyResponses) -> None:
        self._of_key = of_key
        self._number = of_key.connection()
        self._most = most
        self._ids: deque[str] = deque()

    def get(self, ident: str) -> StoredResponse | None:
        """Return the response of this connection with an id, or None."""
        return self._of_key.get(self._number, ident)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response of this connection, and drop the connection's oldest one if there are more than ``most``."""
        self._ids.append(stored.id)
        self._of_key.put(self._number, stored)
        if len(self._ids) > self._most:
            self._of_key.remove(self._number, self._ids.popleft())

    def close(self) -> None:
        """Forget all responses of the connection."""
        while self._ids:
            self._of_key.remove(self._number, self._ids.pop())


def checked_id(value: Any, name: str) -> str:
    """Return the id of a response.  ApiError (400) for anything but a text."""
    if not isinstance(value, str) or not value:
        raise wrong(name, f"={shown(value)}: expected the id of a response")
    return value
