"""The Triton kernels under Triton's interpreter, in a process of its own: it is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"), pytest.mark.slow]


def test_the_kernels_give_what_their_references_give():
    here = Path(__file__).parents[2] / "helpers"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider"]
    parts = ("", "_lora", "_attention", "_sums", "_kept", "_shared", "_quant", "_quantize", "_fixed")
    files = [f"interpreted{of}.py" for of in parts]
    command += ["--durations=10", *(str(here / name) for name in files)]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_kernels_of_compressions_have_one_variant_for_all_sizes():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_kept.py")
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    # moves of two kinds of caches, loads and choices
    assert done.stdout.split() == ["26", "4", "True"]
