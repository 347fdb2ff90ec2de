"""Joules of a counter, shared among the requests of an engine."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from energy_helpers import Powercap

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.errors import ConfigError
from minivllm.runtime.energy.account import EVERY, SETTLE, EnergyAccount
from minivllm.runtime.energy.counters import Polled, Sum, open_counter
from minivllm.testing.sim import request, run, sim_engine

POCKET = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 256, "max_num_seqs": 8, "max_model_len": 512}


class Clock:
    """A clock in seconds, which advances a little with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


class Counter:
    """A counter of a machine with ``watts``, which is updated every ``each`` seconds of a clock."""

    name = "made up"

    def __init__(self, clock: Clock, watts: float = 100.0, each: float = 0.02) -> None:
        self.clock, self.watts, self.each, self.broken = clock, watts, each, False

    def joules(self) -> float:
        if self.broken:
            raise OSError("gone")
        return self.watts * self.each * (self.clock.now // self.each)


def counted(step: float = 0.004, windows=(None,), **options):
    """Return an engine whose steps take ``step`` seconds of a clock, with its account, clock and counter."""
    engine, clock = sim_engine(windows=windows, **options), Clock()
    counter = Counter(clock)
    engine.energy = account = EnergyAccount(counter, clock)
    submit = engine.executor.submit

    def slow(plan) -> None:
        clock.now += step
        submit(plan)

    engine.executor.submit = slow
    account.attach(engine, windows)
    return engine, account, clock, counter


def settle(account, clock) -> None:
    while account.settling:
        clock.now += 0.002
        account.look()


def total(account) -> float:
    return account.busy + account.idle


@pytest.mark.parametrize("options", [{}, {"depth": 1}, {"drafts": 2}, {"blocks": 14}, {"windows": (None, 8)}])
def test_the_joules_of_all_requests_are_what_the_counter_gave_while_busy(options):
    """With steps in flight, drafts, preemptions (blocks are short), a window, forks and an abort."""
    engine, account, clock, counter = counted(**options)
    clock.now += 1.0
    made = [request(engine, str(i), range(3 + 2 * i), max_tokens=12 + i, ignore_eos=True) for i in range(4)]
    made.append(request(engine, "two", [1, 2, 3], max_tokens=9, n=2, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.abort("1")
    run(engine)
    settle(account, clock)
    clock.now += 2.0
    stats = engine.stats()["energy"]
    assert options.get("blocks") is None or engine.planner.preemptions
    assert total(account) == pytest.approx(counter.joules())
    assert sum(r.energy.joules for r in made) == pytest.approx(account.busy)
    assert stats["busy_joules"] == pytest.approx(account.busy) and stats["counter"] == "made up"
    assert stats["joules_per_output_token"] == pytest.approx(account.busy / engine.publisher.tokens)
    assert account.idle == pytest.approx(300, abs=2 * 100 * counter.each)  # seconds of rest at 100 watts


def test_a_request_pays_for_the_rows_and_the_kv_that_it_has_in_each_step():
    """Two equal requests have equal joules.

    If the weights take nothing beside the KV, joules grow with the KV that is read.
    """
    engine, account, clock, _ = counted()
    twins = [request(engine, name, [5, 6, 7, 8], max_tokens=40, ignore_eos=True) for name in "ab"]
    run(engine)
    settle(account, clock)
    one, other = (r.energy.joules for r in twins)
    assert one == pytest.approx(other, rel=0.05)
    engine, account, clock, _ = counted(step=0.02, prefix=False)
    account._weights = 1e-9
    long, short = (
        request(engine, str(n), np.arange(n) % 40, max_tokens=16, ignore_eos=True) for n in (60, 2)
    )  # both fit into one step
    run(engine)
    settle(account, clock)
    shares = [sum((n + i) / (62 + 2 * i) for i in range(16)) for n in (60, 2)]  # of steps that take the same time
    assert long.energy.joules / short.energy.joules == pytest.approx(shares[0] / shares[1], rel=0.01)
    engine, account, clock, _ = counted(step=0.02, prefix=False)
    account._weights = 1e12  # and where they are all there is, each token of a step costs the same
    long, short = (request(engine, str(n), np.arange(n) % 40, max_tokens=16, ignore_eos=True) for n in (48, 16))
    engine.step()
    account._gather()
    assert long.energy.weight / short.energy.weight == pytest.approx(3)


def test_the_counter_is_read_seldom_and_never_where_nobody_asked():
    engine, _account, clock, counter = counted(step=0.001)
    reads, ask = [], counter.joules
    counter.joules = lambda: (reads.append(clock.now), ask())[1]
    request(engine, "a", [1], max_tokens=200, ignore_eos=True)
    run(engine)
    assert 2 <= len(reads) <= 0.25 / EVERY + 3
    bare = sim_engine()
    assert not bare.events.planning.wrappers and not bare.events.publishing.wrappers and bare.energy is None
    r = request(bare, "a", [1], max_tokens=3)
    run(bare)
    assert r.energy is None and "energy" not in bare.stats()


def test_an_end_is_told_once_its_joules_are_known_and_without_them_if_the_counter_stands_still():
    engine, account, clock, counter = counted()
    received = []
    r = request(engine, "a", [1, 2], max_tokens=3, ignore_eos=True)
    r.on_done = lambda r: account.when_known(r, lambda: received.append(r.energy.joules))
    run(engine)
    assert account.settling and not received
    settle(account, clock)
    assert received == [r.energy.measured] and received[0] > 0
    counter.watts = 0.0
    account._last = 0.0
    begin = clock.now
    r = request(engine, "b", [1, 2], max_tokens=3, ignore_eos=True)
    r.on_done = lambda r: account.when_known(r, lambda: received.append(r.energy.joules))
    run(engine)
    settle(account, clock)
    assert received[1:] == [None] and SETTLE < clock.now - begin < SETTLE + 0.1


def test_a_counter_that_breaks_is_said_and_nobody_waits_for_it(caplog):
    engine, account, _clock, counter = counted()
    received = []
    r = request(engine, "a", [1, 2], max_tokens=60, ignore_eos=True)
    r.on_done = lambda r: account.when_known(r, lambda: received.append(r.energy.joules))
    for _ in range(20):
        engine.step()
    counter.broken = True
    run(engine)
    assert received == [None] and not account.settling
    assert engine.stats()["energy"]["fault"] == "gone" and "made up cannot be read: gone" in caplog.text


def test_work_whose_counter_nobody_waited_for_is_nobodys_and_the_time_after_it_is_idle():
    engine, account, clock, counter = counted()
    r = request(engine, "a", [1, 2], max_tokens=3, ignore_eos=True)
    run(engine)
    before = account.busy
    clock.now += 100
    other = request(engine, "b", [1, 2], max_tokens=30, ignore_eos=True)
    run(engine)
    settle(account, clock)
    assert r.energy.joules is None and account.busy - before == pytest.approx(other.energy.joules)
    assert account.idle > 0.99 * 100 * counter.watts and total(account) == pytest.approx(counter.joules())


def test_counters_of_several_gpus_are_one_and_one_that_is_not_there_says_so(tmp_path):
    clock = Clock()
    both = Sum([Counter(clock), Counter(clock, 50.0)])
    clock.now = 2.001
    assert both.joules() == pytest.approx(300) and both.name == "made up of 2 GPUs"
    with pytest.raises(OSError, match="no RAPL under"):
        open_counter(f"rapl:{tmp_path}", list)
    with Powercap(tmp_path / "cap") as cap:
        meter = open_counter(f"rapl:{cap.folder}", list)
        first = meter.joules()
        while meter.joules() == first:
            pass
    for word in ("yes", "rapl:", "nvml"):
        with pytest.raises(ConfigError, match="energy"):
            LLM("pocket", energy=word)
    with pytest.raises(ConfigError, match=r"energy=rapl:.*no RAPL under .*set energy=off, or rapl:FOLDER"):
        LLM("pocket", **POCKET, energy=f"rapl:{tmp_path}")
    with pytest.raises(ConfigError, match="executor minivllm/sim does not report its devices"):
        LLM("pocket", **POCKET, energy="on", executor="sim")


def test_a_counter_that_is_slow_to_read_is_read_by_a_thread_until_the_engine_stops():
    class Slow:
        name, count, broken = "slow", 0, False

        def joules(self):
            time.sleep(0.03)
            if self.broken:
                raise OSError("gone")
            self.count += 1
            return float(self.count)

    slow = Slow()
    engine = sim_engine()
    engine.energy = account = EnergyAccount(Polled(slow))
    account.attach(engine, [None])
    r = request(engine, "a", [1, 2], max_tokens=30, ignore_eos=True)
    begin = time.perf_counter()
    run(engine)
    steps = time.perf_counter() - begin
    while account.settling:
        time.sleep(0.002)
        account.look()
    assert r.energy.joules >= 1 and steps < 30 * 0.03
    engine.stop()
    last = slow.count
    time.sleep(0.1)
    assert slow.count == last
    broken = Polled(slow)
    slow.broken = True
    with pytest.raises(OSError, match="gone"):
        while True:
            broken.joules()


def test_outputs_stats_and_records_have_joules_and_a_diff_does_not_count_them(tmp_path, capsys):
    with Powercap(tmp_path / "cap") as cap:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path, more in zip(paths, ({"energy": f"rapl:{cap.folder}"}, {}), strict=True):
            with LLM("pocket", **POCKET, **more, record=path) as llm:
                params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
                found = llm.generate(["One day", "The fox and the bear"], params, use_tqdm=False)
                *_, last = llm.stream("One day", params)
                joules = [out.metrics.joules for out in (*found, last.output)]
                stats = llm.stats().get("energy")
                if more:
                    assert sum(joules) == pytest.approx(stats["busy_joules"], abs=1e-5) and min(joules) > 0
                else:
                    assert joules == [None] * 3 and stats is None
    one, other = (json.loads(path.read_text())["results"] for path in paths)
    assert sum(one["joules"]) == pytest.approx(one["stats"]["energy"]["busy_joules"], abs=1e-5)
    assert len(one["joules"]) == 3 and "joules" not in other
    assert main(["diff", *map(str, paths)]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("nothing that decides the tokens differs\nthe tokens are the same")
    assert "energy.busy_joules" in reported
