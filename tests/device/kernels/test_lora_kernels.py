"""The kernels of adapters on a GPU, and compiled for one; under the interpreter ``test_kernels.py`` tests them."""

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

import lora_kernels as checks

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", checks.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_each_token_gets_the_product_of_its_adapter(dtype, shape):
    for tokens in (1, 5, 40, 300):
        checks.check("cuda", dtype, shape, tokens, BOUNDS[dtype])
        checks.check("cuda", dtype, shape, tokens, BOUNDS[dtype], invariant=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", checks.SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)], ids=str)
def test_each_token_gets_the_product_of_its_adapter_from_rows_behind_the_weight(dtype, bound, shape):
    for tokens in (1, 19, 260, 1000):
        checks.check_behind("cuda", dtype, shape, tokens, bound)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tokens", [70, 300, 1030, 4100])
def test_a_gate_with_the_products_of_adapters_has_the_bits_of_separate_kernels(tokens):
    checks.check_gate("cuda", torch.bfloat16, tokens, 2e-2)


def test_steps_of_all_numbers_of_tokens_run_three_variants_of_each_kernel():
    """A variant for each number of tokens would be compiled while clients wait.  Reads of outputs are 16 bytes wide."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_lora.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    separate, gates, behind = done.stdout.splitlines()
    assert separate == "30 3 6 9 True", "launches, variants by number of tokens, wide reads"
    assert gates == "3 1", "launches, variants"
    assert behind == "40 10 True", "launches, variants (two sizes of tiles, five operations), wide reads of B"
