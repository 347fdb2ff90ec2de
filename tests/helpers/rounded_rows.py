"""Checks of 8-bit rows from a norm or a gate on any device, under the interpreter (``interpreted_quant.py``) and on a
GPU (``device/kernels/test_quant_kernels.py``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from minivllm.core.interfaces.decoder import Norm
from minivllm.core.interfaces.quantizer import ModuleInfo, Shard, WeightScheme
from minivllm.device.kernels.activation import gate_mul, gate_mul_rounded
from minivllm.device.kernels.norm import add_rms_norm, add_rms_norm_rounded
from minivllm.device.kernels.quant import FusedProduct
from minivllm.device.kernels.scaled import ScaledProduct, rows
from minivllm.device.layers.fused import GatedLinear, LinearNorm, NormedLinear
from minivllm.device.layers.linear import Linear
from minivllm.device.layers.norm import RMSNorm

HIDDEN, INNER, EPS = 64, 96, 1e-5
SIZES = {"o": (HIDDEN, HIDDEN), "up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "qkv": (80, HIDDEN)}


def drawn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def same(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.float(), b.float())
        for a, b in zip(found, want, strict=True)
    )


def alike(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], dtype: torch.dtype) -> bool:
    """Return whether codes and scales are equal, except for a last bit of a norm.

    A GPU may sum the squares in another order.  Such a bit changes one number in a thousand, or one of a short row, to
    the next code."""
    (codes, scale), (other, by) = found, want
    near = 4 * torch.finfo(dtype).eps  # the scale is a quotient of sums that may differ by some last bits
    if codes.dtype != other.dtype or not torch.allclose(scale, by, rtol=near, atol=0) or scale.shape != by.shape:
        return False
    off = (codes.float() - other.float()).abs()
    beside = off <= (1 if codes.dtype == torch.int8 else other.float().abs() / 7 + 2**-9)
    return bool(beside.all()) and int((off > 0).sum()) <= max(1, codes.numel() / 1000)


def check_rounding(device: str, dtype: torch.dtype, eight: torch.dtype, m: int, k: int) -> None:
    """Check that codes and scales are those that the kernel of rows computes from a norm and a gate."""
    x, residual = drawn(1, m, k).to(device, dtype), drawn(2, m, k).to(device, dtype)
    weight = (drawn(3, k) * torch.logspace(-1, 2, k)).to(device, dtype)
    y, stream = add_rms_norm(x, residual.clone(), weight, EPS)
    *found, got = add_rms_norm_rounded(x, residual.clone(), weight, EPS, eight)
    assert torch.equal(got, stream)
    assert alike(tuple(found), rows(y, eight), dtype)
    if m > 1:
        x[1, k // 2] = torch.nan
        codes, scale, _ = add_rms_norm_rounded(x, residual.clone(), weight, EPS, eight)
        spoilt = scale.isnan().flatten().tolist()
        assert spoilt == rows(x, eight)[1].isnan().flatten().tolist() == [i == 1 for i in range(m)]
        assert torch.equal(codes[0].float(), found[0][0].float())
    both = (drawn(4, m, 2 * k) * 3).to(device, dtype)
    both[0] = 0
    for activation in ("silu", "gelu_tanh"):
        found = gate_mul_rounded(both, eight, activation)
        assert alike(found, rows(gate_mul(both, activation=activation), eight), dtype)
        assert not found[0][0].float().any() and bool((found[1][0] == 1).all())
    both[-1, 0] = torch.nan
    assert gate_mul_rounded(both, eight)[1].isnan().flatten().tolist() == [i == m - 1 for i in range(m)]


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


class Scaled(WeightScheme):
    """A weight and rows of 8 bits.  ``requested`` counts products of unrounded rows."""

    def __init__(self, n: int, k: int, eight: torch.dtype, device: str) -> None:
        weight = drawn(n + k, n, k).mul_(40).clamp_(-127, 127).to(eight).to(device)
        self.of, self.requested = ScaledProduct(weight, (drawn(n, n).abs() / 500 + 1e-4).to(device)), 0
        self.tensors: dict[str, torch.Tensor] = {}

    def params(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load(self, param: str, tensor: torch.Tensor, part: str) -> None:
        raise AssertionError("nothing is loaded")

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None, adapter: Any = None) -> torch.Tensor:
        self.requested += 1
        return self.of(x, out)

    def joined(self, bias: torch.Tensor | None, mode: int, activation: str) -> Any:
        return FusedProduct(self.of.wide, bias, mode, activation, self.of.weight.dtype, scaled=self.of)


class Plain(Scaled):
    """A weight that accepts unrounded rows only."""

    joined = WeightScheme.joined


def run(schemes: dict[str, Scaled], fuse: bool, x: torch.Tensor, residual: torch.Tensor, shards: int) -> tuple:
    """Return the results of the layers of a block behind attention, and of the first layer of the next block."""
    device, group = str(x.device), SimpleNamespace(peers=None, all_reduce=lambda y: y.mul_(2))
    made = {}
    for name, (n, k) in SIZES.items():
        split = "row" if shards > 1 and name in ("o", "down") else None
        shard = Shard(0, shards if split else 1)
        info = ModuleInfo(name, "linear", k, (("", n),), str(x.dtype)[6:], device, split=split, shard=shard)
        made[name] = Linear(info, schemes[name], group)
    norms = [RMSNorm(f"norm{i}", HIDDEN, Norm(eps=EPS), x.dtype, device, fuse=True) for i in range(2)]
    for norm in norms:
        norm.weight.copy_(torch.linspace(0.5, 2, HIDDEN))
    o, down = (LinearNorm(made[n], norm, fuse, False) for n, norm in zip(("o", "down"), norms, strict=True))
    up, qkv = GatedLinear(made["up"], gate_mul, fuse), NormedLinear(made["qkv"], fuse)
    o.follow(up)
    up.follow(down)
    down.follow(qkv)
    h, stream = o(x, residual.clone())
    h, stream = down(up(h), stream)
    return qkv(h), stream


def check_followed(device: str, dtype: torch.dtype, eight: torch.dtype, m: int, shards: int = 1) -> None:
    """Check that products of passed rounded rows equal products that round them, for more than 8 rows.

    A product that accepts unrounded rows only must receive them unrounded.
    """
    x, residual = drawn(1, m, HIDDEN).to(device, dtype), drawn(2, m, HIDDEN).to(device, dtype)
    for plain in ((), ("up",), ("down",), ("qkv",)):
        schemes = {n: (Plain if n in plain else Scaled)(*size, eight, device) for n, size in SIZES.items()}
        want = run(schemes, False, x, residual, shards)
        assert [one.requested for one in schemes.values()] == [1, 1, 1, 1]
        got = run(schemes, True, x, residual, shards)
        assert same(got, want) if device == "cpu" else all(off(a, b) < 0.02 for a, b in zip(got, want, strict=True))
        handed = [name for name, one in schemes.items() if one.requested == 1]
        assert handed == ([n for n in SIZES if n != "o" and n not in plain] if m > 8 else [])
