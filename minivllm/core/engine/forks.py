"""Rows that share computed tokens: the branches of a request (several answers to one prompt) and the beams of a search.

All changes of a search or a fork to slots, blocks and the next delta are made here, while a step is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from .guides import release
from .request import RUNNING, WAITING

if TYPE_CHECKING:
    from .beams import Beams
    from .cache import KVCache
    from .images import Images
    from .request import Seq
    from .slots import Slots


class ForkPlanner(Protocol):
    """The attributes of a planner that forks and searches change."""

    slots: Slots
    cache: KVCache
    images: Images | None
    reserved: int
    joins: list[tuple[int, Seq]]
    forks: list[tuple[int, int, Seq]]
    chosen: list[tuple[int, int]]
    searches: list[Beams]

    def make_room(self, requester: int, need: int) -> int: ...
    def leave(self, slot: int) -> None: ...


def fork_ready(planner: ForkPlanner) -> None:
    """Fork the branches of a request from its first row, once that row has computed the prompt except for the last
    token.  The branches share the prompt's blocks.

    Beams that return after a preemption fork once the first of them has computed their common tokens.  A row with a
    guide continues when its guide is ready too."""
    s = planner.slots
    for slot in s.running[s.forking[s.running]].tolist():
        seq = s.seq[slot]
        if seq is None:
            continue  # the row was preempted to free blocks for the branches of another row
        if s.partner[slot] >= 0:
            release(s, slot)
            continue
        at = int(s.computed[slot])
        if at < s.schedulable[slot] or s.step[slot] > s.published:
            continue  # the steps that compute the shared KV must have finished
        beams = seq.request.beams
        branches = seq.branches if beams is None else beams.seqs[1 : len(beams.live)]
        if not room_for(planner, slot, len(branches) * (at % s.block > 0)):
            continue
        if beams is None:
            planner.reserved -= len(branches)
            for branch in branches:
                child = s.enter(branch)
                branch.status = RUNNING
                if planner.images is not None:
                    planner.images.share(branch, at)
                planner.cache.fork(slot, child, at)
                planner.forks.append((slot, child, branch))
            seq.branches = []
        else:
            for beam in branches:
                planner.cache.fork(slot, beam.slot, at)
                s.ready[beam.slot] = True
                # the beam's tokens have changed since its last step, so the device receives all of
                # them again
                planner.joins.append((beam.slot, beam))
        s.forking[slot] = False
        s.schedulable[slot] = s.known[slot]


def room_for(planner: ForkPlanner, slot: int, copies: int) -> bool:
    """Return True if ``copies`` blocks are available in each KV group for a fork of this row.  If they are not, and the
    row is the oldest, other rows are preempted."""
    s = planner.slots
    cache = planner.cache
    need = np.full((len(cache.pools), 1), copies)
    while not cache.can_take(need):
        if s.id[slot] != s.id[s.running].min() or planner.make_room(slot, 1) == slot:
            return False
    return True


def enter_beams(planner: ForkPlanner, beams: Beams) -> None:
    """Move the beams of a request into slots, except for the first one, which is in a slot already.  They stay idle
    there."""
    s = planner.slots
    first = beams.seqs[0]
    for seq in beams.seqs[1:]:
        slot = s.enter(seq)
        s.id[slot] = s.id[first.slot]
        s.ready[slot] = False
        seq.status = RUNNING
    if len(beams.live) > 1:
        s.forking[first.slot], s.schedulable[first.slot] = True, beams.common()


def apply_pending(planner: ForkPlanner) -> None:
    """Apply the decisions of beam searches for whose forks there are enough blocks.

    Blocks can only be short when idle beams receive their first blocks.  Later each fork replaces a beam that ends."""
    for beams in list(planner.searches):
        if beams.pending is None:
            continue  # the request was preempted after its strategy had decided
        drop_beams(planner, beams)
        fits = _fits(planner, beams)
        if not fits and room_for(planner, beams.seqs[0].slot, beams.width - 1):
            fits = _fits(planner, beams)
        if fits:
            apply(planner, beams)
            planner.searches.remove(beams)


def drop_beams(planner: ForkPlanner, beams: Beams) -> None:
    """Release the blocks of the beams that end in the pending step of a search."""
    assert beams.pending is not None
    s = planner.slots
    for beam in beams.pending.drop:
        slot = beams.seqs[beam].slot
        planner.cache.release(slot)
        s.table[:, slot, : int(s.blocks[:, slot].max())] = 0
        s.blocks[:, slot] = 0
        s.trimmed[:, slot] = 0
        s.prefix_published[slot] = 0
        s.computed[slot] = 0
        s.ready[slot] = False


def _fits(planner: ForkPlanner, beams: Beams) -> bool:
    """Return whether there are blocks for the copies of partly filled blocks that the forks of a search's pending step
    need."""
    if beams.pending is None:
        return False  # the request was preempted to make room
    s = planner.slots
    cache = planner.cache
    partly = (len(beams.request.prompt) + beams.length) % s.block > 0
    return cache.can_take(np.full((len(cache.pools), 1), len(beams.pending.fork) * partly))


def apply(planner: ForkPlanner, beams: Beams) -> None:
    """Apply the forks and tokens of the pending step to slots, blocks and the next delta."""
    s = planner.slots
    step = beams.pending
    seqs = beams.seqs
    assert step is not None
    n = len(beams.request.prompt) + beams.length
    for fork in step.fork:
        child = seqs[fork.beam]
        source = seqs[fork.parent]
        planner.cache.fork(source.slot, child.slot, n)
        s.tokens[child.slot, :n] = s.tokens[source.slot, :n]
        child.keys = list(source.keys)
        child.page_keys = list(source.page_keys)
        planner.forks.append((source.slot, child.slot, child))
    for beam, node in step.append:
        slot = seqs[beam].slot
        s.tokens[slot, n] = node.token
        s.known[slot] = s.schedulable[slot] = s.collected[slot] = n + 1
        s.ready[slot] = True
        planner.chosen.append((slot, node.token))
    beams.applied()


def preempt_beams(planner: ForkPlanner, beams: Beams) -> None:
    """Preempt a request with beams: remove all its beams from their slots together.  The tokens of the live beams are
    kept in the first sequences of the request."""
    s = planner.slots
    seqs = beams.seqs
    if beams.pending is not None:
        planner.searches.remove(beams)
    tokens = []
    for beam, token in beams.leave():
        slot = seqs[beam].slot
        ids = s.tokens[slot, : s.collected[slot]].copy()
        tokens.append(ids if token is None else np.append(ids, np.int32(token)))
    for seq in seqs:
        seq.preempted += 1
        planner.leave(seq.slot)
        seq.status = WAITING
    for seq, ids in zip(seqs, tokens, strict=False):
        seq.tokens = ids
        seq.known = len(ids)
        seq.keys = []
        seq.page_keys = []
        seq.hint = None
