"""A wiring in another process: what was chosen arrives as JSON, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from plugin_helpers import install

from minivllm import LLM, PluginError, ResourceError, SamplingParams
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.core.wiring import wiring_from_json, wiring_to_json
from minivllm.registration.fresh import command
from minivllm.registry import Catalog, build_part

POCKET = Path(__file__).parents[3] / "minivllm" / "pocket" / "model"
pytestmark = pytest.mark.skipif(not POCKET.is_dir(), reason="the model is not in this tree")
SMALL = {
    "model": "pocket", "device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 32, "max_model_len": 128,
}  # fmt: skip
PROMPT = list(range(20, 40))

MINE = """
from pydantic import BaseModel
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from dataclasses import replace

class Options(BaseModel, extra="forbid"):
    mark: str = ""

class Mine(Sdpa):
    "Counts what it computes."
    spec = replace(SDPA, impl="worker_exp:Mine", options="worker_exp:Options")
    calls = 0
    def forward(self, *args, **more):
        Mine.calls += 1
        return super().forward(*args, **more)
"""

PROBE = """
import json, os, sys, time

def serve(text, prompt, report):
    from minivllm.registration import discovery
    from minivllm.device.worker import process as worker
    runner = worker.build(text)
    named = [m for m in sys.modules if m.startswith(("minivllm.plugins.", "worker_", "acme"))]
    found = {"pid": os.getpid(), "imported": sorted(named), "asked": discovery._cached is not None,
             "mark": runner.backend.options.mark, "file": sys.modules["worker_exp"].__file__}
    found["tokens"] = generate(runner, json.loads(prompt))
    found["calls"] = type(runner.backend).calls
    with open(report, "w") as file:
        json.dump(found, file)

def generate(runner, prompt):
    import numpy as np
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.parts import CacheOptions, EngineParts
    from minivllm.core.engine.request import Request
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.plugins.evictor.lru import Lru
    from minivllm.plugins.executor.local import Local
    from minivllm.plugins.scheduler.fcfs import Fcfs
    from minivllm.plugins.strategy.single import Single

    executor = Local()
    executor.runner = runner
    engine = Engine(
        runner.wiring, executor, runner.capacity(), EngineParts(
            lambda ctx: Fcfs(None, ctx), lambda ctx: Lru(None, ctx),
            list(zip(runner.names, runner.processors)), [("minivllm/single", Single(None))],
        ), CacheOptions(),
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    request = Request("r", np.array(prompt, np.int32), params, time.monotonic())
    tokens = []
    request.watch, request.sink = True, lambda seq, ids, ended: tokens.extend(map(int, ids))
    engine.add(request)
    while request.finished is None:
        engine.step()
    return tokens
"""


def wiring(**options):
    return resolve(EngineConfig(**SMALL, **options), Catalog.discover()).wiring


def test_a_plugin_passed_by_target_arrives_in_two_processes(tmp_path, monkeypatch):
    folder = tmp_path / "experiment"  # on no path but this process's own, put there by hand
    folder.mkdir()
    (folder / "worker_exp.py").write_text(MINE)
    (folder / "worker_probe.py").write_text(PROBE)
    install(folder, "acme", {"minivllm.attention": {"flash": "acme_spec:S"}}, acme_spec="1 / 0")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    mine = {"name": "worker_exp:Mine", "options": {"mark": "from the config"}}
    text = wiring_to_json(wiring(attention=mine, allow_targets=["worker_exp"]))
    with LLM(**SMALL) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        want = llm.generate(PROMPT, greedy, use_tqdm=False)[0].tokens

    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # on a tiny model threads only wait for each other
    reports = [tmp_path / f"{rank}.json" for rank in range(2)]
    workers = [
        subprocess.Popen(command("worker_probe:serve", text, json.dumps(PROMPT), str(report)), cwd=tmp_path, env=env)
        for report in reports
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    found = [json.loads(report.read_text()) for report in reports]
    assert len({os.getpid(), *(f["pid"] for f in found)}) == 3
    for f in found:
        assert (f["file"], f["mark"]) == (str(folder / "worker_exp.py"), "from the config")
        assert f["tokens"] == want and f["calls"] > 0  # it is what computed them
        assert not f["asked"]  # no catalog: what was chosen was chosen in the parent
        parts = json.loads(text)["parts"].values()
        modules = {p["target"].partition(":")[0] for p in (*parts, *json.loads(text)["processors"])}
        # a worker does not create parts that do nothing
        modules -= {"minivllm.plugins.drafter.none", "minivllm.plugins.compressor.none"}
        assert modules <= set(f["imported"]) and "acme_spec" not in f["imported"]
        seams = {m.split(".")[2] for m in f["imported"] if m.startswith("minivllm.plugins.")}
        assert seams == {"attention", "kvformat", "model", "processor", "quantizer", "sampler"}  # none of the engine's


def test_the_wiring_of_a_target_is_plain_json(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "worker_plain.py").write_text(MINE.replace("worker_exp", "worker_plain"))
    made = wiring(attention="worker_plain:Mine", allow_targets=["worker_plain"])
    assert wiring_from_json(wiring_to_json(made)) == made
    assert made.parts["attention"].target == "worker_plain:Mine" and made.parts["attention"].options == {"mark": ""}


def test_a_worker_of_another_version_is_refused():
    text = wiring_to_json(wiring())
    values = {**json.loads(text), "minivllm": "0.0.9"}
    with pytest.raises(ResourceError, match=r"^the wiring was made by minivllm 0\.0\.9, and this process has "):
        wiring_from_json(json.dumps(values))


def test_what_a_worker_cannot_import_names_package_and_entry_point(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    spec = "from minivllm.registration.spec import *\nS = Spec('worker_gone:Arc', (1, 0), 'x', limits=ANY)\n"
    install(tmp_path, "acme", {"minivllm.evictor": {"arc": "worker_gone_spec:S"}}, version="1.4", worker_gone_spec=spec)
    part = resolve(EngineConfig(**SMALL, evictor="arc"), Catalog.discover()).parts["evictor"]
    with pytest.raises(PluginError) as info:
        build_part("evictor", part, None)
    assert str(info.value) == (
        "evictor 'acme/arc' (acme 1.4, entry point 'worker_gone_spec:S') could not be imported from 'worker_gone:Arc': "
        "ModuleNotFoundError: No module named 'worker_gone'"
    )
