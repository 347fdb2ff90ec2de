"""What ``minivllm bench`` measures: figures by their definitions, intervals and tests by known values."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
import time
from types import SimpleNamespace

import pytest
from cli_helpers import run_cli

from minivllm.cli.bench_runs import watch_of
from minivllm.config import EngineConfig
from minivllm.config.load import load_config
from minivllm.errors import ConfigError, ResourceError
from minivllm.lab.bench import startup, state, statistics, workload
from minivllm.lab.bench.answers import TimedAnswer, figures
from minivllm.lab.bench.repeats import dumps, merged
from minivllm.lab.bench.workload import BenchAsk, Generated

SMALL = [
    "--set",
    "dtype=float32",
    "--set",
    "max_num_seqs=4",
    "--set",
    "max_num_batched_tokens=64",
    "--set",
    "num_kvcache_blocks=64",
]
LITTLE = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4"]


# ---------------------------------------------------------------- statistics


def test_student_s_quantiles_are_those_of_the_table():
    table = {1: 12.7062, 2: 4.3027, 4: 2.7764, 10: 2.2281, 30: 2.0423, 120: 1.9799}
    for df, t in table.items():
        assert statistics.student_quantile(df) == pytest.approx(t, abs=2e-4)
        assert statistics.student_p(t, df) == pytest.approx(0.05, abs=1e-5)
    assert statistics.student_p(0, 5) == 1 and statistics.student_p(math.inf, 5) == 0


def test_an_interval_of_normal_values_holds_their_mean_in_95_of_100_cases():
    rng = random.Random(0)
    held = 0
    for _ in range(400):
        low, high = statistics.interval([rng.gauss(3, 1) for _ in range(4)])
        held += low <= 3 <= high
    assert 0.92 < held / 400 < 0.98
    assert statistics.interval([1.0]) is None


def test_pairs_find_a_difference_that_is_smaller_than_the_noise_between_seeds_and_none_where_there_is_none():
    rng = random.Random(1)
    a = [100 * math.exp(rng.gauss(0, 0.5)) for _ in range(6)]
    faster = [1.1 * x * math.exp(rng.gauss(0, 0.01)) for x in a]
    found = statistics.paired(a, faster)
    assert found.low < 1.1 < found.high and found.sentence() == "a difference"
    wrong = sum(
        statistics.paired(a, [x * math.exp(rng.gauss(0, 0.1)) for x in a]).sentence() == "a difference"
        for _ in range(400)
    )
    assert 0.01 < wrong / 400 < 0.09  # 5 % by definition
    assert statistics.paired(a, a).sentence() == "the same in every run"
    constant = statistics.paired(a, [1.1 * x for x in a])  # no spread, no Student's test
    assert math.isnan(constant.p) and constant.sentence() == "the same ratio in every run: no test without a spread"
    assert statistics.paired([3.0, 3.0], [3.3, 3.3]).sentence().startswith("the same ratio in every run")
    assert statistics.paired(a[:1], faster[:1]).sentence() == "one pair: no test"
    assert statistics.paired([0.0], [1.0]).sentence() == "not measured"


def test_holm_s_correction_is_that_of_the_definition():
    assert statistics.holm([0.01, 0.04, math.nan, 0.03]) == pytest.approx([0.03, 0.06, math.nan, 0.06], nan_ok=True)
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


# ---------------------------------------------------------------- requests and figures


def test_generated_requests_are_a_function_of_the_seed_share_their_prefix_and_keep_to_their_lengths():
    requests = Generated(num_prompts=50, input_len=20, output_len=10, range_ratio=0.5, prefix_len=7, vocab=30)
    asks = requests.asks(3)
    assert asks == requests.asks(3) != requests.asks(4)
    assert len({ask.prompt[:7] for ask in asks}) == 1
    assert {len(ask.prompt) for ask in asks} <= set(range(17, 38)) and len({len(ask.prompt) for ask in asks}) > 5
    assert {ask.max_tokens for ask in asks} <= set(range(5, 16))
    assert max(max(ask.prompt) for ask in asks) < 30


@pytest.mark.parametrize("burstiness", [1.0, 0.25])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness):
    asks = workload.poisson([BenchAsk((1,), 1)] * 4000, 20.0, 0, burstiness)
    gaps = [b.at - a.at for a, b in itertools.pairwise(asks)]
    mean = sum(gaps) / len(gaps)
    varied = sum((g - mean) ** 2 for g in gaps) / len(gaps) / mean**2
    assert asks[0].at == 0 and mean == pytest.approx(1 / 20, rel=0.1)
    assert varied == pytest.approx(1 / burstiness, rel=0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("[1]", ":1: expected an object with a 'prompt'"),
        ('{"prompt": ""}', ":1: prompt='': expected a text or a list of token ids"),
        ('{"prompt": [1, -1]}', "expected a text or a list of token ids"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0: expected a whole number from 1"),
        ('{"prompt": "a", "at": -1}', "at=-1: expected seconds after the start"),
        ('{"prompt": "a", "tokens": 3}', "'tokens': expected prompt, max_tokens and at"),
        ('{"prompt": "a", "at": 1}\n{"prompt": "b"}', "1 of 2 requests have no 'at'; expected it in all or in none"),
    ],
)
def test_a_file_of_requests_that_cannot_be_read_names_its_line(tmp_path, text, message):
    path = tmp_path / "asks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        workload.read(str(path), 4)
    assert message in str(caught.value)


def test_a_line_with_a_text_alone_is_a_request(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('"Once upon a time"\n{"prompt": "Then", "max_tokens": 2}\n')
    assert workload.read(str(tmp_path / "prompts.jsonl"), 4) == [BenchAsk("Once upon a time", 4), BenchAsk("Then", 2)]


def test_a_file_s_requests_are_sorted_by_time_and_have_the_default_length(tmp_path):
    path = tmp_path / "asks.jsonl"
    path.write_text('{"prompt": "b", "at": 2}\n\n{"prompt": [1, 2], "max_tokens": 3, "at": 1}\n')
    assert workload.read(str(path), 4) == [BenchAsk((1, 2), 3, 1), BenchAsk("b", 4, 2)]


def test_figures_are_those_of_the_definitions_and_leave_failed_requests_out():
    answers = [
        TimedAnswer(0.0, 0.1, 0.5, [0.2, 0.2], 10, 3),
        TimedAnswer(0.2, 0.3, 0.3, [], 20, 1, late=0.01),
        TimedAnswer(0.3, 0.0, 0.0, [], 5, 0, error="gone"),
    ]
    found = figures(answers, 2.0, {"ttft": 150, "tpot": 250})
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 4)
    assert (
        found["request_throughput"] == 1 and found["output_throughput"] == 2 and found["total_token_throughput"] == 17
    )
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_tpot_ms"] == pytest.approx(200)
    assert found["p99_itl_ms"] == pytest.approx(200) and found["p99_e2el_ms"] == pytest.approx(498)
    assert found["request_goodput"] == 0.5
    assert found["last_arrival"] == pytest.approx(0.3)


def test_the_median_of_runs_comes_with_its_interval_and_what_was_not_measured_is_null():
    found = merged([{"a": 1.0, "b": None, "c": 2}, {"a": 3.0, "b": None, "c": 2}, {"a": 2.0, "b": None, "c": 2}])
    assert (found["a"], found["b"], found["c"]) == (2.0, None, 2)
    low, high = found["intervals"]["a"]
    assert low == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-3) and high == pytest.approx(4 - low)
    some = merged([{"a": math.nan, "b": None}, {"a": 2.0, "b": 4.0}, {"a": math.inf, "b": 6.0}])
    assert some["a"] == 2 and some["b"] == 5 and "a" not in some["intervals"]
    assert math.isnan(merged([{"a": math.nan}] * 3)["a"])
    assert json.loads(dumps({"x": math.nan, "y": [math.inf, 1]})) == {"x": None, "y": [None, 1]}


# ---------------------------------------------------------------- the machine


def test_a_counter_of_joules_that_wraps_is_unwrapped_and_sub_domains_do_not_count_twice(tmp_path):
    for name, energy in (("intel-rapl:0", 900), ("intel-rapl:0:0", 5), ("intel-rapl:1", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(str(energy))
        (tmp_path / name / "max_energy_range_uj").write_text("999")
    meter = state.Rapl(tmp_path)
    assert meter.joules() == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100")  # 900 -> 999 -> 100
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("60")
    assert meter.joules() == pytest.approx((200 + 50) / 1e6)
    with pytest.raises(OSError, match="no energy counter"):
        state.Rapl(tmp_path / "intel-rapl:0")


def test_the_load_of_others_is_what_this_process_did_not_use():
    with state.MachineWatch() as watch:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
    found = watch.found
    assert found["seconds"] >= 0.05 and len(found["load_average"]) == 3
    assert found["energy_joules"] is not None or found["energy_unknown"]
    assert state.clocks_apart({"mhz": 1000}, {"mhz": 1900}) and not state.clocks_apart({"mhz": 1000}, {"mhz": 1010})
    assert not state.clocks_apart({}, {"mhz": 1})


def test_the_energy_of_several_gpus_is_not_taken_for_that_of_one():
    found = {"model": "pocket", "tensor_parallel_size": 2}
    with watch_of(EngineConfig(**found), "cuda")() as watch:
        pass
    assert watch.found["energy_joules"] is None
    assert watch.found["energy_unknown"] == "the counter is that of one GPU, and 2 are used"


# ---------------------------------------------------------------- commands


def test_throughput_counts_every_token_and_writes_vllm_s_names_with_the_bill_of_materials(capsys, tmp_path):
    path = tmp_path / "t.json"
    code, out, _ = run_cli(
        capsys,
        "bench",
        "throughput",
        *SMALL,
        *LITTLE,
        "--repeats",
        "2",
        "--prefix-len",
        "16",
        "--output-json",
        str(path),
    )
    assert code == 0 and "output tokens/s" in out
    found = json.loads(path.read_text())
    assert found["kind"] == "throughput" and len(found["repeats"]) == len(found["machine_states"]) == 2
    assert (found["num_requests"], found["total_output_tokens"], found["total_input_tokens"]) == (4, 16, 96)
    assert found["tokens_per_second"] == pytest.approx(found["total_token_throughput"])
    assert {"output_throughput", "mean_ttft_ms", "p99_tpot_ms", "elapsed_time", "total_num_tokens"} <= set(found)
    assert found["prefix_hit_rate"] >= 16 / 96  # whoever comes a step later finds the common prefix
    assert found["bill_of_materials"]["fingerprint"] and found["settings"]["prefix_len"] == 16


def test_answers_of_one_token_have_no_time_per_token(capsys):
    one = [*LITTLE[:-1], "1", "--repeats", "2", "--warmups", "0"]
    code, out, _ = run_cli(capsys, "bench", "throughput", *SMALL, *one)
    assert code == 0 and "per token unknown" in out
    code, out, _ = run_cli(capsys, "bench", "serve", "--direct", *SMALL, *one)
    assert code == 0 and re.search(r" inf +any .* - +- +\d", out)


def test_latency_has_a_row_for_each_length_and_batch(capsys):
    options = ["--input-len", "4,20", "--batch-size", "1,3", "--output-len", "3", "--repeats", "2", "--warmups", "0"]
    code, out, _ = run_cli(capsys, "bench", "latency", *SMALL, *options, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [(row["input_len"], row["batch_size"]) for row in rows] == [(4, 1), (4, 3), (20, 1), (20, 3)]
    for row in rows:
        assert row["total_output_tokens"] == 3 * row["batch_size"] and len(row["latencies"]) == 2
        assert row["total_input_tokens"] == row["input_len"] * row["batch_size"]
        assert 0 < row["median_ttft_ms"] < 1e3 * row["latency"]


def test_serve_of_an_engine_in_this_process_measures_each_load_and_each_request(capsys, tmp_path):
    path = tmp_path / "s.json"
    loads = ["--max-concurrency", "1,4", "--repeats", "1", "--goodput", "ttft:60000", "--output-json", str(path)]
    code, out, _ = run_cli(capsys, "bench", "serve", "--direct", *SMALL, *LITTLE, *loads)
    assert code == 0 and "goodput/s" in out
    one, four = json.loads(path.read_text())["rows"]
    assert (one["max_concurrency"], four["max_concurrency"]) == (1, 4)
    for row in (one, four):
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 0, 16)
        assert row["request_goodput"] == pytest.approx(row["request_throughput"])
        assert row["requests"]["output_lens"] == [4] * 4 and len(row["requests"]["itls"][0]) == 3
    starts = one["requests"]["start_times"]
    assert starts == sorted(starts)


def test_a_file_with_times_is_replayed_and_no_rate_may_contradict_it(capsys, tmp_path):
    path = tmp_path / "asks.jsonl"
    path.write_text('{"prompt": "One day", "at": 0.05, "max_tokens": 2}\n{"prompt": [5, 6, 7], "at": 0}\n')
    args = ["bench", "serve", "--direct", *SMALL, "--dataset", str(path), "--output-len", "3"]
    code, out, _ = run_cli(capsys, *args, "--repeats", "1", "--warmups", "0", "--json")
    found = json.loads(out)
    assert code == 0 and found["output_lens"] == [3, 2] and found["input_lens"][0] == 3
    assert found["start_times"][1] >= 0.049 and found["start_times"][0] < found["start_times"][1]
    code, _, err = run_cli(capsys, *args, "--request-rate", "3")
    assert code == 2 and "its requests have arrival times (at)" in err


def test_memory_names_what_the_weights_and_the_kv_blocks_take(capsys):
    code, out, _ = run_cli(capsys, "bench", "memory", *SMALL, *LITTLE, "--json")
    found = json.loads(out)
    values = found["bill_of_materials"]["resolved"]
    assert code == 0 and found["kv_pool_bytes"] == 65 * 131072 and values["device"] == "cpu"
    assert found["kv_peak_bytes"] == 4 * 131072  # four requests of 12 tokens, a block of 16 each
    assert found["process_peak_bytes"] >= found["process_built_bytes"] > found["weight_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["latency", "--batch-size", "5"], "--batch-size 5 is more than max_num_seqs=4; lower it"),
        (["throughput", "--range-ratio", "2"], "--range-ratio 2: expected 0 to 1"),
        (["throughput", "--output-json", "/no/folder/t.json"], "/no/folder/t.json: No such file"),
        (
            ["serve", "--direct", "--url", "http://x"],
            "--url is for a running server, --direct for an engine in this process",
        ),
        (["serve", "--url", "http://x", "--model", "pocket"], "--url: the server has a configuration of its own"),
        (["serve", "--goodput", "speed:3"], "expected one of ttft, tpot, e2el and milliseconds"),
        (["serve", "--goodput", "ttft:1", "ttft:2"], "--goodput: the same name twice"),
        (["serve", "--find-knee", "--direct", "--num-prompts", "3"], "3 requests are too few for it"),
        (["serve", "--request-rate", "1,2", "--max-concurrency", "1,2"], "only one of them may have several values"),
        (["serve", "--request-rate", "0"], "0 is out of range: expected a finite number above 0"),
        (["serve", "--direct", "--timeout", "3"], "--timeout 3 is for answers over HTTP"),
        (["serve", "--burstiness", "0.5"], "--burstiness is for arrivals at a --request-rate"),
        (["serve", "--goodput-share", "0.5"], "--goodput-share is for --find-knee with --goodput"),
        (["serve", "--find-knee", "--goodput", "ttft:1", "--goodput-share", "5"], "--goodput-share 5: expected"),
        (["serve", "--find-knee", "--max-concurrency", "1,4"], "expected at most one --max-concurrency, not 2"),
        (["serve", "--url", "http://x", "--allow-target", "acme"], "leave out --model, --config, --set"),
        (["throughput", "--dataset", "x", "--vocab", "9", "--prefix-len", "0"], "--prefix-len, --vocab: random"),
        (["memory", "--set", "executor=sim"], "use executor=local"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, args, message):
    own = [] if "--url" in args else SMALL
    code, _, err = run_cli(capsys, "bench", args[0], *own, *args[1:])
    assert code == 2 and message in err


@pytest.mark.slow
def test_a_start_in_a_process_of_its_own_is_timed_part_by_part(capsys):
    code, out, _ = run_cli(capsys, "bench", "startup", "--repeats", "1", "--warmups", "0", "--json")
    found = json.loads(out)
    assert code == 0 and found["startup_s"] == pytest.approx(
        found["import_s"] + found["build_s"] + found["first_token_s"]
    )
    parts = {key: value for key, value in found.items() if key.startswith("build_") and isinstance(value, float)}
    whole = parts.pop("build_s")
    named = {f"build_{name}_s" for name in ("imports", "plug-ins", "device", "config", "weights", "kv_cache", "other")}
    assert named < set(parts)
    assert all(part > 0 for part in parts.values()) and sum(parts.values()) == pytest.approx(whole)


def test_a_start_is_measured_with_bytecode_though_the_environment_forbids_it(monkeypatch):
    seen = []

    def run(argv, env, **_):
        seen.append(env)
        return SimpleNamespace(stdout="", stderr="no engine", returncode=3)

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(startup.subprocess, "run", run)
    with pytest.raises(ResourceError, match="ended with 3: no engine"):
        startup.once(load_config(keywords={"model": "pocket"}))
    assert len(seen) == 1 and "PYTHONDONTWRITEBYTECODE" not in seen[0] and seen[0]["PYTHONPATH"]


@pytest.mark.slow
def test_a_server_is_started_measured_over_http_and_ended(capsys):
    code, out, _ = run_cli(capsys, "bench", "serve", *SMALL, *LITTLE, "--repeats", "1", "--json")
    found = json.loads(out)
    assert code == 0 and (found["completed"], found["total_output_tokens"], found["total_input_tokens"]) == (4, 16, 32)


def test_prompts_begin_with_one_of_so_many_prefixes_the_first_of_them_most_often(capsys):
    drawn = [ask.prompt[:6] for ask in Generated(400, 4, 1, prefix_len=6, num_prefixes=5).asks(3)]
    counts = sorted((drawn.count(one) for one in set(drawn)), reverse=True)
    assert len(counts) == 5 and counts[0] > 2 * counts[-1] > 0
    assert Generated(9, 4, 1, prefix_len=6).asks(3) == Generated(9, 4, 1, prefix_len=6, num_prefixes=1).asks(3)
    code, _, err = run_cli(capsys, "bench", "throughput", *SMALL, *LITTLE, "--num-prefixes", "3")
    assert code == 2 and "--num-prefixes 3: prefixes need a length; add --prefix-len N" in err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "startup"])
def test_a_process_that_is_started_finds_a_part_beside_the_configuration(command, capsys, tmp_path, monkeypatch):
    own = "from minivllm.plugins.evictor.lru import Lru\n\nclass Mine(Lru):\n    pass\n"
    (tmp_path / f"own_{command}.py").write_text(own)
    config = tmp_path / "c.toml"
    config.write_text(f'evictor = "own_{command}:Mine"\n')
    monkeypatch.setattr(sys, "path", [*sys.path])
    little = LITTLE if command == "serve" else ["--warmups", "0"]
    args = ["--config", str(config), "--allow-target", f"own_{command}", *SMALL, *little, "--repeats", "1"]
    code, _, err = run_cli(capsys, "bench", command, *args)
    assert code == 0 and str(tmp_path) in sys.path, err
