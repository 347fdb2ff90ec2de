"""Checks of the kernels of experts on any device, under the interpreter (``interpreted.py``) and on a GPU
(``models/test_expert_kernels.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.core.interfaces.decoder import CHOSEN_SOFTMAX, CLAMPED, SIGMOID, SOFTMAX, Router
from minivllm.core.interfaces.quantizer import StoredWeight
from minivllm.device.kernels.experts import ExpertProducts, ResidualNorm, SharedOutput
from minivllm.device.kernels.packed_experts import PackedExperts, takes
from minivllm.device.kernels.router import assign, most_blocks, route
from minivllm.device.layers.experts import floor_of
from minivllm.device.layers.experts import route as reference_route
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.int4 import pack

NEAR = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
ROUTERS = [
    Router(),
    Router(normalize=True),
    Router(CHOSEN_SOFTMAX),
    Router(SIGMOID, normalize=True, scale=2.5, choice_bias=True),
    Router(SOFTMAX, scale=0.5, rounded=False),
    Router(SIGMOID, normalize=True, floor=0.3, rounded=False),
]
# tokens, experts, chosen, hidden, inner, activation, biases, whether the division of the norm is missing, fixed
SHAPES = [
    (1, 8, 2, 64, 32, "silu", False, True, False),
    (4, 8, 2, 64, 48, CLAMPED, True, False, False),
    (5, 8, 3, 64, 32, "gelu", True, True, False),
    (40, 2, 2, 64, 32, "silu", False, True, False),  # more pairs of an expert than a block has, and no assignment
    (37, 16, 4, 96, 80, "silu", False, False, True),
    (130, 4, 2, 64, 160, CLAMPED, True, True, False),
    (3, 5, 5, 64, 32, "relu", False, False, True),
]


# form (see ``packed``) of both weights or of each, and a shape of the table above
PACKED = [
    ("u4 32", (1, 8, 2, 64, 32, "silu", False, True, False)),
    ("u4 32 z", (5, 8, 3, 64, 32, "gelu", True, True, False)),
    ("u4 32 z", (40, 2, 2, 64, 32, "silu", False, True, False)),
    ("u4 128", (130, 4, 2, 128, 256, CLAMPED, True, True, False)),
    ("i8 0", (37, 16, 4, 96, 80, "silu", False, False, False)),
    ("i8 16", (9, 5, 5, 64, 48, "relu", False, True, False)),
    ("i8 16 z", (5, 4, 2, 64, 32, "silu", False, False, False)),
    ("u4 32, i8 16", (40, 2, 2, 64, 32, "silu", False, False, False)),
    ("f8 64", (70, 4, 2, 128, 64, "silu", False, True, False)),
]


def check_routes(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for experts, chosen in ((5, 5), (8, 1), (60, 4), (128, 8)):
        logits = torch.randn(33, experts, generator=generator).to(device, dtype)
        logits[7] = logits[7, 0]  # equal logits, for which the lower id is chosen
        bias = torch.randn(experts, generator=generator).to(device)
        for how in ROUTERS:
            given = bias if how.choice_bias else None
            weights, ids = route(logits, chosen, how.score, how.normalize, how.scale, given, how.rounded, floor_of(how))
            want, its = reference_route(logits, chosen, how, given)
            assert torch.equal(ids, its), (experts, chosen, how)
            torch.testing.assert_close(weights, want, rtol=1e-2 if how.rounded else 1e-5, atol=1e-6)
            check_given(logits, chosen, how, given, generator)


def check_given(logits: Tensor, chosen: int, how: Router, bias: Tensor | None, generator: torch.Generator) -> None:
    """Given experts get the weights that they would have as chosen ones; rows of -1 keep the router's choice."""
    options = (how.score, how.normalize, how.scale, bias, how.rounded, floor_of(how))
    weights, ids = route(logits, chosen, *options)
    again = route(logits, chosen, *options, ids)
    assert torch.equal(again[0], weights) and torch.equal(again[1], ids)
    other = torch.rand(logits.shape, generator=generator).argsort(dim=1)[:, :chosen].int().to(logits.device)
    other[3:5] = -1
    weights, found = route(logits, chosen, *options, other)
    assert torch.equal(found[5:], other[5:]) and torch.equal(found[3:5], ids[3:5])
    want, _ = reference_route(logits, chosen, how, bias, other)
    torch.testing.assert_close(weights, want, rtol=1e-2 if how.rounded else 1e-5, atol=1e-6)


def check_pruned(device: str) -> None:
    """An expert with a logit of -inf is chosen after all others, also where their scores are 0 too."""
    logits = torch.tensor([[-torch.inf, 200.0, 0.0, 0.0]], device=device)
    bias = torch.tensor([5.0, 0, 0, 0], device=device)
    for score in ("softmax", "sigmoid", "chosen_softmax"):
        weights, ids = route(logits, 3, score, choice_bias=bias if score == "sigmoid" else None)
        assert sorted(ids[0].tolist()) == [1, 2, 3] and torch.isfinite(weights).all()


def check_bad_logits(device: str) -> None:
    """Check that the ids of a row with any content are experts, each once."""
    logits = torch.randn(4, 8, device=device)
    logits[0], logits[1, 3], logits[2] = float("nan"), float("nan"), float("-inf")
    for how in ROUTERS[:3]:
        _, ids = route(logits, 3, how.score, how.normalize)
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in ids.tolist()), ids


def check_assignment(device: str) -> None:
    """Check that each pair is in one block of its expert, and that other places of blocks are empty."""
    for tokens, experts, chosen, bm in ((1, 4, 2, 16), (50, 8, 3, 16), (900, 16, 4, 64), (700, 3, 3, 16)):
        ids = torch.rand(tokens, experts, device=device).topk(chosen).indices.int()
        order, expert = assign(ids, experts, bm)
        pairs = tokens * chosen
        assert len(expert) == most_blocks(pairs, experts, bm) and len(order) == bm * len(expert)
        flat, seen = ids.flatten().tolist(), []
        for e, block in zip(expert.tolist(), order.view(-1, bm).tolist(), strict=True):
            if e >= 0:
                mine = [pair for pair in block if pair < pairs]
                assert mine and all(flat[pair] == e for pair in mine) and set(block) <= {*mine, pairs}
                seen += mine
        assert sorted(seen) == list(range(pairs)) and expert[expert >= 0].diff().ge(0).all()


def experts_in_float64(x: Tensor, ids: Tensor, weights: Tensor, kernel: ExpertProducts, activation: str) -> Tensor:
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu": torch.relu}
    up, down = kernel.up.double().view(kernel.count, -1, kernel.hidden), kernel.down.double()
    down = down.view(kernel.count, kernel.hidden, -1)
    out = torch.zeros(len(x), kernel.hidden, dtype=torch.float64, device=x.device)
    for t in range(len(x)):
        for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            y = up[e] @ x[t] + (0 if kernel.up_bias is None else kernel.up_bias[e].double())
            gate, other = y.chunk(2)
            if activation == CLAMPED:
                gate, other = gate.clamp(max=kernel.limit), other.clamp(-kernel.limit, kernel.limit)
                y = (other + 1) * gate * torch.sigmoid(kernel.alpha * gate)
            else:
                y = act[activation](gate) * other
            out[t] += w * (down[e] @ y + (0 if kernel.down_bias is None else kernel.down_bias[e].double()))
    return out


def packed(rows: int, inputs: int, form: str, device: str) -> tuple[StoredWeight, Tensor]:
    """Return a quantized weight of normally distributed numbers times 0.1, and the numbers float64 [rows, inputs].

    ``form`` has the dtype, the inputs of a group, and "z" if there are zero points, such as "u4 32 z".
    """
    dtype, size, *more = form.split()
    group = int(size) or inputs
    generator = torch.Generator().manual_seed(rows)
    scale = (torch.rand(rows, inputs // group, generator=generator) + 0.5) / 10
    codes = torch.randn(rows, inputs, generator=generator)
    zero = torch.randint(1, 15, scale.shape, generator=generator).float() if more else None
    if dtype == "u4":
        codes, scale = (codes * 3 + 8).round().clamp(0, 15).to(torch.uint8), scale / 3
        weight = pack(codes)
    elif dtype == "f8":
        codes, scale = (codes * 50).clamp(-448, 448), scale / 50
        weight = codes = codes.to(torch.float8_e4m3fn)
    else:
        codes, scale = (codes * 40).round().clamp(-127, 127).to(torch.int8), scale / 40
        weight = codes = (codes.int() + 7).clamp(0, 255).to(torch.uint8) if more else codes
    centre = zero if zero is not None else torch.full_like(scale, 8.0 if dtype == "u4" else 0.0)
    held = codes.double() - centre.double().repeat_interleave(group, 1)
    held = held * scale.double().repeat_interleave(group, 1)
    stored = [
        None if t is None else t.to(device) for t in (weight, scale if int(size) else scale[:, 0].contiguous(), zero)
    ]
    return StoredWeight(*stored, int(size)), held.to(device)


def check_packed_products(device: str, dtype: torch.dtype, shape: tuple, form: str) -> None:
    """Check the products of experts with quantized weights."""
    _, count, _, hidden, inner, activation, *_ = shape
    of_up, of_down = (form.split(", ") * 2)[:2]
    up, wide_up = packed(count * 2 * inner, hidden, of_up, device)
    down, wide_down = packed(count * hidden, inner, of_down, device)
    plain = ExpertProducts(wide_up.view(count, -1, hidden), wide_down.view(count, hidden, inner))
    assert takes(up) and takes(down)

    def make(biases: tuple, limit: float | None) -> tuple[ExpertProducts, Any]:
        plain.up_bias, plain.down_bias, plain.limit, plain.alpha = *biases, limit, 1.702
        return PackedExperts(count, up, down, *biases, activation, limit, 1.702), plain

    _check(device, dtype, shape, make)


def check_products(device: str, dtype: torch.dtype, shape: tuple) -> None:
    """Check the sum over a token's experts, and the stream and its norm with the sum."""
    _, count, _, hidden, inner, activation, *_, fixed = shape
    generator = torch.Generator().manual_seed(3)
    up, down = (
        (torch.randn(*size, generator=generator) * 0.1).to(device, dtype)
        for size in ((count, 2 * inner, hidden), (count, hidden, inner))
    )

    def make(biases: tuple, limit: float | None) -> tuple[ExpertProducts, Any]:
        kernel = ExpertProducts(up, down, *biases, activation, limit, 1.702, fixed)
        return kernel, kernel

    _check(device, dtype, shape, make)


def _check(device: str, dtype: torch.dtype, shape: tuple, made: Any) -> None:
    """Compare the products of ``made``, with biases and a limit, with those of the weights in numbers."""
    tokens, count, chosen, hidden, inner, activation, biased, undivided, *_ = shape
    generator = torch.Generator().manual_seed(1)
    make = lambda *size, by=1.0: (torch.randn(*size, generator=generator) * by).to(device, dtype)  # noqa: E731
    x, logits = make(tokens, hidden), make(tokens, count)
    biases = (make(count, 2 * inner), make(count, hidden)) if biased else (None, None)
    limit = 0.5 if activation == CLAMPED else None
    kernel, reference = made(biases, limit)
    weights, ids = route(logits, chosen, normalize=True)
    wide, squares = x.double(), None
    if undivided:
        squares = x.float().pow(2).reshape(tokens, 2, -1).sum(-1)
        wide = wide * torch.rsqrt(squares.double().sum(1, keepdim=True) / hidden + 1e-5)
    near = NEAR[dtype]
    got, nothing = kernel(x, ids, weights, squares, 1e-5)
    want = experts_in_float64(wide, ids, weights, reference, activation)
    assert nothing is None
    assert (got.double() - want).abs().max() <= near * want.abs().max()
    residual, norm = make(tokens, hidden), make(hidden)
    for whole in (False, True):
        stream = ResidualNorm(residual.clone(), norm, 1e-6, whole)
        y, squares_after = kernel(x, ids, weights, squares, 1e-5, stream)
        torch.testing.assert_close(stream.residual, residual + got, rtol=near, atol=near)
        after = stream.residual.double()
        assert squares_after is None or not whole
        if squares_after is not None:
            y = y.double() * torch.rsqrt(squares_after.double().sum(1, keepdim=True) / hidden + 1e-6)
        after = after * torch.rsqrt(after.pow(2).mean(1, keepdim=True) + 1e-6) * norm.double()
        assert (y.double() - after).abs().max() <= near * after.abs().max()
    other, gate = make(tokens, hidden), make(hidden)
    share = torch.sigmoid(wide @ gate.double())[:, None]
    for shared, added in ((SharedOutput(other, None), other), (SharedOutput(other, gate), other.double() * share)):
        total, _ = kernel(x, ids, weights, squares, 1e-5, None, shared)
        assert (total.double() - want - added).abs().max() <= near * (want + added).abs().max()
        stream = ResidualNorm(residual.clone(), norm, 1e-6, False)
        y, squares_after = kernel(x, ids, weights, squares, 1e-5, stream, shared)
        assert squares_after is None and torch.equal(stream.residual, residual + total)
        after = stream.residual.double()
        after = after * torch.rsqrt(after.pow(2).mean(1, keepdim=True) + 1e-6) * norm.double()
        assert (y.double() - after).abs().max() <= near * after.abs().max()


def check_twice_the_same_expert(device: str) -> None:
    """Check a token whose overridden router chooses one expert several times."""
    make = lambda *size: torch.randn(*size, generator=torch.Generator().manual_seed(2)).to(device) / 8  # noqa: E731
    kernel = ExpertProducts(make(4, 64, 64), make(4, 64, 32))
    for tokens in (2, 20, 60):
        x, ids = make(tokens, 64), torch.full((tokens, 3), 2, dtype=torch.int32, device=device)
        weights = torch.rand(tokens, 3).to(device)
        want = experts_in_float64(x.double(), ids, weights, kernel, "silu")
        torch.testing.assert_close(kernel(x, ids, weights)[0].double(), want, rtol=1e-4, atol=1e-6)


def check_a_row_alone(device: str, dtype: torch.dtype) -> None:
    """Check that with ``fixed`` a token has the same bits alone and beside any other tokens."""
    generator = torch.Generator().manual_seed(3)
    make = lambda *size: torch.randn(*size, generator=generator).to(device, dtype) / 8  # noqa: E731
    kernel = ExpertProducts(make(8, 2 * 48, 64), make(8, 64, 48), fixed=True)
    x, weights = make(300, 64), torch.rand(300, 3, generator=generator).to(device)
    ids = torch.rand(300, 8, generator=generator).topk(3).indices.int().to(device)
    whole = kernel(x, ids, weights)[0]
    for part in (slice(0, 1), slice(5, 9), slice(3, 40), slice(100, 290)):
        assert torch.equal(kernel(x[part].clone(), ids[part].clone(), weights[part].clone())[0], whole[part])


def check_an_odd_width(device: str, dtype: torch.dtype) -> None:
    """Compare an inner width that kernels cannot read 16 bytes at a time with float64, with and without biases."""
    generator = torch.Generator().manual_seed(5)
    make = lambda *size: (torch.randn(*size, generator=generator) / 4).to(device, dtype)  # noqa: E731
    for inner, biased, fixed in ((13, True, True), (7, False, False)):
        up, down = make(4, 2 * inner, 64), make(4, 64, inner)
        biases = (make(4, 2 * inner), make(4, 64)) if biased else (None, None)
        kernel = ExpertProducts(up, down, *biases, fixed=fixed)
        for tokens in (1, 6):
            x, weights = make(tokens, 64), torch.rand(tokens, 2, generator=generator).to(device)
            ids = torch.rand(tokens, 4, generator=generator).topk(2).indices.int().to(device)
            want = torch.zeros(tokens, 64, dtype=torch.float64, device=device)
            for t in range(tokens):
                for e, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
                    both = up[e].double() @ x[t].double() + (0 if biases[0] is None else biases[0][e].double())
                    gate, other = both.chunk(2)
                    out = down[e].double() @ (torch.nn.functional.silu(gate) * other)
                    want[t] += weight * (out + (0 if biases[1] is None else biases[1][e].double()))
            got = kernel(x, ids, weights)[0].double()
            assert (got - want).abs().max() <= NEAR[dtype] * want.abs().max()
    with pytest.raises(ModelError, match="expected a multiple of 16 bytes"):
        ExpertProducts(make(4, 8, 63), make(4, 63, 4))


def check_those_of_transformers(device: str) -> None:
    """Compare the fallback's ``Routed`` with the forward that it replaces."""
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    from minivllm.plugins.model.fallback.layers import Routed
    from minivllm.plugins.model.fallback.plan import experts_of

    cfg = OlmoeConfig(hidden_size=64, intermediate_size=32, num_experts=6)
    cfg._experts_implementation = "eager"
    module = OlmoeExperts(cfg).to(device).requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    for param in module.parameters():
        param.copy_(torch.randn(param.shape, generator=generator).to(device) / 8)
    assert experts_of(module) == "silu"
    for tokens in (1, 40):
        x, scores = torch.randn(tokens, 64, generator=generator).to(device), torch.rand(tokens, 6, generator=generator)
        weights, ids = (found.to(device) for found in scores.topk(2))
        got = Routed(module, "silu", False)(x, ids, weights)
        torch.testing.assert_close(got, module(x, ids, weights), rtol=1e-4, atol=1e-5)
