"""Executor ``process``: what the conformance kit does not ask: how a worker ends, and by which way masks go."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from minivllm import LLM, AsyncLLM, EngineDeadError, ModelError, ResourceError, SamplingParams
from minivllm.core.interfaces.plan import LateInputs
from minivllm.plugins.executor import process
from minivllm.plugins.executor.process import LATE, MASKS, Process

SMALL = {
    "model": "pocket", "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 32, "max_model_len": 128, "executor": "process",
}  # fmt: skip
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
DYING = """
import os, sys
from dataclasses import replace
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA

class Dying(Sdpa):
    "Ends its process in the tenth call."
    spec = replace(SDPA, impl="dying:Dying")
    calls = 0
    def forward(self, *args, **more):
        Dying.calls += 1
        if Dying.calls == 10:
            print("no more of this", file=sys.stderr, flush=True)
            os._exit(77)
        return super().forward(*args, **more)
"""


def worker(llm) -> subprocess.Popen:
    return llm.engine.executor._child


def test_a_worker_that_ends_in_a_step_ends_the_engine_with_its_last_words(tmp_path, monkeypatch, capfd):
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.syspath_prepend(tmp_path)
    with LLM(**SMALL, attention="dying:Dying", allow_targets=["dying"]) as llm:
        child = worker(llm)
        begun = time.monotonic()
        out = llm.generate("Once upon a time", LONG, use_tqdm=False)[0]
        assert out.finish_reason == "error" and 0 < len(out.tokens) < 10
        assert f"{child.pid} has ended, exit code 77; its last words: no more of this" in out.error
        assert time.monotonic() - begun < 10.0
        with pytest.raises(EngineDeadError, match="exit code 77"):
            llm.generate("Once upon a time", LONG, use_tqdm=False)
    assert child.poll() is not None
    assert "no more of this" in capfd.readouterr().err, "what the worker says is passed on"


def test_a_worker_that_is_killed_while_nothing_runs_ends_the_engine_within_two_seconds():
    async def check():
        llm = AsyncLLM(**SMALL)
        try:
            stream = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            async for _ in stream:
                pass
            assert llm.engine.dead is None
            os.kill(worker(llm).pid, signal.SIGKILL)
            begun = time.monotonic()
            while llm.engine.dead is None and time.monotonic() - begun < 5.0:
                await asyncio.sleep(0.05)
            assert llm.engine.dead is not None and "signal 9 (SIGKILL)" in llm.engine.dead
            assert time.monotonic() - begun < 2.0
        finally:
            llm.close()

    asyncio.run(check())


def test_a_worker_ends_with_the_process_that_started_it():
    """However that ends: here it is killed in the middle of a request."""
    code = f"""
        import os, signal, threading, time
        from minivllm import LLM, SamplingParams
        if __name__ == "__main__":
            llm = LLM(**{SMALL!r})
            print(llm.engine.executor._child.pid, flush=True)
            llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, end = int(done.stdout), time.monotonic() + 10.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}"), "the worker outlives the engine"


def test_ctrl_c_reaches_the_engine_and_not_its_worker():
    """A terminal sends it to the whole group."""
    with LLM(**SMALL) as llm:
        worker(llm).send_signal(signal.SIGINT)
        out = llm.generate("Once upon a time", LONG, use_tqdm=False)[0]
        assert len(out.tokens) == 100 and worker(llm).poll() is None


def test_an_error_of_the_start_is_the_workers_own(tmp_path):
    for options, error, words in (
        ({"model": str(tmp_path)}, ModelError, "config.json"),
        ({"num_kvcache_blocks": 1 << 50}, ResourceError, "no memory for a KV cache"),
    ):
        with pytest.raises(error, match=words):
            LLM(**{**SMALL, **options})


def test_a_worker_that_cannot_start_is_a_resource_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(process, "WORKER", "minivllm.plugins.executor.nowhere:main")
    with pytest.raises(ResourceError, match=r"exit code 1; its last words: .*No module named .*nowhere"):
        LLM(**SMALL)


def test_masks_in_lent_memory_go_as_a_place_and_others_as_bytes(monkeypatch):
    sent = []
    executor = Process()
    monkeypatch.setattr(executor, "_send", lambda kind, *parts, file=-1: sent.append((kind, b"".join(parts))))
    masks = [executor.mask_memory(3, 7), executor.mask_memory(1 << 10, 1 << 10), executor.mask_memory(3, 7)]
    for mask in masks:
        mask[:] = 5
        sent.clear()
        executor.supply(1, LateInputs(mask[:2]))
        assert [kind for kind, _ in sent] == [MASKS]
    for mask in (np.zeros((2, 7), np.int32), masks[0][:, ::2]):
        sent.clear()
        executor.supply(1, LateInputs(mask))
        assert [kind for kind, _ in sent] == [LATE]
    assert (masks[0] == 5).all() and (masks[2] == 5).all(), "one lies in another"
