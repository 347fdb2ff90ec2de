"""The product of many rows and its gate in one kernel: its compiled code, its choice, and on a Hopper its outputs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gated_product = pytest.importorskip("minivllm.device.kernels.gated_product", exc_type=ImportError)

SHAPES = [(256, 128), (1280, 832), (3072, 1024)]  # outputs and inputs
SHARED = 227 * 1024  # bytes of shared memory that a program may use


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(gated_product, "_AGREES", {})


def on_hopper(test):
    there = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="no GPU of compute capability 9.0")(test))


def inputs(rows, n, k, seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=draw, device="cuda").bfloat16()
    weight = torch.randn(2 * n, k, generator=draw, device="cuda").bfloat16() / k**0.5
    return x, weight


def wanted(x, weight):
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def test_the_kernel_compiles_without_spilled_registers_and_once_for_all_numbers_of_rows():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_gated.py")
    command = [sys.executable, str(script), *(f"{n}x{k}" for n, k in SHAPES)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [f"{n}x{k}" for n, k in SHAPES]
    for _, shared, products, copies, registers, spills, same in lines:
        assert int(shared) <= SHARED and int(spills) == 0 and int(registers) <= 168
        assert int(products) >= 8 and int(copies) >= 5 and same == "True"


def test_few_tiles_and_other_weights_have_the_product_of_the_library(monkeypatch):
    assert gated_product.pays(8192, 3072) and not gated_product.pays(4096, 3072)
    assert gated_product.pays(1170, 14336) and not gated_product.pays(1024, 14336)
    monkeypatch.setattr(gated_product, "capability", lambda device: 9)
    weight = torch.empty(512, 128, dtype=torch.bfloat16)
    assert gated_product.fits(weight)
    others = [weight.half(), weight[:384], weight[:, :96].contiguous(), weight[:, :64], weight.t()]
    assert not any(map(gated_product.fits, others))
    monkeypatch.setattr(gated_product, "capability", lambda device: 10)
    assert not gated_product.fits(weight)


@pytest.mark.parametrize("found", [0.01, 0.5, float("nan"), RuntimeError("no such instruction")])
def test_a_kernel_that_fails_or_disagrees_is_compared_once_and_not_used(monkeypatch, caplog, found):
    calls = []

    def distance(weight):
        calls.append(weight)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(gated_product, "distance", distance)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = torch.empty(512, 128, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        results = [gated_product.agrees(weight) for _ in range(3)]
    good = found == 0.01
    assert results == [good] * 3 and len(calls) == 1 and len(caplog.records) == (not good)


def test_a_lack_of_memory_for_the_comparison_is_not_kept(monkeypatch):
    found = [torch.OutOfMemoryError("full"), 0.01]

    def distance(weight):
        if isinstance(found[0], Exception):
            raise found.pop(0)
        return found[0]

    monkeypatch.setattr(gated_product, "distance", distance)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = torch.empty(512, 128, dtype=torch.bfloat16)
    assert [gated_product.agrees(weight) for _ in range(2)] == [False, True]


def test_nothing_is_compared_during_a_capture_or_a_rehearsal(monkeypatch):
    monkeypatch.setattr(gated_product, "distance", lambda weight: pytest.fail("compared"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weight = torch.empty(512, 128, dtype=torch.bfloat16)
    assert not gated_product.agrees(weight)
    monkeypatch.setattr(gated_product, "rehearsing", lambda: True)
    assert gated_product.agrees(weight) and not gated_product._AGREES


@on_hopper
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 64, 127, 128, 333, 4000])
def test_outputs_equal_the_gated_product_in_float64_up_to_rounding(rows, n, k):
    x, weight = inputs(rows, n, k)
    want = wanted(x, weight)
    found = gated_product.multiply(x, weight).double()
    assert ((found - want).norm(dim=1) / want.norm(dim=1)).max() < 0.006


@on_hopper
def test_a_row_has_equal_bits_beside_other_rows_and_rows_of_nan_change_no_other():
    x, weight = inputs(4000, 1280, 832)
    whole = gated_product.multiply(x, weight)
    assert torch.equal(whole, gated_product.multiply(x, weight))
    assert torch.equal(whole[1000:1333], gated_product.multiply(x[1000:1333].contiguous(), weight))
    x[::7] = torch.nan
    spoilt = gated_product.multiply(x, weight)
    kept = [i for i in range(4000) if i % 7]
    assert torch.equal(whole[kept], spoilt[kept]) and spoilt[::7].isnan().all()


@on_hopper
def test_nothing_behind_the_last_row_is_written():
    x, weight = inputs(333, 256, 128)
    memory = torch.full((600, 256), 7.0, device="cuda", dtype=torch.bfloat16)
    empty = torch.empty

    def placed(shape, **how):
        return memory[: shape[0]] if tuple(shape) == (333, 256) else empty(shape, **how)

    torch.empty = placed
    try:
        gated_product.multiply(x, weight)
    finally:
        torch.empty = empty
    assert (memory[333:] == 7).all() and not (memory[:333] == 7).all()


@on_hopper
def test_captured_products_are_those_of_a_launch():
    x, weight = inputs(2048, 1280, 832)
    assert gated_product.agrees(weight)
    want = gated_product.multiply(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated_product.multiply(x, weight)
    found.fill_(0)
    graph.replay()
    assert torch.equal(found, want)
