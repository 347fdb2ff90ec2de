"""Tests of the built-in strategies alone.  The conformance kit tests the rest."""

import pytest

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.strategy import BranchEnd
from minivllm.errors import RequestError
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.plugins.strategy.single import Single
from minivllm.testing.sim import request, run, sim_engine


def test_single_says_which_strategy_serves_more():
    try:
        Single().start(SamplingParams(n=2))
    except RequestError as e:
        assert "use 'parallel'" in str(e) and e.param == "n"
    else:
        raise AssertionError("n=2 was accepted")


def test_parallel_answers_in_sample_order():
    ends = [BranchEnd(s, 3, None, "stop") for s in (2, 0, 1)]
    assert list(Parallel().result(SamplingParams(n=3), ends)) == [0, 1, 2]


class Ranked(Parallel):
    """``extra={"rank": "last"}`` turns the answer round."""

    reads = Parallel.reads | {"rank"}

    def takes(self, params):
        return "rank" in params.extra

    def result(self, params, ends):
        return list(super().result(params, ends))[::-1]


def test_a_strategy_has_the_requests_that_set_a_parameter_of_its_own():
    engine = sim_engine(slots=6, blocks=60, strategy=Parallel())
    with pytest.raises(RequestError, match="no processor, sampler or strategy in the config reads it"):
        request(engine, "a", [1, 2], n=2, max_tokens=3, extra={"rank": "last"})
    engine.strategies = [*engine.strategies, ("acme/ranked", Ranked())]
    made = request(engine, "b", [1, 2], n=2, max_tokens=3, extra={"rank": "last"})
    plain = request(engine, "c", [1, 2], n=2, max_tokens=3)
    run(engine)
    assert [s.sample for s in engine.answer(made)] == [1, 0] and [s.sample for s in engine.answer(plain)] == [0, 1]
