"""A request whose strategy is asked after every step (``mode = "stepwise"``): what its search decides, as data.

The request keeps ``width`` slots, its *beams*, from admission on.  A beam is live, or idle without a block.  After a
step the strategy says which live beams go on, and with which tokens.  A beam that goes on stays where it is; if it goes
on several times the others take the places of beams that do not: they share its full blocks, copy the last one, and
its columns (``Delta.fork``), so nothing is ever computed twice::

    beam            0     1     2         blocks of 4 tokens
    after step 1    a     .     .         a: [b1][b2 |          width 3, the others idle
    after step 2    a1    a2    a3        b1 shared by three, b2 copied twice
    after step 3    a27   a24   a31       a1 is dropped: beam 0 takes over from beam 1

``Beams.advance`` returns that as a ``BeamStep``, which the planner applies when it plans the next step (``forks``),
where there may be other rows to preempt for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minivllm.core import checks
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.strategy import Grown, Moves, Pick, Search

from .request import Request, Seq
from .scores import TokenLogprobs

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import LogProbs


class SearchNode(NamedTuple):
    """A generated token and those before it: beams with a common beginning share its nodes."""

    before: SearchNode | None
    token: int
    logprobs: TokenLogprobs


class Kept(NamedTuple):
    """A continuation that may be an output."""

    last: SearchNode | None
    score: float | None
    finish: Finish


class BeamFork(NamedTuple):
    """``beam`` takes over what ``parent`` has computed; both are numbers of beams, from 0."""

    parent: int
    beam: int


@dataclass(frozen=True)
class BeamStep:
    """What a search has decided after a step, to be applied in this order."""

    drop: tuple[int, ...]  # live beams from which nothing goes on: their blocks are given back
    fork: tuple[BeamFork, ...]
    # (beam, its new last token): the live beams from then on
    append: tuple[tuple[int, SearchNode], ...]
    outputs: int  # continuations that were kept
    done: bool  # the search has ended: nothing of the above is to be applied


class Survivor(NamedTuple):
    """A live beam of a request that loses its slots: ``beam`` has computed its tokens, which ``token`` follows if it is
    not None."""

    beam: int
    token: int | None


@dataclass(eq=False)
class Beams:
    """Invariants: either all beams have a slot or none has; ``live`` are beams in the order in which the search knows
    them, and have generated ``length`` tokens each; a beam that is not live holds no block and is not ready;
    ``pending`` is None while a step is awaited."""

    request: Request
    search: Search
    live: list[int] = field(default_factory=lambda: [0])
    length: int = 0
    kept: list[Kept] = field(default_factory=list)
    pending: BeamStep | None = None
    given: int = 0  # outputs, once it has ended

    def __post_init__(self) -> None:
        self.tail: list[SearchNode | None] = [None] * self.width  # by beam
        # live beam -> tokens and their logarithms
        self._candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def width(self) -> int:
        return self.request.params.width

    @property
    def seqs(self) -> list[Seq]:
        return self.request.sequences

    # ---- after a step ------------------------------------------------------------------------------------------------

    def take(self, beam: int, logprobs: LogProbs, j: int) -> bool:
        """Candidates of a live beam from row j of a result; True once all live beams have theirs."""
        n = self.request.topk
        self._candidates[beam] = logprobs.top_ids[j, :n], logprobs.top[j, :n].astype(np.float64)
        return len(self._candidates) == len(self.live)

    def advance(self, generated: Callable[[int], list[int]]) -> BeamStep:
        """Ask the search; what it has decided stays ``pending`` unless it is done.  ``generated(beam)``: its token ids
        so far.  ValueError: the search broke its contract."""
        grown = [self._grown(beam) for beam in self.live]
        finishes: dict[tuple[int, int], Finish | None] = {}

        def finish(branch: int, token: int) -> Finish | None:
            at = (branch, token)
            if at not in finishes:
                finishes[at] = self._finish(self.live[branch], token, generated)
            return finishes[at]

        moves: Moves = self.search.advance(
            grown, lambda branch, token: finish(branch, token) is not None
        )
        go_on = list(moves.go_on)
        if len(go_on) > self.width or len({(p.branch, p.token) for p in go_on}) < len(go_on):
            raise ValueError(
                f"{len(go_on)} branches go on; want at most {self.width}, no two with equal tokens"
            )
        nodes = [self._node(p, grown) for p in go_on]
        for p in go_on:
            if finish(p.branch, p.token) is not None:
                raise ValueError(f"branch {p.branch} goes on with token {p.token}, which ends it")
        before = len(self.kept)
        for p in moves.keep:
            score = checks.score(p.score)
            self.kept.append(
                Kept(self._node(p, grown), score, finish(p.branch, p.token) or Finish("stop"))
            )
        self._candidates.clear()
        step = self._placed(go_on, nodes, len(self.kept) - before, bool(moves.done or not go_on))
        self.pending = None if step.done else step
        return step

    def _placed(
        self, go_on: Sequence[Pick], nodes: Sequence[SearchNode], outputs: int, done: bool
    ) -> BeamStep:
        """Which beam is whose: the first that goes on from one stays there."""
        stays: dict[int, int] = {}  # beam -> continuation
        rest: list[tuple[int, int]] = []  # (continuation, beam that it comes from)
        for i, p in enumerate(go_on):
            beam = self.live[p.branch]
            if beam in stays:
                rest.append((i, beam))
            else:
                stays[beam] = i
        idle = iter(beam for beam in range(self.width) if beam not in stays)
        place = {i: beam for beam, i in stays.items()}
        forks = tuple(BeamFork(parent, place.setdefault(i, next(idle))) for i, parent in rest)
        return BeamStep(
            drop=tuple(beam for beam in self.live if beam not in stays),
            fork=forks,
            append=tuple((place[i], node) for i, node in enumerate(nodes)),
            outputs=outputs,
            done=done,
        )

    def _grown(self, beam: int) -> Grown:
        ids, values = self._candidates[beam]
        known = len(self.request.prompt) + self.length
        may = np.isfinite(values) & self.request.stops.allowed(ids, known)
        return Grown(self.length, ids[may], values[may])

    def _finish(
        self, beam: int, token: int, generated: Callable[[int], list[int]]
    ) -> Finish | None:
        """How the beam ends if it goes on with this token."""
        if self.request.completes is not None:
            stopped = self.request.completes([*generated(beam), token])
            if stopped is not None:
                return Finish("stop", stopped)
        return self.request.stops.finish(token, len(self.request.prompt) + self.length + 1)

    def _node(self, p: Pick, grown: Sequence[Grown]) -> SearchNode:
        branch = checks.whole(p.branch, 0, len(self.live) - 1, "there is no branch")
        beam = self.live[branch]
        token = checks.whole(p.token, 0, 2**31 - 1, f"branch {branch} goes on with")
        if token not in grown[p.branch].tokens:
            raise ValueError(f"token {token} is no candidate of branch {p.branch}")
        ids, values = self._candidates[beam]
        at, k = int(np.flatnonzero(ids == token)[0]), self.request.logprobs
        rank = 1 + int((values > values[at]).sum())
        entry = TokenLogprobs(float(values[at]), rank, ids[:k].tolist(), values[:k].tolist())
        return SearchNode(self.tail[beam], token, entry)

    def outputs(self, cut: Finish | None) -> list[Kept]:
        """The answer, best first.  ``cut``: the reason if it ends early; live branches fill up then."""
        n, last = self.request.params.n, len(self.kept) - 1
        order = dict.fromkeys(
            checks.whole(i, 0, last, "result() gave") for i in self.search.result()
        )
        found = [self.kept[i] for i in list(order)[:n]]
        if cut is not None:
            tails = (
                [node for _, node in self.pending.append]
                if self.pending
                else [self.tail[b] for b in self.live]
            )
            found += [Kept(tail, None, cut) for tail in tails[: n - len(found)]]
        elif not found:
            raise ValueError("it ended without an output")
        return found

    # ---- what the planner has done -----------------------------------------------------------------------------------

    def applied(self) -> None:
        """The pending step has been applied: a step with the live beams may be planned."""
        assert self.pending is not None
        for beam, node in self.pending.append:
            self.tail[beam] = node
        self.live = [beam for beam, _ in self.pending.append]
        self.length, self.pending = self.length + 1, None

    def leave(self) -> list[Survivor]:
        """All beams lose their slots.  Of the live ones, in order, the first beams keep the tokens."""
        found = [Survivor(beam, None) for beam in self.live]
        tails = [self.tail[beam] for beam in self.live]
        if self.pending is not None:
            parents = {beam: parent for parent, beam in self.pending.fork}
            found = [
                Survivor(parents.get(beam, beam), node.token) for beam, node in self.pending.append
            ]
            tails = [node for _, node in self.pending.append]
            self.length += 1
        self.live, self.pending = list(range(len(found))), None
        self.tail[: len(tails)] = tails
        self._candidates.clear()
        return found

    def common(self) -> int:
        """Leading tokens that all live beams have in common while none has a slot."""
        rows = np.stack([self.seqs[beam].tokens for beam in self.live])
        return int(np.argmin((rows == rows[0]).all(axis=0)))  # no two are equal

    @property
    def resting(self) -> bool:
        """No step in flight holds a beam that has left."""
        return not any(seq.in_flight for seq in self.seqs)


def unwind(last: SearchNode | None) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens and log-probabilities up to a node, in order."""
    nodes = []
    while last is not None:
        nodes.append(last)
        last = last.before
    return [n.token for n in reversed(nodes)], [n.logprobs for n in reversed(nodes)]
