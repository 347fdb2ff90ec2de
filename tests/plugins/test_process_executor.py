"""Executor ``process``: the tests that are not in the conformance kit, about the end of a worker and the way
of masks.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from minivllm import LLM, AsyncLLM, EngineDeadError, ModelError, ResourceError, SamplingParams
from minivllm.core.interfaces import codec
from minivllm.core.interfaces.plan import LateInputs, StepResult
from minivllm.errors import MinivllmError
from minivllm.plugins.executor import process
from minivllm.plugins.executor.process import LATE, MASKS, Process
from minivllm.runtime.processes.channel import Message
from minivllm.runtime.processes.child import ChildEnded

SMALL = {
    "model": "pocket", "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 32, "max_model_len": 128, "executor": "process",
}  # fmt: skip
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
DYING = """
import os, sys, time
from dataclasses import replace
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA

class Dying(Sdpa):
    "Does something else in the tenth call."
    spec = replace(SDPA, impl="NAME:Dying")
    calls = 0
    def forward(self, *args, **more):
        Dying.calls += 1
        if Dying.calls == 10:
            print("no more of this", file=sys.stderr, flush=True)
            DO
        return super().forward(*args, **more)
"""


def plant(folder, name, do):
    """Return the options that choose an attention back end which runs ``do`` in the tenth call, after writing its
    module.
    """
    (folder / f"{name}.py").write_text(DYING.replace("NAME", name).replace("DO", do))
    return {"attention": f"{name}:Dying", "allow_targets": [name]}


def worker(llm) -> subprocess.Popen:
    return llm.engine.executor._child._process


def test_a_worker_that_ends_in_a_step_ends_the_engine_with_its_last_words(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(tmp_path)
    with LLM(**SMALL, **plant(tmp_path, "dying", "os._exit(77)")) as llm:
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


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["", "in a step"])
def test_a_worker_ends_with_the_process_that_started_it(hangs, tmp_path):
    """However that ends: here it is killed, while a request runs."""
    options = {**SMALL, **(plant(tmp_path, "hanging", "time.sleep(60)") if hangs else {})}
    code = f"""
        import os, signal, sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from minivllm import LLM, SamplingParams
        if __name__ == "__main__":
            llm = LLM(**{options!r})
            print(llm.engine.executor._child.pid, flush=True)
            threading.Timer({4.0 if hangs else 0.2}, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True:
                llm.generate("Once", SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, end = int(done.stdout), time.monotonic() + 15.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}"), "the worker outlives the engine"


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system does not tell CPU times of threads")
def test_an_engine_that_does_nothing_and_its_worker_use_no_cpu():
    """Right after steps so short that both looked for the next message without a rest."""
    with LLM(**SMALL) as llm:
        llm.generate("Once upon a time", LONG, use_tqdm=False)

        def spent() -> float:
            with open(f"/proc/{worker(llm).pid}/schedstat") as file:  # of its first thread, which waits for messages
                return time.process_time() + int(file.read().split()[0]) / 1e9

        before = spent()
        time.sleep(0.5)
        assert spent() - before < 0.05


@pytest.mark.slow
def test_an_engine_that_is_forgotten_frees_its_worker():
    llm = LLM(**SMALL)
    child = worker(llm)
    del llm
    gc.collect()
    assert child.wait(15.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("holder", [True, False], ids=["held", ""])
def test_the_dead_are_noticed_though_another_process_holds_their_end(holder, tmp_path, monkeypatch):
    """A process that the worker has forked has all its descriptors."""
    fork = "if os.fork() == 0: time.sleep(20); os._exit(0)\n            " if holder else ""
    monkeypatch.syspath_prepend(tmp_path)
    with LLM(**SMALL, **plant(tmp_path, "forking", f"{fork}os._exit(77)")) as llm:
        begun = time.monotonic()
        out = llm.generate("Once upon a time", LONG, use_tqdm=False)[0]
        assert "exit code 77" in out.error and time.monotonic() - begun < 5.0


@pytest.mark.slow
def test_signals_to_the_group_are_left_to_the_process_that_serves():
    """A terminal sends Ctrl-C to the whole group, a supervisor SIGTERM."""
    with LLM(**SMALL) as llm:
        for number in (signal.SIGINT, signal.SIGTERM):
            worker(llm).send_signal(number)
        out = llm.generate("Once upon a time", LONG, use_tqdm=False)[0]
        assert len(out.tokens) == 100 and worker(llm).poll() is None


def test_messages_out_of_turn_and_answers_that_nobody_awaits(monkeypatch):
    """A received result is returned even if the worker has ended since.

    An answer to an earlier call is skipped.  An error of the worker is raised with its message.
    """
    messages = []

    class Scripted:
        def ready(self):
            return bool(messages)

        def receive(self, wait, rhythm=None):
            if not messages:
                raise ChildEnded("it has ended")
            return messages.pop(0)

        def send(self, kind, parts, file=-1):
            pass

        def alive(self):
            return bool(messages)

    ids = np.zeros(1, np.int32)
    result = b"".join(codec.encode_result(StepResult(7, ids, ids, ids, ids.astype(np.uint8))))
    executor = Process()
    executor._child = Scripted()
    executor._due.extend([7, 8])
    messages.append(Message(process.RESULT, bytearray(result)))
    assert [r.id for r in executor.collect(0)] == [7]
    with pytest.raises(EngineDeadError, match="it has ended"):
        executor.collect(0)

    executor = Process()
    executor._child = Scripted()
    reported = [{"call": 0, "answer": "late"}, {"call": 1, "answer": "mine"}]
    messages += [Message(process.ANSWER, bytearray(json.dumps(one).encode())) for one in reported]
    assert executor.call("verb") == "mine"
    error = {"call": 2, "error": {"name": "KeyError", "message": "KeyError: 'path'", "param": None}}
    messages.append(Message(process.FAILED, bytearray(json.dumps(error).encode())))
    with pytest.raises(MinivllmError, match=r"^KeyError: 'path'$"):
        executor.call("verb")
    executor._due.append(9)
    messages.append(Message(process.ANSWER, bytearray(b"{}")))
    with pytest.raises(EngineDeadError, match="out of order"):
        executor.collect(0)


@pytest.mark.slow
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
    for i, mask in enumerate(masks):
        mask[:] = 5 + i
        sent.clear()
        executor.supply(1, LateInputs(mask[:2]))
        assert [kind for kind, _ in sent] == [MASKS]
    for mask in (np.zeros((2, 7), np.int32), masks[0][:, ::2]):
        sent.clear()
        executor.supply(1, LateInputs(mask))
        assert [kind for kind, _ in sent] == [LATE]
    assert all((mask == 5 + i).all() for i, mask in enumerate(masks)), "one lies in another"
