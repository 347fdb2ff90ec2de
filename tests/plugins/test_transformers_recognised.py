"""The parts of a transformers model that are recognised by their computation."""

from __future__ import annotations

import pytest
import torch

from minivllm.core.interfaces.decoder import Norm
from minivllm.plugins.model.fallback.layers import Shared
from minivllm.plugins.model.fallback.plan import gate_of, norm_of


class LlamaRMSNorm(torch.nn.Module):
    """By its name alone."""

    def __init__(self, change):
        super().__init__()
        self.weight, self.variance_epsilon, self.change = torch.nn.Parameter(torch.ones(16)), 1e-3, change

    def forward(self, x):
        return self.change(x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt(), self.weight)


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda x, w: x * w, Norm(1e-3)),
        (lambda x, w: x * (1 + w), Norm(1e-3, 1.0)),
        (lambda x, w: x * w * 1.01, None),
        (lambda x, w: x * w.square(), None),
        (lambda x, w: x[..., :4], None),
    ],
)
def test_a_norm_is_recognised_by_what_it_computes(change, found):
    assert norm_of(LlamaRMSNorm(change)) == found


def test_an_epsilon_that_counts_is_told_from_another():
    norm = torch.nn.LayerNorm(16, eps=1e-2)
    assert norm_of(norm) == Norm(1e-2, 0.0, True, True)


class MLP(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(8, 12), torch.nn.Linear(8, 12)
        self.down_proj, self.compute = torch.nn.Linear(12, 8), compute

    def forward(self, x):
        return self.down_proj(self.compute(self.gate_proj(x), self.up_proj(x)))


@pytest.mark.parametrize(
    "compute, found",
    [
        (lambda g, u: torch.nn.functional.silu(g) * u, "silu"),
        (lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u, "gelu_tanh"),
        (lambda g, u: g * torch.nn.functional.silu(u), None),
        (lambda g, u: torch.nn.functional.silu(g) * u * 2, None),
    ],
)
def test_a_gated_mlp_is_recognised_by_what_it_computes(compute, found):
    assert gate_of(MLP(compute), ("gate_proj", "up_proj", "down_proj")) == found


def test_a_shared_product_is_computed_once_for_each_tensor_in_any_order():
    calls = []
    weight = torch.randn(6, 4)
    shared = Shared(lambda x: calls.append(1) or x @ weight.T, 4, [2, 3, 1])
    for order in ((0, 1, 2), (2, 0, 1)):
        x = torch.randn(1, 5, 4)
        want = (x @ weight.T).split([2, 3, 1], -1)
        assert all(torch.equal(shared.piece(i, x), want[i]) for i in order)
    assert len(calls) == 2
    x, y = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    first = shared.piece(0, x)
    assert torch.equal(shared.piece(1, y), (y @ weight.T)[..., 2:5])
    assert torch.equal(shared.piece(0, x), first), "another tensor in between"
    assert shared.given is x
