"""The kernels of shared prefixes, compiled for a Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"), pytest.mark.slow]


def test_the_kernels_of_common_shapes_spill_no_registers():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_shared.py")
    done = subprocess.run(
        [sys.executable, str(script), "few"], env=environ, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {"_shared", "_decode"} and len(lines) == 8
    assert all(int(line[-2]) == 0 for line in lines), done.stdout
