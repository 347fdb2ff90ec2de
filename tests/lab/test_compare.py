"""``minivllm compare``: quality by its definitions, runs that are there are not run again, sentences that say what was
measured."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import weakref
from argparse import Namespace

import numpy as np
import pytest
from cli_helpers import run_cli

from minivllm import LLM, SamplingParams
from minivllm.cli import compare as cli_compare
from minivllm.cli.common import record_path
from minivllm.cli.compare import contenders
from minivllm.errors import ConfigError
from minivllm.lab.bench import quality, report, trials
from minivllm.lab.bench.comparing import ComparedRuns
from minivllm.lab.bench.pareto import Front
from minivllm.lab.bench.quality import TextScores
from minivllm.lab.bench.repeats import dumps
from minivllm.lab.bench.statistics import paired, shifted
from minivllm.lab.bench.store import Store, digest

SMALL = ["--set", "max_num_seqs=4", "--set", "max_num_batched_tokens=128", "--set", "num_kvcache_blocks=64"]
LITTLE = ["--num-prompts", "3", "--input-len", "6", "--output-len", "3", "--warmups", "0", "--quality-tokens", "24"]


def test_perplexity_is_that_of_the_log_probabilities_of_the_prompt():
    text = quality.text_of("")
    with LLM("pocket", dtype="float32", max_num_seqs=4, max_num_batched_tokens=256, num_kvcache_blocks=64) as llm:
        found = quality.score(llm, text, 2 * quality.PIECE + 9)
        pieces = np.split(found.ids, np.cumsum(found.lengths)[:-1])
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([piece.tolist() for piece in pieces], params, use_tqdm=False)
    assert found.lengths.tolist() == [quality.PIECE, quality.PIECE, 9]
    losses = []
    for piece, output in zip(pieces, outputs, strict=True):
        given = [output.prompt_logprobs[i][int(piece[i])].logprob for i in range(1, len(piece))]
        losses.append(-sum(given) / len(given))
    assert found.losses() == pytest.approx(losses, abs=1e-4)
    own = quality.summary(found, found)
    whole = sum(loss * (n - 1) for loss, n in zip(losses, found.lengths, strict=True)) / (found.lengths - 1).sum()
    assert own["perplexity"] == pytest.approx(math.exp(whole), rel=1e-4)
    assert own["kl"] == 0 and own["top1_agreement"] == 1 and own["scored_tokens"] == found.lengths.sum() - 3


def test_a_piece_is_scored_behind_its_prompt_alone():
    text, prompt = quality.text_of(""), 20
    with LLM("pocket", dtype="float32", max_num_seqs=4, max_num_batched_tokens=256, num_kvcache_blocks=64) as llm:
        found = quality.score(llm, text, 2 * quality.PIECE + 9, prompt)
        pieces = np.split(found.ids, np.cumsum(found.lengths)[:-1])
        outputs = llm.generate([piece.tolist() for piece in pieces], SamplingParams(max_tokens=1, prompt_logprobs=0))
        with pytest.raises(ConfigError, match="--quality-prompt 4096: expected fewer tokens than max_model_len"):
            quality.score(llm, text, 64, 4096)
    assert found.lengths.tolist()[:2] == [quality.PIECE + prompt - 1] * 2
    losses = []
    for piece, output in zip(pieces, outputs, strict=True):
        given = [output.prompt_logprobs[i][int(piece[i])].logprob for i in range(prompt, len(piece))]
        losses.append(-sum(given) / len(given))
    assert found.losses() == pytest.approx(losses, abs=1e-4)
    assert quality.summary(found, found)["scored_tokens"] == found.lengths.sum() - prompt * len(pieces)


def test_a_sweep_of_budgets_reports_rows_memory_and_the_quality_of_compressed_requests(capsys, tmp_path):
    path = tmp_path / "r.json"
    args = [
        "compare",
        "--set",
        "dtype=float32",
        "--set",
        "num_kvcache_blocks=40",
        "--set",
        "enable_prefix_caching=false",
    ]
    args += ["--sweep", "compressor=knorm", "kv_budget=0,0.25", "--seeds", "1,2", "--warmups", "0"]
    args += ["--num-prompts", "8", "--input-len", "100", "--output-len", "24", "--quality-tokens", "64"]
    code, out, _ = run_cli(capsys, *args, "--output-json", str(path))
    assert code == 0
    found = json.loads(path.read_text())
    whole, quarter = found["rows"]
    assert found["settings"]["quality_prompt"] == quality.LONG_PROMPT
    assert whole["compressions"] == 0 and quarter["compressions"] == 8
    assert quarter["mean_rows"] > whole["mean_rows"] and quarter["most_rows"] == 8
    assert 0 < quarter["kv_peak_mib"] <= 40 * 16 * quarter["kv_token_bytes"] / 2**20
    assert whole["quality"]["kl"] == 0 and quarter["quality"]["kl"] > 0.01
    assert quarter["quality"]["perplexity"] > whole["quality"]["perplexity"]
    assert {"mean_rows", "kv_peak_mib", "kl", "perplexity", "output_throughput"} <= set(quarter["against_first"])
    assert f"counted of {quarter['name']}: " in out and "rows at once" in out and "KV MiB" in out


def test_kl_and_agreement_are_those_of_the_definitions_and_other_tokens_are_not_compared(tmp_path):
    def scores(rows, ids=(0, 1, 2)):
        with np.errstate(divide="ignore"):
            return TextScores(np.array(ids, np.int32), np.array([3]), np.log(np.array(rows, np.float32)))

    a, b = scores([[0.5, 0.25, 0.25], [0.0, 0.4, 0.6]]), scores([[0.25, 0.5, 0.25], [0.1, 0.3, 0.6]])
    want = (0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.4 * math.log(4 / 3)) / 2
    found = b.against(a)
    assert found["kl"] == pytest.approx(want, rel=1e-5) and found["top1_agreement"] == 0.5
    assert b.losses() == pytest.approx([-(math.log(0.5) + math.log(0.6)) / 2])
    assert scores([[0.2, 0.2, 0.6]] * 2, ids=(0, 2, 2)).against(a) == {}
    a.save(tmp_path / "a.npz")
    assert TextScores.load(tmp_path / "a.npz").against(a)["kl"] == 0
    (tmp_path / "half.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    assert TextScores.load(tmp_path / "half.npz") is None and TextScores.load(tmp_path / "none.npz") is None


def test_a_sweep_runs_each_combination_over_the_seeds_and_what_is_there_is_not_run_again(capsys, tmp_path, monkeypatch):
    config, path = tmp_path / "c.toml", tmp_path / "r.json"
    config.write_text('dtype = "float32"\nscheduler = "fcfs"\n')
    args = ["compare", str(config), *SMALL, *LITTLE, "--results", str(tmp_path / "kept"), "--output-json", str(path)]
    sweep = ["--sweep", "quantizer=none,int8"]
    code, out, _ = run_cli(capsys, *args, *sweep, "--seeds", "1,2", "--task", "echo", "--cases", "2")
    assert code == 0 and "quantizer=int8 over quantizer=none:" in out
    found = json.loads(path.read_text())
    none, int8 = found["rows"]
    assert (none["name"], int8["name"]) == ("quantizer=none", "quantizer=int8")
    assert none["quality"]["kl"] == 0 and int8["quality"]["kl"] > 1e-7 and int8["weight_bytes"] < none["weight_bytes"]
    assert none["same_tokens"] == 1 and none["first_divergence"] is None
    assert {"output_throughput", "task_echo", "perplexity"} <= set(int8["against_first"])
    assert [run["seed"] for run in found["runs_by_name"]["quantizer=int8"]] == [1, 2]
    parts = found["bills_of_materials"]["quantizer=int8"]["parts"]
    assert next(part["name"] for part in parts if part["seam"] == "quantizer") == "minivllm/int8"

    ran, real = [], trials.run
    monkeypatch.setattr(
        trials, "run", lambda llm, *given: ran.append((llm.config.quantizer.name, given[2])) or real(llm, *given)
    )
    code, again, err = run_cli(capsys, *args, *sweep, "--seeds", "1,2", "--task", "echo", "--cases", "2")
    assert code == 0 and not ran and again == out and "4 of 4 runs are in" in err
    code, _, _ = run_cli(capsys, *args, *sweep, "--seeds", "1,2,7", "--task", "echo", "--cases", "2")
    assert code == 0 and ran == [("none", 7), ("int8", 7)]
    ran.clear()  # the same runs against another reference: only quality is measured again
    code, _, _ = run_cli(
        capsys, *args, "--sweep", "quantizer=int8,none", "--seeds", "1,2", "--task", "echo", "--cases", "2"
    )
    first, second = json.loads(path.read_text())["rows"]
    assert code == 0 and not ran and first["quality"]["kl"] == 0 and second["quality"]["kl"] > 1e-7


def test_a_table_says_what_was_asked_what_differs_and_how_many_prefixes_were_found(capsys, tmp_path):
    """And what of the file is not used: requests are said by flags."""
    config, requests, path = tmp_path / "c.toml", tmp_path / "asks.jsonl", tmp_path / "r.json"
    config.write_text('dtype = "float32"\n[sampling]\ntemperature = 1\n[run]\nprompts = ["x"]\n')
    args = ["compare", str(config), *SMALL, "--output-len", "3", "--warmups", "0", "--quality-tokens", "0"]
    args += ["--sweep", "enable_prefix_caching=true,false", "--seeds", "1,2", "--in-turns"]
    drawn = ["--num-prompts", "8", "--input-len", "6", "--prefix-len", "32", "--output-json", str(path)]
    code, out, err = run_cli(capsys, *args, *drawn)
    assert code == 0 and out.startswith("8 requests of 6 random tokens, 32 more in common, 3 out, temperature 0\n")
    assert "over enable_prefix_caching=true: only enable_prefix_caching differs\n" in out
    assert err.count(f"[run] and [sampling] of {config}: not used here") == 1
    on, off = json.loads(path.read_text())["rows"]
    assert on["prefix_hit_rate"] > 0.3 and off["prefix_hit_rate"] == 0
    assert f"counted of {off['name']}: prefix hits 0.000" in out and on["verdict"] == ""
    requests.write_text('"a b"\n"a c"\n')
    code, out, err = run_cli(capsys, *args, "--dataset", str(requests))
    assert code == 0 and f"2 requests of {requests}, temperature 0\n" in out and "counted" not in out
    assert "at temperature 0: all seeds have the same requests" in err


@pytest.mark.parametrize("turns", [[], ["--in-turns"]])
def test_a_configuration_that_fails_is_left_out_and_the_others_are_compared(capsys, tmp_path, monkeypatch, turns):
    (tmp_path / "own_failing.py").write_text(
        "from minivllm.plugins.evictor.lru import Lru\n\n\nclass Own(Lru):\n"
        "    def __init__(self, *given):\n        raise RuntimeError('no luck')\n"
    )
    path, config = tmp_path / "r.json", tmp_path / "c.toml"
    config.write_text('dtype = "float32"\n')
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_failing", raising=False)
    args = ["compare", str(config), *SMALL, *LITTLE, "--seeds", "1,2", *turns, "--allow-target", "own_failing"]
    args += ["--output-json", str(path), "--sweep"]
    code, out, err = run_cli(capsys, *args, "evictor=lru,own_failing:Own,fifo")
    assert code == 1 and "evictor=fifo over evictor=lru: only evictor differs\n" in out, err
    place = f"(at {tmp_path / 'own_failing.py'}:6)"
    assert err.count(f"no luck {place}; it is left out, and the others go on") == 1, err
    assert out.splitlines()[-1].startswith("failed: evictor=own_failing:Own: ")
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["evictor=lru", "evictor=fifo"]
    assert list(found["failed"]) == ["evictor=own_failing:Own"]
    code, out, _ = run_cli(capsys, *args, "evictor=lru,own_failing:Own")
    assert code == 1 and [row["name"] for row in json.loads(path.read_text())["rows"]] == ["evictor=lru"]
    assert out.splitlines()[-1].startswith("failed: evictor=own_failing:Own: ")
    path.unlink()
    code, out, err = run_cli(capsys, *args, "evictor=own_failing:Own,lru,fifo")
    assert code not in (0, 1) and not out and "own_failing:Own: " in err and not path.exists(), "the first is the base"


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_cell_that_cannot_be_opened_leaves_nothing_behind_and_the_others_run(in_turns):
    """What it held of the device would be missing to those behind it, and change what is compared."""
    held, heard = [], []

    class Weights:
        pass

    def failing():
        weights = Weights()
        held.append(weakref.ref(weights))
        raise RuntimeError(f"no memory beside {type(weights).__name__}")

    cells = [trials.Cell("a", failing), trials.Cell("b", lambda: contextlib.nullcontext("engine"))]

    def once(cell, llm, seed):
        assert llm == "engine" and not any(ref() for ref in held)
        return cell.name, seed

    doing = trials.Trials(once, failed=lambda cell, exc: heard.append((cell.name, str(exc))))
    assert doing.measure(cells, [1, 2], in_turns) == [[], [("b", 1), ("b", 2)]]
    assert heard == [("a", "no memory beside Weights")] and len(held) == 1
    with pytest.raises(RuntimeError, match="no memory"):
        trials.Trials(once).measure(cells, [1, 2], in_turns)


def test_runs_that_are_kept_have_an_engine_each_so_that_those_of_another_call_are_no_others(
    capsys, tmp_path, monkeypatch
):
    """An engine that has served a run may be another one than at its start: a policy that draws, a cache."""
    made, real = [], cli_compare.open_llm
    monkeypatch.setattr(cli_compare, "open_llm", lambda *given: made.append(given) or real(*given))
    args = ["compare", *SMALL, *LITTLE, "--set", "dtype=float32", "--sweep", "evictor=lru,fifo"]
    for more, count in (([], 2), (["--results", str(tmp_path)], 4), (["--results", str(tmp_path)], 0)):
        made.clear()
        code, _, err = run_cli(capsys, *args, "--seeds", "1,2", *more)
        assert code == 0 and len(made) == count, err
    assert run_cli(capsys, *args, "--seeds", "1,2,3", *more)[0] == 0 and len(made) == 2


def test_a_sweep_is_cut_at_commas_that_no_bracket_or_quote_holds():
    options = '{name="own:X",options={a=[1,2],b="x,{\\",",c=\'y,\\\'}}'
    values = cli_compare._values(f"evictor=lru,{options},fifo")
    assert values == ["evictor=lru", f"evictor={options}", "evictor=fifo"]
    assert cli_compare._values('skip=["a,b"],[]') == ['skip=["a,b"]', "skip=[]"]
    assert cli_compare._values("model=it's,other") == ["model=it's", "model=other"]
    with pytest.raises(ConfigError, match="expected key=value,value"):
        cli_compare._values("evictor=lru,,fifo")
    for wrong in ("evictor={a=1,b", "evictor='x,y", "evictor=a],b"):
        with pytest.raises(ConfigError, match="expected pairs, and commas between values"):
            cli_compare._values(wrong)


PIECES = [0.9, 1.1, 1.0, 1.2, 0.8, 1.05, 0.95, 1.0]  # losses of the pieces of a text
NOISE = [0.01, -0.01, 0.012, -0.008, 0.004, -0.009, 0.006, -0.006]


def measured(name, speeds, shift=0.0, kl=0.0, top1=1.0, weights=10):
    """Return a stored configuration: runs of three seeds, and the quality of a text in eight pieces."""
    state = {"mhz": None}
    figures = [dict.fromkeys(("median_ttft_ms", "median_tpot_ms"), 1.0) for _ in speeds]
    for one, speed in zip(figures, speeds, strict=True):
        one |= {"output_throughput": speed, "weight_bytes": weights << 20, "joules_per_output_token": None}
        one |= {"total_output_tokens": 9}
    runs = {str(i): {"figures": f, "state": state, "tokens": [[i]]} for i, f in enumerate(figures)}
    losses = [x + shift + (n if shift or kl else 0.0) for x, n in zip(PIECES, NOISE, strict=True)]
    quality = {
        "perplexity": math.exp(sum(losses) / 8),
        "losses": losses,
        "tokens": "t",
        "kl": kl,
        "top1_agreement": top1,
        "kl_pieces": [abs(kl * (1 + 9 * n)) for n in NOISE],
        "top1_pieces": [top1 + (n if kl else 0.0) for n in NOISE],
    }
    return name, {"runs": runs, "quality": quality}


def front_of(*found):
    names = [name for name, _ in found]
    table = ComparedRuns(names, [one for _, one in found], range(3), {})
    return table, Front(table.result(dict.fromkeys(names)))


FIGURES = ("output_throughput", "perplexity", "kl", "top1_agreement", "weight_bytes")
STEADY, FASTER, NOISY = (100.0, 101.0, 99.0), (150.0, 151.0, 148.0), (150.0, 300.0, 60.0)


def test_nobody_is_beaten_by_less_than_the_tests_of_the_table_show():
    float32 = measured("float32", STEADY)
    for other, beats in (
        (measured("b", NOISY), ""),  # the runs do not decide
        (measured("b", FASTER), "beaten by b (tokens/s)"),
        (measured("b", FASTER, shift=0.2, kl=0.01), ""),  # a higher perplexity
        (measured("b", FASTER, shift=-0.001, kl=0.01, top1=0.9, weights=2), ""),  # nf4: by its divergence
        (measured("b", STEADY, weights=9), "beaten by b (weights)"),
        (measured("b", STEADY, weights=11), ""),
    ):
        table, front = front_of(float32, other)
        assert front.beaten(0, FIGURES) == beats, other
        whole = table.result(dict.fromkeys(table.names))
        for key, one in whole["rows"][1]["against_first"].items():  # one rule: the sentences of compare are the signs
            if key in FIGURES:
                assert (front.sign(0, 1, key) != 0) == (one["says"] == "a difference"), (key, one)


def test_rows_behind_the_first_are_tested_against_each_other_by_the_same_rule():
    rows = [measured("a", FASTER), measured("b", STEADY), measured("c", NOISY), measured("d", (98.0, 96.5, 95.0))]
    _, front = front_of(*rows)
    assert front.beaten(1, FIGURES) == "beaten by a (tokens/s)" and front.beaten(2, FIGURES) == ""
    assert all(front.sign(i, j, key) == -front.sign(j, i, key) for i in range(4) for j in range(4) for key in FIGURES)
    assert all(front.sign(2, j, "output_throughput") == 0 for j in range(4)), "a row of wide intervals decides nothing"
    text = report.section("r", json.loads(dumps(front_of(*rows)[0].result(dict.fromkeys("abcd")))))
    assert "beaten by a (tokens/s)" in text and "Holm" in text


def test_a_ratio_far_from_one_with_a_wide_interval_is_undecided():
    wide = paired([100.0, 101.0, 99.0], [10.0, 60.0, 12.0])
    assert wide.ratio < 0.5 and wide.low < 1 < wide.high and wide.sentence() == "these runs do not decide"
    near = paired([100.0, 101.0, 99.0, 100.0], [101.0, 100.0, 99.5, 100.5])
    assert near.sentence() == "no difference shown" and 0.9 < near.low < near.high < 1.1


def test_a_shift_has_student_s_interval_of_the_differences():
    found = shifted([1.0, 2.0, 3.0], [1.5, 2.4, 3.9])
    assert found.difference == pytest.approx(0.6) and found.low < 0 < found.high  # 0.6 +- 4.303 * 0.2646 / sqrt(3)
    assert found.high - found.difference == pytest.approx(4.3027 * 0.26458 / math.sqrt(3), rel=1e-3)
    assert shifted([1.0, 1.0], [1.0, 1.0]).sentence() == "the same in every pair"
    assert shifted([1.0], [2.0]).sentence() == "one pair: no test"


def test_a_digest_depends_on_the_sources_the_machine_and_the_workload(tmp_path):
    bill = {"fingerprint": "a", "versions": {}, "machine": {"cpu": "x"}, "environment": {}}
    changed = [{**bill, "fingerprint": "b"}, {**bill, "machine": {"cpu": "y"}}, {**bill, "versions": {"torch": "2"}}]
    keys = {digest(one, {"n": 1}) for one in (bill, *changed)} | {digest(bill, {"n": 2})}
    assert len(keys) == 5 and digest(bill, {"n": 1}) == digest(dict(bill), {"n": 1})
    store = Store(str(tmp_path))
    store.keep_run("k", 1, {"figures": {"x": math.nan}})
    (tmp_path / "broken.json").write_text('{"runs"')
    assert Store(str(tmp_path)).of("k")["runs"] == {"1": {"figures": {"x": None}}}
    assert Store(str(tmp_path)).of("broken") == {"runs": {}, "quality": {}}


def test_speeds_at_other_clocks_are_not_compared():
    def stored(rates, mhz):
        runs = {}
        for seed, rate in enumerate(rates, 1):
            figures = {"output_throughput": rate, "median_ttft_ms": 1.0, "median_tpot_ms": 1.0, "weight_bytes": 1}
            run = {"figures": {**figures, "total_output_tokens": 1}, "tokens": [[1]]}
            runs[str(seed)] = {**run, "state": {"mhz": mhz, "seconds": 1.0}}
        return {"runs": runs, "quality": None}

    measured = [stored([1, 1], 1900), stored([2, 2.001], 1200), stored([2, 2.001], 1910)]
    found = ComparedRuns(["a", "b", "c"], measured, [1, 2], {}).result({})
    says = [row["against_first"]["output_throughput"]["says"] for row in found["rows"][1:]]
    assert says == ["not compared: clocks of 1900 and 1200 MHz", "a difference"]


def test_perplexities_of_other_tokens_are_not_compared():
    def stored(ids, loss):
        rows = np.log(np.full((2, 3), loss, np.float32))
        scores = TextScores(np.array(ids, np.int32), np.array([3]), rows)
        figures = {"output_throughput": loss, "median_ttft_ms": 1.0, "median_tpot_ms": 1.0, "weight_bytes": 1}
        run = {"figures": {**figures, "total_output_tokens": 1}, "state": {}, "tokens": [[1]]}
        return {"runs": {"1": run}, "quality": quality.summary(scores, scores)}

    three = [stored((0, 1, 2), 0.5), stored((0, 2, 1), 0.4), stored((0, 1, 2), 0.4)]
    table = ComparedRuns(["a", "b", "c"], three, [1], {})
    whole = table.result({})
    assert ["perplexity" in row["against_first"] for row in whole["rows"]] == [False, False, True]
    b, c = "\n".join(table.lines(whole, "3 requests")).split("b over a:")[1].split("c over a:")
    assert "perplexity: not compared: other tokens" in b and "other tokens" not in c


def test_the_run_table_of_a_compared_file_is_that_of_another_command(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(f'max_num_seqs = {ord(name)}\n[run]\nrecord = "x.json"\n')
    given = {"sweep": [], "set": [], "config": [], "model": None, "allow_target": []}
    args = Namespace(file=[str(tmp_path / "a.toml"), str(tmp_path / "b.toml")], **given)
    found = contenders(args)
    assert [record_path(one.args, one.loaded) for one in found] == [None, None]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["c.toml", "d.toml"], "c and d are the same configuration; expected different ones"),
        ([], "expected at least two files to compare, or --sweep"),
        (["c.toml"], "expected at least two files to compare, or --sweep"),
        (["c.toml", "c.toml", "--sweep", "seed=1,2"], "expected at most one file to begin with, not 2"),
        (["--sweep", "seed"], "expected key=value,value, for example quantizer=none,int8"),
        (["--sweep", "seed=1,"], "expected key=value,value"),
        (["--sweep", "seed=1,1"], "seed=1: the same configuration twice"),
        (["--sweep", "seed=1,2", "--seeds", "3,3"], "--seeds 3,3: the same seed twice"),
        (["--sweep", "seed=1,2", "--task", "ecco"], "no such task. Did you mean 'echo'?"),
        (["--sweep", "sede=1,2"], "sede"),
        (["--sweep", "seed=1,2", "--seed", "99"], "--seed 99: this command has a run for each seed of --seeds"),
        (
            ["--sweep", "seed=1,2", "--text", "c.toml", "--quality-tokens", "0"],
            "--text has no effect with --quality-tokens 0",
        ),
        (
            ["--sweep", "seed=1,2", "--quality-prompt", "9", "--quality-tokens", "0"],
            "--quality-prompt 9 has no effect with --quality-tokens 0",
        ),
        (["--sweep", "seed=1,2", "--cases", "20"], "--cases 20: of no task; add --task NAME"),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    for name in ("c", "d"):
        (tmp_path / f"{name}.toml").write_text("seed = 1\n")
    code, _, err = run_cli(capsys, "compare", *SMALL, *LITTLE, *args)
    assert code == 2 and message in err
