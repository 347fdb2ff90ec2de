"""The client's side of a request: turn tokens into pieces of text, without ever waiting for a slow reader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.finish import Finish, FinishReason
from minivllm.errors import EngineDeadError
from minivllm.frontend.text import RequestText

from .routes import ReadRoutes
from .scored import Scored

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.runtime.text.tokenizer import Tokenizer


# ``tell`` (sample, text, number of tokens) returns whether the text was sent; a text that was not sent becomes a piece
Tell = Callable[[int, str, int], bool]


@dataclass(slots=True)
class TextPiece:
    """New text and tokens of a branch.

    The last piece of a branch has a ``finish_reason``: "stop", "length", "abort" or "error".
    With "error", ``error`` is the message, and ``param`` the field of the request at fault, if any.
    ``logprobs`` is a sequence with a dict for each token, as in ``CompletionOutput``.
    """

    sample: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: Scored | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    param: str | None = None


class Stream(RequestText):
    """The answer of a request as an async iterator of ``TextPiece``, used only by the event loop's thread.

    It ends when every branch has ended.  The request is aborted by ``aclose``, at the end of ``async with``, or when
    the last reference to the stream is lost.

    Invariant: at most one piece of each branch waits to be read.  Later text is appended to that piece.  So a slow
    reader delays nothing, and an unread stream takes no more memory than its answer.

    ``marks`` maps token ids to the characters that stand for them in the text of pieces (``marks.Marks``).  Only a
    parser may read such text; ``texts[sample].text`` has no marks.
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
        marks: Mapping[int, str] | None = None,
    ) -> None:
        # beams are sent only after they are chosen, so only the n best ones are branches of the stream
        branches = params.n if params.beam_width is not None else params.width
        super().__init__(params, tokenizer, branches, time.monotonic(), scored=False, marks=marks)
        self.number = number
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.prompt: Any = ()  # i32 [prompt_tokens]
        self._parts: list[tuple[int, Any]] = []  # (first position, plan.LogProbs) of the prompt
        self._prompt_scored: Scored | None = None
        self._spell = None if tokenizer is None or not params.detokenize else partial(_spelled, tokenizer)
        # log-probabilities of all tokens of each branch
        self.scored = None if params.logprobs is None else [Scored(self._spell) for _ in range(branches)]
        # branch that ended without an error -> values f32 [width] of each read of ``taps``, or its embedding
        self.weights_version = 0  # newest version of the weights that drew tokens, once the request has ended
        self.tapped: dict[int, list[np.ndarray]] = {}
        # branch that ended without an error -> its routes, if the request reads them
        self.routes: dict[int, ReadRoutes] = {}
        self.moves = 0  # number of times that the request was sent to another engine after the end of its engine
        self._drop = drop  # function that aborts the request
        self._cut = cut  # function that ends a branch in the engine
        self._read = read  # the client's set of streams that a task waits for
        self._pending: dict[int, TextPiece] = {}
        self._fed: dict[int, float] = {}  # branch -> time of its last tokens
        self._error: Exception | None = None
        self._done = False  # whether the last piece has arrived
        self._tell: Tell | None = None  # set only while the reader waits in ``take``
        self._wake: asyncio.Future[None] | None = None
        self._until: Callable[[int, str], bool] | None = None

    # ---- the reader ----------------------------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TextPiece:
        """Return the next piece.  Raise EngineDeadError if the engine has ended before the request."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            # a strong reference keeps the waiting task alive, because all other references of the client to the stream
            # are weak
            self._read.add(self)
            try:
                await self._wake
            finally:
                self._wake = None
                self._read.discard(self)
        return self._pending.pop(next(iter(self._pending)))

    def taken(self) -> list[TextPiece]:
        """Return the unread pieces without waiting.

        Raise EngineDeadError if there are none and the engine has ended.
        """
        if self._pending:
            pieces = list(self._pending.values())
            self._pending.clear()
            return pieces
        if self._error is not None:
            raise self._error
        return []

    async def ended(self) -> None:
        """Wait until the request has ended in the engine.  Its pieces can still be read."""
        while not self._done:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None

    async def aclose(self) -> None:
        """Drop the unread pieces, and abort the request if it runs.  A second call does nothing."""
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
        """Return whether the request has not ended."""
        return not self._done

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache, known from the first token on."""
        return self.metrics.cached_tokens

    # ---- called by the client ------------------------------------------------------------------------------------

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
        """Add tokens to a branch, or ignore them if the branch has ended.

        ``reason`` is the finish reason of the branch if it ends with these tokens.  ``stop_token`` is the id that ended
        it, if that is not an end-of-sequence token.  ``error`` and ``param`` are those of ``TextPiece``.
        """
        if reason is None and sample in self.open and self.texts[sample].plain and self._until is None:
            # the usual case: one or two tokens in the middle of an answer
            new, stopped, used = self.texts[sample].extend(ids), None, len(ids)
            if self._tell is not None and not self._pending and self._tell(sample, new, used):
                return
        else:
            delta = self.accept(sample, ids, Finish(reason, stop_token) if reason else None)
            if delta is None:
                return
            new, stopped, used = delta
            if self._until is not None and new and sample in self.open and self._until(sample, new):
                self._close(sample)
        piece = self._pending.get(sample)
        if piece is None:
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
        """End a branch once ``until(sample, text)`` is true.  ``until`` is called with each new piece of its text."""
        self._until = until
        for sample in sorted(self.open):
            text = self.texts[sample].marked
            if text and until(sample, text):
                self._close(sample)
                piece = self._pending.setdefault(sample, TextPiece(sample, "", []))
                piece.finish_reason = "stop"
                self._cut(self, sample, "")
                self._rouse()

    def _close(self, sample: int) -> None:
        """End the text of a branch."""
        self.texts[sample].finish("stop")
        self.open.discard(sample)

    def started(self, at: float, cached_tokens: int, entered: float | None = None) -> None:
        """Record the times (``time.monotonic``) at which the first token came and the request left the queue."""
        self.metrics.first_token_time = at
        self.metrics.cached_tokens = cached_tokens
        self.metrics.scheduled_time = entered

    def gap(self, sample: int, count: int, now: float) -> tuple[float, int] | None:
        """Record that ``count`` tokens of a branch have come.

        Return the seconds between two tokens and the number of gaps, or None after the first token alone.
        """
        before = self._fed.get(sample)
        self._fed[sample] = now
        if before is None:  # the first tokens are several if the request is not streamed, or with a draft
            before = self.metrics.first_token_time
            count -= 1
        if before is None or not count:
            return None
        return max(now - before, 0.0) / count, count

    def _keep(self, piece: TextPiece, all: Scored, new: Scored | None, used: int) -> None:
        """Add the scores of the first ``used`` new tokens to a piece and to ``all`` scores of the branch.

        The tokens after a stop string do not belong to the answer.
        """
        if new is None:
            new = Scored()
        elif used != len(new):
            new = new.cut(0, used)
        new.spell = self._spell
        all.extend(new)
        if piece.logprobs is None:
            piece.logprobs = new
        else:
            piece.logprobs.extend(new)

    def score_prompt(self, parts: Sequence[tuple[int, Any]]) -> None:
        """Add scores of the prompt, as pairs of a first position and a ``plan.LogProbs``.

        All scores are added before the first piece.
        """
        self._parts += parts
        self._prompt_scored = None

    @property
    def prompt_logprobs(self) -> Scored:
        """Return the scores of the prompt's tokens.  Tokens whose scores were not requested have none."""
        if self._prompt_scored is None:
            self._prompt_scored = Scored.of_prompt(self.prompt, self._parts, self._spell)
        return self._prompt_scored

    def finished(self, at: float, order: list[int] | None = None) -> None:
        """End the stream because the request has ended in the engine.

        ``at`` is the time of ``time.monotonic``.  ``order`` lists the samples of the answer, best first; None means all
        in order.
        """
        self.order = order if order is not None else list(range(self.params.n))
        self.metrics.finished_time = at
        self._end()

    def fail(self, error: Exception) -> None:
        """End the stream with an error.  Pieces that have come can still be read."""
        if not self._done:
            self._error = error
            self._end()

    def move(self, drop: Callable[[Stream], None], cut: Callable[[Stream, int, str], None]) -> None:
        """Replace the methods by those of another engine's client, to which the request moves before it has a token."""
        self._drop = drop
        self._cut = cut

    def _end(self) -> None:
        """Mark the request as ended and wake the reader."""
        self._done = True
        self.open.clear()
        self._rouse()

    def _rouse(self) -> None:
        """Wake the reader."""
        self._tell = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode((token,), skip_special_tokens=False)


async def take(streams: Sequence[Stream], tell: Sequence[Tell] | None = None) -> list[tuple[int, TextPiece]]:
    """Wait for the streams, and return their unread pieces as pairs of the stream's index and the piece.

    Return [] when all streams have ended.  Raise EngineDeadError if the engine has ended before one of them.  ``tell``
    has a function for each stream.  While this method waits, text in the middle of an answer is passed to this function
    first, which saves the round of the event loop for waking a task.  It receives no log-probabilities, so streams with
    log-probabilities must not use it.
    """
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
            stream._wake = wake
            stream._tell = None if tell is None else tell[at]
            stream._read.add(stream)  # see ``Stream.__anext__``
        try:
            await wake
        finally:
            for stream in streams:
                stream._wake = stream._tell = None
                stream._read.discard(stream)


async def end(abort: Callable[[str], Awaitable[None]], streams: Sequence[Stream], seconds: float = 1.0) -> None:
    """Close streams of one client, and abort running requests by ``abort(request_id)``.

    Wait at most ``seconds`` for the last tokens of the requests.  The engine sends the tokens of an answer that is not
    streamed only at the end of the answer.
    """
    ending = {asyncio.create_task(stream.ended()) for stream in streams if stream.running}
    for stream in streams:
        if stream.running:
            with contextlib.suppress(EngineDeadError):
                await abort(stream.request_id)
    if ending:
        _, late = await asyncio.wait(ending, timeout=seconds)
        for task in late:
            task.cancel()
    for stream in streams:
        await stream.aclose()
