"""Return values of schedulers, evictors and strategies.  A wrong value fails with the name of the plug-in."""

from __future__ import annotations

import numpy as np
import pytest
from callback_helpers import NAN, Odd

from minivllm import PluginError, RequestError
from minivllm.core.interfaces.scheduler import StepShape
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Moves, Pick, Search
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.testing.sim import VOCAB, answer, at_rest, outputs, request, run, sim_engine

# ---- schedulers ------------------------------------------------------------------------------------------------------

NUMBERS = [
    None,
    "1",
    [],
    np.empty(0),
    np.zeros(2),
    np.zeros((1, 1)),
    [None],
    ["1"],
    [NAN],
    NAN,
    [1j],
    [True],
    Odd(),
    {},
]
WRONG_POLICIES = {
    "key": NUMBERS,
    "lane": [*NUMBERS, [1.0], [0.5], 0],
    "order": [
        None, 5, NAN, [9], [-1], [0.0], [True], ["0"], [None], [NAN], np.array([0.0]), [0] * 9, np.zeros((1, 2)), Odd(),
    ],
    "shape": [
        None, 5, "mix", StepShape("other"), StepShape(None), StepShape(prefill_cap=-1), StepShape(prefill_cap=NAN),
        StepShape(prefill_cap="3"), StepShape(prefill_cap=float("inf")), StepShape(hold_until=NAN), StepShape([]),
        StepShape(hold_until=None), StepShape(hold_until="soon"), StepShape(prefill_cap=True), Odd(),
    ],
    "victim": [None, -1, 99, 0.0, 1.5, NAN, True, "0", [0, 1], np.array([0, 1]), np.float64(0), 2**70, Odd()],
}  # fmt: skip


class Policy(Fcfs):
    wrong: dict = {}

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.left = dict.fromkeys(self.wrong, self.times)

    def _answer(self, name, right):
        if not self.left.get(name):
            return right
        self.left[name] -= 1
        return self.wrong[name]

    def key(self, new):
        return self._answer("key", super().key(new))

    def lane(self, new):
        return self._answer("lane", super().lane(new))

    def order(self, head, running, now):
        return self._answer("order", super().order(head, running, now))

    def shape(self, load, now):
        return self._answer("shape", StepShape())

    def victim(self, candidates, need):
        return self._answer("victim", super().victim(candidates, need))


POLICIES = [(where, value) for where, values in WRONG_POLICIES.items() for value in values]


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_wrong_answer_of_a_policy_costs_a_turn_and_three_in_a_row_end_the_engine_by_its_name(times):
    for where, value in POLICIES:
        policy = type("Policy", (Policy,), {"wrong": {where: value}, "times": times})
        engine, made, refused = sim_engine(policy=policy, blocks=16, slots=4), [], 0
        for i in range(8):
            try:
                made.append(request(engine, f"r{i}", range(i, i + 9), max_tokens=20, ignore_eos=True))
            except RequestError as e:
                assert where in ("key", "lane") and "scheduler Policy failed on this request: " in str(e)
                refused += 1
        for _ in range(2000):
            if engine.dead or not engine.busy:
                break
            engine.step()
        if times == 1 or where in ("key", "lane"):
            assert engine.dead is None and refused == (min(times, 8) if where in ("key", "lane") else 0)
            assert all(outputs(r) == [answer(r.prompt, r.params)] for r in made), (where, refused)
            at_rest(engine)
        else:
            assert "planning failed (Policy): " in engine.dead, engine.dead
            assert f"{where}() gave" in engine.dead or isinstance(value, Odd), engine.dead
            assert all(r.done and r.finished for r in made)


@pytest.mark.parametrize("window", [0, -1, None, 2.5, "256"])
def test_a_policy_that_would_be_shown_nobody_is_refused_at_start(window):
    with pytest.raises(PluginError, match="Narrow: its window is"):
        sim_engine(policy=type("Narrow", (Fcfs,), {"window": window}))


# ---- evictors --------------------------------------------------------------------------------------------------------

WRONG_VICTIMS = [
    lambda keys: None, lambda keys: keys[:-1], lambda keys: [*keys, 1], lambda keys: keys[::-1] * 0, lambda keys: [NAN],
    lambda keys: keys + np.uint64(1), lambda keys: [-1] * len(keys), lambda keys: "x",
    lambda keys: [keys[0]] * (len(keys) + 1), lambda keys: [None] * len(keys), lambda keys: Odd(), lambda keys: 5,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_VICTIMS)
def test_wrong_victims_end_the_engine_by_the_evictors_name_and_everyone_is_told(wrong):
    bad = type("Bad", (Lru,), {"victims": lambda self, n: wrong(Lru.victims(self, n))})
    engine = sim_engine(evictor=bad, blocks=14, slots=3)
    made = [request(engine, f"r{i}", range(i, i + 17), max_tokens=12, ignore_eos=True) for i in range(12)]
    run(engine)
    assert engine.dead.startswith("evictor Bad ") and all(r.done for r in made)


# ---- strategies ------------------------------------------------------------------------------------------------------


class Strategy(Parallel):
    wrong: dict = {}

    def _answer(self, name, right, params):
        return self.wrong[name] if name in self.wrong and params.tenant == "bad" else right

    def topk(self, params):
        return self._answer("topk", super().topk(params), params)

    def start(self, params):
        return self._answer("start", super().start(params), params)

    def result(self, params, ends):
        return self._answer("result", super().result(params, ends), params)


SAMPLES = [
    None, 5, [], "01", [None], [NAN], [0.0, 1.0], [0, 0], [0, 9], [-1, 0], [True, False], ["0", "1"], [2**70], Odd(),
    [0, 1, 2], np.array([0.0, 1.0]), [[0, 1]],
]  # fmt: skip
WRONG_STRATEGIES = [
    *(("topk", value) for value in (None, "1", 1.5, NAN, -2, 2**40, [1], True, Odd())),
    *(("start", value) for value in (*SAMPLES, (0, 1), [Branch(0), Branch(0)], [Branch(0), Branch(2)], [Branch(-1)])),
    *(("start", value) for value in ([Branch(i) for i in range(3)], [Branch(None)], [Branch(0.0)], [Branch(NAN)])),
    *(("result", value) for value in SAMPLES),
]


def test_a_wrong_answer_of_a_strategy_fails_its_own_request_by_its_name():
    for where, value in WRONG_STRATEGIES:
        strategy = Strategy(None)
        strategy.wrong = {where: value}
        engine = sim_engine(strategy=strategy, slots=6)
        made = [request(engine, f"r{i}", [i, 3], n=2, max_tokens=5, ignore_eos=True) for i in range(2)]
        bad = dict(n=2, max_tokens=5, ignore_eos=True, tenant="bad")
        if where == "result":
            r, done = request(engine, "bad", [1, 4], **bad), []
            r.on_done = lambda r, done=done: done.append(r.answer)
            run(engine, check=True)
            assert [s.finish_reason for s in r.sequences] == ["error", "error"] and done == [r.sequences]
            assert r.sequences[0].error.startswith("strategy Strategy: "), r.sequences[0].error
        else:
            with pytest.raises(RequestError, match="Strategy failed on this request: "):
                request(engine, "bad", [1, 4], **bad)
        run(engine, check=True)
        assert all(outputs(r) == [answer(r.prompt, r.params, i) for i in range(2)] for r in made), (where, value)
        at_rest(engine)


class Guided(Search):
    """A search that continues with the three likeliest tokens.

    It returns a wrong value in its third step or at the end.
    """

    def __init__(self, wrong, answer):
        self.wrong, self.answer, self.steps, self.kept = wrong, answer, 0, 0

    def advance(self, grown, ends):
        self.steps += 1
        if self.wrong is not None and self.steps == 3:
            return self.wrong(grown)
        picks = [Pick(b, int(t)) for b, g in enumerate(grown) for t in g.tokens[:3] if not ends(b, int(t))][:3]
        keep = [Pick(0, int(grown[0].tokens[0]), -1.0)] if self.steps == 4 else []
        self.kept += len(keep)
        return Moves(picks, keep, done=self.steps == 4)

    def result(self):
        return range(self.kept) if self.answer is None else self.answer


class Stepwise(DecodingStrategy):
    mode, reads, search_of = "stepwise", frozenset({"beam_width"}), None

    def takes(self, params):
        return params.beam_width is not None

    def topk(self, params):
        return 8

    def start(self, params):
        return [Branch(i) for i in range(params.beam_width)]

    def search(self, params, most):
        return type(self).search_of


TOKEN = lambda grown: int(grown[0].tokens[0])  # noqa: E731
WRONG_MOVES = [
    lambda g: None, lambda g: 5, lambda g: [Pick(0, TOKEN(g))], lambda g: Moves(None), lambda g: Moves([None]),
    lambda g: Moves([Pick(None, TOKEN(g))]), lambda g: Moves([Pick(0.0, TOKEN(g))]),
    lambda g: Moves([Pick(-1, TOKEN(g))]),
    lambda g: Moves([Pick(9, TOKEN(g))]), lambda g: Moves([Pick(0, float(TOKEN(g)))]), lambda g: Moves([Pick(0, None)]),
    lambda g: Moves([Pick(0, NAN)]), lambda g: Moves([Pick(0, -1)]), lambda g: Moves([Pick(0, 10**6)]),
    lambda g: Moves([Pick(0, TOKEN(g))] * 2), lambda g: Moves([Pick(0, int(t)) for t in g[0].tokens[:4]]),
    lambda g: Moves([Pick(True, TOKEN(g))]), lambda g: Moves([], [Pick(0, TOKEN(g), NAN)]),
    lambda g: Moves([], [Pick(0, TOKEN(g), None)]), lambda g: Moves([], [Pick(0, TOKEN(g), "1")]),
    lambda g: Moves([], [Pick(7, TOKEN(g), 1.0)]), lambda g: Moves([], [Pick(0, VOCAB, 1.0)]), lambda g: Moves([Odd()]),
    lambda g: Moves([], None),
]  # fmt: skip
WRONG_ANSWERS = [5, [None], [0.0], [NAN], [-1], [9], ["0"], [True], Odd(), [[0]]]


def test_wrong_moves_and_answers_of_a_search_fail_its_own_request_by_its_name():
    for wrong, final in [*((w, None) for w in WRONG_MOVES), *((None, a) for a in WRONG_ANSWERS), (None, None)]:
        Stepwise.search_of = Guided(wrong, final)
        engine = sim_engine(blocks=100)
        engine.strategies = [("own/steps", Stepwise()), ("parallel", Parallel())]
        r = request(engine, "r", range(9), beam_width=3, max_tokens=20, ignore_eos=True)
        other = request(engine, "other", range(5), max_tokens=6)
        run(engine, check=True)
        if (wrong, final) == (None, None):
            assert r.answer[0].finish_reason != "error", "the test has no power"
        else:
            assert r.sequences[0].finish_reason == "error", (wrong, final)
            assert r.sequences[0].error.startswith("strategy Stepwise: "), r.sequences[0].error
        assert outputs(other) == [answer(other.prompt, other.params)]
        at_rest(engine)


@pytest.mark.parametrize("search", [None, 5, object()])
def test_what_is_no_search_fails_its_own_request(search):
    Stepwise.search_of = search
    engine = sim_engine(blocks=100)
    engine.strategies = [("own/steps", Stepwise()), ("parallel", Parallel())]
    r = request(engine, "r", range(9), beam_width=3, max_tokens=20, ignore_eos=True)
    run(engine, check=True)
    assert r.sequences[0].finish_reason == "error" and "Stepwise" in r.sequences[0].error
    at_rest(engine)
