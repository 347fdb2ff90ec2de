"""``minivllm ablate``: what is taken away is away, changes no token of a greedy answer, and is refused where it is not
there."""

from __future__ import annotations

import json

import pytest
from cli_helpers import run_cli

from minivllm import LLM
from minivllm.errors import ResourceError
from minivllm.lab.bench import ablate, offline, trials
from minivllm.lab.bench.statistics import Paired
from minivllm.lab.bench.workload import Generated

SMALL = ["--set", "max_num_seqs=4", "--set", "max_num_batched_tokens=64", "--set", "num_kvcache_blocks=64"]
LITTLE = ["--num-prompts", "4", "--input-len", "6", "--output-len", "4", "--repeats", "2", "--warmups", "0"]
OPTIONS = dict(max_num_seqs=4, max_num_batched_tokens=64, num_kvcache_blocks=64)


def test_without_a_kv_cache_each_token_is_computed_from_all_before_it_and_is_the_same():
    asks = Generated(4, 6, 5, 0.5, 0, 1, 1000).asks(0)
    with LLM("pocket", dtype="float32", enable_prefix_caching=False, **OPTIONS) as llm:
        kept, _ = offline.generate(llm, asks, 0.0, 0)
        before = llm.engine.clock.count
        again, seconds = ablate.recompute(llm, asks, 0.0, 0)
        steps = llm.engine.clock.count - before
        stats = llm.stats()
    assert [one.token_ids for one in again] == [one.token_ids for one in kept]
    assert [one.output_tokens for one in again] == [ask.max_tokens for ask in asks]
    assert [one.prompt_tokens for one in again] == [len(ask.prompt) for ask in asks]
    assert steps == max(ask.max_tokens for ask in asks) and stats["prefix_hits"] == 0
    assert all(0 < one.ttft <= one.latency <= seconds for one in again)
    computed = sum(int(n) for n in llm.engine.clock.tokens[before : before + steps])
    assert computed == sum(len(a.prompt) + i for a in asks for i in range(a.max_tokens))


def test_an_ablation_says_what_each_part_is_worth_and_repeats_the_baseline(capsys, tmp_path):
    path = tmp_path / "a.json"
    parts = "prefix-cache,continuous-batching"
    flags = ["--part", parts, "--in-turns", "--output-json", str(path)]
    code, out, _ = run_cli(capsys, "ablate", *SMALL, *LITTLE, *flags)
    assert code == 0 and "prefix-cache: enable_prefix_caching=false" in out
    found = json.loads(path.read_text())
    rows = {row["part"]: row for row in found["rows"]}
    assert list(rows) == ["prefix-cache", "continuous-batching", "nothing (again)"]
    assert all(row["same_tokens"] == 1 for row in rows.values())
    assert found["prefix_hit_rate"] > 0 and rows["prefix-cache"]["prefix_hit_rate"] == 0
    assert rows["nothing (again)"]["engine_steps"] == found["engine_steps"]
    for row in rows.values():
        worth = row["worth"]["output_throughput"]
        assert worth["low"] <= worth["ratio"] <= worth["high"] and worth["says"]
    assert found["bill_of_materials"]["config"]["values"]["enable_prefix_caching"]


def test_every_part_that_is_offered_takes_settings_that_the_engine_takes():
    with LLM("pocket", scheduler="fcfs", quantizer="int8", kv_format="int8", drafter="ngram", **OPTIONS) as llm:
        found, missing = ablate.chosen(llm, [])
    names = {part.name for part in found} | {name for name, _ in missing}
    assert names == {part.name for part in ablate.PARTS}
    assert {"quantization", "kv-format", "speculation", "kv-cache"} <= {part.name for part in found}
    why = dict(missing)
    assert "GPU" in why["fusion"] and why["batch-invariance"] == "batch_invariant is false"
    from minivllm.config import load_config

    for part in ablate.PARTS:
        load_config(sets=[*part.sets])


def test_an_ablation_removes_the_compression_of_all_requests(capsys, tmp_path):
    path = tmp_path / "a.json"
    compressed = ["--set", "compressor=random", "--set", "kv_budget=3", "--set", "compress_every=1"]
    flags = ["--part", "compression", "--in-turns", "--output-json", str(path)]
    code, _, err = run_cli(capsys, "ablate", *SMALL, *compressed, *LITTLE, *flags)
    assert code == 0, err
    rows = {row["part"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["compression"]["same_tokens"] < 1 == rows["nothing (again)"]["same_tokens"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--part", "compression"], "all tokens stay in the KV cache: compressor is none"),
        (["--part", "compression", "--set", "compressor=knorm"], "kv_budget and pressure_budget are 0"),
        (["--part", "prefix-cach"], "no such part. Did you mean 'prefix-cache'?"),
        (["--part", "fusion"], "there is nothing to take away: fused kernels are those of a GPU"),
        (["--part", "speculation"], "there is nothing to take away: nothing is drafted"),
        (["--part", "prefix-cache", "--set", "enable_prefix_caching=false"], "enable_prefix_caching is false"),
        (["--part", "continuous-batching", "--set", "scheduler=static"], "the scheduler is static already"),
    ],
)
def test_a_part_that_cannot_be_taken_away_is_refused_by_name(capsys, args, message):
    code, _, err = run_cli(capsys, "ablate", *SMALL, "--set", "device=cpu", *LITTLE, *args)
    assert code == 2 and message in err


def test_engines_in_turns_run_every_seed_once_and_begin_with_another_each_time():
    order = []

    class Engine:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            order.append("end")

    cells = [trials.Cell(name, Engine) for name in "abc"]
    once = lambda cell, llm, seed: order.append((cell.name, seed)) or (cell.name, seed)  # noqa: E731
    measured = trials.Trials(once, lambda cell, llm: order.append("warm"))
    found = measured.measure(cells, [5, 6], True)
    assert found == [[(name, 5), (name, 6)] for name in "abc"]
    runs = [("a", 5), ("b", 5), ("c", 5), ("b", 6), ("c", 6), ("a", 6)]
    assert order == [each for run in runs for each in ("warm", run, "end")]  # an engine made anew for each run
    order.clear()
    assert measured.measure(cells, [5, 6], False) == found
    assert order[:4] == ["warm", ("a", 5), ("a", 6), "end"]
    order.clear()
    there = trials.Trials(once, there=lambda cell, seed: cell.name != "b" or seed == 5)
    assert there.measure(cells, [5, 6], True) == [[], [("b", 6)], []] and order == [("b", 6), "end"]


def test_the_configuration_that_fails_is_named():
    def no_engine():
        raise ResourceError("no memory")

    with pytest.raises(ResourceError) as failed:
        trials.Trials(lambda cell, llm, seed: 0).measure([trials.Cell("second", no_engine)], [1], False)
    assert str(failed.value) == "second: no memory"


def test_tokens_that_differ_are_found_and_the_sentences_of_a_table_are_corrected_for_their_number():
    a = [{"tokens": [[1, 2, 3], [4]]}, {"tokens": [[1, 2], [9]]}]
    b = [{"tokens": [[1, 2, 3], [4]]}, {"tokens": [[1, 7], [9, 9]]}]
    assert trials.same_tokens(a, b) == 0.5 and trials.first_divergence(a, b) == 2
    assert trials.same_tokens(a, a) == 1 and trials.first_divergence(a, a) is None
    alone = trials.judged([{"x": Paired(1.1, 1.01, 1.2, 0.04, 5)}])
    among = trials.judged([{"x": Paired(1.1, 1.01, 1.2, 0.04, 5), "y": Paired(1.0, 0.9, 1.1, 0.8, 5)}])
    assert alone[0]["x"]["says"] == "a difference"
    assert among[0]["x"]["says"] == "these runs do not decide, with so many tests"


def test_parts_of_the_user_are_settings_of_a_file_and_of_flags(tmp_path):
    file = tmp_path / "parts.toml"
    file.write_text('[small]\nmax_num_seqs = 2\nevictor = "fifo"\n[draft.drafter]\nname = "none"\n')
    found = ablate.defined(["few:max_num_seqs=3", "few:run_ahead=0"], str(file))
    assert {part.name: part.sets for part in found} == {
        "small": ("max_num_seqs=2", 'evictor="fifo"'),
        "draft": ('drafter.name="none"',),
        "few": ("max_num_seqs=3", "run_ahead=0"),
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--define", "few"], "expected NAME:KEY=VALUE"),
        (["--define", "few:max_num_seqs"], "expected NAME:KEY=VALUE"),
        (["--define", "kv-cache:max_num_seqs=2"], "the name of a built-in part"),
        (["--define", "few:max_num_seqz=2"], "part 'few': --set: unknown option 'max_num_seqz'"),
        (["--define", "same:max_num_seqs=4"], "the configuration has max_num_seqs=4 already"),
        (["--parts", "none.toml"], "none.toml"),
    ],
)
def test_a_part_of_the_user_that_is_none_is_refused(capsys, args, message):
    code, _, err = run_cli(capsys, "ablate", "--model", "pocket", "--set", "max_num_seqs=4", *args)
    assert code == 2 and message in err


def test_a_part_of_the_user_is_measured_and_seeds_that_change_nothing_are_warned_of(capsys, tmp_path):
    asks = tmp_path / "asks.jsonl"
    asks.write_text('"a b"\n"a c"\n')
    args = ["--set", "max_num_seqs=4", "--set", "num_kvcache_blocks=64", "--set", "dtype=float32"]
    args += ["--define", "few:max_num_seqs=1", "--repeats", "2", "--warmups", "0", "--output-len", "2"]
    code, out, err = run_cli(capsys, "ablate", "--model", "pocket", *args, "--dataset", str(asks))
    assert code == 0, err
    assert "few: max_num_seqs=1: defined by the user" in out and "kv-cache" not in out
    assert "warning: seeds change nothing" in out and "at temperature 0: all seeds have the same requests" in out


def test_seeds_that_change_an_answer_are_not_warned_of():
    same, other = {"tokens": [[1]]}, {"tokens": [[2]]}
    assert trials.same_over_seeds([[same, same], [same, other]], "", 0.0) == ""
    assert trials.same_over_seeds([[same]], "", 0.0) == ""
    assert "no draw differs" in trials.same_over_seeds([[same, same], [other, other]], "", 1.0)
