"""The queue of waiting sequences, in lanes, each sorted by the policy's key with its first ones at hand.

    lane "a"   front [3.1  3.2  4.0]  sorted     back  a heap of all later ones
    lane "b"   front [1.7]                       back  empty

A step looks at the first lanes and their fronts only, so what it costs does not depend on how many wait.  Most policies
use one lane; one that divides sequences, by tenant say, is shown the first of each lane.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .request import Seq

    # key, id, sequence, what a policy is shown of it; no two have the same id
    Entry = tuple[float, int, Seq, bytes]

FRONT = 512  # entries after which the later half of a front goes to the back


class _Lane:
    """Invariants: no entry of ``back`` comes before one of ``front``; all of ``front`` wait, and of ``back`` all but
    ``gone``; a lane in which nobody waits is taken out of the queue."""

    __slots__ = ("back", "front", "gone")

    def __init__(self) -> None:
        self.front: list[Entry] = []
        self.back: list[Entry] = []
        self.gone = 0

    def push(self, entry: Entry) -> None:
        if self.back and not (self.front and entry < self.front[-1]):
            heapq.heappush(self.back, entry)
            return
        insort(self.front, entry)
        if len(self.front) > FRONT:
            for later in self.front[FRONT // 2 :]:
                heapq.heappush(self.back, later)
            del self.front[FRONT // 2 :]

    def first(self, n: int) -> list[Entry]:
        while len(self.front) < n and self.back:
            entry = heapq.heappop(self.back)
            if entry[2].queued:
                self.front.append(entry)
            else:
                self.gone -= 1
        return self.front[:n]

    def remove(self, seq: Seq) -> None:
        """``seq.queued`` is False by now."""
        at = bisect_left(self.front, (seq.key, seq.id))
        if at < len(self.front) and self.front[at][2] is seq:
            del self.front[at]
            return
        self.gone += 1  # it is skipped when it comes up
        if self.gone > len(self.back) // 2 + 32:
            self.back = [e for e in self.back if e[2].queued]
            heapq.heapify(self.back)
            self.gone = 0

    def __len__(self) -> int:
        return len(self.front) + len(self.back) - self.gone


class WaitingQueue:
    """``len`` is the number of those that wait, iteration gives them in no order."""

    def __init__(self) -> None:
        self.lanes: dict[int, _Lane] = {}  # first the lane that was served longest ago
        self.n = 0

    def push(self, seq: Seq, key: float, lane: int = 0, row: bytes = b"") -> None:
        """``row`` of ``admission.row_of``; it is kept here because a step reads hundreds, and few of the sequences."""
        seq.key, seq.lane, seq.queued = key, lane, True
        if lane not in self.lanes:
            self.lanes[lane] = _Lane()
        self.lanes[lane].push((key, seq.id, seq, row))
        self.n += 1

    def remove(self, seq: Seq, served: bool = False) -> None:
        """It waits no longer; if it was ``served`` its lane goes behind the others."""
        seq.queued = False
        self.n -= 1
        lane = self.lanes[seq.lane]
        lane.remove(seq)
        if not len(lane):
            del self.lanes[seq.lane]
        elif served and len(self.lanes) > 1:
            self.lanes[seq.lane] = self.lanes.pop(seq.lane)

    def head(self) -> Seq | None:
        """The smallest key, of the first 64 lanes."""
        best = None
        for lane in islice(self.lanes.values(), 64):
            first = lane.front[0] if lane.front else lane.first(1)[0]
            best = first if best is None or first < best else best
        return None if best is None else best[2]

    def heads(self) -> list[Seq]:
        """The first of each lane, of the first 64 lanes."""
        return [(lane.front or lane.first(1))[0][2] for lane in islice(self.lanes.values(), 64)]

    def first(self, n: int) -> list[Entry]:
        """At most n entries: the first of each lane, as many of each."""
        return [entry for line in self.lines(n) for entry in line]

    def lines(self, n: int) -> list[list[Entry]]:
        """The same lane by lane."""
        share, lanes = max(1, n // max(len(self.lanes), 1)), islice(self.lanes.values(), n)
        return [
            lane.front[:share] if len(lane.front) >= share else lane.first(share) for lane in lanes
        ]

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Seq]:
        return (
            e[2] for lane in self.lanes.values() for e in (*lane.front, *lane.back) if e[2].queued
        )
