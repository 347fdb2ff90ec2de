"""The kernels of experts on a GPU; under the interpreter they are tested by ``test_kernels.py``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import expert_kernels as checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_goes_to_the_experts_that_it_goes_to_in_torch(dtype):
    checks.check_routes("cuda", dtype)
    checks.check_bad_logits("cuda")
    checks.check_pruned("cuda")


def test_each_pair_of_a_token_and_an_expert_is_in_one_block_of_that_expert():
    checks.check_assignment("cuda")


@pytest.mark.parametrize("shape", checks.SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_give_the_weighted_sum_and_the_stream_with_it(dtype, shape):
    checks.check_products("cuda", dtype, shape)
    checks.check_twice_the_same_expert("cuda")


@pytest.mark.parametrize(("form", "shape"), checks.PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_experts_give_it_of_the_numbers_that_they_hold(dtype, form, shape):
    checks.check_packed_products("cuda", dtype, shape, form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_of_fixed_experts_has_the_bits_that_it_has_alone(dtype):
    checks.check_a_row_alone("cuda", dtype)
    checks.check_an_odd_width("cuda", dtype)


def test_in_the_place_of_experts_of_transformers_they_give_the_same():
    checks.check_those_of_transformers("cuda")
