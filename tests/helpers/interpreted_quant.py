"""Checks of the kernels of quantized weights on a CPU, under Triton's interpreter; run by test_kernels.py.

Its float8 differs and its bfloat16 is truncated, so rows are tested in int8, and words in float16.  Inline assembly is
run in numpy (``ptx.py``).
"""

from __future__ import annotations

import ptx
import pytest
import quant_kernels
import rounded_rows
import torch

from minivllm.device.kernels import quant, quant_gemv, quant_small_m, scaled
from minivllm.device.kernels.products import GATED, PLAIN
from minivllm.device.kernels.quant import FusedProduct
from minivllm.device.kernels.quant_epilogue import EpilogueProduct

ptx.interpret()


@pytest.mark.parametrize("shape", quant_kernels.SHAPES)
def test_quantized_weights_are_multiplied_as_they_are_held(shape):
    quant_kernels.check_products("cpu", torch.float32, shape, (3, 17))


def test_quantized_weights_take_any_rows_and_fill_what_they_are_given():
    quant_kernels.check_calls("cpu", torch.float32)


@pytest.mark.parametrize("m", [1, 2])
def test_few_rows_of_eight_bits_are_rounded_and_scaled_row_by_row(m):
    weight = torch.randint(-127, 128, (24, 64), dtype=torch.int8)
    kernels = scaled.ScaledProduct(weight, torch.rand(24) / 100 + 1e-3)
    x = torch.randn(m, 64) * torch.tensor([[1.0], [30.0]])[:m]
    by_row = x.abs().amax(1, keepdim=True) / 127
    want = ((x / by_row).round() * by_row).double() @ (weight.double() * kernels.scale.double()[:, None]).T
    torch.testing.assert_close(kernels(x).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [("int8", 20, 1040, 0, False), *quant_kernels.SHAPES[3:]])
def test_one_and_two_rows_have_the_products_of_the_held_weight_times_their_factors(shape, dtype):
    kernels, held = quant_kernels.make(*shape, "cpu")
    for m in (1, 2):
        x, by_row = torch.randn(m, held.shape[1]).to(dtype), torch.rand(m) + 0.5
        if quant_gemv.gemv_fits(kernels, x):
            plain = EpilogueProduct(kernels)
            quant_kernels.close(quant_gemv.gemv(plain, x)[0], x, held, f"{m} rows")
            scaled_rows = quant_gemv.gemv(plain, x, by_row=by_row)[0].double() / by_row[:, None].double()
            quant_kernels.close(scaled_rows, x, held, f"{m} rows with a factor each")


@pytest.mark.parametrize("shape", [shape for shape in quant_kernels.SMALL if shape[0] != "fp8"])
def test_few_rows_of_quantized_weights_with_what_follows_them(shape):
    quant_kernels.check_small("cpu", torch.float16, shape, dict(BN=16, BK=64, P=2, STAGES=2, num_warps=1))


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shape", quant_kernels.SMALL_FOUR, ids=str)
def test_few_rows_of_four_bits_with_what_surrounds_them(shape, parts, each):
    tile = dict(BN=16, EACH=each, SK=parts, STAGES=2, num_warps=1)
    quant_kernels.check_small_four("cpu", torch.float16, shape, tile)


def test_few_rows_of_four_bits_are_served_as_far_as_tiles_were_measured(monkeypatch):
    monkeypatch.setattr(quant_small_m, "capability", lambda device: 9)
    for k, group, rows in ((14336, 128, 8), (14336, 32, 4), (16384, 64, 8), (16896, 128, 0), (1056, 32, 0)):
        packed, scale = torch.empty(16, k // 2, dtype=torch.uint8), torch.empty(16, k // group)
        assert FusedProduct(quant.Quantized(packed, scale, None, group)).rows == rows, (k, group)
    kernels, _ = quant_kernels.make("int4", 16, 128, 128, False, "cpu")
    with pytest.raises(ValueError, match="9 rows: expected 1 to 8"):
        quant_kernels.run_small(FusedProduct(kernels), torch.zeros(9, 128).half(), None)


def test_rows_are_rounded_before_a_product_of_few_rows():
    tile = dict(BN=16, BK=64, P=2, STAGES=2, num_warps=1)
    quant_kernels.check_small("cpu", torch.float16, quant_kernels.SMALL[0], tile, rounded=True)


@pytest.mark.parametrize("stages", [0, 2], ids=["registers", "shared"])
@pytest.mark.parametrize("second", [{"EACH": 1}, {"EACH": 20}, {"BK": 256}], ids=["in turn", "a tile each", "long"])
@pytest.mark.parametrize("shape", quant_kernels.ONE_ROW)
def test_one_row_of_quantized_weights_with_what_follows_it(monkeypatch, shape, second, stages):
    monkeypatch.setattr(quant_gemv, "SHORT", 0 if "BK" in second else 4096)
    tile = dict(BN=8, STAGES=stages, num_warps=1, **second)
    quant_kernels.check_vector("cpu", torch.float16, shape, tile)
    if shape[0] == "int8":
        quant_kernels.check_vector("cpu", torch.float16, shape, tile, rounded=True)


@pytest.mark.parametrize("stages", [0, 2], ids=["registers", "shared"])
@pytest.mark.parametrize("second", [{"EACH": 1}, {"BK": 256}], ids=["short", "long"])
def test_a_row_that_float8_holds_has_by_eights_the_products_that_elements_give(monkeypatch, second, stages):
    monkeypatch.setattr(quant_gemv, "SHORT", 0 if "BK" in second else 4096)
    kernels, _ = quant_kernels.make("fp8", 40, 640, 0, False, "cpu")
    x = (torch.randn(1, 640) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).half() / 64
    x[0, 3] = 7.0  # the largest float8 number in these steps
    tops = x.float().abs().unflatten(1, (4, -1)).amax(2).view(torch.int32)
    tile = dict(BN=8, STAGES=stages, num_warps=1, **second)
    for mode in (PLAIN, GATED):
        eights = FusedProduct(kernels, None, mode, rounded=torch.float8_e4m3fn)
        assert quant_gemv.elements_of(eights, x)[0] == 8
        want = quant_kernels.run_gemv(FusedProduct(kernels, None, mode), x, tile)[0]
        for known in (None, tops):
            got = quant_kernels.run_gemv(eights, x, tile, known)[0]
            quant_kernels.agree(got, want.double(), 2e-3, "sums of four in float16")


@pytest.mark.parametrize("shape", quant_kernels.TILES)
def test_many_rows_of_quantized_weights_by_tiles(shape):
    tile = dict(BM=16, BN=16, BK=64, STAGES=2, num_warps=4)
    quant_kernels.check_tiles("cpu", torch.float32, shape, (3, 20), tile)
    if shape[0] == "int4":
        quant_kernels.check_tiles("cpu", torch.float32, shape, (20,), {**tile, "BK": 128})


def test_many_rows_of_an_int8_weight_by_whole_numbers_of_15_bits():
    quant_kernels.check_fixed("cpu", torch.float32, (3, 20), dict(BM=16, BN=16, BK=64, STAGES=2, num_warps=4))


def test_what_is_large_in_a_row_is_not_rounded():
    x = torch.randn(3, 300)
    x[1, 7], x[2] = 50, 0
    large = x.abs() >= 6
    small = x.masked_fill(large, 0)
    step = small.abs().amax(1, keepdim=True) / 127
    want = torch.where(large, x, (small / torch.where(step > 0, step, 1)).round() * step)
    torch.testing.assert_close(scaled.rounded_but_large(x, 6.0), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [64, 200])
def test_norms_and_gates_round_rows_as_the_kernel_of_rows_does(k):
    rounded_rows.check_rounding("cpu", torch.float32, torch.int8, 3, k)


@pytest.mark.parametrize("m", [8, 9])
@pytest.mark.parametrize("shards", [1, 2])
def test_rows_that_are_handed_over_rounded_give_the_bits_of_products_that_round_them(m, shards):
    rounded_rows.check_followed("cpu", torch.float32, torch.int8, m, shards)


def test_sums_of_eight_bits_that_are_split_are_those_in_one():
    weight, by_column = torch.randint(-127, 128, (40, 640), dtype=torch.int8), torch.rand(40) / 100
    arrived = torch.zeros(8, dtype=torch.int32)
    for m in (5, 20):
        q, scale = scaled.rows(torch.randn(m, 640), torch.int8)
        found = []
        for parts, turned in ((1, 0), (2, 0), (4, 0), (1, 1), (3, 1)):
            tile = dict(BM=16, BN=32, BK=64, SK=parts, STAGES=2, num_warps=4, TURNED=turned)
            y = torch.full((m, 40), torch.nan)
            found.append(scaled.product(q, scale, weight, by_column, y, tile, arrived))
        exact = (q.double() * scale.double()) @ (weight.double() * by_column.double()[:, None]).T
        torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(one, found[0]) for one in found) and not arrived.any()
