"""Work of a start that threads do ahead of its first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from minivllm.device import early

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static int note(const char *name, int value) {
    FILE *file = fopen(getenv("CALLS"), "a");
    fprintf(file, "%s %d\\n", name, value);
    fclose(file);
    return 0;
}
int cuInit(unsigned flags) { return note("init", flags) || getenv("NO_GPU"); }
int cuDeviceGet(int *device, int number) { *device = 7; return note("device", number); }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return note("context", device); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_driver_and_a_context_are_made_once_for_a_gpu_and_not_for_a_cpu(tmp_path, monkeypatch):
    source, library, calls = tmp_path / "driver.c", tmp_path / "libcuda.so", tmp_path / "calls"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("CALLS", str(calls))
    hashed = []
    monkeypatch.setattr(early, "hash_compiler", lambda: hashed.append(calls.read_text()))
    assert early.open_driver("cpu", True, str(library)) is None and not calls.exists()
    early.open_driver("auto", library=str(library)).join()
    assert calls.read_text() == "init 0\n"
    early.open_driver("cuda", True, str(library)).join()
    assert calls.read_text() == "init 0\ninit 0\ndevice 0\ncontext 7\n"
    monkeypatch.setenv("NO_GPU", "1")
    early.open_driver("cuda", True, str(library)).join()
    assert calls.read_text().endswith("context 7\ninit 0\n") and len(hashed) == 2, "there is no GPU"
    assert hashed[-1].endswith("context 7\n"), "the compiler is hashed behind the driver"


def test_a_machine_without_a_driver_starts_as_before(tmp_path, capfd):
    early.open_driver("auto", True, str(tmp_path / "none.so")).join()
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded ahead on Linux only")
def test_the_libraries_of_torch_are_loaded_without_importing_it_and_then_torch_computes():
    code = """
import sys, threading
from minivllm import LLM
from minivllm.device import early
for thread in threading.enumerate():
    if thread.name == "minivllm-start":
        thread.join()
with open("/proc/self/maps") as maps:
    mapped = maps.read()
imported = "torch" in sys.modules
import torch
print(imported, "libtorch_cpu.so" in mapped, float(torch.ones(3) @ torch.ones(3)), early.open_torch())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "3.0", "None"]


def test_the_key_of_tritons_cache_is_computed_before_the_first_kernel_needs_it():
    pytest.importorskip("triton")
    code = """
from minivllm.device import early
early.begin(early.hash_compiler).join()
from triton.runtime.cache import triton_key
before = triton_key.cache_info()
triton_key()
print(before.currsize, triton_key.cache_info().hits - before.hits)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_a_cpu_prepares_no_kernels():
    assert early.prepare_kernels("cpu") == []


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded ahead on Linux only")
def test_a_process_that_ends_while_a_library_loads_ends_with_its_own_exit_code():
    """Without a wait nearly every such end was a crash (SIGABRT or SIGSEGV), for example after a wrong option."""
    code = """
import sys, time
from minivllm.device import early
early.open_torch()
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""
    for seconds in ("0", "0.05", "0.1", "0.15", "0.2"):
        done = subprocess.run([sys.executable, "-c", code, seconds], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (3, ""), seconds


def test_the_end_of_a_process_waits_for_the_work_of_its_start_but_not_for_ever(tmp_path):
    code = """
import sys, threading, time
from minivllm.device import early
def work(seconds, path):
    time.sleep(seconds)
    open(path, "w").close()
early.EXIT_SECONDS = 1.0
early.begin(work, 0.3, sys.argv[1])
early.begin(work, 60, sys.argv[2])
"""
    done, late = tmp_path / "done", tmp_path / "late"
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", code, done, late], check=True, timeout=30)
    assert done.exists() and not late.exists() and time.monotonic() - begun < 20
