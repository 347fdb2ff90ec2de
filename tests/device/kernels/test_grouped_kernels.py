"""The kernels of bytes in groups on a GPU; under the interpreter they are tested by ``test_kernels.py``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import grouped_kernels as checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("shape", checks.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_in_groups_are_multiplied_as_they_are_held(dtype, shape):
    checks.check_products("cuda", dtype, shape, (0, 1, 3, 17, 64, 130, 300))
