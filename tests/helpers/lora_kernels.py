"""Checks of the kernels of adapters against float64, for the interpreter and for a GPU."""

from __future__ import annotations

import torch

from minivllm.device.kernels import products
from minivllm.device.kernels.activation import gate_mul
from minivllm.plugins.adapter.triton_lora import LoraProduct, group

PLACES, RANK = 5, 16
# (inputs, first outputs of the parts, outputs), shapes of qkv, gate and up, and a plain layer
SHAPES = [(1100, [0, 70, 100], 230), (64, [0, 136], 272), (40, [0], 48)]


def case(device, dtype, shape, tokens, seed=0):
    """Return (x, y, a, b, ranks, places).  Rows beyond the rank of an adapter are zero."""
    torch.manual_seed(seed)
    inputs, starts, outputs = shape
    a = torch.randn(PLACES, len(starts), RANK, inputs).mul(inputs**-0.5)
    b = torch.randn(PLACES, outputs, RANK).mul(0.3)
    ranks = torch.tensor([[3, 7], [16, 7], [0, 7], [9, 7], [1, 7]], dtype=torch.int32)[:, 0]
    for place, rank in enumerate(ranks.tolist()):
        a[place, :, rank:], b[place, :, rank:] = 0, 0
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


def check_joined(device, dtype, rows, mode, inputs, starts, outputs, tolerance):
    """Compare low-rank products inside a product of few rows with float64, for a mode of ``products.Product``."""
    torch.manual_seed(rows)
    ranks = torch.tensor([3, 16, 0, 9, 1], dtype=torch.int32)
    a = torch.randn(PLACES, len(starts), RANK, inputs).mul(inputs**-0.5)
    b = torch.randn(PLACES, outputs, RANK).mul(0.3)
    for place, rank in enumerate(ranks.tolist()):
        a[place, :, rank:], b[place, :, rank:] = 0, 0
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    places = torch.randint(-1, PLACES, (rows,), dtype=torch.int32)
    x, weight, a, b = (t.to(dtype).to(device) for t in (x, weight, a, b))
    residual, norm = torch.randn(rows, outputs).to(dtype).to(device), torch.rand(outputs).to(dtype).to(device)
    ranks, places = ranks.to(device), places.to(device)
    groups = group(places, torch.stack([ranks, ranks], dim=1), False)
    made = LoraProduct(a, b, 1, starts)
    product = products.Product(weight, None, mode)
    assert made.joins and product.takes_low_rank(rows, tuple(starts))
    plain = {"residual": residual.clone(), "norm": norm} if mode == products.ADDED else {}
    without = product(x, **plain)[0]
    given = {"residual": residual.clone(), "norm": norm} if mode == products.ADDED else {}
    got = product(x, **given, low=made.low_rank(x, groups))[0]
    full = expected(x, x.double() @ weight.double().T, a, b, ranks, places, starts)
    if mode == products.GATED:
        full = torch.nn.functional.silu(full[:, : outputs // 2]) * full[:, outputs // 2 :]
    if mode == products.ADDED:
        error = (given["residual"].double() - residual.double() - full).abs().max().item()
        assert error < tolerance, error
        full = (full + residual) * norm
    error = (got.double() - full).abs().max().item()
    assert error < tolerance, (dtype, rows, mode, error)
    assert torch.equal(got[places < 0], without[places < 0]), "a row without an adapter changes"


def check_behind(device, dtype, tokens, inputs, starts, outputs, tolerance):
    """Compare low-rank products that are added behind a product, and together with a gate of two parts, with
    float64."""
    torch.manual_seed(tokens)
    a = torch.randn(PLACES, len(starts), RANK, inputs).mul(inputs**-0.5)
    b, ranks = torch.randn(PLACES, outputs, RANK).mul(0.3), torch.full((PLACES,), RANK, dtype=torch.int32)
    a[1, :, 5:], b[1, :, 5:] = 0, 0
    x, y = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    places = torch.randint(-1, PLACES, (tokens,), dtype=torch.int32)
    places[: tokens // 3] = 2  # as in a long prompt
    x, y, a, b = (t.to(dtype).to(device) for t in (x, y, a, b))
    ranks, places = ranks.to(device), places.to(device)
    groups = group(places, torch.stack([ranks, ranks], dim=1), False)
    made = LoraProduct(a, b, 1, starts)
    want = expected(x, y, a, b, ranks, places, starts)
    if made.adds:
        got = made(x, y.clone(), groups)
        error = (got.double() - want).abs().max().item()
        assert error < tolerance, (dtype, tokens, starts, error)
        assert torch.equal(got[places < 0], y[places < 0]), "a row without an adapter changes"
    assert made.adds or made.gates
    if made.gates:
        got, plain = made.gated(x, y, "silu", groups), gate_mul(y)
        want = torch.nn.functional.silu(want[:, : outputs // 2]) * want[:, outputs // 2 :]
        error = (got.double() - want).abs().max().item()
        assert error < tolerance, (dtype, tokens, starts, error)
        assert torch.equal(got[places < 0], plain[places < 0]), "a row without an adapter changes"


# (inputs, first outputs of the parts, outputs)
BEHIND = [(1100, [0, 128, 256], 300), (64, [0, 136], 272), (40, [0], 48)]

# (mode, inputs, first outputs of the parts, outputs); the second splits its inputs over programs
JOINED = [
    (products.PLAIN, 320, [0, 128, 192], 256),
    (products.PLAIN, 2048, [0], 64),
    (products.GATED, 192, [0, 128], 256),
    (products.ADDED, 1100 + 4, [0], 192),
]
