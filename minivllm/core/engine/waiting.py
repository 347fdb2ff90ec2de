"""The queue of waiting sequences, in lanes. Each lane is sorted by the policy's key, and its first entries are a list.

    lane "a"   front [3.1  3.2  4.0]  sorted     back  a heap of all later ones
    lane "b"   front [1.7]                       back  empty

A step reads only the first lanes and their fronts, so its time does not depend on the length of the queue.  Most
policies use one lane.  A policy that divides sequences, for example by tenant, sees the first entries of each lane.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .request import Seq

    # An entry: (key, unique id, sequence, its row of numbers for the policy).
    Entry = tuple[float, int, Seq, bytes]

FRONT = 512  # when ``front`` has more entries than this, its second half moves to ``back``


class _Lane:
    """The waiting sequences of one lane, sorted by the policy's key.

    Invariants: no entry of ``back`` precedes one of ``front``.  All entries of ``front`` wait; ``back`` also has
    ``gone`` entries that do not wait any more.  A lane without a waiting entry is removed from the queue."""

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
        """Remove a sequence from the lane.  The caller has set ``seq.queued`` to False."""
        at = bisect_left(self.front, (seq.key, seq.id))
        if at < len(self.front) and self.front[at][2] is seq:
            del self.front[at]
            return
        self.gone += 1  # the entry stays in ``back``, and is ignored when it is reached
        if self.gone > len(self.back) // 2 + 32:
            self.back = [e for e in self.back if e[2].queued]
            heapq.heapify(self.back)
            self.gone = 0

    def __len__(self) -> int:
        return len(self.front) + len(self.back) - self.gone


class WaitingQueue:
    """The queue of waiting sequences, in lanes (one for each owner, or as the policy divides them).  ``len`` counts
    them; iteration yields them in no fixed order."""

    def __init__(self) -> None:
        # lane number -> lane; the one from which a sequence was admitted longest ago is first
        self.lanes: dict[int, _Lane] = {}
        self.n = 0

    def push(self, seq: Seq, key: float, lane: int = 0, row: bytes = b"") -> None:
        """Add a sequence to a lane at its sort key.  ``row`` is the result of ``admission.row_of``.  It is stored in
        the entry, because a step reads hundreds of rows but few sequences."""
        seq.key = key
        seq.lane = lane
        seq.queued = True
        if lane not in self.lanes:
            self.lanes[lane] = _Lane()
        self.lanes[lane].push((key, seq.id, seq, row))
        self.n += 1

    def remove(self, seq: Seq, served: bool = False) -> None:
        """Remove a sequence from the queue.  ``served`` moves its lane (part of the queue, such as one for each owner)
        behind the other lanes."""
        seq.queued = False
        self.n -= 1
        lane = self.lanes[seq.lane]
        lane.remove(seq)
        if not len(lane):
            del self.lanes[seq.lane]
        elif served and len(self.lanes) > 1:
            self.lanes[seq.lane] = self.lanes.pop(seq.lane)

    def head(self) -> Seq | None:
        """Return the sequence with the smallest key in the first 64 lanes (parts of the queue, such as one for each
        owner); None if the queue is empty."""
        best = None
        for lane in islice(self.lanes.values(), 64):
            first = lane.front[0] if lane.front else lane.first(1)[0]
            best = first if best is None or first < best else best
        return None if best is None else best[2]

    def heads(self) -> list[Seq]:
        """Return the first sequence of each of the first 64 lanes (parts of the queue, such as one for each owner)."""
        return [(lane.front or lane.first(1))[0][2] for lane in islice(self.lanes.values(), 64)]

    def first(self, n: int) -> list[Entry]:
        """Return at most n entries, an equal number from the front of each lane."""
        return [entry for line in self.lines(n) for entry in line]

    def lines(self, n: int) -> list[list[Entry]]:
        """Return at most n entries as one list per lane, an equal number from the front of each lane."""
        share = max(1, n // max(len(self.lanes), 1))
        lanes = islice(self.lanes.values(), n)
        return [
            lane.front[:share] if len(lane.front) >= share else lane.first(share) for lane in lanes
        ]

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Seq]:
        return (
            e[2] for lane in self.lanes.values() for e in (*lane.front, *lane.back) if e[2].queued
        )
