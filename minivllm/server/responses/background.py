"""Responses that are generated after their request was answered.  A client reads them with GET until they end."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from minivllm.server import errors, logs
from minivllm.server.errors import ApiError
from minivllm.server.http.sse import supervise
from minivllm.server.openai import JsonObject
from minivllm.server.openai.generate import Answer
from minivllm.server.openai.sockets import never

from .output import CANCELLED, FAILED, IN_PROGRESS
from .work import ResponseWork


class Job:
    """A response that is being generated in the background."""

    def __init__(self, work: ResponseWork, answer: Answer, held: AsyncExitStack, seconds: float) -> None:
        self.work = work
        self.task = asyncio.create_task(self._run(answer, held, seconds))

    async def _run(self, answer: Answer, held: AsyncExitStack, seconds: float) -> None:
        """Generate the response and store it, even if the generation fails or is cancelled.  Then log it."""
        work, start = self.work, time.monotonic()
        async with held:
            try:
                await supervise(work.finish(answer), never, work.service.door, seconds)
            except asyncio.CancelledError:
                await work.keep_failed(CANCELLED, None)
            except Exception as exc:
                error = errors.of(exc)
                if error.status == 500:
                    logs.log.error("response %s failed", work.id, exc_info=exc)
                await work.keep_failed(FAILED, error)
        ms = round(1e3 * (time.monotonic() - start), 1)
        logs.event("response", response=work.id, request_id=work.state["request_id"], ms=ms, **work.state["log"])

    def now(self) -> JsonObject:
        """Return the response with the items that are complete."""
        return self.work.response(IN_PROGRESS, output=self.work.output.finished())


def not_found(ident: str) -> ApiError:
    """Return the error for an unknown response."""
    return ApiError(404, f"Response with id '{errors.printable(ident, 80)}' not found.")
