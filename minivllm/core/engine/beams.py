"""The beams of a request whose strategy is called after every step (``mode = "stepwise"``), and its decisions as data.

The request keeps ``width`` slots, its *beams*, from admission on.  A beam is live, or idle without a block.  After a
step the strategy selects the live beams that continue, and their next tokens.  A beam that continues keeps its slot.
If it continues with several tokens, each further one takes the slot of a beam that ends.  It shares the full blocks and
copies the last block and the columns (``Delta.fork``), so that nothing is computed twice::

    beam            0     1     2         blocks of 4 tokens
    after step 1    a     .     .         a: [b1][b2 |          width 3, the others idle
    after step 2    a1    a2    a3        b1 shared by three, b2 copied twice
    after step 3    a27   a24   a31       a1 is dropped: beam 0 takes over from beam 1

``Beams.advance`` returns these decisions as a ``BeamStep``.  The planner applies it when it plans the next step
(``forks``), because it may have to preempt other rows for the copies.
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
    """A generated token of a beam search, with a link to the token before it.  Beams with a common beginning share
    these nodes."""

    before: SearchNode | None
    token: int
    logprobs: TokenLogprobs


class Kept(NamedTuple):
    """A finished continuation of a beam search, which may become an output of the request."""

    last: SearchNode | None
    score: float | None
    finish: Finish


class BeamFork(NamedTuple):
    """Fork of a beam: ``beam`` takes over the computed tokens of ``parent``.  Both are beam numbers from 0."""

    parent: int
    beam: int


@dataclass(frozen=True)
class BeamStep:
    """The decisions of a beam search after a step.  They are applied in the order of the fields."""

    drop: tuple[int, ...]  # numbers of the beams that end in this step and release their blocks
    fork: tuple[BeamFork, ...]
    # (beam, last token) of each beam that is live after this step
    append: tuple[tuple[int, SearchNode], ...]
    outputs: int  # count of finished continuations that the search kept in this step
    done: bool  # True: the search has ended, and the other fields are not applied


class Survivor(NamedTuple):
    """A live beam of a preempted request, whose tokens are kept until the request runs again.

    ``beam`` is the number of the beam that has computed these tokens.  ``token`` is one more token, chosen but not
    computed yet, or None."""

    beam: int
    token: int | None


@dataclass(eq=False)
class Beams:
    """The state of a search, such as beam search, with ``width`` beams.

    Invariants: either all beams have a slot or none has.  ``live`` lists the live beams in the order of the search, and
    each has ``length`` generated tokens.  A beam that is not live holds no block and is not ready.  ``pending`` is None
    until the next step's decision is made.
    """

    request: Request
    search: Search
    live: list[int] = field(default_factory=lambda: [0])
    length: int = 0
    kept: list[Kept] = field(default_factory=list)
    pending: BeamStep | None = None
    given: int = 0  # count of outputs in the answer, set at the end of the search

    def __post_init__(self) -> None:
        self.tail: list[SearchNode | None] = [None] * self.width  # by beam
        # live beam -> ids and log-probabilities of its candidates
        self._candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def width(self) -> int:
        return self.request.params.width

    @property
    def seqs(self) -> list[Seq]:
        return self.request.sequences

    # ---- after a step ------------------------------------------------------------------------------------------------

    def take(self, beam: int, logprobs: LogProbs, j: int) -> bool:
        """Store the candidates for the next token of beam ``beam``: the log-probabilities in row ``j`` of ``logprobs``.

        Return True once all live beams have their candidates."""
        n = self.request.topk
        self._candidates[beam] = logprobs.top_ids[j, :n], logprobs.top[j, :n].astype(np.float64)
        return len(self._candidates) == len(self.live)

    def advance(self, generated: Callable[[int], list[int]]) -> BeamStep:
        """Call the search plug-in with the candidates of all live beams, and return its decisions.  Unless the search
        is done, they are also stored as ``pending`` until the planner applies them.

        ``generated(beam)`` returns the beam's generated token ids.  ValueError if the search returns invalid moves."""
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
                f"{len(go_on)} branches go on; expected at most {self.width}, no two with equal tokens"
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
        """Return the decisions of a step, with a beam number for each continuation in ``go_on``.

        The first continuation of a beam keeps the beam's number.  Each further one gets the number of a beam that has
        no continuation (a fork).  ``nodes`` are the last tokens of the continuations, and ``outputs`` counts the
        finished ones that the search kept."""
        stays: dict[int, int] = {}  # beam -> continuation
        rest: list[tuple[int, int]] = []  # (continuation, beam that it continues)
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
        """Return the end (reason and stop string) of a beam if ``token`` is appended to it; None if the beam continues
        then.  ``generated(beam)`` returns the beam's generated token ids."""
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
        at = int(np.flatnonzero(ids == token)[0])
        k = self.request.logprobs
        rank = 1 + int((values > values[at]).sum())
        entry = TokenLogprobs(float(values[at]), rank, ids[:k].tolist(), values[:k].tolist())
        return SearchNode(self.tail[beam], token, entry)

    def outputs(self, cut: Finish | None) -> list[Kept]:
        """Return the outputs of the search, best first.

        If the search ends early, ``cut`` is the reason of the end, and unfinished live beams fill up the outputs to the
        number ``n`` of the request.  ValueError if a finished search has no output."""
        n = self.request.params.n
        last = len(self.kept) - 1
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
            raise ValueError("the search ended without an output; expected at least one")
        return found

    # ---- changes by the planner --------------------------------------------------------------------------------------

    def applied(self) -> None:
        """Update the list of live beams and their length after the planner has applied the pending decisions."""
        assert self.pending is not None
        for beam, node in self.pending.append:
            self.tail[beam] = node
        self.live = [beam for beam, _ in self.pending.append]
        self.length = self.length + 1
        self.pending = None

    def leave(self) -> list[Survivor]:
        """Return the tokens of the live beams, in order, because the request is preempted and all its beams lose their
        slots.

        Afterwards beam 0 has the tokens of the first live beam, beam 1 those of the second, and so on."""
        found = [Survivor(beam, None) for beam in self.live]
        tails = [self.tail[beam] for beam in self.live]
        if self.pending is not None:
            parents = {beam: parent for parent, beam in self.pending.fork}
            found = [
                Survivor(parents.get(beam, beam), node.token) for beam, node in self.pending.append
            ]
            tails = [node for _, node in self.pending.append]
            self.length += 1
        self.live = list(range(len(found)))
        self.pending = None
        self.tail[: len(tails)] = tails
        self._candidates.clear()
        return found

    def common(self) -> int:
        """Return the count of leading tokens that all live beams have in common.  No beam may have a slot."""
        rows = np.stack([self.seqs[beam].tokens for beam in self.live])
        # index of the first difference; no two beams have equal tokens
        return int(np.argmin((rows == rows[0]).all(axis=0)))

    @property
    def resting(self) -> bool:
        """Return True if no beam of the request is in a step in flight that was submitted before the beam left its
        slot."""
        return not any(seq.in_flight for seq in self.seqs)


def unwind(last: SearchNode | None) -> tuple[list[int], list[TokenLogprobs]]:
    """Return the tokens and the log-probabilities from the first node to ``last``, in order; two empty lists for
    None."""
    nodes = []
    while last is not None:
        nodes.append(last)
        last = last.before
    return [n.token for n in reversed(nodes)], [n.logprobs for n in reversed(nodes)]
