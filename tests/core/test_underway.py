"""Requests that arrive together compute their shared prompt once."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.core.engine import underway
from minivllm.core.engine.request import FINISHED
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.scheduler.static import Static
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine

HEAD = list(range(20))


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    monkeypatch.setattr(underway, "LEAST_TOKENS", 8)


def prompt(*own: int, head: list[int] = HEAD) -> list[int]:
    return [*head, *own]


def served(engine, prompts, **params):
    """Serve prompts that arrive together, and return the requests and the number of computed prompt tokens."""
    params = {"max_tokens": 4, "ignore_eos": True, **params}
    requests = [request(engine, f"r{i}", one, **params) for i, one in enumerate(prompts)]
    computed = []
    submit = engine.executor.submit
    engine.executor.submit = lambda plan: (computed.append(plan), submit(plan))[1]
    run(engine, check=True)
    for r in requests:
        assert outputs(r) == [answer(r.prompt, r.params, s.sample) for s in r.sequences]
    at_rest(engine)
    assert not engine.planner.underway.rows or not engine.slots.n_running
    return requests, sum(int(plan.q_len[plan.q_len > 1].sum()) for plan in computed)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_prefix_of_requests_that_arrive_together_is_computed_once(depth, windows):
    engine = sim_engine(depth=depth, windows=windows, blocks=100)
    requests, computed = served(engine, [prompt(30 + i, 40, 41) for i in range(6)])
    assert [r.cached_tokens for r in requests] == [0, *[20] * 5]
    assert computed == 23 + 5 * 3 and engine.stats()["prefix_waits"] >= 5


@pytest.mark.parametrize("depth", [0, 1])
def test_others_overtake_the_requests_that_wait(depth):
    engine = sim_engine(depth=depth, blocks=100)
    other = [30 + i for i in range(12)]
    requests, computed = served(engine, [prompt(30), prompt(31), other, prompt(32)], max_tokens=6)
    assert computed == 21 + 12, "one token of the others is left to compute"
    assert requests[2].scheduled <= requests[1].scheduled


def test_a_long_prompt_in_chunks_is_followed_as_far_as_it_is_shared():
    engine = sim_engine(depth=1, blocks=100, budget=16)
    head = [i % 50 for i in range(60)]
    requests, computed = served(engine, [prompt(1, 2, head=head), prompt(3, 4, head=head), prompt(5, head=head[:30])])
    assert [r.cached_tokens for r in requests[:2]] == [0, 60] and requests[2].cached_tokens >= 28
    assert computed <= 62 + 2 + 4


def test_short_common_prefixes_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(underway, "LEAST_TOKENS", 24)
    engine = sim_engine(depth=1, blocks=100, budget=128)
    requests, _ = served(engine, [prompt(30), prompt(31)])
    assert engine.stats()["prefix_waits"] == 0 and [r.cached_tokens for r in requests] == [0, 0]


@pytest.mark.parametrize("more", [{"prefix": False}, {"checkpoints": 8}, {"policy": Static}], ids=str)
def test_nobody_waits_without_a_cache_with_states_or_in_a_static_batch(more):
    engine = sim_engine(depth=1, blocks=100, budget=128, **more)
    served(engine, [prompt(30), prompt(31), prompt(32)])
    assert engine.stats()["prefix_waits"] == 0


def test_requests_of_other_salts_and_those_that_score_their_prompt_do_not_wait():
    engine = sim_engine(depth=1, blocks=100, budget=128)
    salts = [request(engine, f"s{i}", prompt(30), max_tokens=2, cache_salt=f"{i}") for i in range(2)]
    run(engine, check=True)
    assert engine.stats()["prefix_waits"] == 0 and [r.cached_tokens for r in salts] == [0, 0]


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_requests_do_not_wait_for_a_row_that_is_gone(end):
    engine = sim_engine(depth=1, blocks=100, budget=16)
    first, second = (request(engine, rid, prompt(30 + i), max_tokens=2) for i, rid in enumerate("ab"))
    if end == "fail":
        engine.executor.fail_at = {1}
    engine.step()
    assert second.sequences[0].slot < 0, "it waits"
    if end == "abort":
        engine.abort(first.id)
    run(engine, check=True)
    assert outputs(second) == [answer(second.prompt, second.params, 0)]
    at_rest(engine)


def test_a_plan_passes_over_a_bounded_number_of_requests(monkeypatch):
    monkeypatch.setattr("minivllm.core.engine.newcomers.MOST_PASSED", 3)
    engine = sim_engine(depth=1, blocks=100, budget=200)
    for i in range(6):
        request(engine, f"r{i}", prompt(30 + i), max_tokens=2)
    request(engine, "other", [49] * 9, max_tokens=2)
    engine.step()
    assert engine.stats()["prefix_waits"] == 3 and engine.planner.n_waiting == 6
    order = [seq.id for seq in sorted(engine.planner.waiting, key=lambda seq: (seq.key, seq.id))]
    assert order == sorted(order)
    run(engine, check=True)
    at_rest(engine)


def test_preempted_rows_do_not_keep_others_waiting():
    engine = sim_engine(depth=2, blocks=24, slots=6, budget=24)
    requests, _ = served(engine, [prompt(*range(30, 30 + i)) for i in range(1, 7)], max_tokens=24)
    assert engine.planner.preemptions and all(len(r.sequences) == 1 for r in requests)


def test_requests_that_wait_outlast_a_scheduler_that_raises():
    """The policy orders the queue again while a plan has requests that wait for a prefix."""

    class Failing(Fcfs):
        window = 2
        calls = 0

        def order(self, queue, running, now):
            self.calls += 1
            if self.calls == 2:
                raise ValueError("planted")
            return np.arange(len(queue))

    engine = sim_engine(depth=1, blocks=100, budget=128, policy=Failing)
    requests, _ = served(engine, [prompt(30 + i) for i in range(3)])
    assert engine.stats()["prefix_waits"] and engine.planner.policy.calls > 2
    assert all(r.sequences[0].status == FINISHED for r in requests)
