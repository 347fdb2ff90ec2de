"""A whole answer as JSON, written in pieces, because the client chooses the size of an answer.

    answer ──pieces()──► 64 KiB and more ──► the client       the next piece is made after the client took the last one
      │ small values at once
      └ WrittenInParts: many log-probabilities ──JOB each──► WorkerPool ──► JSON of a part

So the memory of an answer is its columns and one piece of JSON, and the event loop serves other requests between two
pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.server.http.sse import dump
from minivllm.server.link.scored import Scored

from . import JsonObject, logprobs
from .logprobs import Speller
from .offsets import Places

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.server.worker_pool import WorkerPool

PIECE = 1 << 16  # least number of bytes of a piece
AT_ONCE = 1024  # largest number of scores of an answer that the event loop converts, in one or two milliseconds
FEW = 128  # largest number of tokens of an answer whose text positions the event loop computes
JOB = 1 << 13  # number of scores of a job for the worker pool: about ten milliseconds, and 0.5 MB of JSON
SLICE = 0.002  # seconds of work in the event loop after which other requests run


class Slices:
    """The event loop's time for long answers, in slices of ``SLICE`` seconds, one per iteration of the loop.

    A short task therefore waits for at most one slice in each of its steps, however many long answers there are.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def begin(self) -> float:
        """Begin a slice (a short turn of work in the event loop) without waiting.

        Return the time (``time.perf_counter``) at which it ends, ``SLICE`` seconds from now."""
        return time.perf_counter() + SLICE

    async def next(self) -> float:
        """Run the other tasks that wait, and then begin the next slice (a short turn of work in the event loop).

        Return the time (``time.perf_counter``) at which it ends.  If several tasks call this, they get slices in turn,
        one in each iteration of the loop."""
        async with self._turn:
            await asyncio.sleep(0)
        return self.begin()


class WrittenInParts(Protocol):
    """A value whose JSON is written in parts."""

    def parts(self, shaper: Shaper) -> AsyncIterator[bytes]:
        """Yield the JSON of the value, in parts."""


class Shaper:
    """Converts the log-probabilities of one answer to JSON: the first few on the event loop, the others in the worker
    pool.

    ``owner`` identifies the client, because the pool serves clients in turn."""

    def __init__(self, pool: WorkerPool, tokenizer: Tokenizer | None, speller: Speller, owner: str) -> None:
        self.tokenizer, self._pool, self._speller, self._owner = tokenizer, pool, speller, owner
        self._scores = AT_ONCE
        self._tokens = FEW

    async def shape(self, kind: str, scored: Scored, top: int) -> AsyncIterator[list[bytes]]:
        """Yield the result of ``shaped`` for each part of the rows: computed here if it is small, else in a process of
        the pool."""
        for low, high in scored.parts(JOB):
            weight = scored.weight(low, high)
            if weight <= self._scores:
                self._scores -= weight
                yield shaped(kind, scored.rows(low, high), top, self._speller)
            else:
                spelling = {"as_ids": self._speller.as_ids, "detokenize": self._speller.detokenize}
                columns = scored.cut(low, high).pack()
                yield await self._pool.shape({"kind": kind, "top": top, **spelling}, columns, self._owner)

    async def places(self, tokens: Sequence[int], skip: bool, begin: int, prompt: str | None, shown: int) -> list[int]:
        """Return the position of each token in a text of ``shown`` characters (see ``Places``)."""
        if len(tokens) <= self._tokens or self.tokenizer is None:
            self._tokens -= len(tokens)
            found = places(self.tokenizer, tokens, skip, begin, prompt)
        else:
            found = await self._pool.places(tokens, skip, begin, prompt, self._owner)
        return np.minimum(found, shown).tolist()


def shaped(kind: str, rows: Iterator[logprobs.ScoredToken], top: int, speller: Speller) -> list[bytes]:
    """Return columns of JSON, each with one value for each row, with commas and without brackets.

    ``kind`` is "chat", "prompt" (one column) or "completion" (three columns)."""
    if kind == "completion":
        columns = logprobs.completion(rows, top, speller)
        return [dump(columns[name])[1:-1] for name in ("top_logprobs", "tokens", "token_logprobs")]
    if kind == "prompt":
        return [dump(logprobs.prompt(rows, speller))[1:-1]]
    return [dump(logprobs.chat(rows, top, speller))[1:-1]]


def places(tokenizer: Tokenizer | None, tokens: Sequence[int], skip: bool, begin: int, prompt: str | None) -> Any:
    """Return the position of each token in a text, i64 [N]."""
    found = Places(tokenizer, skip, begin, prompt)
    return np.fromiter(map(found.next, tokens), np.int64, len(tokens))


@dataclass
class TokenScores:
    """The scores of tokens as a JSON list with one element for each token.  ``kind`` is "chat" or "prompt"."""

    kind: str
    scored: Scored
    top: int = 0

    async def parts(self, shaper: Shaper) -> AsyncIterator[bytes]:
        """Yield the JSON list of the log-probabilities of all tokens, in parts."""
        before = b"["
        async for (part,) in shaper.shape(self.kind, self.scored, self.top):
            yield before + part
            before = b","
        yield b"[]" if before == b"[" else b"]"


@dataclass
class Stretch:
    """Successive tokens of a choice, and the arguments of ``Shaper.places`` for their positions in its text."""

    scored: Scored
    skip: bool
    begin: int
    prompt: str | None
    shown: int


@dataclass
class CompletionScores:
    """The ``logprobs`` of a choice of completions.

    The largest column, ``top_logprobs``, is written first.  The other columns are kept in memory meanwhile."""

    stretches: Sequence[Stretch]
    top: int

    async def parts(self, shaper: Shaper) -> AsyncIterator[bytes]:
        """Yield the JSON object of the columns of ``logprobs``, in parts."""
        before = b'{"top_logprobs":['
        tokens: list[bytes] = []
        chosen: list[bytes] = []
        offsets: list[bytes] = []
        for part in self.stretches:
            async for tops, names, values in shaper.shape("completion", part.scored, self.top):
                yield before + tops
                before = b","
                tokens.append(names)
                chosen.append(values)
            found = await shaper.places(part.scored.tokens, part.skip, part.begin, part.prompt, part.shown)
            if found:
                offsets.append(dump(found)[1:-1])
        if before != b",":
            yield before
        for name, column in ((b"tokens", tokens), (b"token_logprobs", chosen), (b"text_offset", offsets)):
            yield b'],"' + name + b'":[' + b",".join(column)
        yield b"]}"


async def pieces(answer: JsonObject, shaper: Shaper, slices: Slices) -> AsyncIterator[bytes]:
    """Yield the JSON of an answer in pieces of at least ``PIECE`` bytes, except for the last piece."""
    held: list[bytes] = []
    size = 0
    until = slices.begin()
    async for part in _parts(answer, shaper, True):
        held.append(part)
        size += len(part)
        if size >= PIECE:
            yield b"".join(held)
            held = []
            size = 0
        if time.perf_counter() > until:
            until = await slices.next()
    yield b"".join(held)


async def _parts(value: Any, shaper: Shaper, opened: bool = False) -> AsyncIterator[bytes]:
    """Yield the JSON of a value in parts.

    An object or list with a ``WrittenInParts`` inside is written member by member.  ``opened`` does so for any object
    and list."""
    if hasattr(value, "parts"):
        async for part in value.parts(shaper):
            yield part
    elif isinstance(value, dict) and (opened or _has_leaf(value)):
        before = b"{"
        for name, one in value.items():
            yield before + dump(name) + b":"
            before = b","
            async for part in _parts(one, shaper, name == "choices"):
                yield part
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and (opened or _has_leaf(value)):
        before = b"["
        for one in value:
            yield before
            before = b","
            async for part in _parts(one, shaper):
                yield part
        yield b"]"
    else:
        yield dump(value)


def _has_leaf(value: Any) -> bool:
    """Return whether an object, or a list of objects, has a ``WrittenInParts`` inside."""
    if hasattr(value, "parts"):
        return True
    if isinstance(value, dict):
        return any(map(_has_leaf, value.values()))
    # only the first element is checked, because all elements of a list are alike
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and any(map(_has_leaf, value))
