"""The client's side of one request: tokens come in, pieces of text go out, and a slow reader holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm.errors import EngineDeadError
from minivllm.text.outputs import RequestMetrics, SequenceText

from .scored import Scored

if TYPE_CHECKING:
    from minivllm.core.interfaces.finish import FinishReason
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.text.tokenizer import Tokenizer

    from .client import EngineClient


@dataclass
class TextPiece:
    """New text and tokens of one branch.  The last piece of a branch has ``finish_reason``: "stop", "length", "abort"
    or "error", then ``error`` says why.  ``logprobs``: a sequence of one dict per token, as in ``CompletionOutput``."""

    sample: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: Scored | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def join(self, later: TextPiece) -> None:
        """Take in the piece that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.extend(later.logprobs)
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error


class Stream:
    """An async iterator of ``TextPiece``; it ends when every branch has.  ``aclose``, leaving ``async with``, or
    losing the last reference to it aborts.

    Invariant: at most one piece of each branch waits to be read; what comes meanwhile is joined to it.  So what an
    unread stream holds is bounded by its own answer, and who fills it never waits.

    One event loop's thread uses it.  ``order`` is known at the end: the samples of the answer, best first.
    """

    def __init__(
        self, number: int, request_id: str, prompt_tokens: int, params: SamplingParams, tokenizer: Tokenizer | None,
        drop: Callable[[Stream], None], cut: Callable[[Stream, int, str], None],
        read: set[Stream],
    ) -> None:  # fmt: skip
        self.number, self.request_id, self.params = number, request_id, params
        self.prompt_tokens, self.cached_tokens = prompt_tokens, 0
        self.metrics = RequestMetrics(time.monotonic())
        self.order: list[int] | None = None
        self.prompt: Any = ()  # i32 [prompt_tokens]
        self._parts: list[tuple[int, Any]] = []  # (first position, plan.LogProbs) of the prompt
        self._prompt_scored: Scored | None = None
        branches = params.n if params.beam_width is not None else params.width  # beams come when they are chosen
        plain = params
        if params.logprobs is not None:  # scores are kept here, as they come
            plain = copy.copy(params)
            plain.logprobs = None
        self.texts = [SequenceText(tokenizer, plain, i) for i in range(branches)]
        spell = None if tokenizer is None or not params.detokenize else partial(_spelled, tokenizer)
        self._spell = spell
        self.scored = None if params.logprobs is None else [Scored(spell) for _ in range(branches)]  # of all tokens
        self.open = set(range(branches))  # branches whose last piece is still to come
        self._drop, self._cut, self._read = drop, cut, read
        self._pending: dict[int, TextPiece] = {}
        self._fed: dict[int, float] = {}  # branch -> when its last tokens came
        self._error: Exception | None = None
        self._done = False  # nothing more will come
        self._wake: asyncio.Future[None] | None = None

    # ---- the reader ----------------------------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TextPiece:
        """EngineDeadError if the engine has ended before the request."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            self._read.add(self)  # a task that waits for us is held by nobody else
            try:
                await self._wake
            finally:
                self._wake = None
                self._read.discard(self)
        return self._pending.pop(next(iter(self._pending)))

    def taken(self) -> list[TextPiece]:
        """All that waits, without waiting.  EngineDeadError if nothing does and the engine has ended."""
        if self._pending:
            pieces = list(self._pending.values())
            self._pending.clear()
            return pieces
        if self._error is not None:
            raise self._error
        return []

    async def ended(self) -> None:
        """Returns once the request has ended in the engine; what it said until then can be read."""
        while not self._done:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None

    async def aclose(self) -> None:
        """Abort what still runs; nothing more is read.  Idempotent."""
        self._pending.clear()
        if not self._done:
            self._end()
            self._drop(self)

    def __del__(self) -> None:
        if not self._done:
            self._done = True
            self._drop(self)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.aclose()

    @property
    def running(self) -> bool:
        """Whether more may come."""
        return not self._done

    @property
    def completion_tokens(self) -> int:
        """Tokens of all branches so far; those behind a stop string are not counted."""
        return sum(len(text.token_ids) for text in self.texts)

    # ---- who fills it --------------------------------------------------------------------------------------------

    def feed(
        self, sample: int, ids: Sequence[int], reason: FinishReason | None = None, stop_token: int | None = None,
        logprobs: Scored | None = None, error: str | None = None,
    ) -> None:  # fmt: skip
        """Accepted tokens of a branch, and why it has ended if it has; ``stop_token`` is the id that ended it where
        that is not an end-of-sequence token.  Ignored if the branch has ended."""
        if sample not in self.open:
            return
        text = self.texts[sample]
        if (
            reason is None and ids and text.plain and logprobs is None
        ):  # by far the most: a token or two in the middle of an answer
            shown = text.extend(ids)
            if (waiting := self._pending.get(sample)) is not None:
                waiting.text += shown
                waiting.token_ids += ids
            else:
                self._pending[sample] = TextPiece(sample, shown, list(ids))
                self._rouse()
            return
        # what ends with "stop" here ended with a token: stop strings are found below
        delta = text.feed(ids, reason is not None, stop_token=reason == "stop" and bool(ids))
        if reason is not None:
            text.finish(reason, stop_token)
        if text.finish_reason is not None:
            self.open.discard(sample)
        elif not delta.used and not delta.text:
            return
        new = None if self.scored is None else self._keep(self.scored[sample], logprobs, delta.used)
        piece = TextPiece(
            sample, delta.text, list(ids[: delta.used]), new, text.finish_reason, text.stop_reason,
            error if text.finish_reason == "error" else None,
        )  # fmt: skip
        if (waiting := self._pending.get(sample)) is not None:
            waiting.join(piece)
        else:
            self._pending[sample] = piece
        if reason is None and delta.stopped is not None:
            self._cut(self, sample, delta.stopped)
        self._rouse()

    def started(self, at: float, cached_tokens: int, entered: float | None = None) -> None:
        """The first token came ``at`` seconds of ``time.monotonic``; it left the queue when it ``entered``."""
        self.metrics.first_token_time, self.cached_tokens = at, cached_tokens
        self.metrics.cached_tokens, self.metrics.scheduled_time = cached_tokens, entered

    def gap(self, sample: int, count: int, now: float) -> tuple[float, int] | None:
        """``count`` tokens of a branch have come: (seconds between them, how many such gaps); None for the first."""
        before = self._fed.get(sample)
        self._fed[sample] = now
        if before is None:  # several at once: they are those of a request that nobody watches, or of a draft
            before, count = self.metrics.first_token_time, count - 1
        return None if before is None or not count else (max(now - before, 0.0) / count, count)

    def _keep(self, all: Scored, new: Scored | None, used: int) -> Scored:
        """The scores of as many new tokens as belong to the sequence."""
        new = Scored() if new is None else new if used == len(new) else new.cut(0, used)
        new.spell = self._spell
        all.extend(new)
        return new

    def score_prompt(self, parts: Sequence[tuple[int, Any]]) -> None:
        """(first position, plan.LogProbs) of the prompt: all of them are there with the first piece."""
        self._parts += parts
        self._prompt_scored = None

    @property
    def prompt_logprobs(self) -> Scored:
        """A row a token of the prompt, as far as scores were asked for and have come."""
        if self._prompt_scored is None:
            self._prompt_scored = Scored.of_prompt(self.prompt, self._parts, self._spell)
        return self._prompt_scored

    def finished(self, at: float, order: list[int] | None = None) -> None:
        """The request has ended in the engine."""
        self.order = order if order is not None else list(range(self.params.n))
        self.metrics.finished_time = at
        self._end()

    def fail(self, error: Exception) -> None:
        """The engine has ended; what has come can still be read."""
        if not self._done:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._done = True
        self.open.clear()
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode((token,), skip_special_tokens=False)


async def take(streams: Sequence[Stream]) -> list[tuple[int, TextPiece]]:
    """(position of the stream, piece) of all that waits in any of them, once something does; [] when all have ended.
    EngineDeadError if the engine has ended before one of them."""
    while True:
        found: list[tuple[int, TextPiece]] = []
        done = True
        for at, stream in enumerate(streams):
            if stream._pending or stream._error is not None:
                found += [(at, piece) for piece in stream.taken()]
            done &= stream._done
        if found or done:
            return found
        wake = asyncio.get_running_loop().create_future()
        for stream in streams:
            stream._wake = wake
            stream._read.add(stream)  # a task that waits for us is held by nobody else
        try:
            await wake
        finally:
            for stream in streams:
                stream._wake = None
                stream._read.discard(stream)


async def end(client: EngineClient, streams: Sequence[Stream], seconds: float = 1.0) -> None:
    """Close streams.  What still runs is aborted, and for ``seconds`` at most its last words are waited for: of an
    answer that nobody reads piece by piece the engine tells only then what it had generated."""
    left = {asyncio.create_task(stream.ended()) for stream in streams if stream.running}
    for stream in streams:
        if stream.running:
            with contextlib.suppress(EngineDeadError):
                await client.abort(stream.request_id)
    if left:
        _, late = await asyncio.wait(left, timeout=seconds)
        for task in late:
            task.cancel()
    for stream in streams:
        await stream.aclose()
