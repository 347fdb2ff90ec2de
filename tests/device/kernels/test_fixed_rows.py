"""Products of ``batch_invariant`` on a GPU: bits of a row alone, among other rows, and with the norm before it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from minivllm.device.kernels.fixed_products import FixedProduct
from minivllm.device.kernels.fixed_rows import Addition, FixedLinear
from minivllm.device.kernels.launch import capability
from minivllm.device.kernels.norm import add_rms_norm

NEW = torch.cuda.is_available() and capability(torch.device("cuda")) >= 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NEW, reason="no GPU of compute capability 9.0")]
WEIGHTS = [(4096, 1024, 1, None), (6144, 1024, 1, "silu"), (1024, 2048, 8, None), (1024, 3072, 8, None)]


@pytest.mark.parametrize(("n", "k", "leaves", "activation"), [*WEIGHTS, (1000, 1040, 1, None)])
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_rows(n, k, leaves, activation):
    random = torch.Generator("cuda").manual_seed(n + k)

    def drawn(*shape):
        return torch.randn(*shape, generator=random, device="cuda").bfloat16()

    x, w = drawn(300, k) * 9, drawn(n, k) / k**0.5
    x[::3] *= 1000
    linear = FixedLinear(w, leaves, activation)
    assert (linear.row is not None) == (n % 64 == 0)
    want = linear(x)
    if activation is None:
        exact = x.double() @ w.double().t()
        assert float(((want.double() - exact).abs() / exact.abs().clamp(min=exact.abs().mean())).max()) < 5e-3
    for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 256):
        assert torch.equal(linear(x[:rows]), want[:rows]), rows
    tiles = FixedProduct(w, leaves, activation)
    for i in range(0, 300, 7):
        one = slice(i, i + 1)
        assert torch.equal(linear(x[one]), want[one]) and torch.equal(tiles(x[one]), want[one])
        if not linear.adds(x[one]):
            continue
        residual, norm = drawn(1, k) * 30, drawn(k)
        stream = torch.full_like(residual, torch.nan)
        normed, total = add_rms_norm(x[one], residual.clone(), norm, 1e-6)
        assert torch.equal(linear(x[one], Addition(residual, stream, norm, 1e-6)), linear(normed))
        assert torch.equal(stream, total)
