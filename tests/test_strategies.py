"""What is particular to the built-in strategies; the conformance kit tests the rest."""

from minivllm.core.interfaces.strategy import BranchEnd
from minivllm.core.request import SamplingParams
from minivllm.errors import RequestError
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.plugins.strategy.single import Single


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
