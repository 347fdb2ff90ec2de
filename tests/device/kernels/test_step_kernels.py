"""The kernels of a step's ends.  Triton's interpreter compares them with separate launches in captured_steps.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_steps_of_all_numbers_of_rows_run_one_variant_and_one_if_rows_are_compressed():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_step.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["2"]
