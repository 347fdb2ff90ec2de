"""Stepwise decoding strategies: what their searches do with the candidates that they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.strategy import DecodingStrategy, Grown, Moves, Search

from .base import Seen, since
from .sim import EOS_ID, VOCAB, at_rest, logprobs_after, request, run, sim_engine
from .spec import SpecConformance

MOST, LONG = 7, 40  # tokens of an output in these tests


@dataclass
class Driven:
    """One search, driven as the engine does it over the distribution of the simulated device."""

    search: Search
    prompt: list[int]
    topk: int
    most: int
    live: list[list[int]] = field(default_factory=lambda: [[]])  # generated tokens of each live branch
    kept: list[list[int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # of what is kept
    done: bool = False

    def ends(self, tokens: Sequence[int]) -> bool:
        return tokens[-1] == EOS_ID or len(tokens) == self.most

    def grown(self) -> list[Grown]:
        out = []
        for tokens in self.live:
            values = logprobs_after(np.array(self.prompt + tokens)).astype(np.float64)
            ids = np.argsort(-values, kind="stable")[: self.topk + 1]  # one of them may be the stop id
            out.append(Grown(len(tokens), ids.astype(np.int32), values[ids]))
        return out

    def step(self, check: Callable[[Moves, list[Grown]], None] = lambda moves, grown: None) -> Moves:
        grown = self.grown()
        moves = self.search.advance(grown, lambda branch, token: self.ends([*self.live[branch], token]))
        check(moves, grown)
        self.kept += [[*self.live[p.branch], int(p.token)] for p in moves.keep]
        self.scores += [float(p.score) for p in moves.keep]
        self.live = [[*self.live[p.branch], int(p.token)] for p in moves.go_on]
        self.done = moves.done or not moves.go_on
        return moves

    def run(self) -> list[list[int]]:
        while not self.done:
            self.step()
        return [self.kept[i] for i in self.search.result()]


class StepwiseConformance(SpecConformance):
    """The rules for ``mode = "stepwise"``."""

    def params(self, n: int) -> SamplingParams:
        raise NotImplementedError

    def stepwise(self) -> DecodingStrategy:
        strategy = self.build()
        if strategy.mode != "stepwise":
            pytest.skip("it is not stepwise")
        return strategy

    def drive(self, strategy: DecodingStrategy, params: SamplingParams, prompt: list[int], most: int = MOST) -> Driven:
        k = strategy.topk(params)
        assert isinstance(k, int) and k >= 1, f"topk()={k!r}: a stepwise strategy needs candidates"
        return Driven(strategy.search(params, most), prompt, min(k, VOCAB - 1), most)

    @since(1, 1)
    def test_a_search_keeps_to_its_candidates_and_comes_to_an_end(self) -> None:
        """Each step at most as many branches go on as ``start`` gave, each with a candidate of a live branch that does
        not end it, no two with equal tokens; what is kept is a candidate too.  It ends when its outputs are as long as
        they may be, and the answer is made of what was kept, each once."""
        strategy, seen = self.stepwise(), Seen()

        @self.for_all(100, st.integers(1, 6), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), st.data())
        def search(n: int, prompt: list[int], data: Any) -> None:
            params = self.params(n)
            width = len(list(strategy.start(params)))
            driven = self.drive(strategy, params, prompt, data.draw(st.integers(1, MOST)))

            self._to_its_end(driven, width)
            seen["forked"] += width > 1 and driven.most > 2
            seen["ended early"] += any(tokens[-1] == EOS_ID for tokens in driven.kept)

        seen.require(forked=10)

    def _to_its_end(self, driven: Driven, width: int) -> None:
        """Drive a search, and check each of its moves and its answer."""

        def check(moves: Moves, grown: list[Grown]) -> None:
            picked = [(p.branch, int(p.token)) for p in moves.go_on]
            assert len(picked) <= width, f"{len(picked)} branches go on, and start() gave {width}"
            assert len(set(picked)) == len(picked), f"two branches go on with the same tokens: {picked}"
            for branch, token in [*picked, *((p.branch, int(p.token)) for p in moves.keep)]:
                assert 0 <= branch < len(grown), f"branch {branch} is picked, and {len(grown)} are live"
                assert token in grown[branch].tokens, f"token {token} is no candidate of branch {branch}"
            for branch, token in picked:
                assert not driven.ends([*driven.live[branch], token]), f"token {token} ends branch {branch}"
            assert all(p.score == p.score for p in moves.keep), "a score is NaN"

        for _ in range(driven.most):
            if not driven.done:
                driven.step(check)
        assert driven.done, f"it goes on after {driven.most} steps, when every branch has ended"
        order = list(driven.search.result())
        assert order and len(set(order)) == len(order), f"result() gave {order}: want one at least, none twice"
        assert all(0 <= i < len(driven.kept) for i in order), f"result() gave {order} of {len(driven.kept)} kept"
        scores = [driven.scores[i] for i in order]
        assert scores == sorted(scores, reverse=True), (
            f"result() gave {order}, with the scores {scores}: want the best first"
        )

    @since(1, 1)
    def test_wide_and_long_searches_keep_to_the_rules(self) -> None:
        """Of 9 and of 20 branches, over 40 tokens: the same as of few branches and tokens."""
        strategy = self.stepwise()
        for n, most in ((9, 12), (20, 6), (2, LONG)):
            params = self.params(n)
            if strategy.takes(params):
                self._to_its_end(self.drive(strategy, params, [n, 3], most), len(list(strategy.start(params))))

    @since(1, 1)
    def test_a_search_that_is_cut_short_says_what_it_has(self) -> None:
        """``result`` is asked at any time, also before anything was kept."""
        strategy = self.stepwise()
        driven = self.drive(strategy, self.params(3), [1, 2])
        for _ in range(MOST):
            order = list(driven.search.result())
            assert all(0 <= i < len(driven.kept) for i in order), f"result() gave {order} of {len(driven.kept)} kept"
            if not driven.done:
                driven.step()

    @since(1, 1)
    def test_searches_know_nothing_of_each_other(self) -> None:
        """Those of one instance run side by side, a step of the one, a step of the other; each gives what it gives
        alone."""
        strategy = self.stepwise()

        @self.for_all(40, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=2, max_size=4), st.data())
        def interleaved(requests: list[tuple[int, int]], data: Any) -> None:
            alone = [self.drive(self.build(), self.params(n), [n, first]).run() for n, first in requests]
            shared = [self.drive(strategy, self.params(n), [n, first]) for n, first in requests]
            while open_ := [i for i, d in enumerate(shared) if not d.done]:
                shared[data.draw(st.sampled_from(open_))].step()
            for i, driven in enumerate(shared):
                got = [driven.kept[j] for j in driven.search.result()]
                assert got == alone[i], f"request {i} of {requests}: {got} beside others, {alone[i]} alone"

    @since(1, 1)
    def test_the_engine_gives_what_the_search_gives(self) -> None:
        """On the simulated device, in little memory, so that rows are preempted and come back."""
        strategy = self.stepwise()
        engine = sim_engine(slots=12, blocks=40, depth=1, strategy=strategy, budget=16)
        made = []
        for i, n in enumerate([1, 2, 3, 4] * 3):
            values = {k: v for k, v in vars(self.params(n)).items() if v != getattr(SamplingParams, k, None)}
            values.update(max_tokens=MOST + i % 3, ignore_eos=False)
            made.append(request(engine, f"r{i}", [i, 7, 9, 3 + i], **values))
        run(engine, check=True)
        at_rest(engine)
        for r in made:
            assert r.sequences[0].error is None, f"{r.id}: {r.sequences[0].error}"
            alone = self.drive(self.build(), r.params, r.prompt.tolist(), r.params.max_tokens).run()[: r.params.n]
            got = [s.tokens[len(r.prompt) : s.known].tolist() for s in engine.answer(r)]
            assert got == alone, f"{r.id} n={r.params.n}: {got}, and the search alone gives {alone}"
