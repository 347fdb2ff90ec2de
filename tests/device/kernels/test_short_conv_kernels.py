"""The kernel of the short convolution on a GPU; under the interpreter it is tested by ``test_kernels.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import short_conv_cases as checks

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [*checks.SHAPES, (2048, 3, False)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_convolution_has_the_outputs_rings_and_copies_of_the_reference(dtype, shape):
    for seed in range(4):
        checks.check_convolve("cuda", dtype, shape, seed, BOUNDS[dtype])


def test_steps_of_all_numbers_of_rows_run_one_variant_of_the_kernel():
    """A variant for each number of rows would be compiled while clients wait."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_convolution.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["10", "1"], "launches and variants"
