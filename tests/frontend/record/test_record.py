"""The bill of materials: the content of a hash, the differences, and the ones that follow from others."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import time
import types
from types import SimpleNamespace

import numpy as np
import pytest
from plugin_helpers import write_package
from record_helpers import EVICTOR, GREEDY, bills, changed, lines, one_thread, results, tiny_model

from minivllm import SamplingParams
from minivllm.config import PROCESSORS
from minivllm.device.hardware import Device
from minivllm.frontend.record import machine, sources
from minivllm.frontend.record.diff import NOTHING, compare
from minivllm.frontend.record.nodes import IDENTITY, fingerprint, nodes
from minivllm.frontend.record.tally import ResultTally
from minivllm.testing.tiny import tiny_dir

write = pytest.fixture(write_package)
model = pytest.fixture(scope="module")(tiny_model)
single = pytest.fixture(autouse=True)(one_thread)
made = pytest.fixture(bills)


# ---------------------------------------------------------------- what a hash covers


def test_a_hash_covers_what_a_plug_in_imports_of_its_package_and_imports_nothing(tmp_path, monkeypatch):
    package = tmp_path / "here" / "acme_record"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(package.parent)
    texts = {
        "__init__.py": "",
        "fast.py": "import json\ndef f():\n    from . import kernels\nclass Fast: pass\n",
        "kernels.py": "import acme_record.deep.er\n",
        "other.py": "class Other: pass\n",
    }
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
    why = "Python has not kept the source lines of typed_in:Mine"
    text = f"a: the source of evictor is not known ({why}), so a change in it cannot be seen"
    assert text in lines(one, one)


def test_the_hash_of_minivllm_has_the_engine_and_no_plug_in():
    files = sources.package_source().files
    assert {"core/engine/engine.py", "frontend/llm.py", "runtime/text/tokenizer.py", "core/wiring.py"} <= set(files)
    assert not [name for name in files if name.startswith(("plugins/", "testing/", "frontend/record/", "pocket/"))]


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


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "x.tiktoken", "config.json", "model.safetensors"])
def test_a_file_of_a_terabyte_is_sampled_and_a_change_in_its_first_or_last_bytes_is_seen(tmp_path, name):
    """The file may be sparse, a link to a sparse file, or weights with any header."""

    def identity(first, last, size=1 << 40):
        with open(tmp_path / "large", "wb") as file:
            file.write(first)
            file.seek(size - len(last))
            file.write(last)
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(tmp_path / "large")
        found = (sources.model_identity(tmp_path), sources.tokenizer_identity(tmp_path))
        return next(one.hash for one in found if name in one.files)

    heads = [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b'{"a":[1]}']
    offsets = b'{"a":{"data_offsets":[-5,1e99]},"b":{"data_offsets":[0,9007199254740993]}}'
    heads.append(len(offsets).to_bytes(8, "little") + offsets)
    hashes = [identity(head, b"end") for head in heads]
    assert len({*hashes, identity(b"", b"end", (1 << 40) - 1)}) == len(heads) + 1
    begun = time.monotonic()
    assert identity(b"", b"end") == hashes[0]
    assert time.monotonic() - begun < 5


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
        energy=None,
        taps=(),
        pooling=None,
        prompt=np.array(prompt, np.int32),
        text=text,
        params=params,
        cached_tokens=0,
        finished=None,
    )
    answer = SimpleNamespace(token_ids=output, finish_reason="length")
    return SimpleNamespace(request=inner, texts=[answer], sequences=[], done=None, routes=list)


def tallied(*requests, order=None, **options):
    tally = ResultTally(**options)
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
    tally, one = ResultTally(), request([1], [2])
    tally.watch(one)
    assert tally.results({})["unfinished"] == 1 and tally.results({})["seconds"] >= 0
    called = []
    again = request([1], [2])
    again.done = called.append
    tally.watch(again)
    again.done(again)
    assert called == [again] and tally.results({})["unfinished"] == 1


def test_prompts_and_parameters_are_in_the_hashes_before_and_after_the_end():
    tally, whole = ResultTally(), tallied(request([1, 2], [3]), request([5], [6]))
    requests = [request([1, 2], [3]), request([5], [6])]
    for one in requests:
        tally.watch(one)
    before = tally.results({})
    for one in requests:
        one.done(one)
    for found in (before, tally.results({})):
        assert [found[k] for k in ("prompts_hash", "sampling_hash")] == [
            whole[k] for k in ("prompts_hash", "sampling_hash")
        ]


def test_too_many_requests_are_not_kept(monkeypatch):
    from minivllm.frontend.record import tally

    monkeypatch.setattr(tally, "MOST_REQUESTS", 2)
    monkeypatch.setattr(tally, "MOST_DIGESTS", 2)
    kept = ResultTally(keep=True)
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
    requested = made(attention="wide_of_test:Wide", allow_targets=["wide_of_test"], kvcache_block_size=64)
    assert set(compare(base, requested).subjects) == {"attention", "kvcache_block_size"}
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
    base = changed(made(), machine__cpu="A", machine__native="avx512", machine__memory_gib=8.0, environment={})
    for parts, verdict in [
        (dict(versions__torch="9.0"), "only torch differs"),
        (dict(versions__python="3.99"), NOTHING),
        (dict(machine__cpu="B", machine__threads=99), "only the machine differs"),
        (dict(machine__memory_gib=9.0, machine__system="Linux 9"), NOTHING),
        (dict(machine__gpu="H100"), "only the machine differs"),
        (dict(machine__native="avx2", environment={"MINIVLLM_ISA": "avx2"}), "only the machine differs"),
        (dict(environment={"MINIVLLM_ISA": "avx512", "MINIVLLM_NATIVE": "1"}), NOTHING),
        (dict(environment={"OMP_NUM_THREADS": "1"}), "only the machine differs"),
        (dict(environment={"MINIVLLM_PLUGINS": "", "MINIVLLM_STRICT_PLUGINS": "1"}), NOTHING),
        (dict(versions__torch="9.0", machine__cpu="B"), "torch and the machine differ"),
        (dict(created="2001", command=["x"], changed_sources=["evictor"]), NOTHING),
    ]:
        other = changed(base, **parts)
        assert compare(base, other).verdict.startswith(verdict)
        assert fingerprint(other) == fingerprint(base)
    assert "  memory_gib  8.0 -> 9.0   (not counted)" in lines(base, changed(base, machine__memory_gib=9.0))
    assert any("changed during the run" in x for x in lines(base, other))
    older = changed(base)
    del older["machine"]["native"]
    assert compare(older, base).verdict == compare(base, older).verdict == NOTHING


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
    options = dict(
        max_num_seqs=3,
        seed=1,
        max_num_batched_tokens=65,
        num_kvcache_blocks=41,
        fuse=False,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
    )
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
