"""Comparison of the kernels of adapters with float64 and with separate layers, under the interpreter; run by
test_kernels.py."""

from __future__ import annotations

import lora_kernels
import pytest
import torch

from minivllm.core.interfaces.adapter import AdaptedLayer, AdaptedModel, NeededRows
from minivllm.core.interfaces.decoder import Norm
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.device.kernels import activation, products
from minivllm.device.kernels.products import Product
from minivllm.device.layers import activation as torch_activation
from minivllm.device.layers.adapters import ActiveMethods, LayerAdapters
from minivllm.device.layers.extended_weight import ExtendedProduct
from minivllm.device.layers.fused import GatedLinear, LinearNorm, NormedLinear
from minivllm.device.layers.linear import Dense, Linear
from minivllm.device.layers.norm import RMSNorm
from minivllm.plugins.adapter import lora_memory, triton_extended, triton_lora, triton_merged
from minivllm.plugins.adapter.triton_lora import LoraProduct


@pytest.mark.parametrize("shape", lora_kernels.SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 2e-2)], ids=str)
def test_each_token_gets_the_product_of_its_adapter(dtype, bound, shape):
    for tokens in (1, 19, 260):
        lora_kernels.check("cpu", dtype, shape, tokens, bound)
    lora_kernels.check("cpu", dtype, shape, 19, bound, invariant=True)


@pytest.mark.parametrize("shape", lora_kernels.SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 2e-2)], ids=str)
def test_each_token_gets_the_product_of_its_adapter_from_rows_behind_the_weight(dtype, bound, shape):
    for tokens in (1, 19, 260):
        lora_kernels.check_behind("cpu", dtype, shape, tokens, bound)


@pytest.fixture
def short(monkeypatch):
    """Let steps of 50 tokens count as long ones."""
    monkeypatch.setattr(triton_lora, "SPLIT_TO", 49)
    monkeypatch.setattr(triton_lora, "TILES", ((32, 16), (1 << 62, 32)))


@pytest.mark.parametrize("tokens", [40, 50])
def test_a_gate_with_the_products_of_adapters_has_the_bits_of_separate_kernels(short, tokens):
    lora_kernels.check_gate("cpu", torch.float32, tokens, 1e-5)


class Layers:
    """Two MLPs and a projection, with random adapters of every layer in three places.

    With ``behind`` their weights have the first matrices of the adapters behind them.  With ``one_part`` a gate and the
    values that it multiplies are one part of a layer."""

    def __init__(self, monkeypatch, behind=False, one_part=False):
        monkeypatch.setattr(lora_memory, "runs_kernels", lambda device: True)
        torch.manual_seed(3)
        shapes = {"up": (64, (("gate", 96), ("up", 96))), "down": (96, (("", 64),)), "out": (64, (("", 64),))}
        if one_part:
            shapes["up"] = 64, (("", 192),)
        shapes["qkv"] = 64, (("q", 64), ("k", 64), ("v", 64))
        infos = {name: ModuleInfo(name, "linear", n, parts, "float32", "cpu") for name, (n, parts) in shapes.items()}
        self.linears = {}
        for name, info in infos.items():
            rows = 3 * 16 * len(info.parts) if behind else 0
            self.linears[name] = Linear(info, Dense(info, fuse=True, behind=rows))
        for linear in self.linears.values():
            linear.scheme.weight.normal_(0, 0.1)
        given = {name: AdaptedLayer(info, None, self.linears[name].scheme.extended) for name, info in infos.items()}
        model = AdaptedModel(given, {}, torch.float32, torch.device("cpu"), False, torch.zeros, torch.empty)
        self.memory, self.active = lora_memory.LoraMemory(model, 3, 16), ActiveMethods()
        self.memory.arena.normal_(0, 0.3)
        self.memory.ranks.fill_(16)
        self.memory.ranks[1, 2], self.memory.ranks[0, 0] = 5, 0
        for place in self.memory.places.values():
            a, b = place.views(self.memory.arena)
            for row, rank in enumerate(self.memory.ranks[:, place.number].tolist()):
                a[row, :, rank:], b[row, :, rank:] = 0, 0
        for name, linear in self.linears.items():
            linear.refresh(())  # copies A behind the weight
            linear.adapter = LayerAdapters(name, self.active, [self.memory])
        self.norms = [RMSNorm("norm", 64, Norm(1e-6), torch.float32, "cpu", fuse=True) for _ in range(2)]
        for norm in self.norms:
            norm.weight.uniform_(0.5, 1.5)

    def run(self, tokens, followed, fuse=True, gate=True):
        """Return the results of the products in order, for ``tokens`` random rows.

        ``followed`` means that each pair has the next one as its follower, and ``gate`` that a kernel computes it."""
        named = self.linears
        out = LinearNorm(named["out"], self.norms[0], fuse, False)
        gate_mul = activation.gate_mul if gate else torch_activation.gate_mul
        up = GatedLinear(named["up"], gate_mul, fuse, divides=gate)
        down = LinearNorm(named["down"], self.norms[1], fuse, False)
        qkv = NormedLinear(named["qkv"], fuse)
        if followed:
            for one, other in ((out, up), (up, down), (down, qkv)):
                one.follow(other)
        torch.manual_seed(4)
        x, residual = torch.randn(tokens, 64), torch.randn(tokens, 64)
        places = torch.randint(-1, 3, (tokens,), dtype=torch.int32)
        self.active.numbers = (0,)
        self.memory.begin(places)
        h, residual = out(x, residual)
        gated = up(h)
        h, residual = down(gated, residual)
        found = gated.clone(), h.finished(), qkv(h), residual
        self.memory.end()
        self.active.numbers = ()
        return found


def counted(monkeypatch, owner, name):
    """Return a list that gets an item for each call of a function."""
    calls, kept = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: calls.append(1) or kept(*args, **options))
    return calls


@pytest.mark.parametrize("tokens", [1, 40, 50])
def test_the_kernel_of_a_gate_gives_the_results_of_separate_layers(monkeypatch, short, tokens):
    layers = Layers(monkeypatch)
    merged = counted(monkeypatch, triton_merged, "gated")
    shrinks = counted(monkeypatch, LoraProduct, "shrink")
    found = layers.run(tokens, True)
    assert (len(merged), len(shrinks)) == ((1, 3) if tokens == 50 else (0, 4))
    monkeypatch.setattr(lora_memory.LinearAdapter, "gated", lambda *args: None)
    for mine, other in zip(found, layers.run(tokens, False), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norms", ["separate", "joined with products", "joined behind products"])
@pytest.mark.parametrize("tokens", [1, 40, 50])
def test_rows_behind_the_weights_give_the_results_of_separate_layers(monkeypatch, short, tokens, norms):
    expanded = counted(monkeypatch, triton_extended, "expand_behind")
    added = counted(monkeypatch, triton_extended, "add_behind")
    gates = counted(monkeypatch, triton_extended, "gate_behind")
    shrinks = counted(monkeypatch, LoraProduct, "shrink")
    divided = counted(monkeypatch, ExtendedProduct, "divided")
    layers = Layers(monkeypatch, behind=True)
    for linear in layers.linears.values():
        linear.scheme.extended.finish()
        # number of rows that the kernel of a product multiplies
        linear.scheme.extended.row.rows = 0 if norms == "joined behind products" else 45
    joined = norms != "separate"
    found = layers.run(tokens, True, fuse=joined)
    calls = tuple(map(len, (expanded, added, gates, shrinks)))
    # steps of many tokens have launches of their own for the products of A
    assert calls == ((0, 0, 0, 3) if tokens == 50 else (1, 2, 1, 0) if joined else (3, 0, 1, 0))
    assert len(divided) == (2 if norms == "joined with products" and tokens < 50 else 0)
    for mine, other in zip(found, Layers(monkeypatch).run(tokens, False), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("one_part", [False, True])
@pytest.mark.parametrize("unfused", ["gate", "norms"])
def test_no_kernel_of_adapters_includes_an_operation_that_is_unfused(monkeypatch, short, unfused, one_part):
    """With ``unfused``, torch computes the gate, or the norm with the addition before it, also in steps with
    adapters."""
    gates = [counted(monkeypatch, *at) for at in ((triton_extended, "gate_behind"), (activation, "gate_mul"))]
    added = counted(monkeypatch, triton_extended, "add_behind")
    layers = Layers(monkeypatch, behind=True, one_part=one_part)
    if unfused == "norms":
        for norm in layers.norms:
            norm.fused = None
    found = layers.run(40, True, gate=unfused != "gate")
    assert (bool(sum(map(len, gates))), bool(added)) == (unfused != "gate", unfused != "norms")
    for mine, other in zip(found, Layers(monkeypatch, one_part=one_part).run(40, False), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 40, 50])
def test_a_gate_in_one_part_gets_the_product_of_one_matrix(monkeypatch, short, tokens):
    found = Layers(monkeypatch, behind=True, one_part=True).run(tokens, True)
    for mine, other in zip(found, Layers(monkeypatch, one_part=True).run(tokens, False), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("tokens", "slots"), [(1, 132), (20, 132), (20, 1)])
def test_rows_behind_a_weight_are_multiplied_up_to_the_last_place_of_the_step(monkeypatch, tokens, slots):
    monkeypatch.setattr(products, "SLOTS", slots)
    monkeypatch.setattr(products, "serves", lambda *_: False)
    monkeypatch.setattr(products, "vector_tile", lambda *_: {"BN": 16, "BK": 1024, "STAGES": 1, "num_warps": 4})
    info = ModuleInfo("up", "linear", 1100, (("gate", 64), ("up", 64)), "float32", "cpu")
    extended = ExtendedProduct(info, 3 * 2 * 16)
    extended.whole.normal_()
    extended.finish()
    extended.row.rows = 45
    x = torch.randn(tokens, 1100)
    want = x @ extended.whole.t()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    for places, used in (([-1, -1], 0), ([-1, 0], 1), ([1, 0], 2), ([0, 2], 3)):
        ranks = torch.full((3, 1), 16, dtype=torch.int32)
        found = torch.full((1,), -1, dtype=torch.int32)
        launch = triton_lora._group[(3,)]
        of_tokens = torch.tensor(places, dtype=torch.int32)
        ints = [torch.zeros(64, dtype=torch.int32) for _ in range(4)]
        launch(of_tokens, ranks, *ints, found, 2, 3, 1, P=4, BT=16, SCAN=16, BL=128)
        assert found.item() == used
        y = extended(x, NeededRows(found, 32))
        needed = 128 + 32 * used
        torch.testing.assert_close(y[:, :needed], want[:, :needed], atol=1e-3, rtol=1e-3)
        assert y[:, -(-needed // 64) * 64 :].isnan().all(), "programs of rows that are not needed compute nothing"


def test_the_library_multiplies_if_not_all_programs_of_the_kernel_run_at_once(monkeypatch):
    info = ModuleInfo("down", "linear", 64, (("", 128),), "float32", "cpu")
    extended = ExtendedProduct(info, 16)
    extended.whole.normal_()
    extended.finish()
    extended.row.rows = 64
    launched = []
    monkeypatch.setattr(
        Product, "__call__", lambda self, x, **_: launched.append(len(x)) or (x @ self.weight.t(), None)
    )
    for rows, slots, launches in ((32, 1, [32]), (40, 1, []), (40, 132, [40])):
        monkeypatch.setattr(products, "SLOTS", slots)
        x = torch.randn(rows, 64)
        launched.clear()
        torch.testing.assert_close(extended(x), x @ extended.whole.t(), atol=1e-4, rtol=1e-4)
        assert launched == launches
