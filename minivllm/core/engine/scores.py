"""The log-probabilities of a sequence's tokens, stored as columns (one list per quantity).

So a sequence needs one object instead of five per token.  Otherwise a batch with log-probabilities would create a
million objects, and Python's garbage collector would visit all of them while the device waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

from minivllm.core.interfaces.plan import LogProbs


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the chosen token with its rank, and of the best tokens with their ids, best
    first."""

    chosen: float
    rank: int
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()


class Scores(Sequence[TokenLogprobs]):
    """The log-probabilities of a sequence as columns.  ``chosen`` and ``rank`` have one entry per token.  The ids of
    the best tokens at position i are ``top_ids[ends[i] : ends[i + 1]]``, and their log-probabilities the same part of
    ``top``."""

    __slots__ = ("chosen", "ends", "rank", "top", "top_ids")

    def __init__(self, entries: Iterable[TokenLogprobs] = ()) -> None:
        self.chosen: list[float] = []
        self.rank: list[int] = []
        self.ends = [0]
        self.top_ids: list[int] = []
        self.top: list[float] = []
        for chosen, rank, top_ids, top in entries:
            self.chosen.append(float(chosen))
            self.rank.append(int(rank))
            self.top_ids += top_ids
            self.top += top
            self.ends.append(len(self.top_ids))

    def add_rows(self, steps: Sequence[LogProbs], rows: Sequence[int], most: int) -> None:
        """Append one token per step: row ``rows[i]`` of ``steps[i]``, with its ``most`` best log-probabilities."""
        for lp, row in zip(steps, rows, strict=True):
            chosen, rank, top_ids, top, width = lp.lists
            self.chosen.append(chosen[row])
            self.rank.append(rank[row])
            first = row * width
            end = first + min(most, width)
            self.top_ids += top_ids[first:end]
            self.top += top[first:end]
            self.ends.append(len(self.top_ids))

    def extend(self, more: Sequence[TokenLogprobs]) -> None:
        part = more if isinstance(more, Scores) else Scores(more)
        last = self.ends[-1]
        self.chosen += part.chosen
        self.rank += part.rank
        self.top_ids += part.top_ids
        self.top += part.top
        self.ends += [last + end for end in part.ends[1:]]

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> Scores: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            low, high, stride = at.indices(len(self))
            if stride != 1:
                return Scores(self[i] for i in range(low, high, stride))
            part = Scores()
            high = max(low, high)
            a = self.ends[low]
            b = self.ends[high]
            part.chosen = self.chosen[low:high]
            part.rank = self.rank[low:high]
            part.top_ids = self.top_ids[a:b]
            part.top = self.top[a:b]
            part.ends = [end - a for end in self.ends[low : high + 1]]
            return part
        i = range(len(self))[at]
        a = self.ends[i]
        b = self.ends[i + 1]
        return TokenLogprobs(self.chosen[i], self.rank[i], self.top_ids[a:b], self.top[a:b])
