"""Comparison of the kernels of adapters with float64 and with separate layers, under the interpreter; run by
test_kernels.py."""

from __future__ import annotations

import lora_kernels
import pytest
import torch

from minivllm.core.interfaces.adapter import AdaptedLayer, AdaptedModel
from minivllm.core.interfaces.decoder import Norm
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.device.kernels import activation, products
from minivllm.device.layers.adapters import ActiveMethods, LayerAdapters
from minivllm.device.layers.fused import GatedLinear, LinearNorm, NormedLinear
from minivllm.device.layers.linear import Dense, Linear
from minivllm.device.layers.norm import RMSNorm
from minivllm.plugins.adapter import lora_memory
from minivllm.plugins.adapter.triton_lora import LoraProduct


@pytest.mark.parametrize("shape", lora_kernels.SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 2e-2)], ids=str)
def test_each_token_gets_the_product_of_its_adapter(dtype, bound, shape):
    for tokens in (1, 19, 260):
        lora_kernels.check("cpu", dtype, shape, tokens, bound)
    lora_kernels.check("cpu", dtype, shape, 19, bound, invariant=True)


@pytest.mark.parametrize("case", lora_kernels.JOINED, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 2e-2)], ids=str)
def test_products_of_few_rows_add_those_of_adapters(dtype, bound, case):
    for rows in (2, 19, 40):
        lora_kernels.check_joined("cpu", dtype, rows, *case, bound)


@pytest.mark.parametrize("case", lora_kernels.BEHIND, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 3e-2)], ids=str)
def test_kernels_behind_a_product_add_those_of_adapters(dtype, bound, case):
    for tokens in (1, 70, 1030):
        lora_kernels.check_behind("cpu", dtype, tokens, *case, bound)


def test_joined_layers_add_the_products_of_adapters(monkeypatch):
    monkeypatch.setattr(lora_memory, "runs_kernels", lambda device: True)
    monkeypatch.setattr(products.Product, "fits", lambda product, x: 1 < len(x) <= 64)
    torch.manual_seed(3)
    shapes = {"qkv": (("q", 64), ("k", 64), ("v", 64)), "up": (("gate", 96), ("up", 96)), "down": (("", 64),)}
    infos = {name: ModuleInfo(name, "linear", 64, parts, "float32", "cpu") for name, parts in shapes.items()}
    linears = {name: Linear(info, Dense(info, fuse=True)) for name, info in infos.items()}
    for linear in linears.values():
        linear.scheme.weight.normal_(0, 0.1)
    given = {name: AdaptedLayer(info, None) for name, info in infos.items()}
    model = AdaptedModel(given, {}, torch.float32, torch.device("cpu"), False, torch.zeros, torch.empty)
    memory, active = lora_memory.LoraMemory(model, 3, 16), ActiveMethods()
    memory.arena.normal_(0, 0.3)
    memory.ranks.fill_(16)
    for name, linear in linears.items():
        linear.adapter = LayerAdapters(name, active, [memory])
    before = RMSNorm("norm", 64, Norm(1e-6), torch.float32, "cpu")
    before.weight.uniform_(0.5, 1.5)
    joined, behind = [], []
    sizes, second = products.low_sizes, LoraProduct.second
    monkeypatch.setattr(products, "low_sizes", lambda low, n: joined.append(low) or sizes(low, n))
    monkeypatch.setattr(LoraProduct, "second", lambda *args: behind.append(1) or second(*args))
    found = []
    for fuse in (True, False):
        qkv = NormedLinear(linears["qkv"], fuse)
        up = GatedLinear(linears["up"], activation.gate_mul, fuse)
        down = LinearNorm(linears["down"], before, fuse, False)
        torch.manual_seed(4)
        x, residual = torch.randn(20, 64), torch.randn(20, 64)
        places = torch.randint(-1, 3, (20,), dtype=torch.int32)
        active.numbers = (0,)
        memory.begin(places)
        h, residual = down(x, residual)
        found.append((qkv(h), up(h), residual))
        memory.end()
        assert (len(joined), len(behind)) == (3, 0 if fuse else 2)
    assert None not in joined
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)
