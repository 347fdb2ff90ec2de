"""Norms and linear layers that run together where the rows are few.

A pre-norm decoder alternates between the residual stream and products of its norm::

    stream ──norm──► NormedLinear (qkv) ── attention ──► LinearNorm (o) ──norm──► GatedLinear (gate_up)
      ▲                                                  adds to stream                    │
      └──────────────── LinearNorm (down) adds to the stream, gives the next norm ◄────────┘

Where a norm stands behind a product too, or the stream is scaled, ``Joined`` is what comes between.

What goes from a norm to a product is a ``Normed``.  Each pair decides by the number of rows whether it is one kernel or
its layers one after another, and takes a Normed of either kind.  Where a product of many rows rounds them to 8 bits,
what comes before it (``follow``) hands them over ``Rounded``: a norm or a gate has each row at hand.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .linear import Linear, joined_by
from .norm import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable


class Rounded(NamedTuple):
    """Rows in 8 bits: ``codes`` [T, dim] int8 or float8_e4m3fn, times ``scale`` [T, 1] float32; of ``dtype`` before."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


class GatedRow(NamedTuple):
    """A row ``x`` [1, dim] that is not rounded yet, and ``tops`` int32 [1, P]: of its parts the bits of the largest
    |element|, by which a product rounds or scales it."""

    x: Tensor
    tops: Tensor


class Normed(NamedTuple):
    """RMSNorm's result x [T, dim]; if ``squares`` [T, P] float32 is given, x is not yet divided by
    sqrt(sum of the token's squares / dim + eps).  Rounded only for a product that asked for it."""

    x: Any  # Tensor or Rounded
    squares: Tensor | None = None
    eps: float = 0.0

    def finished(self) -> Any:
        """With the division."""
        if self.squares is None:
            return self.x
        factor = torch.rsqrt(self.squares.sum(dim=1, keepdim=True) / self.x.shape[1] + self.eps)
        return (self.x.float() * factor).to(self.x.dtype)


def row_of(x: Any) -> tuple[Any, dict[str, Tensor]]:
    """What a product takes, and what its kernel of one row is told beside it."""
    return (x.x, {"tops": x.tops}) if isinstance(x, GatedRow) else (x, {})


class _Pair:
    """A linear layer with a kernel for few rows, if its weight has one and nothing is reduced over processes."""

    mode = 0
    activation = "silu"  # of a gate

    def __init__(self, linear: Linear, fuse: bool) -> None:
        self.linear, self.fuse = linear, fuse and not linear.reduce
        self.bias = linear.bias  # what the kernel adds to the product
        self.follower: _Pair | None = None
        self._kernel: Any = None

    def follow(self, other: Any) -> None:
        """``other``, if it is a pair, is what takes all that this gives, and nothing else does."""
        self.follower = other if isinstance(other, _Pair) else None

    def made(self) -> Any:
        """The kernel, which is made once the weight is loaded, or None if there is none."""
        if self.fuse and self._kernel is None:
            self._kernel = joined_by(self.linear.scheme, self.bias, self.mode, self.activation)
            self.fuse = self._kernel is not None
        return self._kernel

    def kernel(self, x: Tensor | Rounded) -> Any:
        """The kernel, or None if the layers do as well by themselves."""
        kernel = None if isinstance(x, Rounded) else self.made()
        return kernel if kernel is not None and kernel.fits(x) else None

    def rounds(self, rows: int) -> torch.dtype | None:
        """The 8-bit dtype in which this wants so many rows, or None."""
        wants = getattr(self.made(), "rounds", None)
        return None if wants is None else wants(rows)

    def takes_tops(self) -> bool:
        """Whether its kernel is told the largest elements of a row's parts (``GatedRow``)."""
        return bool(getattr(self.made(), "takes_tops", False))

    def product(self, x: Tensor | Rounded) -> Tensor:
        """linear(x), as its layer gives it."""
        if not isinstance(x, Rounded):
            return self.linear(x)
        return self.linear.summed(self._kernel.of_rows(*x))


class NormedLinear(_Pair):
    """``Normed -> linear(x)``."""

    def __call__(self, h: Normed) -> Tensor:
        kernel = self.kernel(h.x)
        return self.product(h.finished()) if kernel is None else kernel(h.x, h.squares, h.eps)[0]


class GatedLinear(_Pair):
    """``Normed -> activation(gate) * up``, linear(x) [T, 2 n] being gate | up; a Tensor, or for a follower Rounded, if
    it wants it, or GatedRow."""

    mode = 1

    def __init__(
        self,
        linear: Linear,
        gate_mul: Callable[..., Tensor],
        fuse: bool,
        activation: str = "silu",
        divides: bool = True,  # ``gate_mul`` takes what a Normed is divided by
    ) -> None:
        super().__init__(linear, fuse)
        self.divides = divides
        self.gate_mul, self.activation = partial(gate_mul, activation=activation), activation

    def __call__(self, h: Normed) -> Any:
        kernel = self.kernel(h.x)
        if kernel is not None:
            y, tops = kernel(h.x, h.squares, h.eps)
            known = tops is not None and self.follower is not None and self.follower.takes_tops()
            return GatedRow(y, tops) if known else y
        if h.squares is None or self.linear.bias is not None or not (self.divides and self.linear.scheme.homogeneous):
            y = self.product(h.finished())
            dtype = self.follower.rounds(len(y)) if self.follower is not None and self.divides else None
            return self.gate_mul(y) if dtype is None else self._rounded(y, dtype)
        return self.gate_mul(self.linear(h.x), h.squares, h.x.shape[1], h.eps)  # the division commutes with the product

    def _rounded(self, y: Tensor, dtype: torch.dtype) -> Rounded:
        from minivllm.device.kernels.activation import gate_mul_rounded

        return Rounded(*gate_mul_rounded(y, dtype, self.activation), y.dtype)


class Partial(_Pair):
    """``x -> this process's part of linear(x)``, without the bias: what is summed over those that share the model."""

    def __init__(self, linear: Linear, fuse: bool) -> None:
        super().__init__(linear, False)
        self.fuse = fuse
        self.bias = None

    def __call__(self, x: Tensor | Rounded | GatedRow) -> Tensor:
        if isinstance(x, Rounded):
            return self._kernel.of_rows(*x)
        x, known = row_of(x)
        kernel = self.kernel(x)
        return self.linear.scheme.apply(x) if kernel is None else kernel(x, **known)[0]


class LinearNorm(_Pair):
    """``(x, residual) -> (norm(residual + linear(x)), residual + linear(x))``; the residual given belongs to the layer
    from then on.  ``whole``: the Normed is a finished one, for what is no product.

    Where processes share the model, and their devices each other's memory, one kernel behind the product sums over
    them, adds to the residual and normalises: a fused norm (``StepWiring.unfused``), whether products of few rows are
    joined to others or not."""

    mode = 2

    def __init__(self, linear: Linear, norm: RMSNorm, fuse: bool, whole: bool) -> None:
        super().__init__(linear, fuse and not whole)
        self.norm = norm
        self.part = Partial(linear, fuse) if linear.reduce and norm.fused is not None else None

    def rounds(self, rows: int) -> torch.dtype | None:
        return super().rounds(rows) if self.part is None else self.part.rounds(rows)

    def takes_tops(self) -> bool:
        return super().takes_tops() if self.part is None else self.part.takes_tops()

    def __call__(self, x: Tensor | Rounded | GatedRow, residual: Tensor) -> tuple[Normed, Tensor]:
        if self.part is not None and (peers := self.linear.group.peers) is not None:
            y = self.part(x)
            if peers.takes(y):
                y = self.linear.group.add_norm(y, self.linear.bias, residual, self.norm)
                return Normed(y), residual
            return self._summed(y, residual)
        x, known = row_of(x)
        kernel = self.kernel(x)
        if kernel is None:
            return self._normed(self.branch(x), residual)
        y, squares = kernel(x, residual=residual, norm=self.norm.weight, **known)
        return Normed(y, squares, self.norm.eps), residual

    def _summed(self, part: Tensor, residual: Tensor) -> tuple[Normed, Tensor]:
        """By kernels of their own: the sum over the processes, and the norm."""
        return self._normed(self.linear.summed(part), residual)

    def _normed(self, y: Tensor, residual: Tensor) -> tuple[Normed, Tensor]:
        dtype = self.follower.rounds(len(y)) if self.follower is not None and self.norm.fused is not None else None
        if dtype is None:
            y, residual = self.norm(y, residual)
            return Normed(y), residual
        codes, scale, residual = self.norm.rounded(y, residual, dtype)
        return Normed(Rounded(codes, scale, y.dtype)), residual

    def branch(self, x: Tensor | Rounded | GatedRow) -> Tensor:
        """What is added to the residual, by itself."""
        x, _ = row_of(x)
        if self.part is not None and isinstance(x, Rounded):
            return self.linear.summed(self.part(x))
        return self.product(x)

    def entry(self, residual: Tensor) -> Normed:
        """What the next product takes of a residual to which that was added."""
        return Normed(self.norm(residual)[0])


class NormFusing:
    """A module that is no ``Linear``, and may be one kernel with the addition to the stream and the norm behind it."""

    def with_norm(self, norm: RMSNorm, whole: bool) -> Joined:
        """Return ``(x, residual) -> (Normed of the sum, the sum)``; ``whole`` says that the norm is computed fully."""
        raise NotImplementedError


class Joined:
    """``(x, residual) -> (what the next product takes, residual + scale * after(linear(x)))``; ``after`` and the norm
    ``before`` the next product may be left out.  Two norms with the addition between them are one kernel."""

    def __init__(
        self,
        linear: Callable[[Tensor], Tensor],
        after: RMSNorm | LayerNorm | None,
        before: RMSNorm | LayerNorm | None,
        scale: float,
    ) -> None:
        self.linear, self.after, self.before, self.scale = linear, after, before, scale
        self.kernel = None
        if isinstance(after, RMSNorm) and isinstance(before, RMSNorm) and scale == 1.0:
            self.kernel = before.fused

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Normed, Tensor]:
        return self.add(self.linear(x), residual)

    def add(self, y: Tensor, residual: Tensor) -> tuple[Normed, Tensor]:
        """The same of linear(x)."""
        if self.kernel is not None:
            at = self.before.weight, self.before.eps, self.after.weight, self.after.eps
            y, residual = self.kernel(y, residual, *at)
            return Normed(y), residual
        y = self.scaled(y)
        if self.before is None:
            residual = residual + y
            return Normed(residual), residual
        y, residual = self.before(y, residual)
        return Normed(y), residual

    def scaled(self, y: Tensor) -> Tensor:
        """``scale * after(y)``."""
        if self.after is not None:
            y = self.after(y)[0]
        return y if self.scale == 1.0 else y * self.scale

    def branch(self, x: Tensor) -> Tensor:
        """What is added to the residual, by itself."""
        return self.scaled(self.linear(x))

    def entry(self, residual: Tensor) -> Normed:
        """What the next product takes of a residual to which that was added."""
        return Normed(residual if self.before is None else self.before(residual)[0])
