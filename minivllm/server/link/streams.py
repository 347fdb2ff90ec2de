"""The client's side of one request: tokens come in, pieces of text go out, and a slow reader holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.finish import Finish, FinishReason
from minivllm.errors import EngineDeadError
from minivllm.frontend.text import RequestText

from .scored import Scored

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.runtime.text.tokenizer import Tokenizer


# tell(sample, text, tokens) -> whether it was told; if not, it becomes a piece
Tell = Callable[[int, str, int], bool]


@dataclass(slots=True)
class TextPiece:
    """New text and tokens of one branch.  The last piece of a branch has ``finish_reason``: "stop", "length", "abort"
    or "error", then ``error`` says why, and ``param`` which field of the request is at fault, if one is.
    ``logprobs``: a sequence of one dict per token, as in ``CompletionOutput``."""

    sample: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: Scored | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    param: str | None = None


class Stream(RequestText):
    """An async iterator of ``TextPiece``; it ends when every branch has.  ``aclose``, leaving ``async with``, or
    losing the last reference to it aborts.  Log-probabilities are kept as columns (``scored``).

    Invariant: at most one piece of each branch waits to be read; what comes meanwhile is joined to it.  So what an
    unread stream holds is bounded by its own answer, and who fills it never waits.

    One event loop's thread uses it.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        prompt_tokens: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        drop: Callable[[Stream], None],
        cut: Callable[[Stream, int, str], None],
        read: set[Stream],
    ) -> None:
        branches = params.n if params.beam_width is not None else params.width  # beams come when they are chosen
        super().__init__(params, tokenizer, branches, time.monotonic(), scored=False)
        self.number, self.request_id, self.prompt_tokens = number, request_id, prompt_tokens
        self.prompt: Any = ()  # i32 [prompt_tokens]
        self._parts: list[tuple[int, Any]] = []  # (first position, plan.LogProbs) of the prompt
        self._prompt_scored: Scored | None = None
        spell = None if tokenizer is None or not params.detokenize else partial(_spelled, tokenizer)
        self._spell = spell
        self.scored = None if params.logprobs is None else [Scored(spell) for _ in range(branches)]  # of all tokens
        # f32 [width] of each read of each branch that has ended well, once the request has ended
        self.tapped: dict[int, list[np.ndarray]] = {}
        self._drop, self._cut, self._read = drop, cut, read
        self._pending: dict[int, TextPiece] = {}
        self._fed: dict[int, float] = {}  # branch -> when its last tokens came
        self._error: Exception | None = None
        self._done = False  # nothing more will come
        self._tell: Tell | None = None  # while its reader waits and has not been woken, see ``take``
        self._wake: asyncio.Future[None] | None = None
        self._until: Callable[[int, str], bool] | None = None

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
    def cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache; known with the first token."""
        return self.metrics.cached_tokens

    # ---- who fills it --------------------------------------------------------------------------------------------

    def feed(
        self,
        sample: int,
        ids: Sequence[int],
        reason: FinishReason | None = None,
        stop_token: int | None = None,
        logprobs: Scored | None = None,
        error: str | None = None,
        param: str | None = None,
    ) -> None:
        """Accepted tokens of a branch, and why it has ended if it has; ``stop_token`` is the id that ended it where
        that is not an end-of-sequence token.  Ignored if the branch has ended."""
        if reason is None and sample in self.open and self.texts[sample].plain and self._until is None:
            # by far the most: a token or two in the middle of an answer
            new, stopped, used = self.texts[sample].extend(ids), None, len(ids)
            if self._tell is not None and not self._pending and self._tell(sample, new, used):
                return
        elif (delta := self.accept(sample, ids, Finish(reason, stop_token) if reason else None)) is not None:
            new, stopped, used = delta
            if self._until is not None and new and sample in self.open and self._until(sample, new):
                self._close(sample)
        else:
            return
        if (piece := self._pending.get(sample)) is None:
            if not new and not used and sample in self.open:
                return
            piece = self._pending[sample] = TextPiece(sample, "", [])
        piece.text += new
        piece.token_ids += ids if used == len(ids) else ids[:used]
        if self.scored is not None:
            self._keep(piece, self.scored[sample], logprobs, used)
        if sample not in self.open:
            text = self.texts[sample]
            piece.finish_reason, piece.stop_reason = text.finish_reason, text.stop_reason
            if text.finish_reason == "error":
                piece.error, piece.param = error, param
            if reason is None:
                self._cut(self, sample, stopped or "")
        self._rouse()

    def end_when(self, until: Callable[[int, str], bool]) -> None:
        """End a branch once ``until(sample, text)`` is true; it gets the text of each branch piece by piece."""
        self._until = until
        for sample in sorted(self.open):
            text = self.texts[sample].text
            if text and until(sample, text):
                self._close(sample)
                self._pending.setdefault(sample, TextPiece(sample, "", [])).finish_reason = "stop"
                self._cut(self, sample, "")
                self._rouse()

    def _close(self, sample: int) -> None:
        self.texts[sample].finish("stop")
        self.open.discard(sample)

    def started(self, at: float, cached_tokens: int, entered: float | None = None) -> None:
        """The first token came ``at`` seconds of ``time.monotonic``; it left the queue when it ``entered``."""
        self.metrics.first_token_time, self.metrics.cached_tokens = at, cached_tokens
        self.metrics.scheduled_time = entered

    def gap(self, sample: int, count: int, now: float) -> tuple[float, int] | None:
        """``count`` tokens of a branch have come: (seconds between them, how many such gaps); None for the first."""
        before = self._fed.get(sample)
        self._fed[sample] = now
        if before is None:  # several at once: they are those of a request that nobody watches, or of a draft
            before, count = self.metrics.first_token_time, count - 1
        return None if before is None or not count else (max(now - before, 0.0) / count, count)

    def _keep(self, piece: TextPiece, all: Scored, new: Scored | None, used: int) -> None:
        """The scores of as many new tokens as belong to the sequence, in its next piece and among all of them."""
        new = Scored() if new is None else new if used == len(new) else new.cut(0, used)
        new.spell = self._spell
        all.extend(new)
        if piece.logprobs is None:
            piece.logprobs = new
        else:
            piece.logprobs.extend(new)

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
        self._tell = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode((token,), skip_special_tokens=False)


async def take(streams: Sequence[Stream], tell: Sequence[Tell] | None = None) -> list[tuple[int, TextPiece]]:
    """(position of the stream, piece) of all that waits in any of them, once something does; [] when all have ended.
    EngineDeadError if the engine has ended before one of them.

    ``tell``, one a stream: while this waits, text in the middle of an answer is offered there first, without the turn
    of the event loop that a task costs.  No log-probabilities are told so: the streams are to have none."""
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
        for at, stream in enumerate(streams):
            stream._wake, stream._tell = wake, None if tell is None else tell[at]
            stream._read.add(stream)  # a task that waits for us is held by nobody else
        try:
            await wake
        finally:
            for stream in streams:
                stream._wake = stream._tell = None
                stream._read.discard(stream)


async def end(abort: Callable[[str], Awaitable[None]], streams: Sequence[Stream], seconds: float = 1.0) -> None:
    """Close streams of one client, aborting running requests by ``abort(request_id)``.

    Wait for their last tokens for ``seconds`` at most: the engine sends the tokens of an answer that is not read piece
    by piece only at its end."""
    left = {asyncio.create_task(stream.ended()) for stream in streams if stream.running}
    for stream in streams:
        if stream.running:
            with contextlib.suppress(EngineDeadError):
                await abort(stream.request_id)
    if left:
        _, late = await asyncio.wait(left, timeout=seconds)
        for task in late:
            task.cancel()
    for stream in streams:
        await stream.aclose()
