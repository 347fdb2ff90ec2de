"""Write answers in the form of Ollama's API: lines of JSON, or one object with the whole answer.

    {"model", "created_at", "message": {"role", "content", "thinking", "tool_calls"}, "done": false}
    {"model", "created_at", "message", "done": true, "done_reason", "total_duration", ...}

``/api/generate`` has ``response`` and ``thinking`` in place of ``message``.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from minivllm.server.errors import ApiError
from minivllm.server.http.sse import EventStream, dump
from minivllm.server.openai import JsonObject, logprobs
from minivllm.server.openai.answers import Shaper, TokenScores, pieces
from minivllm.server.openai.calls import Begun, Ended, Part, Said, Thought, Written, json_object
from minivllm.server.openai.generate import SCORES, Answer
from minivllm.server.openai.params import note_default
from minivllm.server.openai.work import Work

if TYPE_CHECKING:
    from minivllm.server.http.connection import Direct
    from minivllm.server.link.client import Stream, TextPiece
    from minivllm.server.link.scored import Scored
    from minivllm.server.openai.reader import Reader

CHAT_PATH = "/api/chat"
HEAD = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
REASONS = {"tool_calls": "stop", None: "stop"}  # finish reason -> Ollama's done_reason, where they differ


class ChatLines(EventStream):
    """The stream of ``/api/chat``.  A silent stream sends a message without text, because clients parse every line."""

    head = HEAD
    comment = b'{"message":{"role":"assistant","content":""},"done":false}\n'

    def _final(self, error: ApiError) -> bytes:
        """Return the last line of an answer that has failed."""
        return dump(error.body(CHAT_PATH)) + b"\n"


class TextLines(ChatLines):
    """The lines of JSON that ``/api/generate`` streams."""

    comment = b'{"response":"","done":false}\n'


def now() -> str:
    """Return the time in RFC 3339."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def load_answer(model: str, members: Mapping[str, Any]) -> JsonObject:
    """Return the answer to a request that only loads the model, which this server did at its start."""
    return {"model": model, "created_at": now(), **members, "done": True, "done_reason": "load"}


@dataclass
class Pieces:
    """The new parts of a message: text, reasoning and complete calls."""

    content: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls)


class Gatherer:
    """Collects the parts of an answer.  A call is passed on when its arguments are complete, since they are an object.

    A call whose arguments are no JSON object becomes text, because clients cannot read such a call."""

    def __init__(self) -> None:
        self._call: Begun | None = None
        self._arguments: list[str] = []
        self._count = 0

    def add(self, found: Pieces, parts: Sequence[Part] | Iterator[Part]) -> Pieces:
        """Add the text, reasoning and complete calls in parts to ``found`` and return it."""
        for part in parts:
            if isinstance(part, Said):
                found.content.append(part.text)
            elif isinstance(part, Thought):
                found.thinking.append(part.text)
            elif isinstance(part, Begun):
                self._call = part
                self._arguments = []
            elif isinstance(part, Written):
                self._arguments.append(part.text)
            elif isinstance(part, Ended) and self._call is not None:
                self._end(found, self._call)
        return found

    def _end(self, found: Pieces, call: Begun) -> None:
        """Add to ``found`` the call whose arguments are now complete."""
        self._call = None
        text = "".join(self._arguments)
        arguments = json_object(text)
        if arguments is None:
            spelled = {"name": call.name, "arguments": text}
            found.content.append(json.dumps(spelled, ensure_ascii=False))
            return
        function = {"index": self._count, "name": call.name, "arguments": arguments}
        found.calls.append({"id": call.id, "function": function})
        self._count += 1


class LineWork(Work):
    """A request of Ollama's API.  A subclass also derives from the class of a chat or of a completion.

    ``shown`` is the model's name in the answer, as the client spelled it."""

    shown = ""
    top = 0
    one_choice = True
    unserved = (
        "echo",
        "prompt_logprobs",
        "taps",
        "routes",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "include_energy",
    )

    def reader(self) -> Reader:
        """Return a new reader for the text of the answer."""
        raise NotImplementedError

    def members(self, found: Pieces) -> JsonObject:
        """Return the members of an answer that have the text."""
        raise NotImplementedError

    async def events(self, answer: Answer, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Yield the answer as lines of JSON.  The last line has the reason of the end and the durations."""
        reader = self.reader()
        gatherer = Gatherer()
        slices = self.service.slices
        reason = None
        while taken := await answer.take():
            until = slices.begin()
            lines: list[bytes] = []
            for _, piece in taken:
                reason = piece.finish_reason or reason
                for line in self._lines(piece, reader, gatherer):
                    lines.append(line)
                    if time.perf_counter() > until:  # much text was waiting for a slow client
                        yield b"".join(lines)
                        lines = []
                        until = await slices.next()
            if lines:
                yield b"".join(lines)
        final = self._final(answer, self.members(Pieces()), reader.reason(reason))
        yield dump(final) + b"\n"

    async def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the whole answer as one JSON object, in pieces."""
        reader = self.reader()
        gatherer = Gatherer()
        found = Pieces()
        reason = None
        while taken := await answer.take():
            for _, piece in taken:
                reason = piece.finish_reason or reason
                gatherer.add(found, reader.parts(piece.text, piece.finish_reason))
        if found.calls:
            found.content = ["".join(found.content).strip()]
        out = self._final(answer, self.members(found), reader.reason(reason))
        scored = answer.streams[0].scored
        if self.params.logprobs is not None and scored is not None:
            out["logprobs"] = TokenScores("chat", scored[0], self.top)
        tokens = self.service.tokens
        shaper = Shaper(tokens.pool, tokens.tokenizer, self.speller, self.state["owner"])
        async for part in pieces(out, shaper, self.service.slices):
            yield part

    def _lines(self, piece: TextPiece, reader: Reader, gatherer: Gatherer) -> Iterator[bytes]:
        """Yield the lines of a piece: the first has its text, and each has at most ``SCORES`` log-probabilities."""
        found = gatherer.add(Pieces(), reader.parts(piece.text, piece.finish_reason))
        for scores in self._score_lists(piece):
            if found or scores:
                line = {"model": self.shown, "created_at": now(), **self.members(found), "done": False}
                if scores:
                    line["logprobs"] = scores
                yield dump(line) + b"\n"
            found = Pieces()

    def _score_lists(self, piece: TextPiece) -> Iterator[list[JsonObject]]:
        """Yield the log-probabilities of a piece, at most ``SCORES`` for a line, and [] for a piece without any."""
        rows: Scored | None = piece.logprobs
        parts = [] if rows is None or self.params.logprobs is None else list(rows.parts(SCORES))
        if rows is None or not parts:
            yield []
            return
        for low, high in parts:
            yield logprobs.chat(rows.rows(low, high), self.top, self.speller)

    def _final(self, answer: Answer, members: JsonObject, reason: str | None) -> JsonObject:
        """Return the last object of a stream, or the object of a whole answer."""
        if self.requested is None:
            note_default(answer, self.default)
        final = {"model": self.shown, "created_at": now(), **members, "done": True}
        final["done_reason"] = REASONS.get(reason, reason)
        final.update(figures(answer.streams[0]))
        if answer.warnings:
            final["warnings"] = answer.warnings
        return final


def figures(stream: Stream) -> JsonObject:
    """Return the durations of a request in nanoseconds and its token counts.

    Durations are at least 1, because clients divide by them.  The model is always loaded."""
    times = stream.metrics
    end = times.finished_time or times.arrival_time
    first = times.first_token_time or end
    start = times.scheduled_time or times.arrival_time
    return {
        "total_duration": nanoseconds(end - times.arrival_time),
        "load_duration": 0,
        "prompt_eval_count": stream.prompt_tokens,
        "prompt_eval_duration": nanoseconds(first - start),
        "eval_count": stream.completion_tokens,
        "eval_duration": nanoseconds(end - first),
    }


def nanoseconds(seconds: float) -> int:
    """Return a duration in nanoseconds, at least 1."""
    return max(round(1e9 * seconds), 1)
