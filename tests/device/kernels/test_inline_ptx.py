"""Instructions that kernels write themselves, run in numpy (``ptx.py``): every code of a form becomes its number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx import bfloat16_of, bits_of_bfloat16, run, written_in

pytest.importorskip("triton")
from minivllm.device.kernels.quant_formats import with_words

BYTES = np.arange(256, dtype=np.uint8)


def float8(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).float().numpy().astype(np.float64)


def int8(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.int8).astype(np.float64)


FORMS = {"int8": int8, "float8": float8}


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether all numbers of the 256 codes, or the 254 of float8 that are no NaN, are equal."""
    there = np.isfinite(want)
    return np.array_equal(got[there], want[there]) and there.sum() >= 254


@pytest.mark.parametrize("form", FORMS)
def test_bytes_become_bfloat16(form):
    (ptx,) = written_in("device/kernels/quant_formats.py", {"int8": "int8_pairs", "float8": "fp8_pairs"}[form])
    (got,) = run(ptx, [BYTES], [np.uint16])
    assert same(bfloat16_of(got), FORMS[form](BYTES))


@pytest.mark.parametrize("form", FORMS)
def test_two_planes_of_bytes_become_bfloat16(form):
    planes = written_in("device/kernels/quant_formats.py", "byte_planes")
    ptx = planes[["float8", "int8"].index(form)]
    low, high = run(ptx, [(BYTES.astype(np.uint16) | BYTES[::-1].astype(np.uint16) << 8)], [np.uint16, np.uint16])
    assert same(bfloat16_of(low), FORMS[form](BYTES))
    assert same(bfloat16_of(high), FORMS[form](BYTES[::-1]))


def test_the_halves_of_words_are_told_apart():
    (ptx,) = written_in("device/kernels/quant_formats.py", "halves_of")
    words = np.arange(64, dtype=np.uint32) * 0x10203 + 0x7FFF0001
    low, high = run(ptx, [words], [np.uint16, np.uint16])
    assert np.array_equal(low, words.astype(np.uint16)) and np.array_equal(high, (words >> 16).astype(np.uint16))


@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_keys_and_values_become_float16(form):
    place = ["int8", "float8"].index(form)
    file = "plugins/attention/triton_bytes.py"
    (got,) = run(written_in(file, "numbers")[place], [BYTES], [np.uint16])
    assert same(got.view(np.float16).astype(np.float64), FORMS[form](BYTES))
    found = run(written_in(file, "quarters")[1 - place], [BYTES.view(np.uint32)], [np.uint16] * 4)
    for i, got in enumerate(found):
        assert np.array_equal(
            np.nan_to_num(got.view(np.float16).astype(np.float64)),
            np.nan_to_num(FORMS[form](BYTES.reshape(-1, 4)[:, i].copy())),
        )


@pytest.mark.parametrize("zero", [0, 1, 7, 8, 15, 16, 100])
def test_codes_of_4_bits_become_multiples_of_a_scale_around_a_zero_point(zero):
    """``int4_pairs`` with scales as ``nibbles_of`` splits them, which are no bfloat16: all bytes, 64 scales."""
    (ptx,), (twice,) = (written_in("device/kernels/quant_formats.py", name) for name in ("int4_pairs", "twice"))
    rng = np.random.default_rng(zero)
    scales = np.repeat(rng.normal(size=64).astype(np.float32) / 20, 256)
    codes = np.tile(BYTES, 64)

    def both(x):  # float32 -> its nearest bfloat16, twice in a word
        return run(twice, [x.view(np.uint32)], [np.uint32])[0]

    near = both(scales)
    rest = both(scales - (near & np.uint32(0xFFFF0000)).view(np.float32))
    low, high = run(ptx, [codes, near, rest, both(np.full_like(scales, 128 + zero))], [np.uint16, np.uint16])
    for got, code in ((low, codes & 15), (high, codes >> 4)):
        want = (code.astype(np.float64) - zero) * scales
        rounded = bfloat16_of(bits_of_bfloat16(want))
        assert (np.abs(bfloat16_of(got) - rounded) <= np.abs(rounded) * 2.0**-7).all()
        assert (bfloat16_of(got) == rounded).mean() > 0.98  # the rest lie between two numbers


def test_a_number_of_8_bits_becomes_128_and_its_half():
    (ptx,) = written_in("device/kernels/quant_formats.py", "number_of")
    words = np.arange(1024, dtype=np.uint32) << 13
    (got,) = run(ptx, [words, np.full_like(words, 0x7F8000), np.full_like(words, 0x43000000)], [np.uint32])
    assert np.array_equal(got.view(np.float32), 128 + (words >> 15 & 255).astype(np.float32) / 2)


def test_bytes_of_two_codes_become_the_float16_numbers_of_any_table():
    (ptx,) = written_in("device/kernels/quant_formats.py", "table_pairs")
    numbers = np.random.default_rng(3).normal(size=16).astype(np.float16)
    whole = with_words(torch.from_numpy(numbers).float())
    words = np.repeat(whole.numpy()[16:].view(np.uint32)[:, None], 256, axis=1)
    low, high = run(ptx, [BYTES, *words], [np.uint16, np.uint16])
    assert np.array_equal(low.view(np.float16), numbers[BYTES & 15])
    assert np.array_equal(high.view(np.float16), numbers[BYTES >> 4])


def test_a_table_with_a_number_beyond_float16_is_refused():
    with pytest.raises(ValueError, match=r"number 70000\.0: expected at most 65504"):
        with_words(torch.linspace(0, 70000, 16))


def test_four_planes_of_codes_of_4_bits_become_subnormal_float16():
    (ptx,) = written_in("device/kernels/quant_formats.py", "code_planes")
    words = np.arange(1 << 16, dtype=np.uint16)
    for shift, power, got in zip((0, 8, 4, 12), (24, 24, 20, 20), run(ptx, [words], [np.uint16] * 4), strict=True):
        assert np.array_equal(got.view(np.float16).astype(np.float64), (words >> shift & 15) * 2.0**-power)


def pairs_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    (ptx,) = written_in("device/kernels/quant_float16.py", "pair_of")
    (got,) = run(ptx, [x.astype(np.float32).view(np.uint32) for x in (low, high)], [np.uint32])
    return got


def test_pairs_of_numbers_become_float8_and_then_a_16th_of_it_in_float16():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        (float8(BYTES)[np.isfinite(float8(BYTES))], rng.normal(size=1000) * 60, [600.0, -1e9, 0.0, 1e-9])
    )
    held = torch.from_numpy(x).clamp(-448, 448).float().to(torch.float8_e4m3fn).double().numpy()
    got = pairs_of(x, x[::-1])
    assert np.array_equal(got.astype(np.uint16).view(np.float16) * 16.0, held)
    assert np.array_equal((got >> np.uint32(16)).astype(np.uint16).view(np.float16) * 16.0, held[::-1])


def test_eight_products_of_float8_are_added_up_as_float16_can():
    (ptx,) = written_in("device/kernels/quant_float16.py", "eight_products")
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (4096, 8)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    x = torch.from_numpy(rng.normal(size=(4096, 8)) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()
    codes[0], x[0] = 0x7E, 448.0  # the largest of both
    weights = codes.view(np.uint64).ravel()
    (got,) = run(ptx, [weights, *(pairs_of(x[:, i], x[:, i + 1]) for i in (0, 2, 4, 6))], [np.uint32])
    products = float8(codes.ravel()).reshape(codes.shape) * x / 16
    off = np.abs(got.view(np.float32) - products.sum(1))
    assert (off <= np.abs(products).sum(1) * 2.0**-9 + 2.0**-20).all()
    assert got.view(np.float32)[0] == 8 * 448 * 28


def halves_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    (ptx,) = written_in("device/kernels/quant_float16.py", "two_of")
    (got,) = run(ptx, [x.astype(np.float32).view(np.uint32) for x in (low, high)], [np.uint32])
    return got


def test_eight_products_of_codes_of_4_bits_are_added_up_as_float16_can():
    """Of numbers less than 2 ** 16, and exactly where one code is multiplied by a whole number."""
    (ptx,) = written_in("device/kernels/quant_float16.py", "code_products")
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (4096, 8)).astype(np.uint32)  # at bits 0 to 3, 4 to 7 and so on
    x = np.round(rng.normal(size=(4096, 8)) * 64).clip(-255, 255) * 2.0 ** rng.integers(-12, 7, (4096, 8))
    codes[0], x[0] = 15, 255 * 2.0**8
    for i in range(8):
        codes[1 + i], codes[1 + i, i], x[1 + i, i] = 0, 13, 3 * (i + 1)
    words = (codes << np.arange(0, 32, 4, dtype=np.uint32)).sum(1).astype(np.uint32)
    near, far = x, x / 16  # what stands four bits further up is 16 times as large
    pairs = [halves_of(near[:, 0], near[:, 4]), halves_of(far[:, 1], far[:, 5])]
    pairs += [halves_of(near[:, 2], near[:, 6]), halves_of(far[:, 3], far[:, 7])]
    (got,) = run(ptx, [words, *pairs], [np.uint32])
    products = codes * x * 2.0**-24
    off = np.abs(got.view(np.float32) - products.sum(1))
    assert (off <= np.abs(products).sum(1) * 2.0**-10 + 8 * 2.0**-25).all()
    assert abs(got.view(np.float32)[0] / (8 * 15 * 255 * 2.0**-16) - 1) < 2.0**-10
    assert np.array_equal(got.view(np.float32)[1:9], [13 * x[1 + i, i] * 2.0**-24 for i in range(8)])


@pytest.mark.parametrize(("outlier", "most"), [(1.0, 1.5e-3), (1e3, 1e-3), (1e5, 1e-3)])
def test_a_row_of_4_bits_is_off_by_less_than_rounding_to_bfloat16_makes(outlier, most):
    """Beside the outputs' root mean square, of 4,096 inputs and a zero point of 8; bfloat16 makes 1.8e-3."""
    (ptx,) = written_in("device/kernels/quant_float16.py", "code_products")
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (64, 512, 8)).astype(np.uint32)
    x = rng.normal(size=(512, 8))
    x[17, 3] *= outlier
    x = bfloat16_of(bits_of_bfloat16(x))
    scaled = x * 2.0 ** (15 - np.floor(np.log2(np.abs(x).max())))
    words = (codes << np.arange(0, 32, 4, dtype=np.uint32)).sum(2).astype(np.uint32).ravel()
    pairs = [halves_of(scaled[:, i] / part, scaled[:, i + 4] / part) for i, part in ((0, 1), (1, 16), (2, 1), (3, 16))]
    (got,) = run(ptx, [words, *(np.tile(pair, 64) for pair in pairs)], [np.uint32])
    sums = got.view(np.float32).reshape(64, 512).sum(1, dtype=np.float64) * 2.0**24 - 8 * scaled.sum()
    want = ((codes - 8.0) * scaled).sum((1, 2))
    off = np.sqrt(np.square(sums - want).mean() / np.square(want).mean())
    assert 1e-5 < off < most, off
