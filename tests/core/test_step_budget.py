"""The bound on the prompt tokens of a step, which limits the time that decoding rows wait."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.core.engine.step_budget import AUTO, LEAST_MS, LEAST_SHARE, StepBudget
from minivllm.core.interfaces.executor import StepWiring
from minivllm.core.interfaces.plan import Delta
from minivllm.plugins.executor.options import SimOptions
from minivllm.testing.sim import VOCAB, SimExecutor, answer, at_rest, outputs, request, run, sim_engine

MOST = 16384


def plan_of(q_len, computed, images=0):
    """Return a plan with the columns that a budget reads.  ``images`` rows of features change with it."""
    delta = Delta(image=np.zeros((images, 7), np.int32))
    return SimpleNamespace(q_len=q_len, computed=computed, delta=delta)


class Device:
    """A device whose steps take a time for each decoding row, prompt token and pair, in milliseconds."""

    def __init__(self, step=1.0, row=0.05, token=0.003, pair=1e-6):
        self.step, self.row, self.token, self.pair = step, row, token, pair

    def run(self, budget, rows, prompts):
        """Run a step of ``rows`` decoding rows and chunks of (computed, tokens); return its milliseconds."""
        q_len = np.array([1] * rows + [n for _, n in prompts], np.int32)
        computed = np.array([500] * rows + [at for at, _ in prompts], np.int32)
        pairs = sum(n * (at + n / 2) for at, n in prompts)
        ms = self.step + self.row * rows + self.token * sum(n for _, n in prompts) + self.pair * pairs
        budget.note(plan_of(q_len, computed), ms)
        return ms


def steps_of(budget, device, rows, length, steps=40, at=0):
    """Compute prompts of ``length`` tokens one after another in steps with ``rows`` decoding rows, and return the
    milliseconds of each step.
    """
    found = []
    for _ in range(steps):
        left, chunks = budget.most(rows, at, length - at), []
        while left > 0:
            n = min(left, length - at)
            chunks.append((at, n))
            left, at = left - n, (at + n) % length
        found.append(device.run(budget, rows, chunks))
    return found


@pytest.mark.parametrize("length", [300, 2000, 40_000])
@pytest.mark.parametrize("target", [15.0, 25.0, 80.0])
@pytest.mark.parametrize("rows", [1, 30, 200])
def test_steps_with_decoding_rows_come_to_take_the_target_whatever_prompts_they_compute(length, target, rows):
    budget, device = StepBudget(target, MOST), Device(row=0.02)
    for n in (1, 4, 30, 200):
        device.run(budget, n, [])
    found = steps_of(budget, device, rows, length)
    assert max(found[10:]) <= 1.25 * target and np.mean(found[10:]) >= 0.6 * target


def test_prompts_go_on_though_the_decodes_alone_take_longer_than_the_target():
    budget, device = StepBudget(10.0, MOST), Device(step=30.0)
    device.run(budget, 8, [])
    found = steps_of(budget, device, 8, 5000)
    assert 30.4 + 0.8 * LEAST_SHARE * 10.0 <= np.mean(found[10:]) <= 30.4 + 1.2 * 10.0


@pytest.mark.parametrize("decode", [0.5, 10.0])
def test_the_automatic_bound_is_a_multiple_of_the_shortest_decodes_and_at_least_a_short_time(decode):
    budget, device = StepBudget(None, MOST), Device(step=decode, row=0.0, pair=0.0)
    for rows in (8, 1):
        device.run(budget, rows, [])
    budget.note(plan_of(np.array([1] * 64), np.array([500] * 64)), 9 * decode)
    found, bound = steps_of(budget, device, 8, 3000)[10:], decode + min(max(AUTO * decode, LEAST_MS), MOST * 0.003)
    assert max(found) == pytest.approx(bound, rel=0.1) and np.mean(found) >= 0.8 * bound


def test_long_steps_have_a_number_of_tokens_without_padding_and_short_ones_any_number():
    device = Device(step=1.0, row=0.0, pair=0.0)
    for target, rows, expected in ((20.0, 50, 6144 - 50), (20.0, 300, 6144 - 300), (5.0, 50, None)):
        budget = StepBudget(target, MOST, (2048, 4096, 6144, 8192))
        device.run(budget, rows, [])
        assert budget.most(rows, 0) == MOST, "no prompt was measured"
        for tokens in (900, 3600):  # a step has at most four times the tokens of the largest one before
            device.run(budget, rows, [(0, tokens)])
        free = StepBudget(target, MOST)
        free.pace, free._decodes = budget.pace, budget._decodes
        assert budget.most(rows, 0) == (expected or free.most(rows, 0)) <= free.most(rows, 0)


def test_nothing_is_bounded_before_a_step_was_measured_and_unknown_times_teach_nothing():
    budget = StepBudget(5.0, MOST)
    assert budget.most(8, 0) == MOST
    budget.note(plan_of(np.array([1, 900]), np.array([5, 0])), 0.0)
    budget.note(plan_of(np.array([], np.int32), np.array([], np.int32)), 9.0)
    budget.note(plan_of(np.array([1, 900]), np.array([5, 0]), images=1), 9.0)
    assert budget.most(8, 0) == MOST


def test_sizes_of_captured_steps_leave_at_least_half_of_the_prompt_tokens():
    """Otherwise prompts would nearly stop beside more decoding rows than a long captured step has tokens."""
    sizes = (2048, 2560, 4096)
    free, bound = StepBudget(None, MOST), StepBudget(None, MOST, sizes)
    device, shortened = Device(), 0
    for budget in (free, bound):
        steps_of(budget, device, rows=100, length=4000)
    bound.pace, bound._decodes = free.pace, free._decodes
    for rows in (1, 256, 1000, 2000, 2047, 2500, 5000):
        tokens, found = free.most(rows, 0), bound.most(rows, 0)
        assert tokens / 2 <= found <= tokens
        assert found == tokens or found + rows in sizes
        shortened += found < tokens
    assert shortened, "no size shortens a step"


@pytest.mark.parametrize(("value", "made"), [("off", None), ("auto", [None]), (30.0, [30.0])])
def test_the_option_makes_a_budget_unless_it_is_off(value, made):
    wiring = SimpleNamespace(steps=StepWiring(tpot_target_ms=value), max_num_batched_tokens=100)
    found = StepBudget.of(wiring)
    assert (found and [found.target_ms]) == made


def serve(target, prompts, **options):
    """Serve prompts, each added two steps after the one before, and return the answers and the steps."""
    sim = SimOptions(step_ms=0.2, token_ms=0.05, vocab_size=VOCAB, check=True)
    engine = sim_engine(budget=64, blocks=400, device=lambda _, *rest: SimExecutor(sim, *rest), **options)
    engine.planner.budget = None if target is None else StepBudget(target, 64)
    made = []
    for i, prompt in enumerate(prompts):
        made.append(request(engine, str(i), prompt, max_tokens=20, ignore_eos=True))
        engine.step()
        engine.step()
    run(engine, check=True)
    at_rest(engine)
    return [outputs(r)[0][0] for r in made], engine.executor.trail


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([0.1, 0.8, 2.0]), st.lists(st.integers(1, 150), min_size=1, max_size=9), st.integers(0, 2))
def test_a_target_changes_no_token_and_every_request_ends(target, lengths, depth):
    prompts = [[(7 * i + j) % 49 for j in range(n)] for i, n in enumerate(lengths)]
    found, _ = serve(target, prompts, depth=depth)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert found == [answer(p, params)[0] for p in prompts]


def test_steps_without_decoding_rows_are_not_bounded_and_the_others_are():
    prompts = [[1] * 5, *([n] * 150 for n in range(2, 7))]
    for target, most in ((None, 64), (1.2, 32)):
        _, trail = serve(target, prompts)
        mixed = [sum(n for n in q_len if n > 1) for _, q_len in trail if min(q_len) == 1 < max(q_len)]
        assert max(mixed[3:]) <= most and (target is not None or max(mixed) > 60)
    _, trail = serve(1.2, [[2] * 150, [3] * 150])
    assert max(sum(q_len) for _, q_len in trail) == 64, "a step without decodes has all tokens"


@pytest.mark.parametrize("device_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_were_not_measured_are_left_out(device_ms):
    engine = sim_engine(budget=32, blocks=200)
    engine.planner.budget = StepBudget(None, 32)
    collect = engine.executor.collect
    engine.executor.collect = lambda *args: [replace(result, device_ms=device_ms) for result in collect(*args)]
    requests = [request(engine, str(n), [n] * 60, max_tokens=9, ignore_eos=True) for n in range(4)]
    run(engine, check=True)
    assert [outputs(r)[0] for r in requests] == [answer(r.prompt, r.params) for r in requests]
    assert engine.planner.budget.most(1, 0) == 32


def test_large_images_are_encoded_in_steps_that_keep_the_time_of_prompts():
    budget = StepBudget(None, MOST)
    assert budget.steps_of(4, 16384) == 1  # nothing is known
    for _ in range(5):
        budget.note(plan_of(np.ones(4, np.int32), np.full(4, 500)), 5.0)
    assert budget.most(4, 0) > 0
    ms = {tokens: 0.01 * tokens + 4e-6 * tokens**2 for tokens in (256, 1024, 4096, 16384)}
    for _ in range(20):
        for tokens in (256, 1024, 4096):
            plan = plan_of(np.ones(4, np.int32), np.full(4, 500), images=1)
            budget.note(plan, 5.0 + ms[tokens], (tokens, tokens))
    limit = AUTO * 5.0
    assert budget.steps_of(4, 256) == budget.steps_of(4, 1024) == 1 and ms[1024] < limit
    for tokens in (4096, 16384):
        steps = budget.steps_of(4, tokens)
        assert 0.7 < 2 * ms[tokens] / limit / steps < 1.4
    # a share of an image teaches the same as the whole image
    learned = budget.encodes.seconds(4096, 4096)
    for _ in range(20):
        budget.note(plan_of(np.ones(4, np.int32), np.full(4, 500), images=1), 5.0 + ms[4096] / 8, (512.0, 4096.0))
    assert budget.encodes.seconds(4096, 4096) == pytest.approx(learned, rel=0.15)


def test_a_step_with_prompts_and_images_is_left_out_until_the_time_of_prompts_is_known():
    budget = StepBudget(None, MOST)
    budget.note(plan_of(np.array([1, 100]), np.array([5, 0]), images=1), 30.0, (100.0, 100.0))
    assert budget.encodes.seconds(100, 100) == 0
    budget.note(plan_of(np.array([1, 100]), np.array([5, 0])), 10.0)
    budget.note(plan_of(np.array([1, 100]), np.array([5, 0]), images=1), 30.0, (100.0, 100.0))
    assert 0.018 < budget.encodes.seconds(100, 100) < 0.022 and not budget.pace.each > 2e-4
