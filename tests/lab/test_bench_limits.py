"""Benchmarks of engines that are smaller than the defaults: vocabulary, longest request, rows, KV cache."""

from __future__ import annotations

import json

import pytest
from cli_helpers import run_cli

from minivllm.errors import ConfigError
from minivllm.lab.bench import workload
from minivllm.lab.bench.limits import EngineLimits, fitted
from minivllm.testing.tiny import tiny_dir

SMALL = ["dtype=float32", "device=cpu", "skip_tokenizer_init=true", "num_kvcache_blocks=40"]
SETS = [word for text in SMALL for word in ("--set", text)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_dir(folder, "qwen3", vocab_size=40)
    return str(folder)


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("throughput", ["--num-prompts", "3", "--repeats", "1", "--warmups", "0"]),
        ("latency", ["--repeats", "1", "--warmups", "0"]),
        ("memory", ["--num-prompts", "3"]),
        ("serve", ["--direct", "--num-prompts", "3", "--repeats", "1", "--warmups", "0"]),
        pytest.param(
            "batching",
            ["--request-rate", "50", "--num-prompts", "6", "--repeats", "1", "--warmups", "0"],
            marks=pytest.mark.slow,
        ),
        ("profile", ["--steps", "2"]),
        pytest.param("kernels", ["--repeats", "1", "--warmups", "0"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("longest", [24, pytest.param(6, marks=pytest.mark.slow)])
def test_the_defaults_of_each_bench_fit_a_model_of_few_tokens_and_short_requests(capsys, model, what, more, longest):
    if what == "profile":
        longest = max(longest, 8)  # a prompt token, its answer, two steps to warm up, two profiled ones, two to spare
    sets = [*SETS, "--set", f"max_model_len={longest}", "--set", "max_num_seqs=3"]
    code, out, err = run_cli(capsys, "bench", what, "--model", model, *sets, *more)
    assert code == 0, err
    assert out
    if what != "memory" or longest < 24:
        assert "(not " in err  # the sizes that were lowered are reported


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["throughput", "--vocab", "1000"], "--vocab 1000: the model has 40 tokens"),
        (["latency", "--vocab", "41"], "--vocab 41: the model has 40 tokens"),
        (["throughput", "--input-len", "100"], "make requests of up to 101 tokens, and max_model_len"),
        (["latency", "--input-len", "20", "--output-len", "5"], "are 25 tokens"),
        (["latency", "--batch-size", "4"], "--batch-size 4 is more than max_num_seqs=3"),
        (["profile", "--input-len", "23"], "lower them, or raise num_kvcache_blocks"),
        (["kernels", "--context-len", "25"], "25 tokens of context are more than max_model_len=24"),
    ],
)
def test_sizes_that_were_given_are_refused_where_they_do_not_fit(capsys, model, args, message):
    sets = [*SETS, "--set", "max_model_len=24", "--set", "max_num_seqs=3"]
    code, _, err = run_cli(capsys, "bench", *args, "--model", model, *sets)
    assert code == 2 and message in err


def test_a_profile_runs_where_the_cache_holds_less_than_the_longest_request(capsys):
    """The configuration of the page of benches: 128 blocks, and max_model_len is the model's."""
    args = ["--model", "pocket", "--set", "num_kvcache_blocks=20", "--set", "max_num_seqs=2", "--steps", "2"]
    code, out, _ = run_cli(capsys, "bench", "profile", *args, "--set", "dtype=float32", "--input-len", "16", "--json")
    assert code == 0 and json.loads(out)["decode"]["steps"] == 2


@pytest.mark.parametrize("room", [2, 3, 9, 50, 160, 1000])
def test_fitted_sizes_fit_keep_those_given_and_are_the_defaults_where_there_is_room(room):
    defaults, least = {"a": 100, "b": 60}, {"a": 1, "b": 1}
    fits = lambda sizes: sizes["a"] + sizes["b"] <= room  # noqa: E731
    found = fitted({}, defaults, least, fits, str)
    assert fits(found) and min(found.values()) >= 1 and (found == defaults) == (room >= 160)
    if room > 7:
        assert fitted({"a": 7}, defaults, least, fits, str)["a"] == 7
    else:
        with pytest.raises(ConfigError):
            fitted({"a": 7}, defaults, least, fits, str)


def test_the_room_of_a_request_counts_whole_blocks_of_the_cache():
    limits = EngineLimits(vocab=10, tokens=100, rows=4, step=64, block=16, cache=160)
    assert [limits.room(n) for n in (1, 3, 10, 11)] == [100, 48, 16, 0]


@pytest.mark.parametrize("source", ["sample:azure", "sample:burstgpt", "sample:mooncake", "sample:bailian"])
def test_a_trace_is_a_dataset_whose_lengths_and_equal_beginnings_are_those_of_the_trace(source):
    from minivllm.lab.traces.read import read_trace

    trace = read_trace(source)
    assert workload.names_trace(source)
    asks, left_out = workload.of_trace(source, 40, 9000)
    fit = [i for i in range(len(trace)) if trace.prompt[i] + trace.output[i] <= 9000]
    assert len(asks) == len(fit) and left_out == len(trace) - len(fit)
    assert [len(one.prompt) for one in asks] == trace.prompt[fit].tolist()
    assert [one.max_tokens for one in asks] == trace.output[fit].tolist()
    assert max(max(one.prompt) for one in asks) < 40
    for a in range(min(6, len(fit))):
        for b in range(a):
            x, y = trace.tokens(fit[a]), trace.tokens(fit[b])
            n = min(len(x), len(y))
            same = n if (x[:n] == y[:n]).all() else int((x[:n] != y[:n]).argmax())
            assert asks[a].prompt[:same] == asks[b].prompt[:same]


def test_a_trace_of_requests_that_are_all_too_long_is_refused():
    with pytest.raises(ConfigError, match="its shortest request has"):
        workload.of_trace("sample:azure", 40, 3)


def test_compare_runs_a_trace_and_says_what_it_left_out(capsys, model):
    sets = [*SETS, "--set", "max_model_len=64", "--quality-tokens", "0", "--warmups", "0", "--seeds", "1"]
    trace = "synthetic:requests=9,question=20,answer=8,node=10,longest=200"
    code, out, err = run_cli(
        capsys, "compare", "--model", model, "--sweep", "evictor=lru,fifo", *sets, "--dataset", trace
    )
    assert code == 0 and "(all at once: arrival times are not used)" in out.splitlines()[0], err
    assert "need more than 64 tokens" in err
    code, _, err = run_cli(
        capsys,
        "compare",
        "--model",
        model,
        "--sweep",
        "evictor=lru,fifo",
        *sets,
        "--dataset",
        trace,
        "--input-len",
        "4",
    )
    assert code == 2 and "--input-len: the trace says that" in err
