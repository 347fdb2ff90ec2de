"""Fairness between owners on one engine: an owner is an API key or a client address (``Request.owner``).

Three rules limit the effect of one owner's load on others.  They change nothing where requests name no owner, or all
name the same owner.

* *Turns.*  The queue has a lane for each owner, unless the policy divides it itself.  The owner with
  the fewest rows is next, among equals the owner served longest ago.  The policy orders the sequences of each owner.
* *Shares.*  A step's prompt tokens are divided evenly among the owners with prompts to compute.  The rest of a share
  goes to the other owners.
* *A row each.*  If no row or no blocks are free for an owner without a row, the owner with most rows loses one row per
  step.  It is preempted as for a lack of blocks, and its tokens are kept.

``owner_number`` is the number of an owner; 0 means that the request has no owner.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.core import checks

from .admission import queue_view, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from minivllm.core.interfaces.scheduler import SchedulerPolicy

    from .cache import KVCache
    from .request import Seq
    from .slots import Slots
    from .waiting import Entry, WaitingQueue

# the least number of prompt tokens of an owner in a step, so that chunks are not tiny
LEAST = 32
# If owners take turns, the policy orders the waiting sequences of at most this many owners: those with the fewest
# running rows.
REQUESTED = 16


class OwnerShares:
    """The prompt tokens that a step may have, divided among the owners of requests.  Invariant: ``left`` is the total
    budget minus the tokens that all owners have used."""

    def __init__(self, budget: int, owners: int) -> None:
        self.left = budget
        self._each = max(LEAST, budget // owners) if owners > 1 else sys.maxsize
        self._spent: Counter[int] = Counter()

    def most(self, owner_number: int) -> int:
        """Return the number of tokens that an owner may still use in this step."""
        return min(self.left, self._each - self._spent[owner_number])

    def spend(self, owner_number: int, tokens: int) -> None:
        self.left -= tokens
        self._spent[owner_number] += tokens

    def join(self) -> bool:
        """Stop dividing the budget among owners, so that any owner may use the rest.

        Return False if nothing is left, or if the budget was not divided."""
        divided = self._each < sys.maxsize
        self._each = sys.maxsize
        return divided and self.left > 0


class OwnersPlanner(Protocol):
    """The attributes of a planner that are needed to serve owners in turn."""

    slots: Slots
    cache: KVCache
    policy: SchedulerPolicy
    waiting: WaitingQueue
    orders: bool
    divides: bool
    reserved: int
    stuck: Seq | None
    way_for: int
    unplaced: bool
    protected_after: int

    def ask(self, question: Callable[..., Any], *args: Any) -> Any: ...
    def preempt(self, slot: int) -> None: ...
    def preempt_one_of(self, rows: np.ndarray, need: int) -> int | None: ...


def owner_count(slots: Slots, prefilling: np.ndarray, heads: Iterable[Seq]) -> int:
    """Return the number of owners that have prompt tokens to compute: those of the running rows in the slots
    ``prefilling`` i64 [R], and of the first waiting sequences ``heads``."""
    return len(
        {*slots.owner_number[prefilling].tolist(), *(seq.request.owner_number for seq in heads)}
    )


def rows_of(slots: Slots) -> Counter[int]:
    """Return the number of running rows of each owner, by owner number."""
    return Counter(slots.owner_number[slots.running].tolist())


def of_the_largest(slots: Slots, rows: np.ndarray) -> np.ndarray:
    """Return those of the slots ``rows`` i64 [R] that belong to one owner: the owner with most of them."""
    owner_number = slots.owner_number[rows]
    if not len(rows) or (owner_number == owner_number[0]).all():
        return rows
    numbers, counts = np.unique(owner_number, return_counts=True)
    return rows[owner_number == numbers[np.argmax(counts)]]


def in_turn(
    slots: Slots, lines: Iterable[Sequence[Seq]], parts: OwnerShares | None
) -> Iterator[Seq]:
    """Yield waiting sequences, with owners in turn.  ``lines`` has one list of sequences per owner.

    The next owner is the one with the fewest running rows.  An owner that has used up its part of the step's tokens is
    left out.  The caller admits each sequence before it takes the next one."""
    left = {line[0].request.owner_number: deque(line) for line in lines if line}
    rows = rows_of(slots)
    while open_ := [
        owner_number
        for owner_number, line in left.items()
        if line and (parts is None or parts.most(owner_number) > 0)
    ]:
        owner_number = min(open_, key=rows.__getitem__)
        seq = left[owner_number].popleft()
        yield seq
        rows[owner_number] += 1 + len(seq.branches)


def candidates(planner: OwnersPlanner, now: float, parts: OwnerShares | None) -> Iterator[Seq]:
    """Yield the waiting sequences that may be admitted now, in the order of the scheduling policy, and with owners in
    turn.

    Usually only few of them fit, so the policy orders no more than are taken."""
    p = planner
    queue = planner.waiting
    turns = len(queue.lanes) > 1 and not p.divides
    if not p.orders and not turns:
        while (first := queue.head()) is not None:
            yield first
        return
    lines = queue.lines(p.policy.window)
    # If owners take turns, the policy orders the sequences of each owner in a separate call.  Else it orders the
    # sequences of all lanes in one call.
    if turns and p.orders:
        rows = rows_of(p.slots)
        lines = sorted(lines, key=lambda line: rows[line[0][2].request.owner_number])[:REQUESTED]
    elif not turns:
        lines = [[entry for line in lines for entry in line]]
    found = [_ordered(p, line, now) for line in lines]
    for seq in in_turn(p.slots, found, parts) if turns else found[0]:
        if seq.queued:
            yield seq


def _ordered(planner: OwnersPlanner, entries: list[Entry], now: float) -> list[Seq]:
    """Return the sequences of entries of the queue in the order of the scheduling policy's method ``order``.  The
    entries are sorted by the policy's ``key``."""
    if not planner.orders:
        return [entry[2] for entry in entries]
    seqs = [entry[2] for entry in entries]
    head = queue_view([entry[3] for entry in entries], lambda: planner.cache.hints(seqs))
    running = planner.slots.view(planner.slots.running)
    order = planner.ask(planner.policy.order, head, running, now)
    return [seqs[i] for i in checks.ordered(order, len(seqs))]


def make_way(planner: OwnersPlanner) -> None:
    """Preempt one row of the owner with most rows, if the last plan had no room for an owner that has no row."""
    s = planner.slots
    seq = planner.stuck
    planner.stuck = None
    if seq is None or not seq.queued:
        return
    planner.way_for = seq.id
    rows = rows_of(s)
    owner_number, most = max(rows.items(), key=lambda item: item[1], default=(0, 0))
    if rows[seq.request.owner_number] or most < 2:
        return
    mine = s.running[s.owner_number[s.running] == owner_number]
    planner.preempt_one_of(mine, 1)


def displace(planner: OwnersPlanner, now: float) -> None:
    """Preempt the row that the scheduling policy selects in favour of the next waiting sequence, if it selects one.

    The oldest row is never selected, and a row is preempted only a limited number of times, so that every row makes
    progress."""
    s = planner.slots
    planner.unplaced = False
    head = next(candidates(planner, now, None), None)
    rows = s.running
    if head is None or not len(rows):
        return
    often = s.preempted[rows] >= planner.protected_after
    kept = often | s.forking[rows] | s.beam[rows] | (s.id[rows] == s.id[rows].min())
    rows = rows[~kept]
    if not len(rows):
        return
    index = planner.ask(planner.policy.displaced, queue_view([row_of(head)]), s.view(rows), now)
    chosen = checks.whole(index, -1, len(rows) - 1, "displaced() gave")
    if chosen >= 0:
        planner.preempt(int(rows[chosen]))


def who_is_stuck(planner: OwnersPlanner, refused: Seq | None) -> Seq | None:
    """Return the first waiting sequence of an owner without a row; None if a slot is free, or if a row was already
    preempted for it.

    ``refused`` is the sequence for which the present plan had no room.  If it is None, the first sequence of each owner
    is considered."""
    s = planner.slots
    rows = rows_of(planner.slots)
    if refused is not None:
        return None if rows[refused.request.owner_number] else refused
    if len(s.free) > planner.reserved or s.cooling:
        return None
    found = (seq for seq in planner.waiting.heads() if not rows[seq.request.owner_number])
    # The policy may still not admit this sequence, so only one row is ever preempted for it.
    seq = next(found, None)
    return None if seq is None or seq.id == planner.way_for else seq
