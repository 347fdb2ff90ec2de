"""The kernels of the gated delta rule on a GPU; under the interpreter they are tested by ``test_kernels.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import delta_rule_cases as checks

# of the kernels: the largest number of variants, which are tiles for few and for many rows
VARIANTS = {"_advance": 2, "_keep": 1, "_mix": 1, "_norm": 1, "_one": 2, "_prepare": 1, "_scan": 1}


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
LONG_BOUNDS = {torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
WIDE = (2, 4, 128, 128, 4)


@on_gpu
@pytest.mark.parametrize("shape", [*checks.SHAPES, WIDE])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_delta_rule_gives_the_outputs_states_rings_and_copies_of_the_reference(dtype, shape):
    for seed in range(4):
        checks.check_scan("cuda", dtype, shape, seed, BOUNDS[dtype])


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_gated_norm_is_that_of_the_reference(dtype):
    checks.check_gated_norm("cuda", dtype, BOUNDS[dtype])


@on_gpu
@pytest.mark.parametrize("shape", [*checks.SHAPES, WIDE])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("part", [32, 128])
def test_one_launch_gives_a_step_of_one_token_for_each_row(part, dtype, shape):
    for seed in range(6):
        checks.check_one("cuda", dtype, shape, seed, min(BOUNDS[dtype], 1.5e-2), part=part)


@on_gpu
@pytest.mark.parametrize("shape", [*checks.LONG_SHAPES, WIDE])
@pytest.mark.parametrize("dtype", LONG_BOUNDS, ids=str)
def test_long_rows_in_chunks_give_what_tokens_one_after_another_give(dtype, shape):
    for seed in range(8):
        checks.check_long("cuda", dtype, shape, seed, LONG_BOUNDS[dtype])


def test_steps_of_all_sizes_run_few_variants_of_the_kernels():
    """A variant for each size would be compiled while clients wait.  Products with an operand in registers and under 64
    columns were wrong with Triton 3.6.  With ``batch_invariant`` only multiply-adds within functions such as ``exp``
    are fused, so that a state has the same bits whichever step advances it."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_delta.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    name, plain, invariant = found.pop()
    assert name == "fused" and int(invariant) < int(plain) / 2
    assert {name: int(variants) for name, variants, _ in found} == VARIANTS
    assert all(narrow == "0" for *_, narrow in found)
