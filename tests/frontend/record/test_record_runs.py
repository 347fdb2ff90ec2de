"""Runs that are recorded, from Python and from the command line, and started again."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plugin_helpers import install, write_package
from record_helpers import EVICTOR, GREEDY, OPTIONS, bills, changed, one_thread, tiny_model

from minivllm import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams, Tap
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.routes import count_routes
from minivllm.frontend.record import bill, replay
from minivllm.frontend.record.diff import NOTHING, compare
from minivllm.registry import Catalog
from minivllm.testing.tiny import tiny_dir

write = pytest.fixture(write_package)
model = pytest.fixture(scope="module")(tiny_model)
single = pytest.fixture(autouse=True)(one_thread)
made = pytest.fixture(bills)


# ---------------------------------------------------------------- from Python


def test_a_bill_says_what_was_wired_and_why_and_what_came_out(model):
    with LLM(model=str(model), **OPTIONS) as llm:
        assert llm.bill_of_materials()["results"] is None
        out = llm.generate([[1, 5, 6], [7, 8]], GREEDY, use_tqdm=False)
        made = llm.bill_of_materials()
    parts = {p["seam"]: p for p in made["parts"]}
    sdpa = parts["attention"]
    assert (sdpa["name"], sdpa["distribution"], sdpa["asked"]) == ("minivllm/sdpa", "minivllm", "auto")
    assert "minivllm.plugins.attention.sdpa" in sdpa["source"]["files"] and len(sdpa["source"]["hash"]) == 64
    assert {"evictor", "scheduler", "executor", "processors.minivllm/penalties", "strategies.minivllm/single"} <= set(
        parts
    )
    why = next(r for r in made["reasons"] if r["kind"] == "kvformat")
    assert why["chosen"] == "minivllm/fp32" and why["facts"]["dtype"] == "float32"
    assert any("float32" in text for c in why["candidates"] for text in c["reasons"])
    assert made["config"]["origins"]["max_num_seqs"] == "keyword"
    assert made["resolved"]["kvcache_block_size"] == 16 and made["resolved"]["kv_blocks"] == [41]
    assert made["versions"]["torch"] == torch.__version__ and made["machine"]["threads"] == 1
    done = made["results"]
    assert (done["requests"], done["prompt_tokens"], done["output_tokens"]) == (2, 5, 12)
    assert done["finish_reasons"] == {"length": 2} and done["stats"]["finished"] == 2 and len(out) == 2
    assert str(model) == made["config"]["values"]["model"] and json.loads(json.dumps(made)) == made


def test_a_python_run_is_recorded_when_it_ends_and_runs_again(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with LLM(model=str(model), record="a.json", **OPTIONS) as llm:
        llm.generate([[1, 5, 6], [7, 8]], [GREEDY, SamplingParams(seed=3, max_tokens=4)], use_tqdm=False)
        llm.generate([9], {"temperature": 0, "max_tokens": 2, "logit_bias": {3: 5.0}}, use_tqdm=False)
        list(llm.stream([4, 4], GREEDY))
        llm.record("early.json")
        assert not (tmp_path / "a.json").exists()
    record = bill.read("a.json")
    assert [r["batch"] for r in record["requests"]] == [1, 1, 2, 3] and record["results"]["requests"] == 4
    assert bill.read("early.json")["results"]["tokens_hash"] == record["results"]["tokens_hash"]
    assert main(["run", "a.json", "--record", "b.json"]) == 0
    out, err = capsys.readouterr()
    assert "minivllm: compared with a.json: the tokens are the same: " in err
    assert [line["prompt"] for line in map(json.loads, out.splitlines())] == [[1, 5, 6], [7, 8], [9], [4, 4]]
    assert main(["diff", "a.json", "b.json", "--only", "nothing"]) == 0
    assert capsys.readouterr()[0].startswith(NOTHING + "\nthe tokens are the same: ")
    with LLM(config="a.json") as llm:
        assert llm.config.max_num_seqs == 4 and llm.config.skip_tokenizer_init


def test_the_model_in_the_package_is_recorded_as_such_beside_a_folder_of_its_name(tmp_path, monkeypatch, made):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()
    loaded = load_config(keywords={"model": "pocket", "device": "cpu"}, environ={})
    record = bill.make(resolve(loaded.engine, Catalog.discover()), loaded)
    assert record["config"]["values"]["model"] == "pocket"
    assert Path(record["model"]["folder"]).parent != tmp_path


def test_a_requirement_that_nobody_can_read_does_not_keep_a_run_from_being_recorded(tmp_path, monkeypatch, made, write):
    requires = "Requires-Dist: not ! a requirement\nRequires-Dist: numpy>=1\nRequires-Dist: no-such-package\n"
    install(tmp_path, "acme", {"minivllm.evictor": {"mine": "acme_torn:S"}}, metadata=requires)
    text = f"from minivllm.registration.spec import Spec\n{EVICTOR}S = Spec('acme_torn:Mine', (1, 0), 'for a test')\n"
    write("acme_torn", text)
    (part,) = (p for p in made(evictor="mine")["parts"] if p["seam"] == "evictor")
    assert part["requires"] == {"numpy": importlib.metadata.version("numpy")}


def test_a_function_of_python_cannot_be_run_from_a_file(model, tmp_path):
    def even(ids):
        return range(0, 60, 2)

    path = tmp_path / "f.json"
    with LLM(model=str(model), record=path, **OPTIONS) as llm:
        llm.generate([1, 2], SamplingParams(max_tokens=2, allowed_tokens_fn=even), use_tqdm=False)
    with pytest.raises(ConfigError, match=r"request 1 had allowed_tokens_fn=.*even, a Python function"):
        replay.batches(bill.read(path), "f.json")
    with pytest.raises(ConfigError, match=r"f\.json: has no requests to repeat"):
        replay.batches({"requests": []}, "f.json")


def test_a_run_that_added_vectors_is_another_one_and_cannot_be_run_from_a_file(model, tmp_path):
    hashes = []
    for i, size in enumerate((None, 1.0, 2.0, 2.0)):
        path = tmp_path / f"{i}.json"
        with LLM(model=str(model), record=path, **OPTIONS) as llm:
            point, width = next(iter(llm.tap_points().items()))
            taps = [Tap(point, read=True) if size is None else Tap(point, add=[size] * width)]
            llm.generate([1, 2], SamplingParams(max_tokens=2), False, taps)
        record = bill.read(path)
        hashes.append(record["results"]["sampling_hash"])
        if size is None:
            assert len(replay.batches(record, "f.json")) == 1
        else:
            with pytest.raises(
                ConfigError, match=rf"request 1 added a vector at {point}, which a record does not contain"
            ):
                replay.batches(record, "f.json")
    assert hashes[2] == hashes[3] and len(set(hashes)) == 3


def test_what_requests_read_is_read_again(model, tmp_path, monkeypatch, capsys):
    """Each request its own points, beside one that reads nothing."""
    monkeypatch.chdir(tmp_path)
    with LLM(model=str(model), record="a.json", **OPTIONS) as llm:
        one, other = [*llm.tap_points()][:2]
        taps = [[Tap(one, read=True)], [], [Tap(one, read=True), Tap(other, read=True)]]
        llm.generate([[1, 5, 6], [7, 8], [9]], GREEDY, False, taps)
    assert main(["run", "a.json", "--record", "b.json"]) == 0
    capsys.readouterr()
    assert main(["diff", "a.json", "b.json", "--only", "nothing"]) == 0
    assert capsys.readouterr()[0].startswith(NOTHING + "\nthe tokens are the same: ")
    first, again = bill.read("a.json")["requests"], bill.read("b.json")["requests"]
    assert [r.get("taps") for r in first] == [r.get("taps") for r in again] and len(first[2]["taps"]) == 2


def test_a_record_has_the_routes_that_were_read_and_a_hash_of_given_ones(tmp_path):
    folder = str(tiny_dir(tmp_path / "experts", "qwen3_moe")[0])
    hashes, results = [], []
    for i, routes in enumerate((True, True, {"counts": True, "given": [[[0, 1], [2, 3]]]}, None)):
        path = tmp_path / f"{i}.json"
        with LLM(model=folder, record=path, **OPTIONS) as llm:
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, routes=routes)
            (out,) = llm.generate([[1, 2, 3]], params, False)
        record = bill.read(path)
        hashes.append(record["results"]["sampling_hash"])
        results.append(record["results"].get("routes"))
        if i < 2:
            assert results[i]["counts"] == count_routes(out.routes, 6).tolist() and results[i]["sequences"] == 1
            assert replay.batches(record, "f.json")[0][1][0]["routes"] == {"read": True}
        elif i == 2:
            assert "data" not in str(record["requests"])
            with pytest.raises(ConfigError, match="request 1 had given routes, which a record does not contain"):
                replay.batches(record, "f.json")
    assert results[0] == results[1] and results[3] is None and results[2]["hash"] != results[0]["hash"]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_what_was_refused_or_failed_is_in_the_record(model, tmp_path):
    path = tmp_path / "f.json"
    with pytest.raises(RequestError, match="out of range"), LLM(model=str(model), record=path, **OPTIONS) as llm:
        llm.generate([[1, 2], [10_000]], GREEDY, use_tqdm=False)
    record = bill.read(path)
    assert record["results"]["finish_reasons"] == {"abort": 1} and record["results"]["unfinished"] == 0


def test_the_asynchronous_door_records_too(model, tmp_path):
    async def ask(llm, prompt):
        return [piece async for piece in llm.generate(prompt, GREEDY)]

    async def both():
        async with AsyncLLM(model=str(model), record=tmp_path / "a.json", **OPTIONS) as llm:
            await asyncio.gather(ask(llm, [1, 5, 6]), ask(llm, [7, 8]))
            await llm.record(tmp_path / "early.json")
            return await llm.bill_of_materials()

    made = asyncio.run(both())
    with LLM(model=str(model), **OPTIONS) as llm:
        llm.generate([[7, 8], [1, 5, 6]], GREEDY, use_tqdm=False)
        other = llm.bill_of_materials()
    for record in (made, bill.read(tmp_path / "a.json"), bill.read(tmp_path / "early.json")):
        assert compare(record, other).verdict == NOTHING and compare(record, other).tokens == "same"


# ---------------------------------------------------------------- from the command line


@pytest.fixture
def experiment(model, tmp_path, monkeypatch):
    """A folder with an experiment file that has been run and recorded as a.json."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{key} = {json.dumps(value)}" for key, value in OPTIONS.items() if key != "skip_tokenizer_init"]
    text = "\n".join(
        [
            'model = "pocket"',
            *rows,
            'evictor = "lru"',
            "[sampling]",
            "max_tokens = 4",
            "seed = 5",
            "[run]",
            'prompts_file = "p.txt"',
            'record = "a.json"',
            "",
        ]
    )
    (tmp_path / "exp.toml").write_text(text)
    (tmp_path / "p.txt").write_text("Once\nThen\n")
    assert main(["run", "exp.toml"]) == 0
    (tmp_path / "p.txt").unlink()
    return tmp_path


def reported(capsys, *args):
    code = main(list(args))
    return (code, *capsys.readouterr())


def test_a_recorded_run_runs_again_with_one_part_changed(experiment, capsys, monkeypatch):
    monkeypatch.syspath_prepend(experiment)
    (experiment / "mine_again.py").write_text(EVICTOR)
    code, out, err = reported(capsys, "run", "a.json")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Once", "Then"]
    assert code == 0 and "compared with a.json: the tokens are the same: 8 in 2 requests" in err
    args = ["--set", "evictor=mine_again:Mine", "--allow-target", "mine_again"]
    code, _, err = reported(capsys, "run", "a.json", *args, "--record", "b.json")
    assert code == 0 and "minivllm: changed from a.json: evictor\n" in err
    code, out, _ = reported(capsys, "diff", "a.json", "b.json", "--only", "evictor")
    assert (code, out.splitlines()[:2]) == (0, ["only evictor differs", "the tokens are the same: 8 in 2 requests"])
    code, out, err = reported(capsys, "diff", "a.json", "b.json", "--only", "attention,scheduler")
    assert (code, err) == (1, "minivllm: error: more than attention, scheduler differs: evictor\n")
    code, _, err = reported(capsys, "diff", "a.json", "b.json", "--only", "evicter")
    assert code == 1 and err.endswith("more than evicter differs: evictor. Did you mean 'evictor'?\n")
    found = json.loads(reported(capsys, "diff", "a.json", "b.json", "--json")[1])
    assert (found["verdict"], found["tokens"], found["subjects"]) == ("only evictor differs", "same", ["evictor"])

    refused = reported(capsys, "run", "b.json")
    assert refused[0] == 4 and "--allow-target mine_again" in refused[2], "a file must not allow its own code"
    (experiment / "mine_again.py").write_text(EVICTOR + "    x = 1\n")
    allowed = ["--allow-target", "mine_again"]
    code, out, err = reported(capsys, "run", "b.json", *allowed)
    assert (code, out) == (2, "") and "b.json: this would not be the recorded run: evictor was local/mine_again" in err
    assert "add --force to run the present one" in err
    code, _, err = reported(capsys, "run", "b.json", *allowed, "--force")
    assert code == 0 and "minivllm: not as recorded: evictor was " in err


def test_another_version_or_model_is_refused_and_another_machine_is_told(experiment, capsys):
    base = bill.read("a.json")
    bill.write("torch.json", changed(base, versions__torch="1.0"))
    code, _, err = reported(capsys, "run", "torch.json")
    assert code == 2 and f"torch was 1.0 and is {torch.__version__}" in err
    bill.write("model.json", changed(base, model__hash="0" * 64))
    code, _, err = reported(capsys, "run", "model.json")
    assert code == 2 and "model was pocket (000000000000) and is pocket (" in err
    assert reported(capsys, "run", "model.json", "--model", "pocket-draft", "--force")[0] == 0
    bill.write("cpu.json", changed(base, machine__cpu="Z80"))
    code, _, err = reported(capsys, "run", "cpu.json")
    assert code == 0 and "minivllm: not the machine of cpu.json: the machine was Z80 and is " in err


def test_generate_and_chat_leave_records_that_run_again(experiment, capsys, monkeypatch):
    small = ["--set", "max_num_seqs=4", "--set", "max_num_batched_tokens=64", "--set", "num_kvcache_blocks=40"]
    args = ["--temperature", "0", "--max-tokens", "4", *small]
    assert reported(capsys, "generate", "--chat", "What is 2 + 3?", *args, "--record", "g.json")[0] == 0
    record = bill.read("g.json")
    assert record["config"]["run"] == {"prompts": ["What is 2 + 3?"], "output": None, "chat": True}
    assert record["config"]["origins"]["sampling.max_tokens"] == "--max-tokens"
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 + 3?\nAnd 4 + 5?\n"))
    assert reported(capsys, "chat", *args, "--record", "c.json")[0] == 0
    assert len(bill.read("c.json")["requests"]) == 2
    for name in ("g.json", "c.json"):
        code, _, err = reported(capsys, "run", name)
        assert code == 0 and f"compared with {name}: the tokens are the same" in err


def test_a_record_that_cannot_be_written_or_read_is_refused_before_the_work(experiment, capsys):
    (experiment / "p.txt").write_text("Once\n")

    def refuses(*args):
        code, out, err = reported(capsys, *args)
        assert (code, out) == (2, "")
        return err.removeprefix("minivllm: error: ").rstrip()

    assert refuses("run", "exp.toml", "--record", "no/x.json").startswith(
        "no/x.json: the record cannot be written: no writable directory no"
    )
    assert refuses("run", "a.json", "--record", "a.json").startswith(
        "--record a.json: is the record of the run to repeat"
    )
    wanted = "x.txt: expected a name that ends in .json, so that the record can be read again"
    assert refuses("run", "exp.toml", "--record", "x.txt") == wanted
    (experiment / "x.json").write_text("{}")
    wanted = "x.json: no record of a run; expected a file that --record (or LLM.record) wrote"
    assert refuses("diff", "a.json", "x.json") == wanted
    assert refuses("run", "x.json").endswith("nothing to run: expected prompts or prompts_file in the [run] table")
    (experiment / "x.json").write_text('{"format": "minivllm-run", "format_version": 9}')
    assert refuses("diff", "x.json", "a.json").startswith("x.json: a record of format 9, and this minivllm reads 1")
    half = {k: v for k, v in bill.read("a.json").items() if k not in ("parts", "results")}
    (experiment / "x.json").write_text(json.dumps(half))
    assert refuses("diff", "x.json", "a.json") == "x.json: not a whole record: it lacks the keys parts, results"
    for part, torn in [("parts", None), ("config", {}), ("model", []), ("versions", "torch 2"), ("parts", [{}])]:
        (experiment / "x.json").write_text(json.dumps({**bill.read("a.json"), part: torn}))
        for command in ("diff", "x.json", "a.json"), ("run", "x.json"):
            assert refuses(*command).startswith("x.json: not a whole record ("), part
    changed = bill.read("a.json")
    changed["environment"]["OMP_NUM_THREADS"] = "\x1b[2J"
    (experiment / "x.json").write_text(json.dumps(changed))
    assert main(["diff", "a.json", "x.json"]) == 0
    assert "\x1b" not in (shown := capsys.readouterr().out) and "\\x1b[2J" in shown
    for place, wrong, wanted in [
        (("fingerprint",), True, "fingerprint=True: expected str"),
        (("created",), 5, "created=5: expected str"),
        (("config", "requires"), 1, "config.requires=1: expected list"),
        (("config", "requires"), None, "config.requires=None: expected list"),
        (("results", "tokens_hash"), ..., "it lacks results.tokens_hash"),
        (("results", "requests"), "x" * 5000, "results.requests='xxx"),
    ]:
        changed = bill.read("a.json")
        table = changed if len(place) == 1 else changed[place[0]]
        table.pop(place[-1])
        if wrong is not ...:
            table[place[-1]] = wrong
        (experiment / "x.json").write_text(json.dumps(changed))
        for command in ("diff", "x.json", "a.json"), ("diff", "a.json", "x.json"), ("config", "show", "x.json"):
            said = refuses(*command)
            assert said.startswith(f"x.json: not a whole record: {wanted}") and len(said) < 400
    (experiment / "x.json").write_text("")
    assert refuses("diff", "x.json", "a.json").startswith("x.json:1:1: broken JSON: ")
    assert refuses("diff", "none.json", "a.json") == "none.json: no such file"
    assert sorted(os.listdir(experiment)) == ["a.json", "exp.toml", "p.txt", "x.json"], "refusals leave nothing behind"


def test_diff_imports_no_torch(experiment):
    code = "import sys; from minivllm.cli import main; main(['diff', *['a.json'] * 2]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[0] == NOTHING and done.stdout.endswith("False\n"), done.stderr
