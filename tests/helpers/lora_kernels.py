"""Checks of the kernels of adapters against float64, for the interpreter and for a GPU."""

from __future__ import annotations

import torch

from minivllm.device.kernels.activation import gate_mul
from minivllm.plugins.adapter.triton_extended import expand_behind, gate_behind
from minivllm.plugins.adapter.triton_lora import LoraProduct, group
from minivllm.plugins.adapter.triton_merged import gated

PLACES, RANK = 5, 16
# (inputs, first outputs of the parts, outputs), shapes of qkv, gate and up, and a plain layer
SHAPES = [(1100, [0, 70, 100], 230), (64, [0, 136], 272), (40, [0], 48)]


def case(device, dtype, shape, tokens, seed=0):
    """Return (x, y, a, b, ranks, places).  Rows beyond the rank of an adapter are NaN, and must not be read."""
    torch.manual_seed(seed)
    inputs, starts, outputs = shape
    a = torch.randn(PLACES, len(starts), RANK, inputs).mul(inputs**-0.5)
    b = torch.randn(PLACES, outputs, RANK).mul(0.3)
    ranks = torch.tensor([[3, 7], [16, 7], [0, 7], [9, 7], [1, 7]], dtype=torch.int32)[:, 0]
    for place, rank in enumerate(ranks.tolist()):
        a[place, :, rank:], b[place, :, rank:] = torch.nan, torch.nan
    x, y = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    x[:: max(2, tokens // 2)] *= 3
    places = torch.randint(-1, PLACES, (tokens,), dtype=torch.int32)
    values = (t.to(dtype).to(device) for t in (x, y, a, b))
    return (*values, ranks.to(device), places.to(device))


def expected(x, y, a, b, ranks, places, starts):
    """Return y + (x A^T) B^T in float64."""
    out, bounds = y.double().clone(), [*starts, b.shape[1]]
    for t, place in enumerate(places.tolist()):
        rank = int(ranks[place]) if place >= 0 else 0
        for part in range(len(starts) if rank else 0):
            rows = slice(bounds[part], bounds[part + 1])
            inner = a[place, part, :rank].double() @ x[t].double()
            out[t, rows] += b[place, rows, :rank].double() @ inner
    return out


def check(device, dtype, shape, tokens, tolerance, invariant=False):
    x, y, a, b, ranks, places = case(device, dtype, shape, tokens)
    of_layers = torch.stack([ranks * 0 + 5, ranks], dim=1)  # the layer is the second one
    product = LoraProduct(a, b, 1, shape[1])
    got = product(x, y.clone(), group(places, of_layers, invariant))
    error = (got.double() - expected(x, y, a, b, ranks, places, shape[1])).abs().max().item()
    assert error < tolerance, (dtype, shape, tokens, error)
    assert torch.equal(got[places < 0], y[places < 0]), "a row without an adapter changes"
    if invariant:
        for t in range(0, tokens, 3):
            of_one = group(places[t : t + 1], of_layers, invariant)
            alone = product(x[t : t + 1], y[t : t + 1].clone(), of_one)
            assert torch.equal(alone, got[t : t + 1]), "the bits of a row depend on the other rows"


def check_behind(device, dtype, shape, tokens, tolerance):
    """Compare the kernels for products of A behind those of the weight with float64, and the gate with separate
    kernels."""
    x, y, a, b, ranks, places = case(device, dtype, shape, tokens)
    inner = x @ a.flatten(0, 2).t()  # NaN beyond the rank of an adapter, which must not be read
    whole = torch.cat([y, inner], dim=1)
    of_layers = torch.stack([ranks * 0 + 5, ranks], dim=1)  # the layer is the second one
    groups = group(places, of_layers, False)
    product = LoraProduct(a, b, 1, shape[1])
    got = expand_behind(product, whole, groups)
    error = (got.double() - expected(x, y, a, b, ranks, places, shape[1])).abs().max().item()
    assert error < tolerance, (dtype, shape, tokens, error)
    assert torch.equal(got[places < 0], y[places < 0]), "a row without an adapter changes"
    if product.gates:
        gate = gate_behind(product, whole, "silu", groups)
        assert torch.equal(gate, gate_mul(got)), "the bits of the gate differ from those of separate kernels"


def check_gate(device, dtype, tokens, tolerance):
    """Compare the kernel between the products of an MLP with the separate kernels.

    Gates have the same bits.  ``tolerance`` is that of the products of the next layer, relative to the largest."""
    torch.manual_seed(tokens)
    inputs, inner = 256, 1000
    random = lambda *size: torch.randn(*size).to(dtype).to(device)  # noqa: E731
    up = LoraProduct(
        random(PLACES, 2, RANK, inputs).mul_(0.06), random(PLACES, 2 * inner, RANK).mul_(0.3), 0, [0, inner]
    )
    down = LoraProduct(random(PLACES, 1, RANK, inner).mul_(0.03), random(PLACES, inputs, RANK), 1, [0])
    ranks = torch.tensor([[16, 16], [3, 16], [16, 0], [0, 7], [9, 1]], dtype=torch.int32).to(device)
    places = torch.randint(-1, PLACES, (tokens,), dtype=torch.int32).to(device)
    groups = group(places, ranks, False)
    x, y = random(tokens, inputs), random(tokens, 2 * inner)
    h = up.shrink(x, groups)
    want = gate_mul(up.expand(h, y.clone(), groups))
    found, none = gated(up, None, h, y, "silu", groups)
    assert torch.equal(found, want) and none is None
    found, ahead = gated(up, down, h, y, "silu", groups)
    assert torch.equal(found, want) and ahead is not None
    adapted = (places >= 0) & (ranks[places.clamp(min=0).long(), 1] > 0)
    of_down = down.shrink(want, groups).double().sum(0)[0, adapted]
    error = (ahead.double().sum(0)[0, adapted] - of_down).abs().max() / of_down.abs().max()
    assert error < tolerance, (tokens, error.item())
