"""A whole answer as JSON, written piece by piece: what a client chooses the size of is never built at once.

    answer ──pieces()──► 64 KiB and more ──► the client       the next piece is made once it has taken the last
      │ small leaves at once
      └ Leaf: many log-probabilities ──JOB each──► WorkerPool ──► JSON of a part

So an answer holds the columns that it is made of and a piece of its text, whatever that comes to, and the event loop
does something else between two pieces.
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

from . import logprobs
from .logprobs import Speller
from .offsets import Places

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.server.worker_pool import WorkerPool

PIECE = 1 << 16  # bytes that are sent together
AT_ONCE = 1024  # scores of an answer that the event loop writes itself: a millisecond or two
FEW = 128  # tokens of an answer whose places it finds itself
JOB = 1 << 13  # scores of a part: some ten milliseconds, and 0.5 MB of JSON
SLICE = 0.002  # seconds of the event loop's time, after which others have their turn


class Slices:
    """The event loop's time for answers that have much to say: ``SLICE`` of each, and of one of them in a round of the
    loop.  However many there are, who has little to do waits for one slice at each of its steps."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    def begin(self) -> float:
        """``time.perf_counter`` at which a slice that begins now ends."""
        return time.perf_counter() + SLICE

    async def next(self) -> float:
        """The end of the next slice, once it is there."""
        async with self._one:
            await asyncio.sleep(0)
        return self.begin()


class WrittenInParts(Protocol):
    """A value whose JSON is made in parts."""

    def parts(self, shaper: Shaper) -> AsyncIterator[bytes]: ...


class Shaper:
    """Makes the parts of one answer: the first few scores at once, the others at the worker pool, in turn of ``who``
    asks."""

    def __init__(self, pool: WorkerPool, tokenizer: Tokenizer | None, speller: Speller, who: str) -> None:
        self.tokenizer, self._pool, self._speller, self._who = tokenizer, pool, speller, who
        self._scores, self._tokens = AT_ONCE, FEW

    async def shape(self, kind: str, scored: Scored, top: int) -> AsyncIterator[list[bytes]]:
        """For each part of the rows ``shaped`` of it, encoded."""
        for low, high in scored.parts(JOB):
            weight = scored.weight(low, high)
            if weight <= self._scores:
                self._scores -= weight
                yield shaped(kind, scored.rows(low, high), top, self._speller)
            else:
                own = {"as_ids": self._speller.as_ids, "detokenize": self._speller.detokenize}
                columns = scored.cut(low, high).pack()
                yield await self._pool.shape({"kind": kind, "top": top, **own}, columns, self._who)

    async def places(self, tokens: Sequence[int], skip: bool, begin: int, prompt: str | None, shown: int) -> list[int]:
        """Where each token begins in a text (see ``Places``) of which ``shown`` characters are shown."""
        if len(tokens) <= self._tokens or self.tokenizer is None:
            self._tokens -= len(tokens)
            found = places(self.tokenizer, tokens, skip, begin, prompt)
        else:
            found = await self._pool.places(tokens, skip, begin, prompt, self._who)
        return np.minimum(found, shown).tolist()


def shaped(kind: str, rows: Iterator[logprobs.ScoredToken], top: int, speller: Speller) -> list[bytes]:
    """JSON of a value a row, with commas and without brackets: one column of it, of completions three."""
    if kind == "completion":
        columns = logprobs.completion(rows, top, speller)
        return [dump(columns[name])[1:-1] for name in ("top_logprobs", "tokens", "token_logprobs")]
    found: list[Any] = logprobs.prompt(rows, speller) if kind == "prompt" else logprobs.chat(rows, top, speller)
    return [dump(found)[1:-1]]


def places(tokenizer: Tokenizer | None, tokens: Sequence[int], skip: bool, begin: int, prompt: str | None) -> Any:
    """i64 [N]."""
    found = Places(tokenizer, skip, begin, prompt)
    return np.fromiter(map(found.next, tokens), np.int64, len(tokens))


@dataclass
class TokenScores:
    """A list with a value a token.  ``kind``: "chat" or "prompt"."""

    kind: str
    scored: Scored
    top: int = 0

    async def parts(self, shaper: Shaper) -> AsyncIterator[bytes]:
        before = b"["
        async for (part,) in shaper.shape(self.kind, self.scored, self.top):
            yield before + part
            before = b","
        yield b"[]" if before == b"[" else b"]"


@dataclass
class Stretch:
    """Tokens of a choice one after another, and how they lie in its text: the arguments of ``Shaper.places``."""

    scored: Scored
    skip: bool
    begin: int
    prompt: str | None
    shown: int


@dataclass
class CompletionScores:
    """``logprobs`` of a choice of completions.  The column that is by far the largest comes first: the others are kept
    meanwhile."""

    stretches: Sequence[Stretch]
    top: int

    async def parts(self, shaper: Shaper) -> AsyncIterator[bytes]:
        before, tokens, chosen, offsets = b'{"top_logprobs":[', [], [], []
        for one in self.stretches:
            async for tops, names, values in shaper.shape("completion", one.scored, self.top):
                yield before + tops
                before = b","
                tokens.append(names)
                chosen.append(values)
            found = await shaper.places(one.scored.tokens, one.skip, one.begin, one.prompt, one.shown)
            offsets += [dump(found)[1:-1]] if found else []
        if before != b",":
            yield before
        for name, column in ((b"tokens", tokens), (b"token_logprobs", chosen), (b"text_offset", offsets)):
            yield b'],"' + name + b'":[' + b",".join(column)
        yield b"]}"


async def pieces(answer: dict[str, Any], shaper: Shaper, slices: Slices) -> AsyncIterator[bytes]:
    """The JSON of an answer in pieces of ``PIECE`` bytes or a little more, the last one smaller."""
    held: list[bytes] = []
    size, until = 0, slices.begin()
    async for part in _parts(answer, shaper, True):
        held.append(part)
        size += len(part)
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
        if time.perf_counter() > until:
            until = await slices.next()
    yield b"".join(held)


async def _parts(value: Any, shaper: Shaper, opened: bool = False) -> AsyncIterator[bytes]:
    """``opened``: whether the entries are written one by one, whatever they are."""
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
    elif isinstance(value, list) and opened and value:
        before = b"["
        for one in value:
            yield before
            before = b","
            async for part in _parts(one, shaper):
                yield part
        yield b"]"
    else:
        yield dump(value)


def _has_leaf(value: dict[str, Any]) -> bool:
    return any(hasattr(one, "parts") or (isinstance(one, dict) and _has_leaf(one)) for one in value.values())
