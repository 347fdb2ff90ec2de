"""The WebSocket ``/v1/live``: the state of the engine several times a second, for the page.

    to the client   {"type": "hello", "scope": "all" or "own", "interval": s, "engine": {...}}    first
                    {"type": "state", ...}      a snapshot (``link.snapshot``)
                    {"type": "down", "why"}     the engine does not run
                    {"type": "error", "error"}  before the connection is closed

The client sends nothing but its key, as over ``/v1/ws``.  A key that is not the operator's sees its own requests only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.websockets import WebSocket

import minivllm
from minivllm.server.errors import ApiError
from minivllm.server.http.auth import ApiKeys
from minivllm.server.openai import JsonObject
from minivllm.server.openai.generate import Service
from minivllm.server.openai.sockets import SLOW, Socket

NOT_READ = "this connection only sends: expected no message but the key"


class LiveSocket(Socket):
    """One WebSocket that receives the state of the engine."""

    def __init__(self, socket: WebSocket, service: Service, keys: ApiKeys) -> None:
        super().__init__(socket, service, keys)
        self._scope: str | None = None
        self._joined = False

    def refusal(self, error: ApiError) -> JsonObject:
        """Return the message about an error."""
        return {"type": "error", **error.body()}

    def text(self, message: Any) -> str:
        """Return a message as text; a state is text already, because all readers share it."""
        return message if isinstance(message, str) else super().text(message)

    async def begin(self) -> int | None:
        """Send the facts about the engine, and join the readers of its state.  Return None, or a close code of the
        WebSocket if there are too many readers."""
        sees_all = self.keys.sees_all(self.tenant or "")
        self._scope = None if sees_all else self.owner
        try:
            self.service.live.join(self._scope, self._offer)
        except ApiError as error:
            await self.socket.send_text(self.text(self.refusal(error)))
            return SLOW
        self._joined = True
        await self.out.put(self._hello(sees_all))
        return None

    def _hello(self, sees_all: bool) -> JsonObject:
        """Return the first message.  The reasons for plug-ins may name paths, so they are for operators."""
        info, server = self.service.client.info, self.server
        explained = info.explained if sees_all else [[seam, chosen, ""] for seam, chosen, _ in info.explained]
        engine = {
            "models": list(self.service.names),
            "device": info.device,
            "dtype": info.dtype,
            "kv_tokens": info.kv_tokens,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "weight_bytes": info.weight_bytes,
            "explained": explained,
            "version": minivllm.__version__,
        }
        # limits of requests, which the page shows and respects
        engine["max_logprobs"] = min(server.max_logprobs, info.max_logprobs)
        engine["images"] = self.service.images.most
        engine["max_body_bytes"] = server.max_body_bytes
        scope = "all" if sees_all else "own"
        return {"type": "hello", "scope": scope, "interval": server.live_interval, "engine": engine}

    def _offer(self, state: str) -> None:
        """Queue a state, unless the client has not read the last one."""
        if not self.ending and self.out.empty():
            self.out.put_nowait(state)

    async def receive(self, raw: str) -> None:
        """Refuse a message."""
        # a delay, so that a client that sends messages without end costs little
        await asyncio.sleep(self.server.live_interval)
        await self.out.put(self.refusal(ApiError(400, NOT_READ)))

    async def end(self) -> None:
        """Leave the readers."""
        if self._joined:
            self._joined = False
            self.service.live.leave(self._scope, self._offer)
