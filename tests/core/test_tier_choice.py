"""The choice between loading pages from a tier and computing them, by measured speeds."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.core.engine.tier_choice import LEAST, CopyPace, LoadChoice, Slope


def test_the_faster_way_is_chosen_by_measured_speeds():
    choice = LoadChoice([False, False])
    assert choice.loads({0: 1000}, {0: 1000}, 16)  # without measurements, a load is tried
    choice.step_ended(np.array([64], np.int32), 64.0)  # 1 ms for each token
    choice.step_ended(np.array([1, 1], np.int32), 900.0)  # no prompts
    assert choice.token_seconds == pytest.approx(1e-3)
    assert choice.loads({0: 1000}, {0: 1000}, 16)
    choice.page_loaded(0, 1000, 0.010)
    assert choice.loads({0: 1000}, {0: 1000}, 16)  # 10 ms to load, 16 ms to compute
    assert not choice.loads({0: 1000}, {0: 3000}, 16)  # 30 ms with the loads of other requests first, 16 ms to compute
    assert not choice.loads({0: 2000}, {0: 2000}, 16)
    assert choice.loads({0: 2000, 1: 10}, {0: 2000, 1: 10}, 32)
    choice.written(0, 1000, 0.02)
    assert not choice.loads({0: 1000}, {0: 1000}, 16)  # writing the page takes 20 ms
    assert (choice.loaded, choice.computed) == (4, 3)
    choice.written(0, 1000, 0.02)  # nothing was written since
    assert any(choice.loads({0: 1000}, {0: 1000}, 16) for _ in range(50))  # so that writes are measured again


def test_the_time_of_a_write_is_measured_for_each_rank_alone():
    """Either rank may be ahead when both report."""
    choice, random = LoadChoice([False]), np.random.default_rng(0)
    pages = [0, 0]
    for _ in range(300):
        pages[int(random.integers(2))] += 1
        for rank, seconds in enumerate((1.0e-4, 1.3e-4)):
            choice.written(rank, 1000 * pages[rank], seconds * pages[rank])
        assert not pages[0] * pages[1] or 1.0e-7 <= choice.writing.value <= 1.301e-7


def test_a_token_costs_what_it_adds_to_a_step():
    slope = Slope()
    assert slope.value is None
    slope.add(100, 0.5)
    slope.add(101, 0.505)
    assert slope.value == pytest.approx(0.005, rel=0.01)  # all measured steps are equal, so this is their mean
    for tokens in (10, 50, 400, 900):
        slope.add(tokens, 0.020 + 0.001 * tokens)
    for tokens in (30, 300, 700) * 40:
        slope.add(tokens, 0.020 + 0.001 * tokens)
    assert slope.value == pytest.approx(0.001, rel=0.05)


def test_steps_that_others_delayed_do_not_change_the_speed_of_computing():
    slope, rng = Slope(), np.random.default_rng(0)
    for n, tokens in enumerate(rng.integers(10, 900, 200).tolist()):
        slope.add(tokens, 0.020 + 0.001 * tokens + (1.5 if n % 5 == 0 else 0.0))
        if n > 20:
            assert slope.value == pytest.approx(0.001, rel=0.1)


def test_a_wait_beyond_the_loads_is_learned_and_counts_in_the_choice():
    choice = LoadChoice([False])
    choice.step_ended(np.array([100], np.int32), 100.0)
    choice.page_loaded(0, 1000, 0.010)
    assert choice.loads({0: 1000}, {0: 1000}, 16)
    for n in range(20):  # each request waits 20 ms longer than its loads take, and one is stuck
        choice.ended(choice.seconds_to_load({0: 1000}), 5.0 if n == 17 else 0.030)
    assert choice.seconds_to_load({0: 1000}) == pytest.approx(0.030, rel=0.05)
    assert not choice.loads({0: 1000}, {0: 1000}, 16)
    for _ in range(20):  # now the requests do not wait
        choice.ended(choice.seconds_to_load({0: 1000}), 0.001)
    assert choice.seconds_to_load({0: 1000}) == pytest.approx(0.010, rel=0.05)


def test_a_wait_for_steps_of_other_requests_does_not_count_against_loads():
    choice = LoadChoice([False])
    choice.step_ended(np.array([100], np.int32), 100.0)
    choice.page_loaded(0, 1000, 0.010)
    for _ in range(20):  # the steps that ran meanwhile took 50 ms, and a request would have waited for them anyway
        before = choice.busy_seconds
        choice.step_ended(np.array([50], np.int32), 50.0)
        choice.ended(choice.seconds_to_load({0: 1000}), 0.051, choice.busy_seconds - before)
    assert choice.seconds_to_load({0: 1000}) == pytest.approx(0.010, rel=0.05)
    assert choice.loads({0: 1000}, {0: 1000}, 16)
    assert choice.error_seconds < 20 * 0.0011


def test_steps_between_the_loads_of_requests_teach_no_wait():
    """The end of a load is noticed between steps, so a wait beside steps says nothing about loads."""
    choice = LoadChoice([False])
    choice.page_loaded(0, 1000, 0.010)
    for _ in range(20):
        before = choice.busy_seconds
        choice.step_ended(np.array([50], np.int32), 20.0)
        choice.ended(choice.seconds_to_load({0: 1000}), 0.5, choice.busy_seconds - before)
    assert choice.seconds_to_load({0: 1000}) == pytest.approx(0.010)
    for _ in range(20):  # a long step began before the load and has not ended
        choice.ended(choice.seconds_to_load({0: 1000}), 0.5, alone=False)
    assert choice.seconds_to_load({0: 1000}) == pytest.approx(0.010)


def test_a_step_that_delays_running_rows_costs_their_time_too():
    choice = LoadChoice([False])
    choice.step_ended(np.array([100], np.int32), 100.0)
    choice.page_loaded(0, 1000, 0.5)
    assert not choice.loads({0: 1000}, {0: 1000}, 100)
    assert choice.loads({0: 1000}, {0: 1000}, 100, others=7)
    assert not choice.loads({0: 1000}, {0: 9000}, 100, others=7)
    choice.written(0, 1000, 0.2)  # a write belongs to the step
    assert not choice.loads({0: 1000}, {0: 1000}, 100, others=7)


def test_the_time_of_a_copy_is_the_median_of_recent_ones():
    pace, rng = CopyPace(1e-9), np.random.default_rng(0)
    assert pace.value == 1e-9
    pace.add(0, 1.0)
    assert pace.value == 1e-9  # nothing was copied
    pace.add(1 << 20, 0.0)
    assert pace.value == LEAST  # no copy is faster than memory
    for n, size in enumerate(rng.integers(1, 100, 200).tolist()):
        pace.add(size, size * (5.0 if n % 5 == 0 else 2e-8))  # every fifth copy is stuck
    assert pace.value == pytest.approx(2e-8)


def test_a_slow_tier_is_tried_again():
    choice = LoadChoice([False])
    choice.step_ended(np.array([100], np.int32), 100.0)
    choice.page_loaded(0, 1000, 0.5)
    answers = [choice.loads({0: 1000}, {0: 1000}, 100) for _ in range(100)]
    assert not any(answers[:40])
    assert any(answers)


def test_a_tier_that_is_always_read_is_always_read():
    choice = LoadChoice([True])
    choice.step_ended(np.array([100], np.int32), 1.0)
    choice.page_loaded(0, 1000, 5.0)
    assert choice.loads({0: 1000}, {0: 1000}, 16)
