"""Work of a start that threads do ahead of its first use."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from minivllm.device import early

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
int cuInit(unsigned flags) {
    FILE *file = fopen(getenv("CALLS"), "a");
    fprintf(file, "cuInit %u\\n", flags);
    fclose(file);
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_driver_is_initialized_once_for_a_gpu_and_not_for_a_cpu(tmp_path, monkeypatch):
    source, library, calls = tmp_path / "driver.c", tmp_path / "libcuda.so", tmp_path / "calls"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("CALLS", str(calls))
    assert early.open_driver("cpu", str(library)) is None and not calls.exists()
    early.open_driver("auto", str(library)).join()
    assert calls.read_text() == "cuInit 0\n"


def test_a_machine_without_a_driver_starts_as_before(tmp_path, capfd):
    early.open_driver("auto", str(tmp_path / "none.so")).join()
    assert capfd.readouterr() == ("", "")


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
