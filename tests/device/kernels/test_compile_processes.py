"""Processes that compile the kernels of a first start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from process_groups import living

pytest.importorskip("triton")

from minivllm.core.timing import StartTimes
from minivllm.device import compile_processes
from minivllm.device.kernels import ahead
from minivllm.device.worker import start

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run_check(name):
    """Run a check of compiled_processes.py without Triton's interpreter; return its exit status and output."""
    folders = [str(HERE), str(HERE.parents[1] / "helpers"), str(HERE.parents[1]), *sys.path]
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, str(HERE / "compiled_processes.py"), name]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout.strip(), done.stderr[-4000:]


@pytest.mark.parametrize(
    "name", ["kernels", "keys", "errors", "end_of_processes", "patience", "cancelled", "forgotten", "forked"]
)
def test_processes_compile_each_kernel_or_leave_it_to_a_thread(name):
    assert run_check(name) == (0, "ok", "")


def test_processes_end_when_the_process_that_started_them_is_killed():
    code, group, errors = run_check("killed_parent")
    assert (code, errors) == (-signal.SIGKILL, "")
    end = time.monotonic() + 30.0
    while living(int(group)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_few_cores_and_systems_without_fork_have_no_processes(monkeypatch):
    assert compile_processes.start_processes(compile_processes.FEW) is None
    monkeypatch.delattr(os, "fork")
    assert compile_processes.start_processes(16) is None


def test_an_application_without_an_interpreter_is_not_started_again(monkeypatch):
    monkeypatch.setattr(compile_processes, "CompileProcesses", lambda count: pytest.fail("started"))
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert compile_processes.start_processes(16) is None


def test_threads_compile_if_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert compile_processes.start_processes(16) is None


@pytest.mark.parametrize(("device", "compiled", "started"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)])
def test_processes_start_only_on_a_gpu_whose_kernels_are_not_compiled(monkeypatch, device, compiled, started):
    starts = []
    monkeypatch.setattr(ahead, "CompiledMarks", lambda *_: SimpleNamespace(exist=lambda: compiled))
    monkeypatch.setattr(ahead, "prepare_rehearsals", lambda: None)
    monkeypatch.setattr(compile_processes, "start_processes", starts.append)
    monkeypatch.setattr(start, "_reason_against", lambda *_: None)
    monkeypatch.setattr(start, "_facts", lambda _: [])
    wiring = SimpleNamespace(steps=SimpleNamespace(compile_ahead=None))
    rehearsals = start.Rehearsals(wiring, StartTimes(), torch.device(device), True)
    assert starts == [ahead.usable_threads()] * started and rehearsals.active is not compiled
    rehearsals.close()


class Started:
    """In the place of processes: records whether they were ended."""

    made: list[Started] = []

    def __init__(self, count):
        self.ended = False
        self.made.append(self)

    def close(self):
        self.ended = True


@pytest.fixture
def started(monkeypatch, tmp_path):
    monkeypatch.setattr(Started, "made", [])
    monkeypatch.setattr(compile_processes, "CompileProcesses", Started)
    monkeypatch.setattr(compile_processes, "usable_cores", lambda: 16)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return Started.made


def test_a_start_takes_the_processes_that_were_started_before_it_needed_them(started):
    with compile_processes.spare() as start:
        start()
        assert compile_processes.start_processes(16) is started[0]
        assert compile_processes.start_processes(16) is started[1]
    assert len(started) == 2 and not any(one.ended for one in started)


def test_processes_that_no_start_takes_end_with_it(started):
    with pytest.raises(ZeroDivisionError), compile_processes.spare() as start:
        start()
        raise ZeroDivisionError
    assert [one.ended for one in started] == [True]
    start()
    assert len(started) == 1 and compile_processes.start_processes(16) is started[1]


def test_no_other_processes_are_started_once_a_start_has_its_own(started):
    with compile_processes.spare() as start:
        assert compile_processes.start_processes(16) is started[0]
        start()
    assert len(started) == 1


@pytest.mark.parametrize("variable, folder", [("TRITON_CACHE_DIR", "."), ("TRITON_HOME", ".triton/cache")])
def test_no_processes_are_started_early_if_kernels_were_compiled_before(
    started, monkeypatch, tmp_path, variable, folder
):
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv(variable, str(tmp_path))
    marks = ahead.CompiledMarks(torch.device("cpu"), [])
    marks.path = tmp_path / folder / marks.path.name
    for count in (1, 0):
        started.clear()
        with compile_processes.spare() as start:
            start()
        assert len(started) == count
        marks.set()


def test_interpreted_kernels_have_no_processes(started, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with compile_processes.spare() as start:
        start()
    assert not started
