"""Checks of the kernels of ``minivllm quantize``, and of grouped bytes of checkpoints, under Triton's interpreter; run
by test_kernels.py.
"""

from __future__ import annotations

import grouped_kernels
import pytest
import torch

from minivllm.lab.quantize import gptq
from minivllm.lab.quantize.columns import ColumnKernel
from minivllm.lab.quantize.grid import Grid
from minivllm.lab.quantize.options import QuantizeOptions


@pytest.mark.parametrize(
    ("group", "symmetric", "order"),
    [(32, True, "no"), (24, False, "groups"), (256, True, "no"), (-1, False, "no"), (64, True, "static")],
)
def test_columns_are_rounded_by_the_kernel_as_by_its_equations(monkeypatch, group, symmetric, order):
    torch.manual_seed(group)
    k = 512 if group == 256 else 192
    x = torch.randn(2 * k, k) @ (torch.eye(k) + 0.2 * torch.randn(k, k))
    w, moments = torch.randn(11, k), x.T @ x / len(x)
    grid = Grid(QuantizeOptions("gptq", group=group, symmetric=symmetric), torch.float16)
    want = gptq.solve(w, moments, grid, 0.01, order)
    monkeypatch.setattr(gptq, "_rounding", lambda w: ColumnKernel)
    found = gptq.solve(w, moments, grid, 0.01, order)
    assert (found.codes != want.codes).float().mean() < 0.01  # ties of rounding
    torch.testing.assert_close(found.scale, want.scale, rtol=2e-2, atol=0)
    lost, least = (float(((one.weight() - w) @ x.T).square().mean()) for one in (found, want))
    assert lost <= 1.01 * least
    assert torch.equal(found.group_of, want.group_of)


@pytest.mark.parametrize("shape", [one for one in grouped_kernels.SHAPES if one[0] != torch.float8_e4m3fn], ids=str)
def test_weights_in_groups_are_multiplied_as_they_are_held(shape):
    grouped_kernels.check_products("cpu", torch.float32, shape, (0, 3, 17))
