"""Log-probabilities of tokens as columns, in the form in which they come from the engine.

A client may request millions of them.  Arrays take far less memory than a dozen objects for each token.
They become entries of text and numbers a few at a time, when an answer is written (``openai.logprobs``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minivllm.core.engine.scores import TokenLogprobs
from minivllm.runtime.text.outputs import Logprob, entry_of

BYTES = 4  # size of an entry of each column except ``ends``
Spell = Callable[[int], "str | None"]


class ScoredToken(NamedTuple):
    """The log-probability and the rank of a token, and the best tokens of its position with theirs.

    Rank 0 means that the token has no score, as the first token of a prompt.
    """

    token: int
    chosen: float
    rank: int
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()


class Scored(Sequence[dict[int, Logprob]]):
    """The log-probabilities of N tokens as columns.

    The columns are ``tokens`` i32 [N], ``chosen`` f32 [N], ``rank`` i32 [N] and ``ends`` i64 [N + 1].  The best tokens
    at the position of token i are ``top_ids[ends[i] : ends[i + 1]]`` (i32), with log-probabilities ``top`` (f32).

    As a sequence, it has the entries of ``CompletionOutput.logprobs``, made at each access.  An entry is None for a
    token without a score.  ``spell`` returns the text of a token; None means that entries have no text.
    """

    __slots__ = ("chosen", "ends", "rank", "spell", "tokens", "top", "top_ids")

    def __init__(self, spell: Spell | None = None) -> None:
        self.tokens = array("i")
        self.chosen = array("f")
        self.rank = array("i")
        self.ends = array("q", (0,))
        self.top_ids = array("i")
        self.top = array("f")
        self.spell = spell

    def extend(self, more: Scored) -> None:
        """Append the log-probabilities of the tokens of another object."""
        last = self.ends[-1]
        self.tokens += more.tokens
        self.chosen += more.chosen
        self.rank += more.rank
        self.top_ids += more.top_ids
        self.top += more.top
        self.ends.extend([last + end for end in more.ends[1:]])

    def cut(self, low: int, high: int) -> Scored:
        """Return a copy of the tokens [low, high)."""
        begin, end = self.ends[low], self.ends[high]
        part = Scored(self.spell)
        part.tokens = self.tokens[low:high]
        part.chosen = self.chosen[low:high]
        part.rank = self.rank[low:high]
        part.top_ids = self.top_ids[begin:end]
        part.top = self.top[begin:end]
        part.ends = array("q", [at - begin for at in self.ends[low : high + 1]])
        return part

    def row(self, i: int) -> ScoredToken:
        """Return the scores of token i."""
        best = slice(self.ends[i], self.ends[i + 1])
        top_ids = self.top_ids[best].tolist()
        return ScoredToken(self.tokens[i], self.chosen[i], self.rank[i], top_ids, self.top[best].tolist())

    def rows(self, low: int = 0, high: int | None = None) -> Iterator[ScoredToken]:
        """Return the scores of the tokens [low, high).  None means up to the last token."""
        return map(self.row, range(low, len(self) if high is None else high))

    def weight(self, low: int = 0, high: int | None = None) -> int:
        """Return the number of scores of the tokens [low, high): one of each token, and those of its best tokens."""
        high = len(self) if high is None else high
        return self.ends[high] - self.ends[low] + high - low

    def parts(self, most: int, low: int = 0) -> Iterator[tuple[int, int]]:
        """Split the tokens from ``low`` on into parts and yield (first, end) of each.

        A part has a ``weight`` of at most ``most``, or a single token.
        """
        while low < len(self):
            high = low + 1
            step = max(most // max(self.weight(low, high), 1), 1)  # most tokens have as many scores as the token before
            while high < len(self) and self.weight(low, min(high + step, len(self))) <= most:
                high = min(high + step, len(self))
            yield low, high
            low = high

    def pack(self) -> list[bytes]:
        """Return the columns as bytes: tokens, chosen, rank, number of best tokens of each token, top_ids, top."""
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
        """Return the object for buffers in the form and order of ``pack``."""
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
        """Return the log-probabilities of a prompt's tokens.

        ``parts`` are pairs of a first position and a ``plan.LogProbs``.  A later part replaces an earlier one at the
        same positions.  Tokens that no part covers have no score.
        """
        n = len(prompt)
        width = max((lp.top.shape[1] for _, lp in parts), default=0)
        chosen = np.zeros(n, np.float32)
        rank = np.zeros(n, np.int32)
        sizes = np.zeros(n, np.int32)
        ids = np.zeros((n, width), np.int32)
        top = np.zeros((n, width), np.float32)
        for first, lp in parts:
            at = slice(first, first + len(lp.chosen))
            best = lp.top.shape[1]
            chosen[at] = lp.chosen
            rank[at] = lp.rank
            sizes[at] = best
            ids[at, :best] = lp.top_ids
            top[at, :best] = lp.top
        used = np.arange(width) < sizes[:, None]
        columns = (np.asarray(prompt, np.int32), chosen, rank, sizes, ids[used], top[used])
        return cls.unpack((column.tobytes() for column in columns), spell)

    # ---- as a sequence of entries --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        row = self.row(range(len(self))[at])
        if not row.rank:
            return None
        scores = TokenLogprobs(row.chosen, row.rank, row.top_ids, row.top)
        return entry_of(row.token, scores, None, self.spell or _unspelled)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _unspelled(token: int) -> None:
    return None


class Columns:
    """Reads the log-probabilities of a frame in the order of its tokens."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        if "chosen" in columns:
            names = ("chosen", "rank", "tops", "top_ids", "top")
            self._data = [memoryview(np.ascontiguousarray(columns[name]).data).cast("B") for name in names]
            self._ends = [0, *np.cumsum(columns["tops"], dtype=np.int64).tolist()]
        self._at = 0

    def take(self, ids: Sequence[int]) -> Scored:
        """Return the log-probabilities of the next tokens, whose ids are ``ids``."""
        low = self._at
        self._at = high = low + len(ids)
        own = slice(BYTES * low, BYTES * high)
        best = slice(BYTES * self._ends[low], BYTES * self._ends[high])
        chosen, rank, sizes, top_ids, top = self._data
        tokens = array("i", ids).tobytes()
        return Scored.unpack((tokens, chosen[own], rank[own], sizes[own], top_ids[best], top[best]))
