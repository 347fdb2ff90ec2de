"""Pairs of layers that run as one kernel where the rows are few: a norm before a projection, a gate before one.

Each pair is its two layers; which way it runs is decided by the number of rows, and both ways round alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .linear import Dense, Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from .norm import RMSNorm


class NormLinear:
    """``(x, residual) -> (linear(norm(x + residual)), x + residual)``."""

    def __init__(self, norm: RMSNorm, linear: Linear) -> None:
        self.norm, self.linear = norm, linear

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kernels = skinny_kernels(self.linear, x)
        if kernels is not None:
            weight = self.linear.scheme.weight
            return kernels.norm_linear(x, residual, self.norm.weight, self.norm.eps, weight, self.linear.bias)
        x, residual = self.norm(x, residual)
        return self.linear(x), residual


class GatedLinear:
    """``x -> linear(silu(gate) * up)`` of x [T, 2 n] = gate | up."""

    def __init__(self, silu_mul: Callable[[Tensor], Tensor], linear: Linear) -> None:
        self.silu_mul, self.linear = silu_mul, linear

    def __call__(self, x: Tensor) -> Tensor:
        kernels = skinny_kernels(self.linear, x)
        if kernels is not None:
            return kernels.gated_linear(x, self.linear.scheme.weight, self.linear.bias)
        return self.linear(self.silu_mul(x))


def skinny_kernels(linear: Linear, x: Tensor):
    """The kernels for few rows if they do this layer: a plain weight, nothing to reduce over processes."""
    scheme = linear.scheme
    if not isinstance(scheme, Dense) or scheme.skinny is None or linear.reduce:
        return None
    return scheme.skinny if scheme.skinny.fits(x, scheme.weight) else None
