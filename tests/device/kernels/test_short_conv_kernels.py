"""The kernel of the short convolution on a GPU; under the interpreter it is tested by ``test_kernels.py``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import short_conv_cases as checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("shape", [*checks.SHAPES, (2048, 3, False)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_convolution_has_the_outputs_rings_and_copies_of_the_reference(dtype, shape):
    for seed in range(4):
        checks.check_convolve("cuda", dtype, shape, seed, BOUNDS[dtype])
