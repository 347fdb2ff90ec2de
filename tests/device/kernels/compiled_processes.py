"""Kernels that processes compile for a Hopper where none is; test_compile_processes.py runs it, with a check's name."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import CancelledError
from functools import partial

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
import triton.language as tl
from compiled_loops import Hopper
from process_groups import living
from small_kernels import ask_target, broken, double, negate, number, scale, scale_twice, scaled
from triton import knobs
from triton.runtime import driver

from minivllm.device import compile_processes
from minivllm.device.compile_processes import CompileProcesses
from minivllm.device.kernels.ahead import CompileAhead

CPU, X = torch.device("cpu"), torch.ones(64)


@triton.jit
def unnamed(x, N: tl.constexpr):
    """Belong to the main module, which another process cannot import."""
    tl.store(x + tl.arange(0, N), 1.0)


def wait_for(condition, seconds=60.0):
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Compiled:
    """The names of kernels in the order in which this process got them, and whether they were in Triton's folder."""

    def __init__(self):
        self.found = []
        knobs.compilation.listener = self

    def __call__(self, *, src, cache_hit, **_):
        self.found.append((src.name, cache_hit))


def compile_all(ahead, *launches):
    """Rehearse launches and wait until their kernels are compiled; return whether "finished" was called."""
    jobs = ahead.rehearse(lambda: [launch() for launch in launches])
    finished = []
    ahead.finish(jobs, partial(finished.append, True))
    ahead.wait(jobs)
    ahead.pool.shutdown()
    return [job.exception() for job in jobs], bool(finished)


def check_kernels() -> None:
    """Check that the processes compile all kernels that they can import, and that they end with the last one."""
    compiled, processes = Compiled(), CompileProcesses(2)
    assert os.getsid(processes.pid) != os.getsid(0), "Ctrl-C must not reach the processes"
    launches = [partial(double[(1,)], X, X, 64, size, half) for size in (16, 32) for half in (False, True)]
    launches += [partial(number[(1,)], X, 16, "fp16", tl.float16), partial(unnamed[(1,)], X, 16)]
    launches.append(partial(ask_target[(1,)], X))
    errors, finished = compile_all(CompileAhead(CPU, 2, processes), *launches)
    assert errors == [None] * 7 and finished, errors
    others = [("ask_target", True), ("number", True), ("unnamed", False)]
    assert sorted(compiled.found) == sorted([("double", True)] * 4 + others)
    assert "7.77" in next(iter(ask_target.device_caches[0][0].values())).asm["ttgir"]
    ptx = [one.asm["ptx"] for one in double.device_caches[0][0].values()]
    assert len(set(ptx)) == 4 and all("sm_90" in text for text in ptx)
    wait_for(lambda: not living(processes.pid, zombies=True), 5.0)


def check_keys() -> None:
    """Check that the key of a kernel does not depend on the kernels whose keys were computed before.

    Another process, and a later start, compute keys in another order."""
    keys = {"scale": set(), "scale_twice": set()}
    for order in ((scale, scale_twice), (scale_twice, scale)):
        for function in (scaled, *order):
            function.hash, function.used_global_vals = None, {}
        for function in order:
            keys[function.__name__].add(function.cache_key)
    assert [len(found) for found in keys.values()] == [1, 1]


def check_errors() -> None:
    """Check that a kernel with an error does not end the process that compiles it, and that its error is reported."""
    compiled, processes = Compiled(), CompileProcesses(1)
    launches = [partial(broken[(1,)], X, 16), partial(negate[(1,)], X, X, 16)]
    errors, finished = compile_all(CompileAhead(CPU, 1, processes), *launches)
    assert "nothing_of_this_name" in str(errors[0]) and errors[1] is None and finished
    assert compiled.found == [("negate", True)]


def check_end_of_processes() -> None:
    """Check that threads compile the kernels if the processes have ended."""
    compiled, processes = Compiled(), CompileProcesses(2)
    os.killpg(processes.pid, signal.SIGKILL)
    launches = [partial(negate[(1,)], X, X, size) for size in (16, 32, 64)]
    errors, finished = compile_all(CompileAhead(CPU, 2, processes), *launches)
    assert errors == [None] * 3 and finished
    assert compiled.found == [("negate", False)] * 3


def check_patience() -> None:
    """Check that a thread compiles a kernel if its process does not answer."""
    compile_processes.PATIENCE = 0.2
    compiled, processes = Compiled(), CompileProcesses(1)
    os.killpg(processes.pid, signal.SIGSTOP)
    errors, finished = compile_all(CompileAhead(CPU, 1, processes), partial(negate[(1,)], X, X, 16))
    assert errors == [None] and finished and compiled.found == [("negate", False)]
    assert not living(processes.pid)


def check_cancelled() -> None:
    """Check that ``close`` ends the processes and the compilations that run in them, and that these do not count as
    compiled; a launch then compiles the kernel."""
    compiled, processes = Compiled(), CompileProcesses(1)
    os.killpg(processes.pid, signal.SIGSTOP)
    ahead, finished = CompileAhead(CPU, 1, processes), []
    jobs = ahead.rehearse(lambda: negate[(1,)](X, X, 16))
    ahead.finish(jobs, partial(finished.append, True))
    wait_for(lambda: jobs[0].running())
    time.sleep(0.2)
    ahead.close()
    assert isinstance(jobs[0].exception(10.0), CancelledError) and not finished and not compiled.found
    assert not living(processes.pid)
    assert negate.warmup(X, X, 16, grid=(1,)) is not None and compiled.found == [("negate", False)]


class Endless:
    """A request whose compilation does not end."""

    def __init__(self, begun: str) -> None:
        self.begun = begun

    def __reduce__(self):
        return exec, (f"import time; open({self.begun!r}, 'w').close(); time.sleep(3600)",)


def check_killed_parent() -> None:
    """Print the group of the processes, one of which compiles a kernel, and end this process in a way that it cannot
    notice."""
    processes = CompileProcesses(2)
    begun = os.path.join(os.environ["TRITON_CACHE_DIR"], "begun")
    threading.Thread(target=processes.compile, args=(pickle.dumps(Endless(begun)),), daemon=True).start()
    wait_for(lambda: len(living(processes.pid)) == 3 and os.path.exists(begun))
    print(processes.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def check_forgotten() -> None:
    """Check that the processes end when nothing refers to them."""
    processes = CompileProcesses(3)
    group = processes.pid
    wait_for(lambda: len(living(group)) == 4)
    del processes
    assert not living(group, zombies=True)


def check_forked() -> None:
    """Check that the end of a fork of this process, as ``multiprocessing`` makes them, leaves the processes."""
    compiled, processes = Compiled(), CompileProcesses(1)
    ahead = CompileAhead(CPU, 1, processes)
    wait_for(lambda: len(living(processes.pid)) == 2)
    fork = multiprocessing.get_context("fork").Process(target=int)
    fork.start()
    fork.join()
    assert fork.exitcode == 0 and len(living(processes.pid)) == 2
    errors, finished = compile_all(ahead, partial(negate[(1,)], X, X, 16))
    assert errors == [None] and finished and compiled.found == [("negate", True)]


if __name__ == "__main__":
    driver.set_active(Hopper())  # type: ignore[arg-type]
    globals()[f"check_{sys.argv[1]}"]()
    print("ok")
