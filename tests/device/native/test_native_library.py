"""Whether the library of the native part is found, which kernels a process runs, and the reasons why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_helpers import ROOT, build_hook, compile_one

from minivllm import ConfigError, explain
from minivllm.device.hardware import Device
from minivllm.device.native import library
from minivllm.frontend.record import machine, sources

CPU = {"model": "pocket", "device": "cpu", "dtype": "float32"}
TELL = """
import json, sys
from pathlib import Path
from minivllm.device.native import library
library.FOLDER = Path(sys.argv[1])
print(json.dumps([library.load() is not None, library.isa(), library.why_not(), library.summary()]))
"""
BEST_ON = {"avx2": {"avx2", "fma", "f16c", "bmi2"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}


def told_in_a_process(folder, **environ):
    """[is there a library, isa, why_not, told] of a process with these variables; its error if it ends with one."""
    env = {k: v for k, v in os.environ.items() if k not in (library.SWITCH, library.LIMIT)}
    env |= {"PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run([sys.executable, "-c", TELL, str(folder)], env=env, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Create a folder with the library of the present sources."""
    folder = tmp_path_factory.mktemp("native")
    made = build_hook().build(folder, {"PATH": os.environ["PATH"]})
    if made.name != library.LIBRARY:
        pytest.skip(made.read_text())
    return folder


@pytest.fixture(scope="module")
def best():
    """Return the instruction set of this CPU by the kernel's flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    if not flags >= BEST_ON["avx2"]:
        return "none"
    return "avx512" if flags >= BEST_ON["avx512"] else "avx2"


def found_in(folder, **environ):
    return library.find(folder, environ)


def test_a_library_is_found_with_the_best_instruction_set_of_the_cpu(built, best):
    found = found_in(built)
    assert found.isa == best
    if best == "none":
        assert found.library is None and "AVX2" in found.why_not
    else:
        assert found.library.minivllm_abi() == library.ABI and found.why_not is None


def test_variables_limit_the_instruction_set_and_switch_it_off(built, best):
    if best == "none":
        pytest.skip("this CPU has no instruction set to limit")
    assert told_in_a_process(built) == [True, best, None, f"{best}: captured CPU steps are available"]
    assert told_in_a_process(built, MINIVLLM_ISA="avx2", MINIVLLM_NATIVE="1")[:2] == [True, "avx2"]
    assert told_in_a_process(built, MINIVLLM_ISA="avx512", MINIVLLM_NATIVE="")[1] == best  # it limits and adds nothing
    for name, value in [("MINIVLLM_ISA", "none"), ("MINIVLLM_NATIVE", "0")]:
        reason = f"switched off by {name}={value}"
        want = [False, "none", reason, f"none: no captured CPU steps ({reason})"]
        assert told_in_a_process(built, **{name: value}) == want


def test_an_unknown_value_of_a_variable_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match="MINIVLLM_ISA='sse2': expected none, avx2, avx512, or leave it unset"):
        found_in(tmp_path, MINIVLLM_ISA="sse2")
    with pytest.raises(ConfigError, match="MINIVLLM_NATIVE='no': expected 0, 1, or leave it unset"):
        found_in(tmp_path, MINIVLLM_NATIVE="no")
    assert "ConfigError: the environment variable MINIVLLM_ISA='sse2'" in told_in_a_process(
        tmp_path, MINIVLLM_ISA="sse2"
    )


def test_without_a_library_the_reason_is_the_one_that_the_build_left(tmp_path):
    assert found_in(tmp_path) == library.NativePart(None, "none", library.NOT_BUILT)
    (tmp_path / library.REASON).write_text("no C++ compiler was found\n")
    assert found_in(tmp_path).why_not == "no C++ compiler was found"
    (tmp_path / library.REASON).write_text("")
    assert found_in(tmp_path).why_not == library.NOT_BUILT


def test_a_library_that_cannot_be_loaded_is_told(tmp_path):
    (tmp_path / library.LIBRARY).write_bytes(b"no library\n")
    found = found_in(tmp_path)
    assert found.library is None and found.why_not.endswith(": reinstall") and library.LIBRARY in found.why_not


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({"minivllm_abi": library.ABI + 1, "minivllm_isa": 1}, "this package needs"),
        ({"minivllm_isa": 1}, "undefined symbol: minivllm_abi: reinstall"),
        ({"minivllm_abi": library.ABI, "minivllm_isa": 0}, "this CPU does not have all of AVX2, FMA, F16C and BMI2"),
    ],
)  # fmt: skip
def test_a_library_of_another_version_or_for_another_cpu_is_not_used(tmp_path, functions, reason):
    compile_one(tmp_path / library.LIBRARY, functions)
    found = found_in(tmp_path)
    assert found.library is None and found.isa == "none" and reason in found.why_not


@pytest.mark.parametrize(
    "part",
    [library.NativePart(object(), "avx2"), library.NativePart(None, "none", "no C++ compiler was found")],
    ids=["there", "missing"],
)
def test_explain_and_records_tell_of_it(monkeypatch, part):
    monkeypatch.setattr(library, "_found", lambda: part)
    there = "avx2: captured CPU steps are available"
    missing = "none: no captured CPU steps (no C++ compiler was found)"
    found = explain(**CPU)
    assert dict(found.notes)["native"] == (missing if part.why_not else there)
    assert f"native         {dict(found.notes)['native']}\n" in found.text()
    assert machine.machine(Device("cpu", "a CPU", 0, 2**30, ""))["native"] == part.isa
    assert "native" not in machine.machine(Device("cuda", "a GPU", 90, 2**30, ""))


def test_the_hash_of_the_package_covers_the_sources_of_the_library():
    names = {path.relative_to(library.FOLDER.parents[1]).as_posix() for path in library.FOLDER.glob("*.cpp")}
    assert names and names <= set(sources.package_source().files)
