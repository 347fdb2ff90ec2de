"""The bill of materials: what a hash covers, what a difference is and what only follows from one, and that a recorded
run can be started again."""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plugin_helpers import install, write_package

from minivllm import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from minivllm.cli import main
from minivllm.config import PROCESSORS, load_config
from minivllm.hardware import Device
from minivllm.record import bill, machine, replay, sources
from minivllm.record.diff import NOTHING, compare, report
from minivllm.record.nodes import IDENTITY, fingerprint, nodes
from minivllm.record.tally import Tally
from minivllm.registry import Catalog
from minivllm.testing.tiny import tiny_dir
from minivllm.wiring import resolve

write = pytest.fixture(write_package)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = dict(
    skip_tokenizer_init=True, dtype="float32", device="cpu", num_kvcache_blocks=40, max_num_seqs=4,
    max_num_batched_tokens=64,
)  # fmt: skip
EVICTOR = "from minivllm.plugins.evictor.lru import Lru\nclass Mine(Lru):\n    'another one'\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_dir(folder, "qwen3")
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made(model, monkeypatch):
    """Bills of configurations, without running them."""
    monkeypatch.setattr(machine, "git_state", lambda *_: None)
    package, installed = sources.package_source(), importlib.metadata.packages_distributions()
    monkeypatch.setattr(sources, "package_source", lambda: package)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: installed)  # slow

    def make(sampling=None, **options):
        loaded = load_config(keywords={"model": str(model), **OPTIONS, **options, "sampling": sampling or {}})
        return bill.make(resolve(loaded.engine, Catalog.discover(), loaded.origins), loaded)

    return make


def lines(a, b):
    return report(compare(a, b), "a", "b").splitlines()


def changed(record, **parts):
    """A copy with other values: ``versions__torch="9"``."""
    found = copy.deepcopy(record)
    for path, value in parts.items():
        *folders, name = path.split("__")
        place = found
        for folder in folders:
            place = place[folder]
        place[name] = value
    found["fingerprint"] = fingerprint(found)
    return found


def results(**values):
    base = dict(
        requests=2, unfinished=0, prompt_tokens=9, cached_prompt_tokens=0, output_tokens=12, seconds=1.0, error=None,
        prompts_hash="p", sampling_hash="s", tokens_hash="t", outputs=["1", "2"], stats={"evictions": 4},
    )  # fmt: skip
    return {**base, **values}


# ---------------------------------------------------------------- what a hash covers


def test_a_hash_covers_what_a_plug_in_imports_of_its_package_and_imports_nothing(tmp_path, monkeypatch):
    package = tmp_path / "here" / "acme_record"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(package.parent)
    texts = {
        "__init__.py": "", "fast.py": "import json\ndef f():\n    from . import kernels\nclass Fast: pass\n",
        "kernels.py": "import acme_record.deep.er\n", "other.py": "class Other: pass\n",
    }  # fmt: skip
    (package / "deep").mkdir()
    for name, text in {**texts, "deep/__init__.py": "", "deep/er.py": "x = 1\n"}.items():
        (package / name).write_text(text)
    first = sources.plugin_source("acme_record.fast:Fast")
    names = ["", ".deep", ".deep.er", ".fast", ".kernels"]
    assert list(first.files) == [f"acme_record{name}" for name in names]
    (package / "other.py").write_text("class Other: 'not imported'\n")
    assert sources.plugin_source("acme_record.fast:Fast").hash == first.hash
    (package / "deep" / "er.py").write_text("x = 2\n")
    second = sources.plugin_source("acme_record.fast:Fast")
    assert second.hash != first.hash and second.newest > 0
    assert "acme_record" not in sys.modules
    shutil.copytree(package.parent, tmp_path / "there")
    monkeypatch.syspath_prepend(tmp_path / "there")
    assert sources.plugin_source("acme_record.fast:Fast").hash == second.hash, "where it lies does not matter"


def test_an_experiment_covers_the_files_beside_it_and_the_built_in_that_it_extends(write):
    write("helper_of_mine", "x = 1\n")
    write("experiment_of_mine", "import numpy, os, helper_of_mine\n" + EVICTOR)
    files = sources.plugin_source("experiment_of_mine:Mine").files
    assert {"experiment_of_mine", "helper_of_mine", "minivllm.plugins.evictor.lru"} <= set(files)
    assert not [name for name in files if name.startswith(("numpy", "os", "minivllm.core"))]


def test_a_class_without_a_file_has_no_hash_and_the_diff_says_so(made, monkeypatch):
    module = types.ModuleType("typed_in")
    exec(EVICTOR, module.__dict__)
    module.Mine.__module__ = "typed_in"
    monkeypatch.setitem(sys.modules, "typed_in", module)
    source = sources.plugin_source("typed_in:Mine")
    assert (source.hash, source.missing) == ("", "typed_in has no source file")
    one = made(evictor="typed_in:Mine", allow_targets=["typed_in"])
    text = "a: the source of evictor is not known (typed_in has no source file), so a change in it cannot be seen"
    assert text in lines(one, one)


def test_the_hash_of_minivllm_has_the_engine_and_no_plug_in():
    files = sources.package_source().files
    assert {"core/engine.py", "llm.py", "text/tokenizer.py", "wiring.py"} <= set(files)
    assert not [name for name in files if name.startswith(("plugins/", "testing/", "record/", "pocket/"))]


def test_a_large_weight_file_is_sampled_and_a_change_in_any_tensor_is_seen(tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    monkeypatch.setattr(sources, "WHOLE", 1000)
    monkeypatch.setattr(sources, "PIECE", 64)
    tensors = {name: np.arange(2000, dtype=np.float32) for name in "abc"}

    def identity(**arrays):
        save_file({**tensors, **arrays}, tmp_path / "model.safetensors")
        return sources.model_identity(tmp_path).hash

    base, ones = identity(), np.ones(2000, np.float32)
    assert identity() == base and len({base, *(identity(**{name: ones}) for name in "abc")}) == 4
    for at in (0, 1000, 1999):
        other = tensors["b"].copy()
        other[at] += 1
        assert identity(b=other) != base, at


def test_git_tells_commit_and_changes_and_is_silent_outside_a_repository(tmp_path):
    def git(*args):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    assert machine.git_state(tmp_path) is None
    git("init", "-b", "trunk")
    (tmp_path / "f.py").write_text("1")
    (tmp_path / "g.py").write_text("1")
    git("add", "f.py")
    git("commit", "-m", "x")
    state = machine.git_state(tmp_path)
    assert len(state.pop("commit")) == 40
    assert state == {"branch": "trunk", "dirty": False, "changed_files": 0, "untracked_files": 1}
    (tmp_path / "f.py").write_text("2")
    assert machine.git_state(tmp_path)["dirty"] is True
    assert machine.git_state(tmp_path, "f.py") and machine.git_state(tmp_path, "g.py") is None


def test_the_machine_is_told_with_its_gpu_and_without_its_name():
    import platform

    found = machine.machine(Device("cuda", "NVIDIA H100", 90, 80 * 2**30, "asked for"))
    assert (found["gpu"], found["gpu_memory_gib"], found["compute_capability"]) == ("NVIDIA H100", 80.0, "9.0")
    assert found["cores"] >= 1 and found["memory_gib"] > 0 and "driver" in found
    assert not platform.node() or platform.node() not in json.dumps([found, machine.versions()])
    assert "gpu" not in machine.machine(Device("cpu", "a CPU", 0, 2**30, ""))


def test_the_environment_is_what_changes_numbers_and_no_secret(tmp_path):
    given = {
        "OMP_NUM_THREADS": "2", "HOME": "/x", "TORCH_SECRET_KEY": "s", "HF_TOKEN": "t", "MINIVLLM__SEED": "1",
        "MINIVLLM_PLUGINS": "acme", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    assert set(machine.environment(given)) == {"OMP_NUM_THREADS", "MINIVLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"}
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon Jan 20\nGCC 12\n")
    assert machine.driver(str(tmp_path / "version")) == "570.86.15" and machine.driver("/no") is None


# ---------------------------------------------------------------- what came out


def request(prompt, output, text=None, params=GREEDY):
    inner = SimpleNamespace(
        prompt=np.array(prompt, np.int32), text=text, params=params, cached_tokens=0, sequences=[], finished=None
    )
    answer = SimpleNamespace(token_ids=output, finish_reason="length")
    return SimpleNamespace(request=inner, texts=[answer], done=None)


def tallied(*requests, order=None, **options):
    tally = Tally(**options)
    for one in requests:
        tally.watch(one)
    for i in order or range(len(requests)):
        requests[i].done(requests[i])
    return tally.results({})


def test_hashes_do_not_depend_on_the_order_and_do_on_every_token():
    def three():
        return request([1, 2], [3]), request([1, 2], [4]), request([5], [6, 7])

    base = tallied(*three())
    assert (base["requests"], base["prompt_tokens"], base["output_tokens"]) == (3, 5, 4)
    a, b, c = three()
    for other in (tallied(*three(), order=[2, 0, 1]), tallied(c, a, b)):
        assert all(other[k] == base[k] for k in ("prompts_hash", "sampling_hash", "tokens_hash"))
    assert tallied(*three(), order=[2, 0, 1])["outputs"] == base["outputs"]
    other = tallied(request([1, 2], [3]), request([1, 2], [9]), request([5], [6, 7]))
    assert other["tokens_hash"] != base["tokens_hash"] and other["prompts_hash"] == base["prompts_hash"]
    hot = SamplingParams(temperature=0.5)
    assert tallied(request([1], [2], params=hot))["sampling_hash"] != tallied(request([1], [2]))["sampling_hash"]
    same_text = [tallied(request(ids, [2], text="Once"))["prompts_hash"] for ids in ([1], [3, 4])]
    assert same_text[0] == same_text[1], "another tokenizer makes no other prompt"


def test_an_unfinished_request_is_told_and_its_time_counts():
    tally, one = Tally(), request([1], [2])
    tally.watch(one)
    assert tally.results({})["unfinished"] == 1 and tally.results({})["seconds"] >= 0
    called = []
    again = request([1], [2])
    again.done = called.append
    tally.watch(again)
    again.done(again)
    assert called == [again] and tally.results({})["unfinished"] == 1


def test_too_many_requests_are_not_kept(monkeypatch):
    from minivllm.record import tally

    monkeypatch.setattr(tally, "MOST_REQUESTS", 2)
    monkeypatch.setattr(tally, "MOST_DIGESTS", 2)
    kept = Tally(keep=True)
    for _ in range(2):
        kept.watch(request([1], [2]))
    assert [r["prompt_token_ids"] for r in kept.requests] == [[1], [1]]
    last = request([1], [2])
    kept.watch(last)
    last.done(last)
    assert kept.requests is None and kept.results({})["outputs"] is None


# ---------------------------------------------------------------- what a difference is


def test_one_line_says_what_differs(made, write):
    write("mine_of_test", EVICTOR)
    base, mine = made(), dict(evictor="mine_of_test:Mine", allow_targets=["mine_of_test"])
    for options, verdict in [
        ({}, NOTHING),
        (dict(evictor="lru", attention="minivllm/sdpa", kvcache_block_size=16, max_model_len=256), NOTHING),
        (dict(enforce_eager=False, processors=list(PROCESSORS)), NOTHING),
        (mine, "only evictor differs"),
        (dict(max_num_seqs=3), "only max_num_seqs differs"),
        (dict(**mine, max_num_seqs=3), "evictor and max_num_seqs differ"),
        (dict(**mine, max_num_seqs=3, seed=1), "evictor, seed and max_num_seqs differ"),
        (dict(sampling={"temperature": 0.5}), "only sampling.temperature differs"),
        (dict(processors=["logit_bias"]), "only processors differ"),
        (dict(enforce_eager=True), "only graph differs"),
        (dict(kvcache_block_size=32), "only kvcache_block_size differs"),
        (dict(num_kvcache_blocks=41), "only num_kvcache_blocks differs"),
        (dict(quantizer="int8"), "only quantizer differs"),
        (dict(hooks=[{"name": "step_log", "options": {"path": "steps.csv"}}]), NOTHING),
    ]:
        other = made(**options)
        found = compare(base, other)
        assert found.verdict == verdict, options
        assert (base["fingerprint"] == other["fingerprint"]) == (verdict == NOTHING), options
        assert lines(base, other)[0] == found.verdict
        assert compare(other, base).subjects == found.subjects


def test_consequences_of_a_choice_are_no_differences_of_their_own(made, write):
    write(
        "wide_of_test",
        "from dataclasses import replace\nfrom minivllm.plugins.attention.sdpa import Sdpa\n"
        "from minivllm.plugins.attention.spec import SDPA\n"
        "class Wide(Sdpa):\n    spec = replace(SDPA, impl='wide_of_test:Wide', prefer={'block': 32})\n",
    )
    base = made()
    other = made(attention="wide_of_test:Wide", allow_targets=["wide_of_test"])
    found = compare(base, other)
    assert found.verdict == "only attention differs"
    follows = {d.name: d.follows for d in found.differences}
    assert follows == {"kvcache_block_size": ("attention",), "attention": ()}
    assert "  kvcache_block_size  16 -> 32   (follows from attention)" in lines(base, other)
    asked = made(attention="wide_of_test:Wide", allow_targets=["wide_of_test"], kvcache_block_size=64)
    assert set(compare(base, asked).subjects) == {"attention", "kvcache_block_size"}
    half = made(dtype="bfloat16")
    found = compare(base, half)
    assert found.verdict == "only dtype differs"
    assert {d.name for d in found.differences if d.follows == ("dtype",)} == {"kv_format"}
    named = made(dtype="bfloat16", kv_format="bf16")
    assert set(compare(base, named).subjects) == {"dtype", "kv_format"}, "somebody asked for it"


def test_a_choice_that_changed_with_no_cause_is_a_difference(made):
    base = made()
    other = changed(base, resolved__kvcache_block_size=32)
    assert compare(base, other).verdict == "only kvcache_block_size differs"
    moved = copy.deepcopy(base)
    part = next(p for p in moved["parts"] if p["seam"] == "attention")
    part.update(name="acme/flash", distribution="acme", version="2.0")
    assert compare(base, moved).verdict == "only attention differs"


def test_another_model_is_one_difference_with_what_follows_from_it(made, tmp_path):
    tiny_dir(tmp_path, "llama", max_position_embeddings=128)
    found = compare(made(), made(model=str(tmp_path)))
    assert found.verdict == "only model differs"
    assert {d.name for d in found.differences if d.follows} == {"model_arch", "max_model_len"}


def test_the_same_model_elsewhere_is_the_same_model(made, model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    assert compare(made(), made(model=str(tmp_path / "copy"))).verdict == NOTHING


def test_a_changed_source_is_the_part_and_a_changed_option_is_the_option(made, write):
    write("mine_of_test", EVICTOR)
    mine = dict(evictor="mine_of_test:Mine", allow_targets=["mine_of_test"])
    before = made(**mine)
    write("mine_of_test", EVICTOR + "    x = 1\n")
    assert compare(before, made(**mine)).verdict == "only evictor differs"
    int8 = [made(quantizer={"name": "int8", "options": {"skip": skip}}) for skip in (["a.*"], ["b.*"])]
    assert compare(*int8).verdict == "only quantizer.options.skip differs"
    base = made()
    engine = changed(base, minivllm__source={"hash": "0" * 64, "files": {}})
    assert compare(base, engine).verdict == "only minivllm differs"


def test_versions_and_machine_differ_without_another_fingerprint(made):
    base = changed(made(), machine__cpu="A", machine__memory_gib=8.0, environment={})
    for parts, verdict in [
        (dict(versions__torch="9.0"), "only torch differs"),
        (dict(versions__python="3.99"), NOTHING),
        (dict(machine__cpu="B", machine__threads=99), "only the machine differs"),
        (dict(machine__memory_gib=9.0, machine__system="Linux 9"), NOTHING),
        (dict(machine__gpu="H100"), "only the machine differs"),
        (dict(environment={"OMP_NUM_THREADS": "1"}), "only the machine differs"),
        (dict(environment={"MINIVLLM_PLUGINS": "", "MINIVLLM_STRICT_PLUGINS": "1"}), NOTHING),
        (dict(versions__torch="9.0", machine__cpu="B"), "torch and the machine differ"),
        (dict(created="2001", command=["x"], changed_sources=["evictor"]), NOTHING),
    ]:
        other = changed(base, **parts)
        assert compare(base, other).verdict == verdict
        assert fingerprint(other) == fingerprint(base)
    assert "  memory_gib  8.0 -> 9.0   (not counted)" in lines(base, changed(base, machine__memory_gib=9.0))
    assert any("were changed while the run went on" in x for x in lines(base, other))


def test_what_the_fingerprint_covers_is_what_the_verdict_counts(made):
    """A counted value of any of its groups changes both, whatever it is."""
    base = made(sampling={"temperature": 0.5})
    for name, node in nodes(base).items():
        covered = node.counts and node.group in IDENTITY
        assert covered or node.group in ("versions", "machine") or not node.counts, name
    values = {n: v.value for n, v in nodes(base).items() if v.counts and v.group in IDENTITY}
    assert {"model", "minivllm", "attention", "attention@minivllm/sdpa", "dtype", "seed"} <= set(values)
    assert fingerprint(base) == base["fingerprint"] == json.loads(json.dumps(base))["fingerprint"]


def test_found_memory_is_shown_and_not_counted(made):
    a, b = (changed(made(num_kvcache_blocks=-1), resolved__kv_blocks=[n]) for n in (100, 101))
    assert compare(a, b).verdict == NOTHING
    assert "  kv_blocks  100 -> 101   (not counted)" in lines(a, b)


def test_many_differences_are_counted_in_the_line(made):
    base = made()
    options = dict(max_num_seqs=3, seed=1, max_num_batched_tokens=65, num_kvcache_blocks=41, fuse=False,
                   enable_prefix_caching=False, gpu_memory_utilization=0.5)  # fmt: skip
    assert compare(base, made(**options)).verdict.endswith(" and 2 more differ")


@pytest.mark.parametrize(
    "left, right, text",
    [
        ({}, {}, "the tokens are the same: 12 in 2 requests"),
        ({}, dict(tokens_hash="u", outputs=["1", "3"]),
         "the tokens are not the same: 1 of 2 requests differ, the first is request 2"),
        ({}, dict(tokens_hash="u", outputs=None), "the tokens are not the same: 12 in 2 requests"),
        ({}, dict(tokens_hash="u", prompts_hash="q"), "the tokens cannot be compared: the prompts differ"),
        (dict(unfinished=1), {}, "the tokens cannot be compared: a run has requests that have not ended"),
        (dict(requests=0), {}, "the tokens cannot be compared: a run had no requests"),
        (None, {}, "the tokens cannot be compared: a record holds no results"),
    ],
)  # fmt: skip
def test_a_line_tells_whether_the_tokens_are_the_same(made, left, right, text):
    base = made()
    a, b = (changed(base, results=None if given is None else results(**given)) for given in (left, right))
    assert lines(a, b)[1] == text


def test_measured_numbers_are_shown_with_their_change(made):
    base = made()
    other = changed(base, results=results(stats={"evictions": 6}, seconds=0.5))
    found = lines(changed(base, results=results()), other)
    assert "  evictions  4 -> 6   (+50.0 %)" in found and "  seconds    1.0 -> 0.5   (-50.0 %)" in found


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
    text = f"from minivllm.spec import Spec\n{EVICTOR}S = Spec('acme_torn:Mine', (1, 0), 'for a test')\n"
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
    with pytest.raises(ConfigError, match=r"f\.json: holds no requests to run again"):
        replay.batches({"requests": []}, "f.json")


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
    text = "\n".join(['model = "pocket"', *rows, 'evictor = "lru"', "[sampling]", "max_tokens = 4", "seed = 5",
                      "[run]", 'prompts_file = "p.txt"', 'record = "a.json"', ""])  # fmt: skip
    (tmp_path / "exp.toml").write_text(text)
    (tmp_path / "p.txt").write_text("Once\nThen\n")
    assert main(["run", "exp.toml"]) == 0
    (tmp_path / "p.txt").unlink()
    return tmp_path


def said(capsys, *args):
    code = main(list(args))
    return (code, *capsys.readouterr())


def test_a_recorded_run_runs_again_with_one_part_changed(experiment, capsys, monkeypatch):
    monkeypatch.syspath_prepend(experiment)
    (experiment / "mine_again.py").write_text(EVICTOR)
    code, out, err = said(capsys, "run", "a.json")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Once", "Then"]
    assert code == 0 and "compared with a.json: the tokens are the same: 8 in 2 requests" in err
    args = ["--set", "evictor=mine_again:Mine", "--allow-target", "mine_again"]
    code, _, err = said(capsys, "run", "a.json", *args, "--record", "b.json")
    assert code == 0 and "minivllm: changed from a.json: evictor\n" in err
    code, out, _ = said(capsys, "diff", "a.json", "b.json", "--only", "evictor")
    assert (code, out.splitlines()[:2]) == (0, ["only evictor differs", "the tokens are the same: 8 in 2 requests"])
    code, out, err = said(capsys, "diff", "a.json", "b.json", "--only", "attention,scheduler")
    assert (code, err) == (1, "minivllm: error: more than attention, scheduler differs: evictor\n")
    found = json.loads(said(capsys, "diff", "a.json", "b.json", "--json")[1])
    assert (found["verdict"], found["tokens"], found["subjects"]) == ("only evictor differs", "same", ["evictor"])

    refused = said(capsys, "run", "b.json")
    assert refused[0] == 4 and "--allow-target mine_again" in refused[2], "a file must not allow its own code"
    (experiment / "mine_again.py").write_text(EVICTOR + "    x = 1\n")
    allowed = ["--allow-target", "mine_again"]
    code, out, err = said(capsys, "run", "b.json", *allowed)
    assert (code, out) == (2, "") and "b.json: this would not be the recorded run: evictor was local/mine_again" in err
    assert "add --force to run what there is now" in err
    code, _, err = said(capsys, "run", "b.json", *allowed, "--force")
    assert code == 0 and "minivllm: not as recorded: evictor was " in err


def test_another_version_or_model_is_refused_and_another_machine_is_told(experiment, capsys):
    base = bill.read("a.json")
    bill.write("torch.json", changed(base, versions__torch="1.0"))
    code, _, err = said(capsys, "run", "torch.json")
    assert code == 2 and f"torch was 1.0 and is {torch.__version__}" in err
    bill.write("model.json", changed(base, model__hash="0" * 64))
    code, _, err = said(capsys, "run", "model.json")
    assert code == 2 and "model was pocket (000000000000) and is pocket (" in err
    assert said(capsys, "run", "model.json", "--model", "pocket-draft", "--force")[0] == 0
    bill.write("cpu.json", changed(base, machine__cpu="Z80"))
    code, _, err = said(capsys, "run", "cpu.json")
    assert code == 0 and "minivllm: not the machine of cpu.json: the machine was Z80 and is " in err


def test_generate_and_chat_leave_records_that_run_again(experiment, capsys, monkeypatch):
    small = ["--set", "max_num_seqs=4", "--set", "max_num_batched_tokens=64", "--set", "num_kvcache_blocks=40"]
    args = ["--temperature", "0", "--max-tokens", "4", *small]
    assert said(capsys, "generate", "--chat", "What is 2 + 3?", *args, "--record", "g.json")[0] == 0
    record = bill.read("g.json")
    assert record["config"]["run"] == {"prompts": ["What is 2 + 3?"], "output": None, "chat": True}
    assert record["config"]["origins"]["sampling.max_tokens"] == "--max-tokens"
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 + 3?\nAnd 4 + 5?\n"))
    assert said(capsys, "chat", *args, "--record", "c.json")[0] == 0
    assert len(bill.read("c.json")["requests"]) == 2
    for name in ("g.json", "c.json"):
        code, _, err = said(capsys, "run", name)
        assert code == 0 and f"compared with {name}: the tokens are the same" in err


def test_a_record_that_cannot_be_written_or_read_is_refused_before_the_work(experiment, capsys):
    (experiment / "p.txt").write_text("Once\n")

    def refuses(*args):
        code, out, err = said(capsys, *args)
        assert (code, out) == (2, "")
        return err.removeprefix("minivllm: error: ").rstrip()

    assert refuses("run", "exp.toml", "--record", "no/x.json").startswith(
        "no/x.json: the record cannot be written: no writable directory no"
    )
    assert refuses("run", "a.json", "--record", "a.json").startswith("--record a.json: is the record that is started")
    wanted = "x.txt: want a name that ends in .json, so that the record can be read again"
    assert refuses("run", "exp.toml", "--record", "x.txt") == wanted
    (experiment / "x.json").write_text("{}")
    wanted = "x.json: no record of a run; want a file that --record (or LLM.record) wrote"
    assert refuses("diff", "a.json", "x.json") == wanted
    assert refuses("run", "x.json").endswith(
        "want a file that ends in .toml, .yaml or .yml, or the .json record of a run"
    )
    (experiment / "x.json").write_text('{"format": "minivllm-run", "format_version": 9}')
    assert refuses("diff", "x.json", "a.json").startswith("x.json: a record of format 9, and this minivllm reads 1")
    half = {k: v for k, v in bill.read("a.json").items() if k not in ("parts", "results")}
    (experiment / "x.json").write_text(json.dumps(half))
    assert refuses("diff", "x.json", "a.json") == "x.json: not a whole record: it lacks parts, results"
    for part, torn in [("parts", None), ("config", {}), ("model", []), ("versions", "torch 2"), ("parts", [{}])]:
        (experiment / "x.json").write_text(json.dumps({**bill.read("a.json"), part: torn}))
        for command in ("diff", "x.json", "a.json"), ("run", "x.json"):
            assert refuses(*command).startswith("x.json: not a whole record, edited by hand? "), part
    (experiment / "x.json").write_text("")
    assert refuses("diff", "x.json", "a.json").startswith("x.json: broken JSON: ")
    assert refuses("diff", "none.json", "a.json") == "none.json: No such file or directory"
    assert sorted(os.listdir(experiment)) == ["a.json", "exp.toml", "p.txt", "x.json"], "refusals leave nothing behind"


def test_diff_imports_no_torch(experiment):
    code = "import sys; from minivllm.cli import main; main(['diff', *['a.json'] * 2]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[0] == NOTHING and done.stdout.endswith("False\n"), done.stderr
