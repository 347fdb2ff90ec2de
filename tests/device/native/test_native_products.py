"""Products of the native part: of each format, for each shape and instruction set, those of float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from native_runs import each_isa, needs_library

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight
from minivllm.device.layers.stored_product import readable
from minivllm.device.native import program
from minivllm.plugins.quantizer.int4 import Int4Weight, dequantize
from minivllm.plugins.quantizer.int8 import Int8Weight

pytestmark = needs_library
__all__ = ["each_isa"]

ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 64)
INPUTS = (1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 100, 128, 257)
OUTPUTS = (1, 2, 5, 6, 7, 8, 23, 24, 25, 49)


def guarded(t: torch.Tensor) -> torch.Tensor:
    """The same numbers in the middle of memory that is NaN elsewhere, or 127: what is read beside them shows."""
    filled = torch.full((t.numel() + 256,), float("nan") if t.is_floating_point() else 127, dtype=t.dtype)
    inside = filled[128 : 128 + t.numel()].view(t.shape)
    inside.copy_(t)
    return inside


def close(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """Compare within a few float32 roundings of the sum of magnitudes, which bounds any order of summation."""
    x, w = x.double(), w.double()
    bound = (x.abs() @ w.abs().t()) * x.shape[1] ** 0.5 * 2.0**-22 + 1e-30
    assert ((got.double() - x @ w.t()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_plain_product_is_that_of_float64_for_any_shape(each_isa, dtype):
    torch.manual_seed(0)
    for rows, inputs, outputs in itertools.product(ROWS, INPUTS, OUTPUTS):
        x, w = guarded(torch.randn(rows, inputs)), guarded(torch.randn(outputs, inputs).to(dtype))
        close(program.product(x, w), x, w)


def test_numbers_below_the_smallest_normal_one_are_read_as_they_are(each_isa):
    for dtype, size in ((torch.bfloat16, 2.0**-130), (torch.float16, 2.0**-20), (torch.float32, 2.0**-140)):
        w = torch.full((3, 40), size).to(dtype)
        x = torch.full((2, 40), 2.0**20)
        assert w.double().max() > 0
        close(program.product(x, w), x, w)


def test_an_int8_product_is_that_of_float64_for_any_shape(each_isa):
    torch.manual_seed(0)
    for rows, inputs, outputs in itertools.product(ROWS, INPUTS, OUTPUTS):
        q, scale = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) + 0.01
        x = guarded(torch.randn(rows, inputs))
        close(program.product(x, guarded(q), guarded(scale)), x, q.double() * scale[:, None].double())


@pytest.mark.parametrize("symmetric", [True, False], ids=["no zero points", "zero points"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_an_int4_product_is_that_of_float64_for_any_shape(each_isa, group, symmetric):
    torch.manual_seed(0)
    for rows, groups, outputs in itertools.product(ROWS, (1, 2, 3), OUTPUTS):
        inputs = group * groups
        q = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scale = torch.randn(outputs, groups)
        zero = None if symmetric else torch.rand(outputs, groups) * 15
        x = guarded(torch.randn(rows, inputs))
        got = program.product(x, guarded(q), guarded(scale), None if zero is None else guarded(zero), group)
        halves = torch.stack((q.view(outputs, -1, 16) & 15, q.view(outputs, -1, 16) >> 4), dim=2).double()
        steps = halves.view(outputs, groups, group) - (8.0 if zero is None else zero.double()[..., None])
        close(got, x, (steps * scale.double()[..., None]).view(outputs, inputs))


@pytest.mark.parametrize("made", [Int8Weight, Int4Weight, lambda info: Int4Weight(info, 64, symmetric=False)])
def test_a_quantized_weight_is_multiplied_as_its_scheme_does(each_isa, made):
    torch.manual_seed(0)
    info = ModuleInfo("m", "linear", 192, (("", 37),), "float32", "cpu")
    scheme = made(info)
    scheme.load("weight", torch.randn(37, 192), "")
    scheme.finish()
    stored, x = scheme.stored(), torch.randn(5, 192)
    got = program.product(x, stored.weight, stored.scale, stored.zero, stored.group or 192)
    assert torch.allclose(got, scheme.apply(x), rtol=1e-4, atol=1e-4)
    if stored.weight.dtype == torch.uint8:
        assert torch.allclose(got, x @ dequantize(*stored[:3], torch.float32).t(), rtol=1e-4, atol=1e-4)


def test_a_product_of_a_row_has_the_same_bits_whatever_rows_are_beside_it(each_isa):
    """So a step of several drafts draws what as many steps would."""
    torch.manual_seed(0)
    x, w = torch.randn(13, 100), torch.randn(49, 100).bfloat16()
    whole = program.product(x, w)
    for first, last in itertools.combinations(range(14), 2):
        assert torch.equal(program.product(x[first:last], w), whole[first:last])


def test_a_row_times_nibbles_has_the_same_bits_whether_a_strip_is_unpacked_or_not(each_isa):
    torch.manual_seed(0)
    q, scale, zero = torch.randint(0, 256, (49, 48), dtype=torch.uint8), torch.randn(49, 3), torch.rand(49, 3) * 15
    x = torch.randn(33, 96)
    for given in (None, zero):
        whole = program.product(x, q, scale, given, 32)
        for count in (1, 4, 15, 16, 17):
            assert torch.equal(program.product(x[:count], q, scale, given, 32), whole[:count])


F, B, I8, U8 = torch.float32, torch.bfloat16, torch.int8, torch.uint8
SCALES = torch.ones(6)


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (StoredWeight(torch.zeros(64, 6).t()), "not row after row"),
        (StoredWeight(torch.zeros(6, 32)), "of another shape"),
        (StoredWeight(torch.zeros(6, 64), SCALES), "a scale of plain numbers"),
        (StoredWeight(torch.zeros(6, 64, dtype=torch.float64)), "a dtype that no kernel reads"),
        (StoredWeight(torch.zeros(6, 64, dtype=I8)), "int8 without a scale"),
        (StoredWeight(torch.zeros(6, 64, dtype=I8), SCALES.bfloat16()), "a scale that is no float32"),
        (StoredWeight(torch.zeros(6, 64, dtype=I8), SCALES, SCALES), "int8 with zero points"),
        (StoredWeight(torch.zeros(6, 64, dtype=I8), torch.ones(6, 2), None, 32), "int8 in groups"),
        (StoredWeight(torch.zeros(6, 32, dtype=U8)), "int4 without a scale"),
        (StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(6, 4), None, 16), "groups of half a block"),
        (StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(6, 1), None, 96), "a group that does not divide"),
        (StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(6, 1), None, 32), "too few scales"),
        (StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(6, 2), torch.ones(6, 1), 32), "too few zero points"),
        (StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(2, 6).t(), None, 32), "scales in another order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_weight_in_another_form_is_not_read(stored, why):
    assert not readable(stored, 6, 64)


@pytest.mark.parametrize(
    "stored",
    [
        StoredWeight(torch.zeros(6, 64)),
        StoredWeight(torch.zeros(6, 64, dtype=B)),
        StoredWeight(torch.zeros(6, 64, dtype=I8), SCALES),
        StoredWeight(torch.zeros(6, 64, dtype=I8), SCALES[:, None]),
        StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(6, 2), None, 32),
        StoredWeight(torch.zeros(6, 32, dtype=U8), torch.ones(6, 1), torch.ones(6, 1)),
    ],
)
def test_a_weight_in_one_of_the_forms_is_read(stored):
    assert readable(stored, 6, 64)
