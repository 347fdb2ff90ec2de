"""The conformance suite of decoding strategies: how many branches a request has, and which of them are its answer."""

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
from .strategy_steps import StepwiseConformance, changed_fields
from .verdict import NO_VALUES

WIDTHS = (1, 2, 3, 5, 8, 128)
NARROW = 8  # most branches in tests that draw examples
PLAIN = [("minivllm/single", Single())]  # the strategy of requests that set no parameter of another strategy
NAMES = [f.name for f in fields(SamplingParams)]
BRANCHING = ("best_of", "beam_width")  # standard request fields that a strategy may read
OTHERS = ({"temperature": 0.0}, {"seed": 0}, {"seed": 7}, {"logprobs": 1}, {"max_tokens": None})


@st.composite
def ended(draw: Any, n: int) -> list[BranchEnd]:
    """Draw how n branches have ended; few different values, so that ties are common."""
    scored = draw(st.booleans())
    if scored:
        score = st.sampled_from([0.0, -1.5, -1.5, -80.0])
    else:
        score = st.none()
    why = st.sampled_from(["stop", "length", "abort", "error"])
    ends = []
    for i in range(n):
        length = draw(st.integers(0, 3))
        ends.append(BranchEnd(i, length, draw(score), draw(why)))
    return ends


def _named(change: Mapping[str, Any]) -> str:
    return "".join(f", {k}={v}" for k, v in change.items())


class StrategyConformance(Declaring, Lasting, StepwiseConformance):
    """The conformance suite of decoding strategies.

    Override ``params`` if the strategy takes only requests of a certain kind.  A strategy with ``mode = "stepwise"``
    has no ``result``; the tests call the objects that its ``search`` returns.
    """

    kind = "strategy"

    def context(self) -> tuple[Any, ...]:
        return ()

    def params(self, n: int) -> SamplingParams:
        """Return a request for n outputs that the strategy takes.

        It has ``beam_width=n`` if the strategy reads that.  If the strategy takes no request without the parameters
        that its spec declares, they have other values than their defaults.  Lists, dicts and free texts keep their
        defaults, because the kit knows no values of them.
        """
        strategy = self.build()
        if "beam_width" in strategy.reads:
            wide = {"beam_width": n}
        else:
            wide = {}
        plain = SamplingParams(n=n, max_tokens=6, ignore_eos=True, **wide)
        if not self.spec.params or strategy.takes(replace(plain, n=1)):
            return plain
        extra = {}
        for param in self.spec.params:
            values = list(values_of_own(param))
            if values and (param.kind in (bool, int, float) or param.choices):
                extra[param.name] = values[-1]
        return replace(plain, extra=extra)

    def reference(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int] | None:
        """Return the sample numbers of the expected answer, best first; None leaves the order open.

        The default is the ``n`` likeliest of ``best_of`` branches that ended without error, if the strategy reads
        ``best_of`` and the request sets it.  An override for another order should not use the strategy's own code.
        """
        if "best_of" not in self.build().reads or params.best_of is None or params.best_of == params.n:
            return None
        if any(e.cumulative_logprob is None or e.finish_reason in ("abort", "error") for e in ends):
            return None
        likeliest = sorted(ends, key=lambda e: (-float(e.cumulative_logprob or 0.0), e.sample))
        return [e.sample for e in likeliest[: params.n]]

    def free(self) -> DecodingStrategy:
        """Return a new strategy; skip the test if its mode is "stepwise"."""
        strategy = self.build()
        if strategy.mode == "stepwise":
            pytest.skip("it is stepwise: its searches return the answer")
        return strategy

    def exercise(self, instance: DecodingStrategy) -> Any:
        if instance.mode == "stepwise":
            searches = [self.drive(instance, self.params(n), [n, 1]) for n in (1, 2, 5)]
            return [search.run() for search in searches]
        found = []
        for params in (self.params(n) for n in WIDTHS):
            if instance.takes(params):
                ends = []
                for i in range(params.n):
                    ends.append(BranchEnd(i, 3 + i % 2, -float(i % 3), "stop"))
                samples = [b.sample for b in instance.start(params)]
                found.append((samples, list(instance.result(params, ends))))
        return found

    def once_more(self, instance: DecodingStrategy, number: int) -> None:
        """Serve a request whose seed, length and number of branches depend on ``number``."""
        n = 1 + number % 3
        params = replace(self.params(n), seed=number, max_tokens=6 + number)
        if instance.mode == "stepwise":
            self.drive(instance, params, [n, 1]).run()
        elif instance.takes(params):
            branches = instance.start(params)
            ends = [BranchEnd(b.sample, 3, -1.0 - number, "stop") for b in branches]
            instance.result(params, ends)

    def widths(self) -> list[int]:
        """Return the numbers of outputs among ``WIDTHS`` that the strategy takes."""
        strategy = self.build()
        taken = [n for n in WIDTHS if strategy.takes(self.params(n))]
        if not taken and self.spec.params:
            pytest.skip(f"{NO_VALUES} of {', '.join(sorted(self.spec.reads))} that takes() accepts: override params()")
        assert taken, f"takes() is false for n={', '.join(map(str, WIDTHS))}: override params() if it needs more"
        return taken

    def _narrow(self) -> list[int]:
        return [n for n in self.widths() if n <= NARROW]

    def variants(self) -> Iterator[tuple[str, SamplingParams]]:
        """Yield (name, request) for every number of outputs, and with other values of common parameters."""
        for n in WIDTHS:
            if "best_of" in self.build().reads and n <= NARROW:
                ranked = [{"best_of": n + 2}]
            else:
                ranked = []
            for change in ({}, *OTHERS, *ranked):
                yield f"n={n}{_named(change)}", replace(self.params(n), **change)

    def check_result(self, n: int, ends: Sequence[BranchEnd], got: Sequence[int]) -> None:
        """Fail unless a result names at least one of the branches that ended, and no branch twice."""
        ids = list(got)
        known = [e.sample for e in ends]
        assert ids, f"result() returned nothing for n={n}: a request has at least one output"
        unknown = [i for i in ids if i not in known]
        assert not unknown, f"result() returned the samples {unknown}, and the ended branches are {known}"
        assert len(set(ids)) == len(ids), f"result() returned a sample twice: {ids}"

    @since(1, 0)
    def test_a_request_of_n_has_n_branches_numbered_from_0(self) -> None:
        """Check that ``start`` returns ``params.width`` branches: n, or more by ``best_of`` or ``beam_width``.

        The frontend and the KV cache reserve room for exactly this number, and branches with equal numbers would draw
        the same tokens.
        """
        strategy = self.build()
        assert strategy.mode in ("free", "stepwise"), f"mode={strategy.mode!r}: expected 'free' or 'stepwise'"
        self.widths()  # raises an error if the strategy accepts no number of outputs
        for name, params in self.variants():
            if not strategy.takes(params):
                continue
            try:
                branches = list(strategy.start(params))
            except RequestError as e:
                pytest.fail(f"takes() is true for {name}, and start() refuses it ({e}): return False in takes()")
            assert all(isinstance(b, Branch) for b in branches), f"start() returned {branches}: expected Branch objects"
            samples = [b.sample for b in branches]
            want = list(range(params.width))
            assert samples == want, f"{name}: the branches have the samples {samples}, expected {want}"

    @since(1, 4)
    def test_a_guide_has_a_scale_and_token_ids(self) -> None:
        """Check guides (second prompts that change the logits of branches) and the parameter that turns them on.

        Either all branches of a request have a guide or none has, because branches without a guide share the blocks of
        their prompt.  Only a strategy that is not stepwise may have guides.
        """
        strategy = self.build()
        for name, params in self.variants():
            if strategy.takes(params):
                branches = list(strategy.start(params))
            else:
                branches = []
            guides = [b.guide for b in branches if b.guide is not None]
            assert len(guides) in (0, len(branches)), f"{name}: {len(guides)} of {len(branches)} branches have a guide"
            assert not guides or strategy.mode == "free", f"{name}: guides of a {strategy.mode} strategy"
            for guide in guides:
                assert isinstance(guide, Guide), f"{name}: guide={guide!r}: expected a Guide"
                number = isinstance(guide.scale, (int, float)) and math.isfinite(guide.scale)
                assert number, f"{name}: a guide has scale={guide.scale!r}: expected a finite number"
                whole = all(isinstance(i, int) and i >= 0 for i in guide.prompt)
                assert whole, f"{name}: a guide has prompt={guide.prompt!r}: expected token ids"
                known = guide.param in (*strategy.reads, "prompt")
                assert known, f"{name}: param={guide.param!r}: expected a parameter in reads"

    def _guide(self, params: SamplingParams) -> Guide | None:
        """Return the guide of a request; None if it has none or another strategy serves it."""
        strategy = self.build()
        if strategy.takes(params):
            return next(iter(strategy.start(params))).guide
        return None

    @since(1, 4)
    def test_rows_and_guides_are_preempted_and_come_back(self) -> None:
        """Check requests with and without guides, with so little memory that rows are preempted.

        On the simulated device their tokens are the same as alone.
        """
        strategy = self.free()
        params = self.params(1)
        if self._guide(params) is None:
            pytest.skip("its branches have no guides")
        plain = SamplingParams(max_tokens=9, ignore_eos=True)
        engine = sim_engine(slots=9, blocks=24, depth=1, strategy=strategy, budget=16)
        engine.strategies = [*engine.strategies, *PLAIN]
        requests = []
        for i in range(12):
            values = {**changed_fields(params if i % 3 else plain), "max_tokens": 9 + i % 4}
            prompt = [i, 7, 9, 3 + i] * (1 + i % 2)
            requests.append(request(engine, f"r{i}", prompt, **values))
        run(engine, check=True)
        at_rest(engine)
        assert engine.planner.preemptions, "no row was preempted"
        for r in requests:
            guide = self._guide(r.params)
            if guide is None:
                want = answer(r.prompt, r.params)
            else:
                want = guided_answer(r.prompt, guide, r.params)
            assert outputs(r) == [want], f"{r.id} with the guide {guide}: {outputs(r)}; alone {want}"

    @since(1, 0)
    def test_it_declares_the_parameters_that_it_reads(self) -> None:
        """Check that ``reads`` names ``best_of``, ``beam_width`` or own names in ``extra``.

        The engine refuses a request that sets a name outside of ``reads``, so the strategy may look up no other name
        in ``extra``.
        """
        reads = self.build().reads
        assert isinstance(reads, (set, frozenset)), f"reads is {reads!r}: expected a frozenset of names"
        served = [name for name in sorted(reads) if name in NAMES and name not in BRANCHING]
        assert not served, f"reads names {served}: of the fields of SamplingParams expected {' or '.join(BRANCHING)}"
        for name, params in self.variants():
            extra = Noted(params.extra)
            self._decide(replace(params, extra=extra))
            hidden = sorted((extra.names | params.extra.keys()) - reads)
            assert not hidden, (
                f"{name}: it looks up {', '.join(hidden)} in extra, which `reads` does not name: a request that sets "
                f"it is refused; write reads = frozenset({{{', '.join(map(repr, hidden))}}})"
            )

    @since(1, 3)
    def test_its_spec_declares_the_parameters_that_are_its_own(self) -> None:
        """Check that the spec declares each own parameter in ``reads`` with type, range and summary, and no others.

        ``best_of`` and ``beam_width`` are not declared.
        """
        self.check_declarations(self.build().reads)

    @since(1, 3)
    def test_it_looks_for_every_parameter_that_it_declares(self) -> None:
        """Check that the strategy looks up each parameter that its spec declares.

        Otherwise the parameter of a request would be ignored.
        """
        requests = [params for _, params in self.variants()]
        self.check_looked_for(requests, self._decide)

    def _decide(self, params: SamplingParams) -> None:
        """Call all methods of a new strategy for a request."""
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
        """Check that ``takes`` raises no error for any request.

        The engine calls it on every configured strategy, also for requests of other strategies, which set none of its
        parameters.
        """
        strategy = self.build()
        for n in WIDTHS:
            for change in ({}, *OTHERS):
                try:
                    strategy.takes(SamplingParams(n=n, **change))
                except Exception as e:
                    pytest.fail(f"takes() raised {type(e).__name__}: {e} for n={n}{_named(change)}")

    @since(1, 0)
    def test_what_it_does_not_take_it_refuses_by_name(self) -> None:
        """Check that ``start`` refuses a request that the strategy does not take.

        It raises a RequestError whose ``param`` names the wrong parameter.
        """
        strategy = self.build()
        others = [(name, params) for name, params in self.variants() if not strategy.takes(params)]
        if not others:
            pytest.skip("takes every request")
        for name, params in others:
            with pytest.raises(RequestError) as e:
                branches = list(strategy.start(params))
                pytest.fail(f"takes() is false for {name}, and start() returns {branches}: raise a RequestError there")
            known = e.value.param in [*NAMES, *strategy.reads]
            assert known, f"param={e.value.param!r} of the RequestError: expected the name of a parameter"
            assert e.value.param in str(e.value), f"{str(e.value)!r} does not name {e.value.param}"

    @since(1, 0)
    def test_the_answer_has_the_order_of_the_reference(self) -> None:
        """Check that the answer has the order of ``reference``, best first; equal branches may have any order."""
        self.free()
        seen = Seen()

        @self.for_all(100, st.data())
        def ordered(data: Any) -> None:
            n = data.draw(st.sampled_from(self._narrow()))
            if "best_of" in self.build().reads and data.draw(st.booleans()):
                more = {"best_of": n + 2}
            else:
                more = {}
            params = replace(self.params(n), **more)
            ends = []
            for e in data.draw(ended(n + 2 if more else n)):
                score = data.draw(st.sampled_from([0.0, -0.5, -1.5, -1.5, -80.0]))
                reason = "stop" if e.length % 2 else "length"
                ends.append(replace(e, finish_reason=reason, cumulative_logprob=score))
            want = self.reference(params, ends)
            if want is None:
                return
            seen["ordered"] += 1
            got = list(self.build().result(params, ends))
            scores = {e.sample: e.cumulative_logprob for e in ends}
            same = got == list(want) or [scores[i] for i in got] == [scores[i] for i in want]
            assert same, f"for {ends} the answer is {got}: the reference is {list(want)}"

        if not seen["ordered"]:
            pytest.skip("reference() leaves the order open: override it in a test class")

    @since(1, 0)
    def test_the_answer_is_made_of_branches_that_ended(self) -> None:
        """Check that the answer has some or all ended branches, each once, however they ended.

        The same ends always have the same answer, in another instance too.
        """
        self.free()
        seen = Seen()
        widths = self._narrow()

        @self.for_all(150, st.data())
        def answers(data: Any) -> None:
            n = data.draw(st.sampled_from(widths))
            ends = data.draw(ended(n))
            params = self.params(n)
            strategy = self.build()
            first = list(strategy.result(params, ends))
            self.check_result(n, ends, first)
            for instance in (strategy, self.build()):
                again = list(instance.result(params, list(ends)))
                assert again == first, f"the same {n} ends gave {first}, and then {again}"
            shuffled = data.draw(st.permutations(ends))
            self.check_result(n, ends, strategy.result(params, shuffled))
            seen["several"] += n > 1
            seen["failed"] += any(e.finish_reason == "error" for e in ends)
            seen["ties"] += len({(e.length, e.cumulative_logprob) for e in ends}) < n

        self.meet(seen, failed=10, **({"several": 20, "ties": 10} if max(widths) > 1 else {}))

    @since(1, 0)
    def test_wide_requests_are_answered_as_narrow_ones(self) -> None:
        """Check up to 128 branches: each ended branch is in the answer at most once.

        All of them are in the answer if that holds for 2, 3, 5 and 8 branches.
        """
        strategy = self.free()
        lengths = {}
        for n in (2, 3, 5, 8, 16, 31, 33, 63, 64, 65, 100, 127, 128):
            if strategy.takes(self.params(n)):
                ends = []
                for i in range(n):
                    ends.append(BranchEnd(i, 3 + i % 5, -float(i * 37 % 101), "stop"))
                got = list(strategy.result(self.params(n), ends))
                self.check_result(n, ends, got)
                lengths[n] = len(got)
        narrow = [n for n in lengths if n <= NARROW]
        if narrow and all(lengths[n] == n for n in narrow):
            fewer = {n: m for n, m in lengths.items() if m < n}
            assert not fewer, f"of 2, 3, 5 and 8 branches all are in the answer, but not of {fewer} (branches: answer)"

    @since(1, 0)
    def test_a_request_that_has_gone_is_forgotten(self) -> None:
        """Check that a strategy stores nothing by ``id()``: a new request may have an earlier one's address."""
        strategy = self.build()
        widths = self.widths()
        for i in range(60):
            n = widths[i * 7 % len(widths)]
            params = self.params(n)
            got = list(strategy.start(params))
            want = list(self.build().start(params))
            assert got == want, f"n={n}: start() returns {got[:9]} after {i} other requests, {want[:9]} when new"
            del params

    @since(1, 0)
    def test_requests_know_nothing_of_each_other(self) -> None:
        """Check that one instance gives each of several requests the same answer as alone.

        The requests start and end in any order.
        """
        self.free()
        widths = self._narrow()

        @self.for_all(50, st.lists(st.sampled_from(widths), min_size=2, max_size=5), st.data())
        def interleaved(ns: list[int], data: Any) -> None:
            params = [self.params(n) for n in ns]
            ends = [data.draw(ended(n)) for n in ns]
            shared = self.build()
            starts = [list(shared.start(p)) for p in params]
            order = data.draw(st.permutations(range(len(ns))))
            results = {i: list(shared.result(params[i], ends[i])) for i in order}
            for i in range(len(ns)):
                branches = list(self.build().start(params[i]))
                result = list(self.build().result(params[i], ends[i]))
                assert starts[i] == branches, f"request {i} of n={ns}: {starts[i]} beside others, {branches} alone"
                assert results[i] == result, f"request {i} of n={ns}: {results[i]} beside others, {result} alone"

    @since(1, 0)
    def test_the_parameters_of_a_request_stay_as_they_are(self) -> None:
        """Check that the strategy does not change the parameters of a request, which the caller may use again."""
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
            changed = {}
            for k, v in vars(params).items():
                if v != before.get(k):
                    changed[k] = v
            assert not changed and vars(params).keys() == before.keys(), f"n={n}: it changed {changed or 'a field'}"

    @since(1, 0)
    def test_the_engine_serves_it(self) -> None:
        """Check several concurrent requests on the simulated device.

        Each branch has the tokens of its sample number, and an aborted request has an answer too.
        """
        self.free()
        engine = sim_engine(slots=8, blocks=200, depth=1, strategy=self.build(), reads=PROCESSED)
        requests = []
        for i, n in enumerate(self._narrow() * 3):
            fields = changed_fields(self.params(n))
            requests.append(request(engine, f"r{i}", [i, 7, 9, 3 + i], **fields))
        aborted = requests[-1]
        for _ in range(3):
            engine.step()
        engine.abort(aborted.id)
        run(engine, check=True)
        at_rest(engine)
        for r in requests:
            if r is not aborted:
                guide = self._guide(r.params)
                samples = [s.sample for s in r.sequences]
                found = dict(zip(samples, outputs(r), strict=True))
                want = {}
                for i in range(r.params.n):
                    if guide is None:
                        want[i] = answer(r.prompt, r.params, i)
                    else:
                        want[i] = guided_answer(r.prompt, guide, r.params)
                assert found == want, f"{r.id} n={r.params.n}"
            ends = []
            for s in r.sequences:
                ends.append(BranchEnd(s.sample, 0, None, s.finish_reason or ""))
            got = [s.sample for s in engine.answer(r)]
            self.check_result(r.params.n, ends, got)
