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
    files = [f"interpreted{of}.py" for of in ("", "_attention", "_sums", "_shared", "_quant", "_quantize", "_fixed")]
    command += ["--durations=10", *(str(here / name) for name in files)]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:]
