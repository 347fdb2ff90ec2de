"""The rows of a request whose strategy is asked after every step (``mode = "stepwise"``): beams share KV blocks.

The request keeps ``width`` slots, its *lanes*, from admission on.  A lane is live, or idle without a block.  After a
step the strategy says which live lanes go on, and with which tokens.  A lane that goes on stays where it is; if it goes
on several times the others take the places of lanes that do not: they share its full blocks, copy the last one, and
its columns (``Delta.fork``), so nothing is ever computed twice::

    lane            0     1     2         blocks of 4 tokens
    after step 1    a     .     .         a: [b1][b2 |          width 3, the others idle
    after step 2    a1    a2    a3        b1 shared by three, b2 copied twice
    after step 3    a27   a24   a31       a1 is dropped: lane 0 takes over from lane 1

All live lanes have equally many tokens.  A step's moves are carried out when the next one is planned, where there may
be other rows to preempt for the copies.  The lanes are preempted together and come back together: the first computes
what all have in common, then the others fork from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minivllm.core import checks
from minivllm.core.foreign import call_foreign
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.strategy import Grown, Moves, Pick, Search
from minivllm.errors import EngineDeadError, told

from .request import RUNNING, WAITING, Request, Seq
from .scores import TokenLogprobs

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import LogProbs

    from .engine import Engine
    from .planner import Planner
    from .slots import Slots


class SearchNode(NamedTuple):
    """A generated token and those before it: lanes with a common beginning share its nodes."""

    before: SearchNode | None
    token: int
    logprobs: TokenLogprobs


class Kept(NamedTuple):
    """A continuation that may be an output."""

    last: SearchNode | None
    score: float | None
    ended: Finish


@dataclass(eq=False)
class Lanes:
    """Invariants: either all lanes have a slot or none has; ``live`` are lanes in the order in which the search knows
    them; a lane that is not live holds no block and is not ready; ``moves`` is None while a step is awaited."""

    request: Request
    search: Search
    live: list[int] = field(default_factory=lambda: [0])
    kept: list[Kept] = field(default_factory=list)
    moves: Sequence[Pick] | None = None

    def __post_init__(self) -> None:
        self.tail: list[SearchNode | None] = [None] * self.width  # by lane
        self._next: list[SearchNode] = []  # of each move
        self._got: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # live lane -> its candidates and their logarithms
        self.given = 0  # outputs, once it has ended

    @property
    def width(self) -> int:
        return self.request.params.width

    @property
    def seqs(self) -> list[Seq]:
        return self.request.sequences

    # ---- after a step --------------------------------------------------------------------------------------------

    def take(self, lane: int, logprobs: LogProbs, j: int) -> bool:
        """Candidates of a live lane from row j of a result; True once all live lanes have theirs."""
        n = self.request.topk
        self._got[lane] = logprobs.top_ids[j, :n], logprobs.top[j, :n].astype(np.float64)
        return len(self._got) == len(self.live)

    def advance(self, slots: Slots) -> bool:
        """Ask the search; True if it has ended, else ``moves`` are to be carried out.  ValueError: it broke its
        contract."""
        grown = [self._grown(lane, slots) for lane in self.live]
        reasons: dict[tuple[int, int], Any] = {}

        def ended(branch: int, token: int) -> Finish | None:
            at = (branch, token)
            if at not in reasons:
                reasons[at] = self._ended(self.live[branch], token, slots)
            return reasons[at]

        moves: Moves = self.search.advance(grown, lambda branch, token: ended(branch, token) is not None)
        go_on = list(moves.go_on)
        if len(go_on) > self.width or len({(p.branch, p.token) for p in go_on}) < len(go_on):
            raise ValueError(f"{len(go_on)} branches go on; want at most {self.width}, no two with equal tokens")
        nodes = [self._node(p, grown) for p in go_on]
        for p in go_on:
            if ended(p.branch, p.token) is not None:
                raise ValueError(f"branch {p.branch} goes on with token {p.token}, which ends it")
        for p in moves.keep:
            score = checks.score(p.score)
            self.kept.append(Kept(self._node(p, grown), score, ended(p.branch, p.token) or Finish("stop")))
        self._got.clear()
        self.moves, self._next = go_on, nodes
        return moves.done or not go_on

    def _grown(self, lane: int, slots: Slots) -> Grown:
        ids, values = self._got[lane]
        length = int(slots.known[self.seqs[lane].slot]) - len(self.request.prompt)
        may = np.isfinite(values) & self.request.stops.allowed(ids, length + len(self.request.prompt))
        return Grown(length, ids[may], values[may])

    def _ended(self, lane: int, token: int, slots: Slots) -> Finish | None:
        """Why the lane ends if it goes on with this token."""
        seq = self.seqs[lane]
        n = int(slots.known[seq.slot])
        if self.request.completes is not None:
            ids = [*slots.tokens[seq.slot, len(self.request.prompt) : n].tolist(), token]
            stopped = self.request.completes(ids)
            if stopped is not None:
                return Finish("stop", stopped)
        return self.request.stops.finish(token, n + 1)

    def _node(self, p: Pick, grown: Sequence[Grown]) -> SearchNode:
        branch = checks.whole(p.branch, 0, len(self.live) - 1, "there is no branch")
        lane, token = self.live[branch], checks.whole(p.token, 0, 2**31 - 1, f"branch {branch} goes on with")
        if token not in grown[p.branch].tokens:
            raise ValueError(f"token {token} is no candidate of branch {p.branch}")
        ids, values = self._got[lane]
        at, k = int(np.flatnonzero(ids == token)[0]), self.request.logprobs
        rank = 1 + int((values > values[at]).sum())
        entry = TokenLogprobs(float(values[at]), rank, ids[:k].tolist(), values[:k].tolist())
        return SearchNode(self.tail[lane], token, entry)

    def outputs(self, cut: Finish | None) -> list[Kept]:
        """The answer, best first.  ``cut``: the reason if it ends early; live branches fill up then."""
        n, last = self.request.params.n, len(self.kept) - 1
        order = dict.fromkeys(checks.whole(i, 0, last, "result() gave") for i in self.search.result())
        found = [self.kept[i] for i in list(order)[:n]]
        if cut is not None:
            tails = [self.tail[lane] for lane in self.live] if self.moves is None else self._next
            found += [Kept(tail, None, cut) for tail in tails[: n - len(found)]]
        elif not found:
            raise ValueError("it ended without an output")
        return found

    # ---- in the planner ------------------------------------------------------------------------------------------

    def enter(self, planner: Planner) -> None:
        """The first lane has just taken a slot; the others take theirs, and idle."""
        s, first = planner.slots, self.seqs[0]
        for seq in self.seqs[1:]:
            slot = s.enter(seq)
            s.id[slot], s.ready[slot], seq.status = s.id[first.slot], False, RUNNING
        if len(self.live) > 1:
            s.forking[first.slot], s.goal[first.slot] = True, self.common()

    def common(self) -> int:
        """Leading tokens that all live lanes have in common while none has a slot."""
        rows = np.stack([self.seqs[lane].tokens for lane in self.live])
        return int(np.argmin((rows == rows[0]).all(axis=0)))  # no two are equal

    def wake(self, planner: Planner, parent: int, at: int) -> None:
        """After a preemption: the first lane (in slot ``parent``) has computed what is common, the others fork."""
        for seq in self.seqs[1 : len(self.live)]:
            planner.cache.fork(parent, seq.slot, at)
            planner.slots.ready[seq.slot] = True
            planner.joins.append((seq.slot, seq))  # its tokens are its own, so it joins

    def carry_out(self, planner: Planner) -> bool:
        """Tokens to the lanes, forks for those that go on several times.  False: there are no blocks for the copies
        yet (only at first, when idle lanes get their blocks; later each takes the place of one that ends)."""
        s, cache = planner.slots, planner.cache
        stays: dict[int, int] = {}  # lane -> move
        forks: list[tuple[int, int]] = []  # (move, lane that it comes from)
        for m, p in enumerate(self.moves or ()):
            lane = self.live[p.branch]
            if lane in stays:
                forks.append((m, lane))
            else:
                stays[lane] = m
        for lane in self.live:
            if lane not in stays:
                self._idle(planner, self.seqs[lane].slot)
        n = int(s.known[self.seqs[next(iter(stays))].slot])
        if not cache.can_take(np.full((len(cache.pools), 1), len(forks) * (n % s.block > 0))):
            return False
        idle = iter(lane for lane in range(self.width) if lane not in stays)
        place = {m: lane for lane, m in stays.items()}
        for m, parent in forks:
            lane = place[m] = next(idle)
            child, source = self.seqs[lane], self.seqs[parent]
            cache.fork(source.slot, child.slot, n)
            s.tokens[child.slot, :n] = s.tokens[source.slot, :n]
            child.keys = list(source.keys)
            planner.forks.append((source.slot, child.slot, child))
        self.live = [place[m] for m in range(len(place))]
        for lane, node in zip(self.live, self._next, strict=True):
            slot = self.seqs[lane].slot
            s.tokens[slot, n], self.tail[lane] = node.token, node
            s.known[slot] = s.goal[slot] = s.collected[slot] = n + 1
            s.ready[slot] = True
            planner.chosen.append((slot, node.token))
        self.moves = None
        return True

    def _idle(self, planner: Planner, slot: int) -> None:
        s = planner.slots
        planner.cache.release(slot)
        s.table[:, slot, : int(s.blocks[:, slot].max())] = 0
        s.blocks[:, slot], s.trimmed[:, slot], s.published[slot], s.computed[slot] = 0, 0, 0, 0
        s.ready[slot] = False

    def disband(self, planner: Planner) -> None:
        """Preempted: all lanes leave their slots; what is live is kept by the first ones."""
        s = planner.slots
        tokens = [s.tokens[self.seqs[lane].slot, : s.collected[self.seqs[lane].slot]].copy() for lane in self.live]
        tails = [self.tail[lane] for lane in self.live]
        if self.moves is not None:
            tokens = [np.append(tokens[p.branch], np.int32(p.token)) for p in self.moves]
            tails = list(self._next)
            planner.moving.remove(self)
        for seq in self.seqs:
            seq.preempted += 1
            planner.leave(seq.slot)
            seq.status = WAITING
        for seq, ids in zip(self.seqs, tokens, strict=False):
            seq.tokens, seq.known, seq.keys, seq.hint = ids, len(ids), [], None
        self.live, self.moves = list(range(len(tokens))), None
        self.tail[: len(tails)] = tails
        self._got.clear()

    @property
    def resting(self) -> bool:
        """No step in flight holds a lane that has left."""
        return not any(seq.in_flight for seq in self.seqs)


def unwind(last: SearchNode | None) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens and log-probabilities up to a node, in order."""
    nodes = []
    while last is not None:
        nodes.append(last)
        last = last.before
    return [n.token for n in reversed(nodes)], [n.logprobs for n in reversed(nodes)]


# ---- in the engine -----------------------------------------------------------------------------------------------


def branch(engine: Engine, lanes: Lanes) -> None:
    """All live lanes have their candidates: ask the strategy what becomes of them."""
    before = len(lanes.kept)
    try:
        ended = engine.clock.seams.run("strategy", lanes.advance, engine.slots)
    except Exception as e:  # a plug-in or the client's stop strings: it ends its own request and nothing else
        name = type(lanes.request.strategy).__name__
        finish_lanes(engine, lanes.request, Finish("error"), f"strategy {name}: {told(e)}")
        return
    engine.publisher.tokens += len(lanes.moves or ()) + len(lanes.kept) - before
    if ended:
        finish_lanes(engine, lanes.request, None, None)
    else:
        engine.planner.moving.append(lanes)


def finish_lanes(engine: Engine, request: Request, cut: Finish | None, error: str | None) -> None:
    """End a stepwise request: its lanes leave, and the first sequences become the answer.  ``cut``: the reason if it
    ends before its strategy says so."""
    lanes = request.lanes
    if request.done:
        return
    try:
        outputs = call_foreign(lanes.outputs, cut)
    except Exception as e:
        cut = Finish("error")
        outputs = [Kept(None, None, cut)]
        error = error or f"strategy {type(request.strategy).__name__}: {told(e)}"
    if lanes in engine.planner.moving:
        engine.planner.moving.remove(lanes)
    try:
        for seq in lanes.seqs if not engine.dead else ():
            engine.planner.end(seq)
    except EngineDeadError as e:  # the evictor failed: blocks are in doubt
        engine.fail_all(str(e))
        return
    lanes.given = len(outputs)
    if cut is not None:
        outputs = [out._replace(ended=cut) for out in outputs]
    for seq, out in zip(lanes.seqs, outputs, strict=False):
        ids, seq.logprobs = unwind(out.last)
        seq.tokens = np.append(request.prompt, np.array(ids, np.int32))
        seq.known, seq.published, seq.score = len(seq.tokens), len(ids), out.score
        seq.cumulative_logprob = sum(lp.chosen for lp in seq.logprobs)
        try:
            if request.sink is not None:
                call_foreign(request.sink, seq, ids, out.ended)
        except Exception as e:
            request.sink, error = None, f"what receives its tokens failed: {told(e)}"
    for seq, out in zip(lanes.seqs, outputs + outputs[-1:] * (lanes.width - len(outputs)), strict=True):
        engine.close(seq, *(out.ended if error is None else Finish("error")), error)
