"""Decoding strategies: which branches a request becomes, and which of them are its answer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from minivllm.core.interfaces.params import PROCESSED, SamplingParams
from minivllm.core.interfaces.strategy import Branch, BranchEnd, DecodingStrategy, Guide
from minivllm.errors import RequestError
from minivllm.plugins.strategy.single import Single

from .base import Seen, since
from .declaring import Declaring, values_of_own
from .kept import Lasting
from .sampling_data import Noted
from .sim import answer, at_rest, guided_answer, outputs, request, run, sim_engine
from .strategy_steps import StepwiseConformance

WIDTHS = (1, 2, 3, 5, 8, 128)
PLAIN = [("minivllm/single", Single())]  # serves who asks for nothing
NAMES = [f.name for f in fields(SamplingParams)]
BRANCHING = ("best_of", "beam_width")  # fields that a strategy may read
OTHERS = ({"temperature": 0.0}, {"seed": 0}, {"seed": 7}, {"logprobs": 1}, {"max_tokens": None})


@st.composite
def ended(draw: Any, n: int) -> list[BranchEnd]:
    """How n branches may have ended; ties are common on purpose."""
    scored = draw(st.booleans())
    score = st.sampled_from([0.0, -1.5, -1.5, -80.0]) if scored else st.none()
    why = st.sampled_from(["stop", "length", "abort", "error"])
    return [BranchEnd(i, draw(st.integers(0, 3)), draw(score), draw(why)) for i in range(n)]


def _named(change: Mapping[str, Any]) -> str:
    return "".join(f", {k}={v}" for k, v in change.items())


class StrategyConformance(Declaring, Lasting, StepwiseConformance):
    """Override ``params`` if the strategy takes only requests of a certain kind.  Of a stepwise strategy, which has no
    ``result`` of its own, the searches are tested."""

    kind = "strategy"

    def context(self) -> tuple[Any, ...]:
        return ()

    def params(self, n: int) -> SamplingParams:
        """A request for n outputs that is fit for this strategy: of ``beam_width=n`` if it reads that; of the numbers
        that its spec declares, at other values than their defaults, if it takes no request without them."""
        strategy = self.build()
        wide = {"beam_width": n} if "beam_width" in strategy.reads else {}
        plain = SamplingParams(n=n, max_tokens=6, ignore_eos=True, **wide)
        if not self.spec.params or strategy.takes(replace(plain, n=1)):
            return plain
        numbers = {p.name: list(values_of_own(p))[-1:] for p in self.spec.params if p.kind in (int, float)}
        return replace(plain, extra={name: values[0] for name, values in numbers.items() if values})

    def reference(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int] | None:
        """Sample numbers of the answer, best first, as the strategy should give them; None leaves the order open.

        Default: the ``n`` likeliest of ``best_of`` branches that ended by themselves, if it reads ``best_of`` and the
        request sets it.  Override it for another order, without a look at the strategy's own code."""
        if "best_of" not in self.build().reads or params.best_of is None or params.best_of == params.n:
            return None
        if any(e.cumulative_logprob is None or e.finish_reason in ("abort", "error") for e in ends):
            return None
        likeliest = sorted(ends, key=lambda e: (-float(e.cumulative_logprob or 0.0), e.sample))
        return [e.sample for e in likeliest[: params.n]]

    def free(self) -> DecodingStrategy:
        strategy = self.build()
        if strategy.mode == "stepwise":
            pytest.skip("it is stepwise: its searches give the answer")
        return strategy

    def exercise(self, instance: DecodingStrategy) -> Any:
        if instance.mode == "stepwise":
            return [self.drive(instance, self.params(n), [n, 1]).run() for n in (1, 2, 5)]
        mine = [self.params(n) for n in WIDTHS if instance.takes(self.params(n))]
        ends = lambda p: [BranchEnd(i, 3 + i % 2, -float(i % 3), "stop") for i in range(p.n)]  # noqa: E731
        return [([b.sample for b in instance.start(p)], list(instance.result(p, ends(p)))) for p in mine]

    def once_more(self, instance: DecodingStrategy, number: int) -> None:
        """Serve a request with a seed, a length and a number of branches of its own."""
        n = 1 + number % 3
        params = replace(self.params(n), seed=number, max_tokens=6 + number)
        if instance.mode == "stepwise":
            self.drive(instance, params, [n, 1]).run()
        elif instance.takes(params):
            branches = instance.start(params)
            instance.result(params, [BranchEnd(b.sample, 3, -1.0 - number, "stop") for b in branches])

    def widths(self) -> list[int]:
        """Those of WIDTHS that the strategy takes."""
        strategy = self.build()
        taken = [n for n in WIDTHS if strategy.takes(self.params(n))]
        assert taken, f"takes() is false for n={', '.join(map(str, WIDTHS))}: override params() if it asks for more"
        return taken

    def variants(self) -> Iterator[tuple[str, SamplingParams]]:
        """Requests of every width, as ``params`` gives them and with other values of what all requests may set."""
        for n in WIDTHS:
            ranked = [{"best_of": n + 2}] if "best_of" in self.build().reads and n <= 8 else []
            for change in ({}, *OTHERS, *ranked):
                yield f"n={n}{_named(change)}", replace(self.params(n), **change)

    def check_result(self, n: int, ends: Sequence[BranchEnd], got: Sequence[int]) -> None:
        """Sample numbers of ended branches, at least one, none twice."""
        ids = list(got)
        assert ids, f"result() gave nothing for n={n}: a request has at least one output"
        unknown = [i for i in ids if i not in {e.sample for e in ends}]
        assert not unknown, f"result() gave the samples {unknown}, and those that ended are {[e.sample for e in ends]}"
        assert len(set(ids)) == len(ids), f"result() gave a sample twice: {ids}"

    @since(1, 0)
    def test_a_request_of_n_has_n_branches_numbered_from_0(self) -> None:
        """What it takes it serves: n outputs were asked for (``params.width``: or more branches, by ``best_of`` or
        ``beam_width``), the text side and the KV cache keep room for just so many, and branches of equal numbers would
        draw the same tokens."""
        strategy = self.build()
        assert strategy.mode in ("free", "stepwise"), f"mode={strategy.mode!r}: want 'free' or 'stepwise'"
        self.widths()  # it takes some
        for what, params in self.variants():
            if not strategy.takes(params):
                continue
            try:
                made = list(strategy.start(params))
            except RequestError as e:
                pytest.fail(f"takes() is true for {what}, and start() refuses it ({e}): say so in takes()")
            assert all(isinstance(b, Branch) for b in made), f"start() gave {made}: want Branch objects"
            samples, want = [b.sample for b in made], list(range(params.width))
            assert samples == want, f"{what}: the branches have the samples {samples}, want {want}"

    @since(1, 4)
    def test_a_guide_has_a_scale_and_token_ids(self) -> None:
        """And names the parameter that asks for it.  Of a free strategy's request each branch has one, or none has:
        branches without one share the blocks of their prompt, and those of a search are asked after each step."""
        strategy = self.build()
        for what, params in self.variants():
            made = list(strategy.start(params)) if strategy.takes(params) else []
            guides = [b.guide for b in made if b.guide is not None]
            assert len(guides) in (0, len(made)), f"{what}: {len(guides)} of {len(made)} branches have a guide"
            assert not guides or strategy.mode == "free", f"{what}: guides of a {strategy.mode} strategy"
            for guide in guides:
                assert isinstance(guide, Guide), f"{what}: guide={guide!r}: want a Guide"
                number = isinstance(guide.scale, (int, float)) and math.isfinite(guide.scale)
                assert number, f"{what}: a guide has scale={guide.scale!r}: want a finite number"
                whole = all(isinstance(i, int) and i >= 0 for i in guide.prompt)
                assert whole, f"{what}: a guide has prompt={guide.prompt!r}: want token ids"
                assert guide.param in (*strategy.reads, "prompt"), f"{what}: param={guide.param!r}: want one it reads"

    @since(1, 4)
    def test_rows_and_guides_are_preempted_and_come_back(self) -> None:
        """On the simulated device, in little memory: the tokens are those that there are alone, for whoever has a guide
        and whoever has none."""
        strategy = self.free()
        params = self.params(1)
        if not strategy.takes(params) or next(iter(strategy.start(params))).guide is None:
            pytest.skip("its branches have no guides")
        plain = SamplingParams(max_tokens=9, ignore_eos=True)
        engine = sim_engine(slots=9, blocks=24, depth=1, strategy=strategy, budget=16)
        engine.strategies = [*engine.strategies, *PLAIN]
        made = []
        for i in range(12):
            values = {
                k: v for k, v in vars(params if i % 3 else plain).items() if v != getattr(SamplingParams, k, None)
            }
            made.append(request(engine, f"r{i}", [i, 7, 9, 3 + i] * (1 + i % 2), **{**values, "max_tokens": 9 + i % 4}))
        run(engine, check=True)
        at_rest(engine)
        assert engine.planner.preemptions, "nobody was preempted"
        for r in made:
            branch = next(iter(self.build().start(r.params))) if self.build().takes(r.params) else Branch(0)
            guide = branch.guide
            want = answer(r.prompt, r.params) if guide is None else guided_answer(r.prompt, guide, r.params)
            assert outputs(r) == [want], f"{r.id} with the guide {guide}: {outputs(r)}; alone {want}"

    @since(1, 0)
    def test_it_declares_the_parameters_that_it_reads(self) -> None:
        """``reads`` names ``best_of``, ``beam_width`` or own names in ``extra``.  What it looks for in ``extra`` and
        does not name there no request can bring: the engine refuses it."""
        reads = self.build().reads
        assert isinstance(reads, (set, frozenset)), f"reads is {reads!r}: want a frozenset of names"
        served = [name for name in sorted(reads) if name in NAMES and name not in BRANCHING]
        assert not served, f"reads names {served}: of the fields of SamplingParams want {' or '.join(BRANCHING)}"
        for what, params in self.variants():
            extra = Noted(params.extra)
            self._decide(replace(params, extra=extra))
            hidden = sorted((extra.names | params.extra.keys()) - reads)
            assert not hidden, (
                f"{what}: it looks for {', '.join(hidden)} in extra, which `reads` does not name: a request that sets "
                f"it is refused; say reads = frozenset({{{', '.join(map(repr, hidden))}}})"
            )

    @since(1, 3)
    def test_its_spec_declares_the_parameters_that_are_its_own(self) -> None:
        """With kind, range and meaning; what is in ``reads`` beside ``best_of`` and ``beam_width`` is declared, and
        what is declared is in ``reads``."""
        self.check_declarations(self.build().reads)

    @since(1, 3)
    def test_it_looks_for_every_parameter_that_it_declares(self) -> None:
        """A request that sets one reaches the strategy, which must not ignore it."""
        self.check_looked_for([params for _, params in self.variants()], self._decide)

    def _decide(self, params: SamplingParams) -> None:
        """Ask a new strategy all that a request is asked."""
        strategy = self.build()
        if not strategy.takes(params):
            return
        branches = list(strategy.start(params))
        strategy.topk(params)
        if strategy.mode == "stepwise":
            strategy.search(params, 4)
        else:
            strategy.result(params, [BranchEnd(b.sample, 3, -1.0, "stop") for b in branches])

    @since(1, 0)
    def test_takes_answers_for_any_request(self) -> None:
        """The engine asks every strategy in the config, also about requests that are for another one, which set none of
        the parameters that this one may want."""
        strategy = self.build()
        for n in WIDTHS:
            for change in ({}, *OTHERS):
                params = SamplingParams(n=n, **change)
                try:
                    strategy.takes(params)
                except Exception as e:
                    pytest.fail(f"takes() raised {type(e).__name__}: {e} for n={n}{_named(change)}")

    @since(1, 0)
    def test_what_it_does_not_take_it_refuses_by_name(self) -> None:
        """``start`` of a request that is not its own raises RequestError, and ``param`` names what does not fit."""
        strategy = self.build()
        others = [(what, params) for what, params in self.variants() if not strategy.takes(params)]
        if not others:
            pytest.skip("takes every request")
        for what, params in others:
            with pytest.raises(RequestError) as e:
                pytest.fail(f"takes() is false for {what}, and start() gives {list(strategy.start(params))}")
            known = [*NAMES, *params.extra]
            assert e.value.param in known, f"param={e.value.param!r} of the RequestError: want the name of a parameter"
            assert e.value.param in str(e.value), f"{str(e.value)!r} does not name {e.value.param}"

    @since(1, 0)
    def test_the_answer_has_the_order_of_the_reference(self) -> None:
        """Best first by the author's own definition, ``reference``; where branches are equal, any order of them."""
        self.free()
        seen = Seen()

        @self.for_all(100, st.data())
        def ordered(data: Any) -> None:
            n = data.draw(st.sampled_from([n for n in self.widths() if n <= 8]))
            more = {"best_of": n + 2} if "best_of" in self.build().reads and data.draw(st.booleans()) else {}
            params, strategy = replace(self.params(n), **more), self.build()
            ends = [
                replace(e, finish_reason="stop" if e.length % 2 else "length", cumulative_logprob=float(score))
                for e in data.draw(ended(n + 2 if more else n))
                for score in [data.draw(st.sampled_from([0.0, -0.5, -1.5, -1.5, -80.0]))]
            ]
            want = self.reference(params, ends)
            if want is None:
                return
            seen["ordered"] += 1
            got, by = list(strategy.result(params, ends)), {e.sample: e for e in ends}
            rank = lambda ids: [(by[i].length, by[i].cumulative_logprob, by[i].finish_reason) for i in ids]  # noqa: E731
            same = got == list(want) or [r[1] for r in rank(got)] == [r[1] for r in rank(want)]
            assert same, f"of {ends} the answer is {got}: the reference says {list(want)}"

        if not seen["ordered"]:
            pytest.skip("reference() leaves the order open: override it in a test class")

    @since(1, 0)
    def test_the_answer_is_made_of_branches_that_ended(self) -> None:
        """Some or all of them, each once, best first, however they ended; the same ends give the same answer, in
        another instance too."""
        self.free()
        seen, widths = Seen(), [n for n in self.widths() if n <= 8]

        @self.for_all(150, st.data())
        def answers(data: Any) -> None:
            n = data.draw(st.sampled_from(widths))
            ends, params, strategy = data.draw(ended(n)), self.params(n), self.build()
            first = list(strategy.result(params, ends))
            self.check_result(n, ends, first)
            for again in (strategy, self.build()):
                second = list(again.result(params, list(ends)))
                assert second == first, f"the same {n} ends gave {first}, and then {second}"
            shuffled = data.draw(st.permutations(ends))
            self.check_result(n, ends, strategy.result(params, shuffled))
            seen["several"] += n > 1
            seen["failed"] += any(e.finish_reason == "error" for e in ends)
            seen["ties"] += len({(e.length, e.cumulative_logprob) for e in ends}) < n

        seen.require(failed=10, **({"several": 20, "ties": 10} if max(widths) > 1 else {}))

    @since(1, 0)
    def test_wide_requests_are_answered_as_narrow_ones(self) -> None:
        """Up to 128 branches: each ended one at most once, and all of them if of 2, 3, 5 and 8 all are given."""
        strategy = self.free()
        ends = lambda n: [BranchEnd(i, 3 + i % 5, -float(i * 37 % 101), "stop") for i in range(n)]  # noqa: E731
        taken = [n for n in (2, 3, 5, 8, 16, 31, 33, 63, 64, 65, 100, 127, 128) if strategy.takes(self.params(n))]
        given = {}
        for n in taken:
            got = list(strategy.result(self.params(n), ends(n)))
            self.check_result(n, ends(n), got)
            given[n] = len(got)
        if all(given[n] == n for n in taken if n <= 8) and any(n <= 8 for n in taken):
            few = {n: m for n, m in given.items() if m < n}
            assert not few, f"of 2, 3, 5 and 8 branches it gives all, and fewer of {few} (branches: given)"

    @since(1, 0)
    def test_a_request_that_has_gone_is_forgotten(self) -> None:
        """Another one may lie where it lay: nothing is known by ``id()``."""
        strategy, widths = self.build(), self.widths()
        for i in range(60):
            n = widths[i * 7 % len(widths)]
            params = self.params(n)
            got, want = list(strategy.start(params)), list(self.build().start(params))
            assert got == want, f"n={n}: start() gives {got[:9]} after {i} other requests, {want[:9]} in a new instance"
            del params

    @since(1, 0)
    def test_requests_know_nothing_of_each_other(self) -> None:
        """One instance serves all requests, whose starts and ends come in any order; each gets what it gets alone."""
        self.free()
        widths = [n for n in self.widths() if n <= 8]

        @self.for_all(50, st.lists(st.sampled_from(widths), min_size=2, max_size=5), st.data())
        def interleaved(ns: list[int], data: Any) -> None:
            params = [self.params(n) for n in ns]
            ends = [data.draw(ended(n)) for n in ns]
            alone = [
                (list(self.build().start(p)), list(self.build().result(p, e)))
                for p, e in zip(params, ends, strict=True)
            ]
            shared = self.build()
            starts = [list(shared.start(p)) for p in params]
            order = data.draw(st.permutations(range(len(ns))))
            results = {i: list(shared.result(params[i], ends[i])) for i in order}
            for i, (branches, result) in enumerate(alone):
                assert starts[i] == branches, f"request {i} of n={ns}: {starts[i]} beside others, {branches} alone"
                assert results[i] == result, f"request {i} of n={ns}: {results[i]} beside others, {result} alone"

    @since(1, 0)
    def test_the_parameters_of_a_request_stay_as_they_are(self) -> None:
        """They are the caller's, who may use them for the next request."""
        strategy = self.build()
        for n in self.widths():
            params = self.params(n)
            before = copy.deepcopy(vars(params))
            strategy.takes(params)
            strategy.start(params)
            strategy.topk(params)
            if strategy.mode == "stepwise":
                self.drive(strategy, params, [1, 2]).run()
            else:
                strategy.result(params, [BranchEnd(i, 3, -1.0, "stop") for i in range(n)])
            changed = {k: v for k, v in vars(params).items() if v != before.get(k)}
            assert not changed and vars(params).keys() == before.keys(), f"n={n}: it changed {changed or 'a field'}"

    @since(1, 0)
    def test_the_engine_serves_it(self) -> None:
        """On the simulated device: several requests at once, each branch with the tokens of its own sample."""
        self.free()
        engine = sim_engine(slots=8, blocks=200, depth=1, strategy=self.build(), reads=PROCESSED)
        made = []
        for i, n in enumerate([n for n in self.widths() if n <= 8] * 3):
            values = {k: v for k, v in vars(self.params(n)).items() if v != getattr(SamplingParams, k, None)}
            made.append(request(engine, f"r{i}", [i, 7, 9, 3 + i], **values))
        gone = made[-1]
        for _ in range(3):
            engine.step()
        engine.abort(gone.id)
        run(engine, check=True)
        at_rest(engine)
        for r in made:
            guide = next(iter(self.build().start(r.params))).guide
            want = {i: answer(r.prompt, r.params, i) for i in range(r.params.n)}
            want = want if guide is None else dict.fromkeys(want, guided_answer(r.prompt, guide, r.params))
            by_sample = dict(zip([s.sample for s in r.sequences], outputs(r), strict=True))
            if r is not gone:
                assert by_sample == want, f"{r.id} n={r.params.n}"
            ends = [BranchEnd(s.sample, 0, None, s.finish_reason or "") for s in r.sequences]
            self.check_result(r.params.n, ends, [s.sample for s in engine.answer(r)])
