"""Tests of stepwise decoding strategies, such as beam search, which choose the branches to continue after each
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.strategy import DecodingStrategy, Grown, Moves, Search

from .base import Seen, since
from .drawing import one_of, whole
from .sim import EOS_ID, VOCAB, at_rest, logprobs_after, request, run, sim_engine
from .spec import SpecConformance

MOST = 7  # largest number of tokens of an output in most tests
LONG = 40  # largest number of tokens of an output in the test of long outputs
Tokens = list[int]


def changed_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request that do not have their default values."""
    changed = {}
    for name, value in vars(params).items():
        if value != getattr(SamplingParams, name, None):
            changed[name] = value
    return changed


@dataclass
class Driven:
    """A search that is advanced as the engine does, with the token probabilities of the simulated device."""

    search: Search
    prompt: list[int]
    topk: int
    most: int  # largest number of tokens of an output
    live: list[list[int]] = field(default_factory=lambda: [[]])  # generated tokens of each live branch
    kept: list[list[int]] = field(default_factory=list)  # outputs
    scores: list[float] = field(default_factory=list)  # of the outputs
    done: bool = False

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether these tokens are a complete output: they end with a stop id or have the largest length."""
        stopped = tokens[-1] == EOS_ID
        return stopped or len(tokens) == self.most

    def grown(self) -> list[Grown]:
        """Return the candidate next tokens of each live branch."""
        out = []
        for tokens in self.live:
            history = np.array(self.prompt + tokens)
            values = logprobs_after(history).astype(np.float64)
            # one more than the engine's number, because the stop id may be among them
            best_first = np.argsort(-values, kind="stable")
            ids = best_first[: self.topk + 1]
            out.append(Grown(len(tokens), ids.astype(np.int32), values[ids]))
        return out

    def step(self, check: Callable[[Moves, list[Grown]], None] = lambda moves, grown: None) -> Moves:
        """Advance the search by a token and return its moves; ``check`` is called with the moves and the candidates."""
        grown = self.grown()

        def ends_with(branch: int, token: int) -> bool:
            longer = [*self.live[branch], token]
            return self.ends(longer)

        moves = self.search.advance(grown, ends_with)
        check(moves, grown)
        self.scores += [float(pick.score) for pick in moves.keep]
        self.kept += self._longer(moves.keep)
        self.live = self._longer(moves.go_on)
        self.done = moves.done or not moves.go_on
        return moves

    def _longer(self, picks: Iterable[Any]) -> list[Tokens]:
        """Return the tokens of the picked branches, each with its new token."""
        return [[*self.live[pick.branch], int(pick.token)] for pick in picks]

    def run(self) -> list[list[int]]:
        """Advance the search to its end, and return its outputs, best first."""
        while not self.done:
            self.step()
        return self.answer()

    def answer(self) -> list[list[int]]:
        """Return the outputs of the search so far, best first."""
        return [self.kept[i] for i in self.search.result()]


class StepwiseConformance(SpecConformance):
    """The tests of strategies with ``mode = "stepwise"``, a base class of ``StrategyConformance``."""

    def params(self, n: int) -> SamplingParams:
        """Return a request for n outputs."""
        raise NotImplementedError

    def stepwise(self) -> DecodingStrategy:
        """Return a new strategy; skip the test unless its mode is "stepwise"."""
        strategy = self.build()
        if strategy.mode != "stepwise":
            pytest.skip("it is not stepwise")
        return strategy

    def drive(self, strategy: DecodingStrategy, params: SamplingParams, prompt: list[int], most: int = MOST) -> Driven:
        """Start a search for a request, with outputs of up to ``most`` tokens."""
        k = strategy.topk(params)
        assert isinstance(k, int) and k >= 1, f"topk()={k!r}: a stepwise strategy needs candidates"
        search = strategy.search(params, most)
        topk = min(k, VOCAB - 1)
        return Driven(search, prompt, topk, most)

    @since(1, 1)
    def test_a_search_keeps_to_its_candidates_and_comes_to_an_end(self) -> None:
        """Check each step of a search.

        At most as many branches continue as ``start`` returned, each with a candidate of a live branch that does not
        end it, and no two with equal tokens.  An output that is kept ends with a candidate too.  The search ends once
        its outputs have the largest length, and its answer names kept outputs, each once.
        """
        strategy = self.stepwise()
        seen = Seen()

        ids = st.integers(0, VOCAB - 1)
        numbers = st.integers(1, 6)
        prompts = st.lists(ids, min_size=1, max_size=4)

        @self.for_all(100, numbers, prompts, st.data())
        def search(n: int, prompt: Tokens, data: Any) -> None:
            params = self.params(n)
            width = len(list(strategy.start(params)))
            most = whole(data, 1, MOST)
            driven = self.drive(strategy, params, prompt, most)

            self._to_its_end(driven, width)
            seen["forked"] += width > 1 and driven.most > 2
            seen["ended early"] += any(tokens[-1] == EOS_ID for tokens in driven.kept)

        self.meet(seen, forked=10)

    def _to_its_end(self, driven: Driven, width: int) -> None:
        """Advance a search to its end, and check each of its moves and its answer."""

        def check(moves: Moves, grown: list[Grown]) -> None:
            picked = _tokens_of(moves.go_on)
            kept = _tokens_of(moves.keep)
            assert len(picked) <= width, f"{len(picked)} branches go on, and start() returned {width}"
            assert len(set(picked)) == len(picked), f"two branches go on with the same tokens: {picked}"
            for branch, token in [*picked, *kept]:
                assert 0 <= branch < len(grown), f"branch {branch} is picked, and {len(grown)} are live"
                assert token in grown[branch].tokens, f"token {token} is no candidate of branch {branch}"
            for branch, token in picked:
                longer = [*driven.live[branch], token]
                assert not driven.ends(longer), f"token {token} ends branch {branch}"
            assert all(p.score == p.score for p in moves.keep), "a score is NaN"

        for _ in range(driven.most):
            if not driven.done:
                driven.step(check)
        assert driven.done, f"the search continues after {driven.most} steps, when every branch has ended"
        order = self._check_result(driven)
        distinct = len(set(order)) == len(order)
        assert order and distinct, f"result() returned {order}: expected at least one, none twice"
        scores = [driven.scores[i] for i in order]
        assert scores == sorted(scores, reverse=True), (
            f"result() returned {order}, with the scores {scores}: expected the best first"
        )

    def _check_result(self, driven: Driven) -> list[int]:
        """Return the result of a search, after a check that it names only outputs that the search has kept."""
        order = list(driven.search.result())
        known = all(0 <= i < len(driven.kept) for i in order)
        assert known, f"result() returned {order}, and {len(driven.kept)} outputs were kept"
        return order

    @since(1, 1)
    def test_wide_and_long_searches_keep_to_the_rules(self) -> None:
        """Check searches of 9 and of 20 branches, and of 40 tokens, by the same rules."""
        strategy = self.stepwise()
        for n, most in ((9, 12), (20, 6), (2, LONG)):
            params = self.params(n)
            if strategy.takes(params):
                width = len(list(strategy.start(params)))
                driven = self.drive(strategy, params, [n, 3], most)
                self._to_its_end(driven, width)

    @since(1, 1)
    def test_a_search_that_is_cut_short_says_what_it_has(self) -> None:
        """Check that ``result`` works at any time, also before an output was kept."""
        strategy = self.stepwise()
        driven = self.drive(strategy, self.params(3), [1, 2])
        for _ in range(MOST):
            self._check_result(driven)
            if not driven.done:
                driven.step()

    @since(1, 1)
    def test_searches_know_nothing_of_each_other(self) -> None:
        """Check that searches of one instance, advanced in turns, return the same outputs as alone."""
        strategy = self.stepwise()

        requests_drawn = st.tuples(st.integers(1, 5), st.integers(0, 9))
        few = st.lists(requests_drawn, min_size=2, max_size=4)

        @self.for_all(40, few, st.data())
        def interleaved(requests: list[tuple[int, int]], data: Any) -> None:
            alone = []
            shared = []
            for n, first in requests:
                params = self.params(n)
                prompt = [n, first]
                driven = self.drive(self.build(), params, prompt)
                alone.append(driven.run())
                shared.append(self.drive(strategy, params, prompt))
            while open_ := [driven for driven in shared if not driven.done]:
                one_of(data, *open_).step()
            for i, driven in enumerate(shared):
                got = driven.answer()
                assert got == alone[i], f"request {i} of {requests}: {got} beside others, {alone[i]} alone"

    @since(1, 1)
    def test_the_engine_gives_what_the_search_gives(self) -> None:
        """Check the outputs of the engine on the simulated device, with so little memory that rows are preempted."""
        strategy = self.stepwise()
        engine = sim_engine(slots=12, blocks=40, depth=1, strategy=strategy, budget=16)
        requests = []
        for i, n in enumerate([1, 2, 3, 4] * 3):
            values = changed_fields(self.params(n))
            values |= {"max_tokens": MOST + i % 3, "ignore_eos": False}
            prompt = [i, 7, 9, 3 + i]
            requests.append(request(engine, f"r{i}", prompt, **values))
        run(engine, check=True)
        at_rest(engine)
        for r in requests:
            assert r.sequences[0].error is None, f"{r.id}: {r.sequences[0].error}"
            prompt = r.prompt.tolist()
            n = r.params.n
            driven = self.drive(self.build(), r.params, prompt, r.params.max_tokens)
            outputs = driven.run()
            alone = outputs[:n]
            got = []
            for s in engine.answer(r):
                tokens = s.tokens[len(prompt) : s.known]
                got.append(tokens.tolist())
            assert got == alone, f"{r.id} n={n}: {got}, and the search alone returns {alone}"


def _tokens_of(picks: Iterable[Any]) -> list[tuple[int, int]]:
    """Return (branch, token) of some picks."""
    return [(pick.branch, int(pick.token)) for pick in picks]
