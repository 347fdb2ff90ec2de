"""The admission of waiting sequences: each moves into a slot with its prefix hit and plans its first chunk."""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .admission import row_of
from .forks import ForkPlanner, enter_beams
from .guides import enter_guide
from .owners import OwnersPlanner, candidates, who_is_stuck
from .request import RUNNING
from .sessions import report_turn
from .taps import most_cached
from .underway import MOST_PASSED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .adapters import EngineAdapters
    from .compression import Compression
    from .owners import OwnerShares
    from .request import Seq
    from .underway import Underway


class AdmittingPlanner(OwnersPlanner, ForkPlanner, Protocol):
    """The attributes of a planner that the admission of sequences uses."""

    adapters: EngineAdapters | None
    compression: Compression | None
    underway: Underway
    shared: bool
    placeless: bool

    @property
    def n_waiting(self) -> int: ...
    def encoded(self, slot: int, tokens: int) -> int: ...
    def room(self, slot: int, chunk: int, promised: int = 0) -> tuple[int, int]: ...


def admit(
    planner: AdmittingPlanner,
    chunks: dict[int, int],
    parts: OwnerShares,
    now: float,
    static: bool = False,
) -> None:
    """Admit waiting sequences, and add their first chunks to ``chunks``, which maps a slot to a number of tokens.

    A ``static`` batch enters at once, even if its tokens exceed the budget.  Blocks are first promised to each row, and
    then taken for all rows together."""
    p = planner
    s = p.slots
    new = dict[int, int]()
    promised = 0
    refused = None
    p.placeless = False
    p.underway.refresh()
    # sequences that wait until a running row has computed their common prefix
    delayed: list[Seq] = []
    planned = ChainMap(new, chunks)
    try:
        for seq in _newcomers(p, now, None if static else parts):
            if not static:
                if parts.left <= 0 or len(delayed) == MOST_PASSED:
                    break
                if p.underway.delays(seq, planned):
                    p.waiting.remove(seq)
                    delayed.append(seq)
                    continue
            if not enter(p, seq, promised):
                # no later sequence is admitted before the first one that does not fit
                refused = seq
                break
            request = seq.request
            request.scheduled = request.scheduled or now
            for one in seq.pair:
                promised += _first_chunk(p, one.slot, request.owner_number, parts, new, promised)
    finally:  # sequences that were set aside return to the queue even if a plug-in raises
        p.underway.delayed = delayed
        for seq in delayed:
            p.waiting.push(seq, seq.key, seq.lane, row_of(seq))
    if new:
        rows = np.fromiter(new, np.int32, len(new))
        tokens = np.fromiter(new.values(), np.int32, len(new))
        missing = p.cache.missing(rows, s.computed[rows] + tokens)
        p.cache.grow(rows, missing)
        chunks |= new
    full = len(s.free) <= p.reserved or not p.cache.available
    p.unplaced = p.n_waiting > 0 and (refused is not None or full)
    # ``placeless`` means that device memory for an adapter or for images was missing. Preempting one
    # row would not free it, because other rows may use the same adapter or images.
    if p.shared and p.n_waiting and p.stuck is None and not p.placeless:
        p.stuck = who_is_stuck(p, refused)


def _first_chunk(
    planner: AdmittingPlanner,
    slot: int,
    owner_number: int,
    parts: OwnerShares,
    new: dict[int, int],
    promised: int,
) -> int:
    """Plan the first chunk of prompt tokens of the row in ``slot``, and return the number of new blocks that it needs.

    Write the number of its tokens to ``new[slot]``, unless it is 0.  Subtract them from the owner's share in ``parts``.
    ``promised`` available blocks are left for the chunks of other rows."""
    s = planner.slots
    upto = s.schedulable[[slot]]
    if planner.compression is not None:
        upto = planner.compression.upto(s, np.array([slot]), upto)
    lacking = int(upto[0] - s.computed[slot])
    whole = min(lacking, parts.most(owner_number))
    want = planner.encoded(slot, whole)
    if want < whole:
        # the tokens of an image that is encoded first count against the budget too
        parts.spend(owner_number, whole - want)
    if want <= 0:
        return 0
    tokens, blocks = planner.room(slot, want, promised)
    if tokens:
        new[slot] = tokens
    parts.spend(owner_number, tokens)
    return blocks


def _newcomers(planner: AdmittingPlanner, now: float, parts: OwnerShares | None) -> Iterator[Seq]:
    """Yield the waiting sequences in the order of admission while a slot and blocks are free.  When all selected
    sequences have entered, the policy selects again."""
    p = planner
    entered = True
    while entered and p.n_waiting and len(p.slots.free) > p.reserved and p.cache.available:
        entered = False
        for seq in candidates(p, now, parts):
            yield seq
            entered = True


def enter(planner: AdmittingPlanner, seq: Seq, promised: int) -> bool:
    """Move a waiting sequence into a slot with its prefix hit, and return True.

    Return False without a change if no slot is free, or if blocks for all its known tokens are missing.  ``promised``
    blocks are reserved for other rows."""
    p = planner
    s = p.slots
    beams = seq.request.beams
    wide = len(seq.pair) + len(seq.branches) if beams is None else beams.width
    if len(s.free) - p.reserved < wide:
        return False
    most = seq.known
    if beams is not None and len(beams.live) > 1:
        most = beams.common() + 1
    most = most_cached(seq, most)
    hit = p.cache.lookup(seq, most)
    protected = seq.preempted >= p.protected_after and beams is None
    upto = seq.request.stored
    if not protected:
        upto = min(seq.known, upto)
    if not _has_room(p, seq, hit, upto, promised, protected):
        return False
    p.placeless = not _has_memory(p, seq)
    if p.placeless:
        return False
    p.waiting.remove(seq, served=True)
    slot = s.enter(seq)
    p.joins.append((slot, seq))
    seq.status = RUNNING
    cached = p.cache.adopt(slot, hit, most)
    p.underway.enter(slot)
    if not seq.preempted:
        report_turn(p.cache, seq, "began")
        if seq is seq.request.sequences[0]:
            seq.request.cached_tokens = cached
    if protected:
        p.cache.reserve(slot, upto)
    if seq.branches:
        p.reserved += len(seq.branches)
        s.forking[slot] = True
        s.schedulable[slot] = s.prompt[slot] - 1
    if beams is not None:
        enter_beams(p, beams)
    if seq.guide is not None:
        enter_guide(s, p.cache, p.joins, seq, protected)
    return True


def _has_room(
    planner: AdmittingPlanner,
    seq: Seq,
    hit: list[np.ndarray],
    upto: int,
    promised: int,
    protected: bool,
) -> bool:
    """Return whether there are blocks for ``upto`` tokens of a sequence, and for its guide.  Some blocks stay free for
    the running rows, except for a ``protected`` sequence, which receives the blocks of all its tokens at once."""
    rows = len(planner.slots.running)
    spare = promised
    if rows and not protected:
        spare += 1 + rows // 8
    beside = 0
    guide = seq.guide
    if guide is not None:
        beside = guide.request.end if protected else guide.known
    return planner.cache.has_room(hit, upto, spare, beside)


def _has_memory(planner: AdmittingPlanner, seq: Seq) -> bool:
    """Put the LoRA adapter of a sequence into a place on the device, and reserve device memory for its images.  Return
    False if there is no room for one of them."""
    if planner.adapters is not None and not planner.adapters.place(seq):
        return False
    return planner.images is None or planner.images.place(seq)
