"""Products of a CPU by the native library: for stored weights of each form those of float64, where torch's are slow."""

from __future__ import annotations

import pytest
import torch
from native_runs import checkpoint, each_isa, engine, needs_library, prompt

from minivllm import SamplingParams
from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight
from minivllm.device import hardware
from minivllm.device.layers.expert_linear import DenseExperts
from minivllm.device.layers.linear import Dense
from minivllm.device.layers.stored_product import StoredProduct, stored_product
from minivllm.plugins.quantizer.int4 import Int4Weight
from minivllm.plugins.quantizer.int8 import Int8Weight

pytestmark = needs_library
__all__ = ["each_isa"]

B, H, F = torch.bfloat16, torch.float16, torch.float32
EPSILON = {B: 2.0**-8, H: 2.0**-10, F: 2.0**-22}  # of a rounding of the result, and of the sums


@pytest.fixture
def slow(monkeypatch):
    """Simulate a CPU whose torch has no fast products of 16-bit numbers."""
    monkeypatch.setattr(hardware, "multiplies", lambda dtype: False)


def forms(outputs: int, inputs: int) -> list[tuple[StoredWeight, torch.Tensor]]:
    """Return weights of each form, and their numbers in float64."""
    torch.manual_seed(0)
    plain = [torch.randn(outputs, inputs).to(dtype) for dtype in (B, H, F)]
    found = [(StoredWeight(w), w.double()) for w in plain]
    q, scale = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) + 0.01
    found.append((StoredWeight(q, scale), q.double() * scale[:, None].double()))
    nibbles = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    steps = torch.randn(outputs, inputs // 32)
    halves = nibbles.view(outputs, -1, 1, 16)
    codes = torch.cat((halves & 15, halves >> 4), dim=2).view(outputs, -1, 32).double() - 8
    found.append((StoredWeight(nibbles, steps, None, 32), (codes * steps.double()[..., None]).view(outputs, inputs)))
    return found


def close(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    want, size = x.double() @ w.t(), x.double().abs() @ w.abs().t()
    bound = want.abs() * EPSILON[got.dtype] + size * x.shape[1] ** 0.5 * EPSILON[F] + 1e-30
    assert got.dtype == x.dtype and ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [B, H, F], ids=str)
def test_a_product_is_that_of_float64_for_each_form_and_any_number_of_rows(each_isa, dtype):
    for stored, w in forms(101, 96):
        product = StoredProduct(stored, 101, 96)
        for rows in (0, 1, 3, 5, 16, 64, 600):
            x = torch.randn(rows, 96).to(dtype)
            close(product(x), x, w)


@pytest.mark.parametrize("dtype", [B, F], ids=str)
def test_some_rows_of_a_weight_give_some_columns_in_memory_of_any_order(each_isa, dtype):
    for stored, w in forms(101, 96):
        product, x = StoredProduct(stored, 101, 96), torch.randn(7, 192).to(dtype)[:, ::2]
        close(product(x, slice(30, 77)), x, w[30:77])
        beside = torch.full((7, 60), 5.0, dtype=dtype)
        assert product(x, slice(30, 77), beside[:, 4:51]).data_ptr() == beside[:, 4:51].data_ptr()
        close(beside[:, 4:51], x, w[30:77])
        assert (beside[:, :4] == 5).all() and (beside[:, 51:] == 5).all()
        for out in (torch.empty(47, 7, dtype=dtype).t(), torch.empty(7, 47, dtype=torch.float64)):
            product(x, slice(30, 77), out)
            assert torch.equal(out.to(dtype), product(x, slice(30, 77)))


@pytest.mark.parametrize("dtype", [B, F], ids=str)
def test_the_bits_of_a_row_depend_on_no_other_row(each_isa, dtype):
    for stored, _ in forms(61, 96):
        product, x = StoredProduct(stored, 61, 96), torch.randn(530, 96).to(dtype)
        whole = product(x)
        for rows in (slice(0, 1), slice(3, 7), slice(2, 21), slice(500, 530)):
            assert torch.equal(product(x[rows]), whole[rows])


def test_torch_multiplies_where_it_is_faster(monkeypatch):
    plain, packed = StoredWeight(torch.zeros(6, 64, dtype=B)), StoredWeight(torch.zeros(6, 64).char(), torch.ones(6))
    for fast in (False, True):
        monkeypatch.setattr(hardware, "multiplies", lambda dtype, fast=fast: fast)
        assert (stored_product(plain, 6, 64, B) is None) == fast
        assert (stored_product(packed, 6, 64, B) is None) == fast
        assert stored_product(StoredWeight(torch.zeros(6, 64)), 6, 64, F) is None
        assert stored_product(packed, 6, 64, F) is not None


def test_a_weight_in_another_form_is_left_to_torch(slow):
    assert stored_product(StoredWeight(torch.zeros(64, 6, dtype=B).t()), 6, 64, B) is None
    assert stored_product(StoredWeight(torch.zeros(6, 64, device="meta", dtype=B)), 6, 64, B) is None


@pytest.mark.parametrize("invariant", [False, True])
def test_a_dense_layer_takes_it_and_reads_the_weight_as_it_is_at_each_call(slow, invariant):
    layer = Dense(ModuleInfo("m", "linear", 96, (("", 40),), "bfloat16", "cpu"), invariant=invariant)
    layer.load("weight", torch.randn(40, 96), "")
    layer.finish()
    x = torch.randn(70, 96).bfloat16()
    for _ in range(2):
        close(layer.apply(x), x, layer.weight.double())
        assert layer.native is not None and layer.packed is None and layer.fixed is None
        layer.release()
        layer.weight.normal_()
        layer.refresh()


def test_experts_take_their_rows(slow):
    info = ModuleInfo("m", "experts", 96, (("", 60),), "bfloat16", "cpu", experts=3)
    for layer in (DenseExperts(info), Int8Weight(info), Int4Weight(info)):
        layer.load("weight", torch.randn(60, 96), "")
        layer.finish()
        assert layer.native is not None
        x = torch.randn(5, 96).bfloat16()
        assert torch.equal(layer.expert(x, 1), layer.apply(x)[:, 20:40])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


def logprobs_of(path: str, **options) -> list[list[float]]:
    """Return log-probabilities of two prompts in one batch, one of which is too long for a captured step."""
    llm = engine(path, **{"dtype": "bfloat16", "max_num_batched_tokens": 128, **options})
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outs = llm.generate([{"prompt_token_ids": prompt(n)} for n in (90, 5)], params, use_tqdm=False)
    return [[next(iter(one.values())).logprob for one in out.prompt_logprobs[1:]] for out in outs]


@pytest.mark.parametrize("options", [{}, {"quantizer": "int8"}, {"batch_invariant": True}], ids=str)
def test_an_engine_has_the_probabilities_of_torchs_products(path, monkeypatch, options):
    run, calls = StoredProduct.__call__, []
    monkeypatch.setattr(StoredProduct, "__call__", lambda *a, **k: calls.append(1) or run(*a, **k))
    monkeypatch.setattr(hardware, "multiplies", lambda dtype: True)
    found = [logprobs_of(path, **options)]
    assert not calls
    monkeypatch.setattr(hardware, "multiplies", lambda dtype: False)
    found.append(logprobs_of(path, **options))
    assert calls
    for got, want in zip(*found, strict=True):  # roundings of bfloat16 between operations
        assert float((torch.tensor(got) - torch.tensor(want)).abs().mean()) < 0.04
