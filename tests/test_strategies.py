"""Branches of a request and the order of its answer."""

import pytest

from minivllm.core.interfaces.strategy import BranchEnd
from minivllm.core.request import SamplingParams
from minivllm.errors import RequestError
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.plugins.strategy.single import Single


def ends(*samples):
    return [BranchEnd(s, 3, None, "stop") for s in samples]


def test_single_is_one_branch_and_refuses_more():
    params = SamplingParams()
    assert [b.sample for b in Single().start(params)] == [0]
    assert list(Single().result(params, ends(0))) == [0]
    with pytest.raises(RequestError, match="parallel") as e:
        Single().start(SamplingParams(n=2))
    assert e.value.param == "n"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_parallel_answers_with_every_branch_in_sample_order(n):
    params = SamplingParams(n=n)
    assert [b.sample for b in Parallel().start(params)] == list(range(n))
    assert list(Parallel().result(params, ends(*reversed(range(n))))) == list(range(n))
