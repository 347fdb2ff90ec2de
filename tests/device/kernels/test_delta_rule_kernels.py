"""The kernels of the gated delta rule on a GPU; under the interpreter they are tested by ``test_kernels.py``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import delta_rule_cases as checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("shape", [*checks.SHAPES, (2, 4, 128, 128, 4)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_delta_rule_gives_the_outputs_states_rings_and_copies_of_the_reference(dtype, shape):
    for seed in range(4):
        checks.check_scan("cuda", dtype, shape, seed, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_gated_norm_is_that_of_the_reference(dtype):
    checks.check_gated_norm("cuda", dtype, BOUNDS[dtype])
