"""The simulator: time is what the table of costs says and nothing else, the fit finds costs that are there, the real
engine plans the same steps, and what a table or a rate may not be is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from simulated_costs import COSTS, NOTHING, PROMPTS, SIZES

from minivllm import LLM, AsyncLLM
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.errors import ConfigError, PluginError
from minivllm.lab.simulate import cases, figures
from minivllm.lab.simulate.calibrate import SHARES, Calibrator, calibrate
from minivllm.lab.simulate.fit import MeasuredStep, errors, fit
from minivllm.lab.traces.read import read_trace
from minivllm.lab.traces.trace import build
from minivllm.plugins.executor.costs import BrokenLine, CostTable, PromptCosts, StepCounts, read_costs
from minivllm.plugins.executor.sim import Sim
from minivllm.server.link.client import LocalClient

SMALL = "synthetic:like=pocket,requests=40,seed=3,rate=20"


def alone(*lengths, every=1000.0, output=5):
    n = len(lengths)
    runs = [[(i, k)] for i, k in enumerate(lengths)]
    return build("hand", [i * every for i in range(n)], lengths, [output] * n, [90 + i for i in range(n)], runs)


def case(*sets, costs=COSTS):
    given = ["max_num_seqs=8", "max_num_batched_tokens=64", *sets]
    return cases.cases([("x", load_config([], given))], costs, lambda _: None)[0]


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS.as_json()))
    return str(file)


# ---- time ----------------------------------------------------------------------------------------------------------


def test_a_request_alone_takes_the_sum_of_its_steps():
    """100 tokens in chunks of 64 and 36, then four steps of one row."""
    run = cases.simulate(case(), alone(100, 20), COSTS)
    prefill = (1.0 + 64 + 10) + (1.0 + 36 + 10)
    assert run.first.tolist() == [prefill, 1000 + 1.0 + 20 + 10]
    assert (run.finished - run.first).tolist() == [4 * 2.0, 4 * 2.0]
    assert run.busy == pytest.approx(prefill + 31 + 16) and run.steps == 11


def test_the_first_step_behind_a_pause_costs_more_and_no_other():
    slow = replace(COSTS, slopes={**NOTHING, "wake": 0.5})
    run = cases.simulate(case(), alone(100, 20), slow)
    assert run.first.tolist() == [(1.0 + 64 + 10) + (1.0 + 36 + 10), 1000 + 0.5 + 1.0 + 20 + 10]
    assert (run.finished - run.first).tolist() == [4 * 2.0, 4 * 2.0]


def test_policies_and_figures_see_the_virtual_clock_alone():
    trace = alone(60, 60, 60, every=0.0)
    out = figures.figures(cases.simulate(case("max_num_seqs=1"), trace, COSTS), {"e2el": 90e3}, COSTS.watts)
    one = 1.0 + 60 + 10 + 4 * 2.0
    assert out["duration"] == 3 * one and out["mean_ttft_ms"] == pytest.approx(1e3 * (71 + one))
    assert out["request_goodput"] == pytest.approx(1 / (3 * one)) and out["mean_tpot_ms"] == 2000
    assert out["joules"] == pytest.approx(30.0 * 3 * one) and out["run_seconds"] < 5


def test_static_batches_hold_requests_until_their_time_though_nobody_computes():
    """The policy's wait passes on the virtual clock, by itself."""
    found = cases.simulate(case("scheduler=static", "scheduler.options.max_hold=7"), alone(10), COSTS)
    assert found.first.tolist() == [7 + 1.0 + 10 + 10]


def test_a_run_is_the_same_each_time_and_faster_arrivals_change_it():
    trace = read_trace(SMALL)
    prompts = PromptCosts(BrokenLine([1, 64], [0.002, 0.021]), dict.fromkeys(PROMPTS.slopes, 0.0))
    slow = replace(COSTS, rows=BrokenLine([0, 8], [0.001, 0.004]), small=prompts, large=prompts)
    runs = [cases.simulate(case(), cases.at_rate(trace, rate), slow) for rate in (1, 1, 50, np.inf)]
    assert np.array_equal(runs[0].finished, runs[1].finished)
    assert (runs[2].finished - runs[2].arrival).mean() > (runs[0].finished - runs[0].arrival).mean()
    assert runs[3].arrival.max() == 0 and all(r.served.all() for r in runs)


def test_a_target_for_the_time_per_token_shortens_steps_and_computes_the_same():
    trace = read_trace("synthetic:like=azure-code,requests=60,question=120,seed=3,rate=80")
    prompts = PromptCosts(BrokenLine([1, 512], [0.001, 0.051]), dict.fromkeys(PROMPTS.slopes, 0.0))
    costs = replace(COSTS, rows=BrokenLine([0, 8], [0.001, 0.001]), small=prompts, large=prompts)
    found = {}
    for target in ("off", 5, "auto"):
        run = cases.simulate(case("max_num_batched_tokens=512", f"tpot_target_ms={target}"), trace, costs)
        found[target] = figures.figures(run, {}, {})
    assert found[5]["p99_tpot_ms"] <= 7 < 12 < found["off"]["p99_tpot_ms"]
    assert found[5]["steps"] > found["auto"]["steps"] > found["off"]["steps"]
    assert len({(one["total_output_tokens"], one["completed"]) for one in found.values()}) == 1


def test_what_the_engine_refuses_is_counted_as_failed():
    found = figures.figures(cases.simulate(case("max_model_len=64"), alone(80, 20), COSTS), {}, {})
    assert (found["completed"], found["failed"]) == (1, 1)


# ---- fit -----------------------------------------------------------------------------------------------------------


TRUTH = CostTable(
    BrokenLine([1, 4, 8], [5e-4, 9e-4, 3e-3]),
    PromptCosts(BrokenLine([1, 64], [1e-3, 8e-3]), {"row": 3e-5, "kv": 1e-6, "pairs": 4e-7, "chunk": 1e-4}),
    PromptCosts(BrokenLine([65, 128], [1.6e-2, 2.2e-2]), {"row": 2e-4, "kv": 3e-6, "pairs": 1e-7, "chunk": 4e-4}),
    64,
    {
        "kv": 1e-6,
        "join": 5e-5,
        "plan": 0.0,
        "end": 1e-4,
        "fresh": 2e-4,
        "cold": 5e-4,
        "cold_kv": 3e-7,
        "wake": 2e-3,
        "wake_large": 4e-3,
    },
)
POINTS = [1, 4, 8], [1, 16, 32, 64, 96, 128]


def measured(truth, n=4000, prompts=0.5):
    """Return noisy steps of all kinds, some of which took three times as long."""
    rng = np.random.default_rng(0)
    steps, before = [], (0, 0)
    while len(steps) < n:
        rows, prefill = int(rng.integers(0, 9)), int(rng.integers(1, 121)) * int(rng.random() < prompts)
        if not rows + prefill:
            continue
        pairs = prefill * (rng.integers(0, 500) + prefill / 2)
        chunks = int(rng.integers(1, 4)) if prefill else 0
        others = [int(x) for x in rng.integers(0, 2, 3)]
        kv, wake = int(rows * rng.integers(1, 900)), int(rng.random() < 0.1)
        planned = int(rng.integers(0, 200)) if truth.slopes["plan"] else prefill
        c = StepCounts(rows, kv, prefill, pairs, chunks, *others, max(before), wake, planned)
        before = (before[1], c.tokens if prefill else 0)
        noise = rng.lognormal(0, 0.1) * (3 if rng.random() < 0.02 else 1)
        steps.append(MeasuredStep(c, truth.seconds(c) * noise, "a"))
    return steps


@pytest.mark.parametrize("limit", [64, 0])
def test_costs_that_are_there_are_found_again_through_noise(limit):
    truth = TRUTH if limit else replace(TRUTH, limit=0, small=TRUTH.large, large=TRUTH.small)
    steps = measured(truth)
    found = fit(steps, *POINTS)
    off = [found.seconds(s.counts) / truth.seconds(s.counts) - 1 for s in steps]
    assert np.abs(off).mean() < 0.04 and abs(np.mean(off)) < 0.03
    assert found.limit == limit and errors(found, steps)["all"]["median_error"] < 0.1
    assert found.slopes["kv"] == pytest.approx(1e-6, rel=0.15)
    assert found.large.slopes["kv"] == pytest.approx(truth.large.slopes["kv"], rel=0.25)
    assert found.slopes["wake"] == pytest.approx(2e-3, rel=0.15)
    assert found.slopes["wake_large"] == (pytest.approx(4e-3, rel=0.25) if limit else 0)


def test_what_the_host_plans_beside_a_step_costs_by_itself_and_else_nothing():
    """With a step in flight the next one's prompts are planned in its turn; one by one they are the step's own."""
    truth = replace(TRUTH, slopes={**TRUTH.slopes, "plan": 1e-5})
    assert fit(measured(truth), *POINTS).slopes["plan"] == pytest.approx(1e-5, rel=0.1)
    assert fit(measured(TRUTH), *POINTS).slopes["plan"] == 0


def test_a_row_that_decodes_costs_what_the_whole_step_makes_of_it():
    """Beside a prompt that takes the step beyond the limit more than beside a short one, and more than alone."""

    def extra(prefill):
        with_row, without = (StepCounts(r, 500 * r, prefill, 0.0, bool(prefill)) for r in (2, 1))
        return TRUTH.seconds(with_row) - TRUTH.seconds(without)

    assert extra(100) > 2 * extra(10) and extra(100) > 2 * extra(0)
    short, long = (TRUTH.seconds(StepCounts(r, 0, 60, 0.0, 1)) for r in (4, 5))
    assert long > 1.5 * short, "the limit is one of all tokens of a step"


def test_steps_behind_a_large_one_are_cold_and_no_large_one_is():
    def extra(prefill, before):
        return [TRUTH.seconds(StepCounts(2, 100, prefill, 0.0, bool(prefill), before=b)) for b in (before, 0)]

    for prefill, before, cold in ((0, 65, 1), (20, 65, 1), (0, 64, 0), (100, 100, 0)):
        one, other = extra(prefill, before)
        assert one - other == pytest.approx(cold * (5e-4 + 100 * 3e-7)), (prefill, before)


def test_no_cost_is_below_nothing_and_points_without_steps_are_left_out():
    steps = [MeasuredStep(StepCounts(r, 0, 0, 0.0, 0), 1e-3 / r, "a") for r in (1, 2, 3, 4) for _ in range(20)]
    found = fit(steps, [1, 2, 4, 8, 16], [1, 8])
    assert found.rows.at == [1, 2, 4] and min(*found.rows.seconds, *found.slopes.values()) >= 0
    assert found.limit == 0 and found.small == found.large


def test_a_point_that_steps_hardly_decide_lies_near_its_neighbours():
    """Many rows are seen with much KV alone, so that the KV's cost could stand for theirs."""
    rng = np.random.default_rng(0)
    steps = []
    for rows, low, high in ((1, 0, 4000), (16, 0, 4000), (48, 99_990, 100_000), (64, 0, 4000)):
        for kv in rng.integers(low, high, 40).tolist():
            seconds = (1e-3 + 4e-8 * kv) * (0.8 if rows == 48 else 1.0) * rng.normal(1, 0.05)
            steps.append(MeasuredStep(StepCounts(rows, kv, 0, 0.0, 0), seconds, "a"))
    found = fit(steps, [1, 16, 48, 64], [1])
    assert found.rows(48) == pytest.approx(1e-3, rel=0.25), found.rows
    clear = fit(
        [s for s in steps if s.counts.rows != 48]
        + [MeasuredStep(StepCounts(48, kv, 0, 0.0, 0), 2e-3, "a") for kv in range(0, 4000, 20)],
        [1, 16, 48, 64],
        [1],
    )
    assert clear.rows(48) == pytest.approx(2e-3, rel=0.1), "what many steps say stands"


def test_a_machine_twice_as_slow_takes_twice_as_long_for_every_step():
    slow, steps = replace(TRUTH, add=2e-4).scaled(2.0), measured(TRUTH, 200)
    assert [slow.seconds(s.counts) for s in steps] == [pytest.approx(2 * TRUTH.seconds(s.counts)) for s in steps]
    assert slow.add == 4e-4 and slow.limit == TRUTH.limit


# ---- beside the real engine ----------------------------------------------------------------------------------------


def test_a_real_engine_is_calibrated_and_its_simulation_serves_as_it_does(tmp_path):
    """All requests there at once, so no clock decides: as many steps, hits and tokens as the real engine's."""
    given = ["model=pocket", "device=cpu", "dtype=float32", "max_num_seqs=4", "max_num_batched_tokens=64"]
    loaded = load_config([], [*given, "max_model_len=256", "num_kvcache_blocks=70"])
    trace = cases.at_rate(read_trace("synthetic:like=pocket,requests=24,longest=230,node=30,seed=8"), np.inf)
    with LLM(config=loaded) as llm:
        costs = calibrate(llm.engine, {"model": "pocket"}, 0.6)
        really = cases.run_really(llm.engine, trace)
    assert costs.fit["check"]["steps"] > 5 and costs.engine["num_kvcache_blocks"] == 70
    found = cases.simulate(cases.cases([("x", loaded)], costs, lambda _: None)[0], trace, costs, answers=False)
    assert np.array_equal(found.cached, really.cached) and found.cached.any()
    assert found.steps == really.steps and np.array_equal(found.output, trace.output)


def test_the_executor_sim_takes_what_the_table_says(tmp_path):
    file = tmp_path / "costs.json"
    prompts = PromptCosts(BrokenLine([1, 64], [0.5, 65.0]), dict.fromkeys(PROMPTS.slopes, 0.0))
    small = replace(COSTS, rows=BrokenLine([0, 1], [0.001, 40.0]), small=prompts, large=prompts)
    file.write_text(json.dumps(small.as_json()))
    options = {"costs": str(file), "clock": "virtual"}
    with LLM(model="pocket", executor={"name": "sim", "options": options}, device="cpu", max_num_seqs=4) as llm:
        out = llm.generate([[5, 6]], {"max_tokens": 4, "ignore_eos": True}, use_tqdm=False)[0]
        assert llm.stats()["device_ms"] == 40_000
    took = out.metrics.finished_time - out.metrics.arrival_time
    assert 120 <= took < 150, "requests see another clock than the device's"


# ---- command -------------------------------------------------------------------------------------------------------


def test_parts_that_flags_name_are_run_each_with_each_of_every_configuration(tmp_path, table, capsys):
    (tmp_path / "a.toml").write_text('max_num_seqs = 8\nmax_num_batched_tokens = 64\nscheduler = "deadline"\n')
    given = ["simulate", "--trace", SMALL, "--costs", table, "--config", str(tmp_path / "a.toml"), "--json"]
    flags = ["--evictor", "lru,fifo,", "--evictor", "lfu,lru"]
    for more, schedulers in ((["--scheduler", "fcfs,static"], ["fcfs", "static"]), ([], ["deadline"])):
        assert main([*given, *flags, *more]) == 0
        rows = json.loads(capsys.readouterr().out)["runs"]
        met = [(row["config"], row["scheduler"], row["evictor"]) for row in rows]
        assert met == [("a", one, evictor) for one in schedulers for evictor in ("lru", "fifo", "lfu")]
    horizon = '{name="cost-aware",options={horizon=2.0,ghosts=3}}'
    assert main([*given, "--evictor", f"lru,{horizon}", "--oracle"]) == 0
    met = [row["evictor"] for row in json.loads(capsys.readouterr().out)["runs"]]
    name = "cost-aware (horizon=2.0, ghosts=3)"
    assert met == ["lru", "optimum", "lru", name, name], "bounds are run once"
    assert main([*given, "--evictor", "nobody"]) == 4 and "nobody" in capsys.readouterr().err


def test_simulate_compares_files_and_rates_beside_bounds_without_torch(tmp_path, table):
    for name, scheduler in (("a", "fcfs"), ("b", "prefill-first")):
        text = f'max_num_seqs = 8\nmax_num_batched_tokens = 64\nscheduler = "{scheduler}"\n'
        (tmp_path / f"{name}.toml").write_text(text)
    code = "import sys\nfrom minivllm.cli import main\ncode = main(sys.argv[1:])\nprint('torch' in sys.modules)\n"
    files = [x for n in "ab" for x in ("--config", str(tmp_path / f"{n}.toml"))]
    given = ["simulate", "--trace", SMALL, "--costs", table, *files, "--rate", "x1", "--rate", "xinf", "--oracle"]
    run = [sys.executable, "-c", code, *given, "--goodput", "ttft:1e9", "--json"]
    found = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found[1] == "False", "simulating imports torch"
    rows = json.loads(found[0])["runs"]
    assert [(r["config"], r["scheduler"], r["evictor"], r["rate"]) for r in rows[:6:2]] == [
        ("a", "fcfs", "lru", 1.0),
        ("a", "fcfs", "optimum", 1.0),
        ("a", "shortest-job (lengths known)", "lru", 1.0),
    ]
    assert len(rows) == 12 and all(r["request_goodput"] == r["request_throughput"] for r in rows)
    assert rows[5]["mean_e2el_ms"] < rows[1]["mean_e2el_ms"], "the shortest answer first is no bound"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "x0"], "--rate x0: expected xK"),
        (["--goodput", "ttft"], "--goodput 'ttft': expected NAME:MILLISECONDS"),
        (["--oracle", "--real"], "no real run to compare with"),
        (["--set", "drafter=ngram"], "drafts have no table of costs"),
        (["--output-json", "/nowhere/s.json"], "/nowhere/s.json: No such file or directory"),
        (["--evictor", "8"], "--evictor: evictor: 8 is not a plug-in"),
    ],
)
def test_what_cannot_be_simulated_is_refused(table, capsys, flags, message):
    given = ["--set", "max_num_batched_tokens=64", "--set", "max_num_seqs=8"]
    assert main(["simulate", "--trace", SMALL, "--costs", table, *given, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a table of costs"),
        ({"seconds": {**COSTS.as_json()["seconds"], "kv": -1.0}}, "seconds or watts from 0 on"),
        ({"seconds": {**COSTS.as_json()["seconds"], "rows": {"at": [2, 1], "seconds": [1, 1]}}}, "do not ascend"),
        ({"seconds": {}}, "KeyError: 'rows'"),
        ({"seconds": {**COSTS.as_json()["seconds"], "limit": -1}}, "limit=-1: expected"),
        ({"seconds": {**COSTS.as_json()["seconds"], "large": {}}}, "KeyError: 'tokens'"),
        ({"engine": {}}, "KeyError: 'kvcache_block_size'"),
        ({"engine": None}, "TypeError"),
        ({"engine": {**SIZES, "kvcache_block_size": 0}}, "kvcache_block_size=0: expected"),
        ({"engine": {**SIZES, "depth": -1}}, "depth=-1: expected"),
        ({"engine": {**SIZES, "windows": "x"}}, "windows='x': expected a list"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, change, message):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**COSTS.as_json(), **change}))
    with pytest.raises(ConfigError, match=message):
        read_costs(str(file))


def test_a_table_is_read_as_it_was_written(table):
    assert read_costs(table) == COSTS


def test_who_serves_in_real_time_refuses_a_virtual_clock_before_anything_starts(monkeypatch):
    monkeypatch.setattr(Sim, "start", lambda *_: pytest.fail("started"))
    executor = {"name": "sim", "options": {"clock": "virtual"}}
    with pytest.raises(ConfigError, match=r"clock of its own.*set clock=real"):
        AsyncLLM("pocket", executor=executor, device="cpu")
    loaded = load_config(keywords={"model": "pocket", "executor": executor, "device": "cpu"})
    with pytest.raises(ConfigError, match="clock of its own"):
        asyncio.run(LocalClient(loaded).open())


def test_what_is_no_executor_of_steps_is_not_calibrated_by_any_of_its_names(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Sim, "start", lambda *_: pytest.fail("loaded"))
    for name in ("sim", "minivllm/sim"):
        given = ["--model", "pocket", "--set", f"executor={name}", "-o", str(tmp_path / "c.json")]
        assert main(["calibrate", *given]) == 2
        assert "executor=sim has no steps to measure" in capsys.readouterr().err


def test_a_rate_without_end_is_json_that_others_read(table, capsys):
    given = ["--set", "max_num_batched_tokens=64", "--set", "max_num_seqs=8", "--rate", "xinf"]
    assert main(["simulate", "--trace", SMALL, "--costs", table, *given, "--json"]) == 0
    out = json.loads(capsys.readouterr().out, parse_constant=lambda x: pytest.fail(x))
    assert out["runs"][0]["rate"] == "inf"
    assert main(["simulate", "--trace", SMALL, "--costs", table, *given]) == 0
    assert " xinf " in capsys.readouterr().out


def test_what_an_engine_counted_before_is_not_counted_again():
    executor = {"name": "sim", "options": {"step_ms": 0}}
    trace = cases.at_rate(read_trace("synthetic:like=pocket,requests=6,longest=200,node=30,seed=8"), np.inf)
    with LLM(
        "pocket", executor=executor, device="cpu", max_num_seqs=4, num_kvcache_blocks=20, max_model_len=256
    ) as llm:
        runs = [cases.run_really(llm.engine, trace) for _ in range(2)]
        assert runs[0].evictions > 0
        assert sum(r.evictions for r in runs) == sum(p.evictions for p in llm.engine.cache.pools)
        assert sum(r.preemptions for r in runs) == llm.engine.planner.preemptions


@pytest.mark.parametrize("blocks", [12, 40, 400])
def test_mixed_steps_are_measured_at_every_number_of_rows_and_none_is_preempted(blocks):
    """However small the cache: what a row that is preempted costs would be charged to others."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_kvcache_blocks": blocks}
    with LLM("pocket", executor={"name": "sim", "options": {"step_ms": 0}}, device="cpu", **sizes) as llm:
        ticks = itertools.count()
        with Calibrator(llm.engine, timer=lambda: float(next(ticks))) as c:
            c.mixed("mixed", 8000.0)
            c.traffic("traffic", 400.0)
        assert llm.engine.planner.preemptions == 0 and not llm.engine.busy
    mixed = [s.counts for s in c.steps if s.phase == "mixed" and s.counts.prefill]
    assert {s.rows for s in mixed} >= {0, 1, 2, 3}
    assert min(s.tokens for s in mixed if s.rows) < 8 and max(s.tokens for s in mixed) >= min(64, 3 * blocks)
    assert any(s.phase == "mixed" and s.counts.before and not s.counts.prefill for s in c.steps)


@pytest.mark.parametrize("depth", [0, 1])
def test_no_turn_of_the_engine_is_lost_where_steps_are_in_flight(depth, monkeypatch):
    """The first turn of a burst gives nothing back if a step runs ahead: its time is the first step's."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "run_ahead": depth}
    with LLM("pocket", executor={"name": "sim", "options": {"step_ms": 25}}, device="cpu", **sizes) as llm:
        turns, step = [], llm.engine.step

        def counted():
            worked = step()
            turns.append(worked)
            return worked

        monkeypatch.setattr(llm.engine, "step", counted)
        with Calibrator(llm.engine, timer=lambda: float(sum(turns))) as c:
            for prompts in ([30], [90, 5, 7], [20, 20]):
                for prompt in prompts:
                    c.add(prompt, 6)
                c.drain("decode")
    assert sum(s.seconds for s in c.steps) == sum(turns)
    assert [s.seconds for s in c.steps].count(2.0) == (3 if depth else 0), "of each burst the first step"
    assert sum(s.counts.joins for s in c.steps) == 6
    assert sum(s.counts.planned for s in c.steps) == sum(s.counts.prefill for s in c.steps) == 172


@pytest.mark.parametrize("seconds", [1.0, 40.0, 1000.0])
def test_a_calibration_ends_at_most_one_step_after_each_phase_s_time(seconds):
    """A step takes 10 s and a full cache 125 of them; a phase that its time gives no step measures one."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 4096, "num_kvcache_blocks": 500}
    clock = [0.0]
    with LLM("pocket", executor={"name": "sim", "options": {"step_ms": 0}}, device="cpu", **sizes) as llm:
        step = llm.engine.step

        def slow():
            worked = step()
            clock[0] += 10.0 if worked else 0.0
            return worked

        llm.engine.step = slow
        table = calibrate(llm.engine, {}, seconds, timer=lambda: clock[0])
        assert not llm.engine.busy
    phases = len(SHARES) + 3  # warming up and "check" have two parts each, and wake has none
    assert clock[0] <= seconds + phases * 10.0 * (1 + llm.engine.capacity.depth)
    assert all(table.fit[phase]["steps"] for phase in SHARES)


def test_an_interrupt_of_a_calibration_waits_for_the_end_of_the_step(monkeypatch):
    """In the middle of a step it would end the engine, and a traceback would be logged."""
    with LLM("pocket", executor="sim", device="cpu", max_num_seqs=2, max_model_len=128) as llm:
        plan, steps = llm.engine.planner.next, []

        def interrupted(now):
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)
            steps.append(plan(now))
            return steps[-1]

        monkeypatch.setattr(llm.engine.planner, "next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrate(llm.engine, {}, 0.5)
        assert len(steps) == 4 and not llm.engine.dead


def test_too_little_time_to_calibrate_in_is_said(monkeypatch):
    monkeypatch.setattr(Calibrator, "traffic", lambda *_: None)
    message = pytest.raises(ConfigError, match=r"no step of traffic; raise --seconds")
    with LLM("pocket", executor="sim", device="cpu", max_num_seqs=2, max_model_len=128) as llm, message:
        calibrate(llm.engine, {}, 0.01)


def test_two_paces_are_refused(tmp_path, table):
    with pytest.raises(PluginError, match="costs and step_ms both define"):
        LLM(model="pocket", executor={"name": "sim", "options": {"costs": table, "step_ms": 3.0}}, device="cpu")


def test_the_checkpoints_of_states_are_those_of_the_table_or_of_the_configuration():
    hybrid = replace(COSTS, engine={**COSTS.engine, "state_checkpoints": 6})
    assert case(costs=hybrid).sizes.checkpoints == 6
    assert case("num_state_checkpoints=2", costs=hybrid).sizes.checkpoints == 2
    assert case().sizes.checkpoints is None
    with pytest.raises(ConfigError, match="num_state_checkpoints=2: the table was measured with a model without"):
        case("num_state_checkpoints=2")
