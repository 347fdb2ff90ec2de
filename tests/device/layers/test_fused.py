"""What goes from one product of a pair to the next (``device.layers.fused``), whichever kernels they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.core.interfaces.decoder import Norm
from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight
from minivllm.device.layers import fused
from minivllm.device.layers.activation import gate_mul
from minivllm.device.layers.fused import GatedLinear, GatedRow, LinearNorm, Normed
from minivllm.device.layers.linear import Dense, Linear
from minivllm.device.layers.norm import RMSNorm
from minivllm.plugins.quantizer.eight import LlmInt8Weight

HIDDEN, INNER = 16, 24
# inputs, of which so many share a scale, bits, and whether packed experts may lie so
GROUPS = (
    (192, 32, 4, True), (192, 96, 4, False), (192, 192, 4, True), (320, 160, 4, False), (192, 96, 8, False),
    (192, 192, 8, True), (256, 128, 8, True),
)  # fmt: skip


class Kernel:
    """In the place of a GPU's kernel of one row, by the layers' own product."""

    def __init__(self, linear: Linear, gated: bool) -> None:
        self.linear, self.gated, self.received = linear, gated, None

    def fits(self, x: torch.Tensor) -> bool:
        return len(x) == 1

    def __call__(self, x: Any, squares: Any = None, eps: float = 0.0, residual: Any = None, norm: Any = None) -> Any:
        y = self.linear(x)
        if self.gated:
            y = gate_mul(y)
            return y, y.abs().amax(1, keepdim=True).view(torch.int32)
        residual.add_(y)
        return residual * norm, residual.square().sum(1, keepdim=True)


class Knowing(Kernel):
    takes_tops = True

    def __call__(self, *given: Any, tops: Any = None, **more: Any) -> Any:
        self.received = tops
        return super().__call__(*given, **more)


def linear(name: str, out: int, inp: int, scheme: Any = Dense) -> Linear:
    info = ModuleInfo(name, "linear", inp, (("", out),), "float32", "cpu")
    made = Linear(info, scheme(info))
    made.load("", "weight", torch.randn(out, inp))
    made.finish()
    return made


@pytest.mark.parametrize("kind", [Kernel, Knowing])
def test_a_kernel_is_told_the_largest_elements_of_its_row_only_if_it_takes_them(kind, monkeypatch):
    """A gate of a quantized weight knows them; the next product may be that of a weight that is left as it is."""
    torch.manual_seed(0)
    up, down = linear("up", 2 * INNER, HIDDEN), linear("down", HIDDEN, INNER)
    kernels = {id(up.scheme): Kernel(up, True), id(down.scheme): kind(down, False)}
    monkeypatch.setattr(fused, "joined_by", lambda scheme, *more: kernels[id(scheme)])
    norm = RMSNorm("norm", HIDDEN, Norm(eps=1e-6), torch.float32, "cpu")
    first, second = GatedLinear(up, gate_mul, True), LinearNorm(down, norm, True, False)
    first.follow(second)
    x, stream = torch.randn(1, HIDDEN), torch.randn(1, HIDDEN)
    given = first(Normed(x))
    assert isinstance(given, GatedRow) == (kind is Knowing)
    _, got = second(given, stream.clone())
    torch.testing.assert_close(got, stream + down(gate_mul(up(x))))
    assert (kernels[id(down.scheme)].received is not None) == (kind is Knowing)


def test_rows_are_divided_by_their_norm_before_a_weight_for_which_it_matters_which_elements_are_large():
    torch.manual_seed(0)
    scheme = lambda info: LlmInt8Weight(info, 6.0)  # noqa: E731
    up, eps = linear("up", 2 * INNER, HIDDEN, scheme), 1e-6
    x = torch.full((1, HIDDEN), 0.02)
    x[0, 3] = 2.0  # large once the row is divided
    squares = x.square().sum(1, keepdim=True)
    gate = GatedLinear(up, lambda y, *norm, **more: gate_mul(y), False)
    want = gate(Normed(Normed(x, squares, eps).finished()))
    torch.testing.assert_close(gate(Normed(x, squares, eps)), want, rtol=0, atol=0)


def test_experts_of_packed_weights_are_taken_where_a_tile_lies_in_one_group_or_has_whole_ones():
    takes = pytest.importorskip("minivllm.device.kernels.packed_experts").takes
    for inputs, group, bits, taken in GROUPS:
        weight = torch.zeros(8, inputs * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
        stored = StoredWeight(weight, torch.ones(8, inputs // group), None, group)
        assert (takes(stored) == bits) == taken, (inputs, group, bits)
