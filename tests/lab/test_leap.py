"""Steps that a simulation takes together decide what the turns of the engine would have decided, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from simulated_costs import SIZES

from minivllm.config import load_config
from minivllm.lab.replay.serve import Counting
from minivllm.lab.simulate import cases
from minivllm.lab.simulate.device import Simulated
from minivllm.lab.traces.read import read_trace
from minivllm.plugins.executor.costs import BrokenLine, CostTable, PromptCosts

SCHEDULERS = ("fcfs", "fcfs", "static", "fair", "prefix-aware", "shortest-job", "adaptive", "prefill-first", "deadline")
EVICTORS = ("lru", "lru", "lfu", "fifo", "s3fifo", "prefix-depth", "cost-aware", "tail-lru", "agent-ttl")
COSTS = CostTable(  # about pocket's, no two sums alike
    BrokenLine([0, 1, 8], [1.1e-4, 9.3e-4, 3.7e-3]),
    PromptCosts(BrokenLine([1, 32], [1.3e-3, 5.3e-3]), {"row": 2.9e-5, "kv": 5.9e-7, "pairs": 3.7e-7, "chunk": 1.1e-4}),
    PromptCosts(
        BrokenLine([33, 64], [1.2e-2, 2.1e-2]), {"row": 1.9e-4, "kv": 1.9e-6, "pairs": 8.9e-8, "chunk": 3.1e-4}
    ),
    32,
    {
        "kv": 1.7e-7,
        "join": 1.3e-4,
        "plan": 2.3e-6,
        "end": 7.7e-5,
        "fresh": 2.3e-4,
        "cold": 4.3e-4,
        "cold_kv": 3.1e-7,
        "wake": 1.5e-3,
        "wake_large": 9e-4,
    },
    add=1.9e-4,
    engine=SIZES,
)


class ByTurns(Simulated):
    """As the executor ``sim`` runs each step."""

    submit = Counting.submit


def drawn(seed):
    """Draw a configuration, a trace and a rate."""
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 4, 8, 16])
    options = {
        "model": "pocket",
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": rows,
        "max_num_batched_tokens": rng.choice([n for n in (16, 64, 256, 1024) if n >= rows]),
        "max_model_len": 512,
        "kvcache_block_size": rng.choice([16, 32, 64]),
        "num_kvcache_blocks": rng.choice([40, 64, 100, 400]),
        "run_ahead": rng.choice([0, 0, 0, 1, 2]),
        "enable_prefix_caching": rng.random() < 0.8,
        "partial_prefix_hits": rng.random() < 0.7,
        "scheduler": rng.choice(SCHEDULERS),
        "evictor": rng.choice(EVICTORS),
    }
    loaded = load_config(keywords=options, environ={})
    case = cases.cases([("x", loaded)], COSTS, lambda text: None)[0]
    if rng.random() < 0.2:
        case = replace(case, evictor=None)  # Belady's
    trace = read_trace(f"synthetic:like=pocket,requests={rng.choice([12, 40, 70])},seed={seed}")
    return case, cases.at_rate(trace, rng.choice([0.3, 1, 3, 10, float("inf")])), rng.random() < 0.5


def outcome(case, trace, answers, leaping):
    found = cases.simulate(case, trace, COSTS, answers, leaping)
    columns = [found.first, found.finished, found.cached, found.output]
    return columns, (found.steps, found.preemptions, found.evictions, found.busy)


@pytest.mark.parametrize("seed", range(25))
def test_leaps_and_turns_give_the_same_outcome(seed, monkeypatch):
    case, trace, answers = drawn(seed)
    fast = outcome(case, trace, answers, True)
    monkeypatch.setattr(cases, "Simulated", ByTurns)
    slow = outcome(case, trace, answers, False)
    assert fast[1] == slow[1]
    for one, other in zip(fast[0], slow[0], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", [4, 17, 20])
def test_a_step_behind_a_pause_costs_as_much_in_a_leap(seed, monkeypatch):
    """Twelve requests at a time, for two rows: to take them keeps the host longer than the device."""
    case, trace, answers = drawn(400 + seed)
    case = replace(case, sizes=replace(case.sizes, max_num_seqs=2, depth=0))
    trace = replace(trace, arrival=np.arange(len(trace)) // 12 * 0.11)
    fast, wakes, woken = outcome(case, trace, answers, True), [], ByTurns.wakes
    monkeypatch.setattr(ByTurns, "wakes", lambda self: wakes.append(woken(self)) or wakes[-1])
    monkeypatch.setattr(cases, "Simulated", ByTurns)
    slow = outcome(case, trace, answers, False)
    assert fast[1] == slow[1]
    assert sum(wakes) > 1


def test_most_steps_are_taken_without_a_turn_and_none_where_the_engine_is_to_be_checked(monkeypatch):
    loaded = load_config(keywords={"model": "pocket", "device": "cpu", "max_num_seqs": 4}, environ={})
    case = cases.cases([("x", loaded)], COSTS, lambda text: None)[0]
    trace = read_trace("synthetic:like=pocket,requests=40,seed=1")
    taken, leap = [], cases.leap
    monkeypatch.setattr(cases, "leap", lambda *args: taken.append(leap(*args)) or taken[-1])
    steps = cases.simulate(case, trace, COSTS).steps
    assert sum(taken) > steps / 2
    taken.clear()
    monkeypatch.setenv("MINIVLLM_CHECK", "1")
    assert cases.simulate(case, trace, COSTS).steps == steps and not sum(taken)


def test_only_steps_with_prompts_are_turns_where_no_policy_is_asked(monkeypatch):
    plans, begin = [], Simulated._begin
    monkeypatch.setattr(Simulated, "_begin", lambda self, plan: plans.append(plan) or begin(self, plan))
    loaded = load_config(keywords={"model": "pocket", "device": "cpu", "max_num_seqs": 4}, environ={})
    case = cases.cases([("x", loaded)], COSTS, lambda text: None)[0]
    steps = cases.simulate(case, read_trace("synthetic:like=pocket,requests=40,seed=1"), COSTS).steps
    assert 0 < len(plans) < steps / 2
    assert all(plan.q_len[-1] > 1 or plan.delta.join is not None for plan in plans)


def test_a_policy_that_fails_within_a_leap_ends_the_simulation_as_in_a_turn(monkeypatch):
    from minivllm.errors import EngineDeadError
    from minivllm.plugins.evictor.lru import Lru

    def broken(self, n):
        raise ValueError("no victims today")

    monkeypatch.setattr(Lru, "victims", broken)
    sizes = {"model": "pocket", "device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 40, "max_model_len": 512}
    case = cases.cases([("x", load_config(keywords=sizes, environ={}))], COSTS, lambda text: None)[0]
    trace = read_trace("synthetic:like=pocket,requests=40,seed=1")
    texts = []
    for leaping in (True, False):
        with pytest.raises(EngineDeadError) as raised:
            cases.simulate(case, trace, COSTS, leaping=leaping)
        texts.append(str(raised.value))
    assert "no victims today" in texts[0] and texts[0] == texts[1]
