"""``bench batching``: the same requests and arrivals under each way to form batches."""

from __future__ import annotations

import json

import pytest

import minivllm
from minivllm.cli import bench_runs, main
from minivllm.lab.bench import batching

SETS = [
    word
    for text in ("max_num_seqs=4", "max_num_batched_tokens=64", "num_kvcache_blocks=64", "max_model_len=128")
    for word in ("--set", text)
]
FLAGS = ["--batch", "3", "--request-rate", "50", "--num-prompts", "6", "--input-len", "8", "--output-len", "4"]


@pytest.mark.parametrize("turns", [[], ["--in-turns"]])
def test_all_policies_serve_the_same_requests_each_by_one_engine_and_are_compared_with_continuous(
    tmp_path, capsys, monkeypatch, turns
):
    made, init = [], minivllm.AsyncLLM.__init__
    monkeypatch.setattr(minivllm.AsyncLLM, "__init__", lambda self, **given: made.append(self) or init(self, **given))
    out = tmp_path / "b.json"
    more = ["--repeats", "2", "--warmups", "0", "--policy", "fair", *turns]
    assert main(["bench", "batching", *SETS, *FLAGS, *more, "--output-json", str(out)]) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["policy"] for row in found["rows"]] == ["static", "size-or-timeout", "continuous", "adaptive", "fair"]
    assert len(made) == 5 and "2 runs each by one engine a policy, paired by seed" in printed
    tokens = {tuple(run["total_input_tokens"] for run in row["repeats"]) for row in found["rows"]}
    assert len(tokens) == 1, "runs of one seed have the same prompts"
    for row in found["rows"]:
        assert row["failed"] == 0 and ("against" in row) == (row["policy"] != "continuous")
        assert printed.count(row["policy"]) >= 1
    assert len({bill["fingerprint"] for bill in found["bills_of_materials"].values()}) == 5


def test_a_static_batch_waits_for_its_size_and_the_other_for_its_timeout():
    sets = {way.name: way.sets for way in batching.ways(8, 20.0, ["fair", "fair"])}
    assert "scheduler.options.max_hold=0.02" in sets["size-or-timeout"]
    assert "scheduler.options.max_hold=10" in sets["static"] and list(sets)[-1] == "fair"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "static"], "measured anyway"),
        (["--batch", "9"], "--batch 9 is more than max_num_seqs=4"),
        (["--timeout-ms", "20000"], "at most 10000"),
        (["--set", "scheduler=fair"], "this command compares schedulers"),
        (["--policy", "fcsf", "--batch", "2"], "fcsf"),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys, flags, message):
    assert main(["bench", "batching", *SETS, *flags]) in (2, 4)
    assert message in capsys.readouterr().err


def test_progress_is_told_to_who_waits_at_a_terminal_and_to_nobody_else(capsys, monkeypatch):
    bench_runs.progress("a run")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(bench_runs.sys.stderr, "isatty", lambda: True, raising=False)
    bench_runs.progress("a run")
    assert capsys.readouterr() == ("", "minivllm: a run\n")
