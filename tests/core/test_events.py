"""The events that an engine sends to its listeners."""

from __future__ import annotations

import pytest
from hook_helpers import crowd

from minivllm.core.engine.events import Event, WrappedCall
from minivllm.testing.sim import at_rest, run, sim_engine


def test_listeners_hear_in_the_order_in_which_they_subscribed():
    heard, event = [], Event()
    event(0)
    for name in "ab":
        event.subscribe(lambda value, name=name: heard.append((name, value)))
    event(1)
    event(value=2)
    assert heard == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_the_first_wrapper_is_the_innermost_and_each_sees_arguments_and_result():
    seen, wrapped = [], WrappedCall()
    assert wrapped(int, "7") == 7
    for name in "ab":

        def wrapper(call, text, name=name):
            seen.append((name, text))
            return call(text + "0") + 1

        wrapped.subscribe(wrapper)
    assert wrapped(int, "7") == 702
    assert seen == [("b", "7"), ("a", "70")]


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_events_add_up_to_what_the_engine_counts(windows):
    engine = sim_engine(slots=4, blocks=26, windows=windows, depth=1, budget=16)
    events, added, finished, preempted, cached = engine.events, [], [], [], [set() for _ in windows]
    planned, published, turns, stopped = [], [], [], []
    evicted = [0] * len(windows)

    def gone(group, keys):
        assert cached[group].issuperset(keys.tolist())
        cached[group].difference_update(keys.tolist())

    def counted(group, keys):
        evicted[group] += len(keys)
        gone(group, keys)

    def planning(call):
        plan = call()
        planned.extend([] if plan is None else [plan.id])
        return plan

    def publishing(call, flight, result):
        assert flight.plan.id == result.id
        published.append(result.id)
        call(flight, result)

    events.request_added.subscribe(lambda request: added.append(request.id))
    events.request_finished.subscribe(lambda request: finished.append(request.id))
    events.sequence_preempted.subscribe(lambda seq: preempted.append(seq.id))
    events.blocks_stored.subscribe(lambda group, keys, info: cached[group].update(keys.tolist()))
    events.blocks_evicted.subscribe(counted)
    events.blocks_dropped.subscribe(gone)
    events.planning.subscribe(planning)
    events.publishing.subscribe(publishing)
    events.turn_ended.subscribe(lambda: turns.append(engine.clock.count))
    events.stats_asked.subscribe(lambda stats: stats.update(mine=len(turns)))
    events.engine_stopped.subscribe(stopped.append)
    made = crowd(engine, 14)
    engine.step()
    engine.abort(made[3].id)
    run(engine)
    stats = engine.stats()
    assert sorted(added) == sorted(finished) == sorted(r.id for r in made)
    assert len(preempted) == stats["preemptions"] > 0 and sum(evicted) == stats["evictions"] > 0
    assert cached == [set(pool.index) for pool in engine.cache.pools]
    assert planned == published == list(range(1, len(planned) + 1))
    assert stats["mine"] == len(turns) == engine.clock.count
    engine.reset_prefix_cache()
    assert cached == [set() for _ in windows]
    at_rest(engine)
    engine.stop()
    assert stopped == [None]
