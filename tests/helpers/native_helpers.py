"""Shared code of tests of the native part, with the build hook as a module and libraries of a few lines."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = "hatch_build.py"


def build_hook(root=ROOT):
    """Return ``hatch_build.py`` of a tree as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", root / HOOK)
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # write no bytecode next to the sources
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def compiler():
    """Return a C++ compiler.  Without one the test is skipped."""
    found = next(filter(None, map(shutil.which, build_hook().COMPILERS)), None)
    return found or pytest.skip("no C++ compiler is here")


def compile_one(target, functions):
    """Compile a library of functions without arguments, from name -> result."""
    source = target.with_suffix(".cpp")
    source.write_text(
        "".join(f'extern "C" int {name}(void) {{ return {value}; }}\n' for name, value in functions.items())
    )
    subprocess.run([compiler(), "-shared", "-fPIC", str(source), "-o", str(target)], check=True)


def small_tree(folder):
    """Copy the files that a build reads, with short sources that compile at once."""
    native = folder / "minivllm" / "device" / "native"
    native.mkdir(parents=True)
    for name in (HOOK, "pyproject.toml", "README.md", "LICENSE", ".gitignore", "minivllm/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("__init__.py", "library.py"):
        shutil.copy(ROOT / "minivllm" / "device" / "native" / name, native / name)
    (native / "sizes.h").write_text("int lanes_avx2(), lanes_avx512();\n")
    (native / "kernels.cpp").write_text(
        '#include "sizes.h"\n#define NAME2(isa) lanes_##isa\n#define NAME(isa) NAME2(isa)\n'
        "#ifdef __AVX512F__\nint NAME(ISA)() { return 16; }\n#else\nint NAME(ISA)() { return 8; }\n#endif\n"
    )
    for name in ("parts.cpp", "recurrent.cpp", "rings.cpp"):
        (native / name).write_text("// nothing\n")
    (native / "program.cpp").write_text(
        '#include "sizes.h"\n#include <string>\n#define EXPORTED extern "C" __attribute__((visibility("default")))\n'
        "EXPORTED int minivllm_abi(void) { return 1; }\nEXPORTED int minivllm_isa(void) { return 1; }\n"
        "EXPORTED int minivllm_lanes(void) { return lanes_avx2() + lanes_avx512(); }\n"
        "EXPORTED int minivllm_digits(int n) { return std::to_string(n).size(); }\n"
    )
    return folder


def clean(**values):
    """Return the environment without variables that a build reads, and with these values."""
    return {k: v for k, v in os.environ.items() if k not in ("CXX", "MINIVLLM_NATIVE", "PYTHONPATH")} | values
