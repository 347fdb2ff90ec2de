"""Log-probabilities of tokens as columns, as they come from the engine: arrays, not a dozen objects for each token.

An answer may have millions of them, and how many is the client's choice.  So they stay as they are until they are
written: an entry of text and numbers is made of a few at a time (``logprobs``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minivllm.core.engine.scores import TokenLogprobs
from minivllm.runtime.text.outputs import Logprob, entry_of

BYTES = 4  # of each entry of the columns but ``ends``
Spell = Callable[[int], "str | None"]


class ScoredToken(NamedTuple):
    """A token's.  ``rank`` 0: it has no score, as the first of a prompt, which nothing came before."""

    token: int
    chosen: float
    rank: int
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()


class Scored(Sequence[dict[int, Logprob]]):
    """``tokens`` i32 [N], ``chosen`` f32 [N], ``rank`` i32 [N], ``ends`` i64 [N + 1]; the best of token i are
    ``top_ids[ends[i] : ends[i + 1]]`` (i32) and ``top`` (f32).

    As a sequence it has what ``CompletionOutput.logprobs`` has, made anew at each look; None where there is no score.
    ``spell``: the text of a token, or None."""

    __slots__ = ("chosen", "ends", "rank", "spell", "tokens", "top", "top_ids")

    def __init__(self, spell: Spell | None = None) -> None:
        self.tokens, self.chosen, self.rank = array("i"), array("f"), array("i")
        self.ends = array("q", (0,))
        self.top_ids, self.top = array("i"), array("f")
        self.spell = spell

    def extend(self, more: Scored) -> None:
        last = self.ends[-1]
        self.tokens += more.tokens
        self.chosen += more.chosen
        self.rank += more.rank
        self.top_ids += more.top_ids
        self.top += more.top
        self.ends.extend([last + end for end in more.ends[1:]])

    def cut(self, low: int, high: int) -> Scored:
        part, a, b = Scored(self.spell), self.ends[low], self.ends[high]
        part.tokens, part.chosen, part.rank = self.tokens[low:high], self.chosen[low:high], self.rank[low:high]
        part.top_ids, part.top = self.top_ids[a:b], self.top[a:b]
        part.ends = array("q", [end - a for end in self.ends[low : high + 1]])
        return part

    def row(self, i: int) -> ScoredToken:
        a, b = self.ends[i], self.ends[i + 1]
        return ScoredToken(
            self.tokens[i], self.chosen[i], self.rank[i], self.top_ids[a:b].tolist(), self.top[a:b].tolist()
        )

    def rows(self, low: int = 0, high: int | None = None) -> Iterator[ScoredToken]:
        return map(self.row, range(low, len(self) if high is None else high))

    def weight(self, low: int = 0, high: int | None = None) -> int:
        """How many scores the tokens [low, high) have, and as many more as there are tokens."""
        high = len(self) if high is None else high
        return self.ends[high] - self.ends[low] + high - low

    def parts(self, most: int, low: int = 0) -> Iterator[tuple[int, int]]:
        """(first, end) of parts of at most that ``weight``, or of one token, from ``low`` on."""
        while low < len(self):
            high = low + 1
            step = max(most // max(self.weight(low, high), 1), 1)  # most tokens have as many as the one before
            while high < len(self) and self.weight(low, min(high + step, len(self))) <= most:
                high = min(high + step, len(self))
            yield low, high
            low = high

    def pack(self) -> list[bytes]:
        """Buffers: tokens, chosen, rank, how many of the best, top_ids, top."""
        sizes = np.diff(np.frombuffer(self.ends, np.int64)).astype(np.int32)
        return [
            self.tokens.tobytes(),
            self.chosen.tobytes(),
            self.rank.tobytes(),
            sizes.tobytes(),
            self.top_ids.tobytes(),
            self.top.tobytes(),
        ]

    @classmethod
    def unpack(cls, columns: Iterable[Any], spell: Spell | None = None) -> Scored:
        """Of buffers as ``pack`` makes them."""
        found = cls(spell)
        tokens, chosen, rank, sizes, top_ids, top = columns
        found.tokens.frombytes(tokens)
        found.chosen.frombytes(chosen)
        found.rank.frombytes(rank)
        found.top_ids.frombytes(top_ids)
        found.top.frombytes(top)
        ends = np.cumsum(np.frombuffer(sizes, np.int32), dtype=np.int64)
        found.ends.frombytes(ends.tobytes())
        return found

    @classmethod
    def of_prompt(cls, prompt: np.ndarray, parts: Sequence[tuple[int, Any]], spell: Spell | None = None) -> Scored:
        """``parts``: (position, plan.LogProbs), of which later ones count; what none of them has has no score."""
        n, width = len(prompt), max((lp.top.shape[1] for _, lp in parts), default=0)
        chosen, rank, sizes = np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros(n, np.int32)
        ids, top = np.zeros((n, width), np.int32), np.zeros((n, width), np.float32)
        for first, lp in parts:
            at, k = slice(first, first + len(lp.chosen)), lp.top.shape[1]
            chosen[at], rank[at], sizes[at] = lp.chosen, lp.rank, k
            ids[at, :k], top[at, :k] = lp.top_ids, lp.top
        there = np.arange(width) < sizes[:, None]
        columns = (np.asarray(prompt, np.int32), chosen, rank, sizes, ids[there], top[there])
        return cls.unpack((one.tobytes() for one in columns), spell)

    # ---- as a sequence of entries --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        row = self.row(range(len(self))[at])
        got = TokenLogprobs(row.chosen, row.rank, row.top_ids, row.top)
        return entry_of(row.token, got, None, self.spell or _unspelled) if row.rank else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _unspelled(token: int) -> None:
    return None


class Columns:
    """Log-probabilities of a frame, in the order of its tokens."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        if "chosen" in columns:
            names = ("chosen", "rank", "tops", "top_ids", "top")
            self._data = [memoryview(np.ascontiguousarray(columns[name]).data).cast("B") for name in names]
            self._ends = [0, *np.cumsum(columns["tops"], dtype=np.int64).tolist()]
        self._at = 0

    def take(self, ids: Sequence[int]) -> Scored:
        """Those of the next tokens, which are ``ids``."""
        low, self._at = self._at, self._at + len(ids)
        a, b = BYTES * self._ends[low], BYTES * self._ends[self._at]
        one = slice(BYTES * low, BYTES * self._at)
        chosen, rank, sizes, top_ids, top = self._data
        return Scored.unpack((array("i", ids).tobytes(), chosen[one], rank[one], sizes[one], top_ids[a:b], top[a:b]))
