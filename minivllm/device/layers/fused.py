"""Norms and linear layers that run as one kernel for steps of few rows.

A pre-norm decoder alternates between the residual stream and products of its norm::

    stream ──norm──► NormedLinear (qkv) ── attention ──► LinearNorm (o) ──norm──► GatedLinear (gate_up)
      ▲                                                  adds to stream                    │
      └──────────────── LinearNorm (down) adds to the stream, computes the norm ◄────────┘

If a norm also follows a product, or the branch is scaled, a ``Joined`` does the work between two products.

A norm passes a ``Normed`` to a product.  Each pair chooses by the number of rows whether it runs as one kernel or as
separate layers, and accepts the Normed of both.  Some products quantize many rows to 8 bits.  The norm or gate before
such a product (see ``follow``) then returns the rows ``Rounded``, because its kernel has each row in registers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .linear import Dense, Linear, joined_by
from .norm import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from minivllm.device.kernels.fixed_rows import Addition


ALIGNED = 16  # row lengths are rounded up to a multiple of this, so that 16-bit rows begin at multiples of 32 bytes


class Rounded(NamedTuple):
    """Rows quantized to 8 bits: ``codes`` [T, dim] int8 or float8_e4m3fn, times ``scale`` [T, 1] float32.

    ``dtype`` is the dtype that the rows had before."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


class GatedRow(NamedTuple):
    """An unquantized row ``x`` [1, dim], and the largest absolute value of each of its P parts.

    ``tops`` int32 [1, P] has the bits of these values.  The next product computes the scale of the row from them.
    """

    x: Tensor
    tops: Tensor


class Normed(NamedTuple):
    """The result x [T, dim] of an RMSNorm, which may still need its division.

    If ``squares`` float32 [T, P] is not None, x must still be divided by sqrt(sum of the row's squares / dim + eps).
    x is Rounded only if the next product reads 8 bits (``_Pair.rounds``).

    If ``before`` is not None, x is not yet added to the residual stream.  The next product, or ``finished``, computes
    the addition and the norm, and only then has ``before.stream`` the new residual stream."""

    x: Any  # Tensor or Rounded
    squares: Tensor | None = None
    eps: float = 0.0
    before: Addition | None = None

    def added(self) -> Normed:
        """Return this input after the residual addition and the norm, so that the residual stream is complete."""
        if self.before is None:
            return self
        x = self.finished()
        return Normed(x)

    def finished(self) -> Any:
        """Return x [T, dim] after the remaining work: the residual addition, the norm, or only the norm's division."""
        if self.before is not None:
            from minivllm.device.kernels.norm import add_rms_norm

            residual, stream, weight, eps = self.before
            stream.copy_(residual)
            y, _ = add_rms_norm(self.x, stream, weight, eps)
            return y
        if self.squares is None:
            return self.x
        total = self.squares.sum(dim=1, keepdim=True)
        mean = total / self.x.shape[1]
        factor = torch.rsqrt(mean + self.eps)
        y = self.x.float() * factor
        return y.to(self.x.dtype)


NextInput = tuple[Normed, Tensor]  # (input of the next matrix product, residual stream [T, dim])


@cache
def gated_product() -> ModuleType | None:
    """Return the module of the kernel for products of many rows and their gate, or None if the installed Triton lacks
    the functions of Gluon for it."""
    try:
        return import_module("minivllm.device.kernels.gated_product")
    except ImportError:
        return None


def row_of(x: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a GatedRow into the row and its ``tops`` as a kernel keyword; return any other x without keywords."""
    if isinstance(x, GatedRow):
        return x.x, {"tops": x.tops}
    return x, {}


def addition_of(h: Normed) -> dict[str, Addition]:
    """Return the keyword with which a kernel also computes the residual addition and the norm of ``h``; {} if both
    are already done."""
    if h.before is None:
        return {}
    return {"before": h.before}


class _Pair:
    """A linear layer joined with its neighbours in one kernel for few rows.

    Without such a kernel for the weight, or if the layer sums over processes, the layers run separately."""

    mode = 0
    activation = "silu"  # activation of the gate, if the joined kernel has a gate

    def __init__(self, linear: Linear, fuse: bool) -> None:
        self.linear = linear
        self.fuse = fuse and not linear.reduce
        self.bias = linear.bias  # bias that the kernel adds to the product; None means no bias
        self.follower: _Pair | None = None
        self._kernel: Any = None

    def follow(self, other: Any) -> None:
        """Set ``other`` as the only reader of this pair's output, so that the output can have the reader's format.

        ``other`` is ignored unless it is a pair of fused operations.
        """
        self.follower = other if isinstance(other, _Pair) else None

    def made(self) -> Any:
        """Return the kernel of the joined layers, or None if there is none for this weight.  The first call builds it,
        and needs a loaded weight."""
        if self.fuse and self._kernel is None:
            self._kernel = joined_by(self.linear.scheme, self.bias, self.mode, self.activation)
            self.fuse = self._kernel is not None
        return self._kernel

    def kernel(self, x: Tensor | Rounded) -> Any:
        """Return the joined kernel if it is faster for the rows of ``x`` [T, in] than separate layers, else None.

        A step with adapters needs separate layers."""
        if isinstance(x, Rounded) or self.linear.adapted:
            return None
        kernel = self.made()
        if kernel is None or not kernel.fits(x):
            return None
        return kernel

    def divides_adapted(self, x: Tensor | Rounded) -> bool:
        """Return whether a step with adapters computes the product of x [T, in], a row of which must still be divided
        by its root mean square."""
        linear = self.linear
        if isinstance(x, Rounded) or not self.fuse or linear.bias is not None or not linear.adapted:
            return False
        return linear.adapter.divides(linear.scheme.apply, x)

    def rounds(self, rows: int) -> torch.dtype | None:
        """Return the 8-bit dtype to which the product's input is quantized for ``rows`` rows; None means no
        quantization."""
        wants = getattr(self.made(), "rounds", None)
        if wants is None or self.linear.adapted:
            return None
        return wants(rows)

    def adds(self, x: Tensor) -> bool:
        """Return whether the kernel computes a residual addition and a norm before the product of x [T, in]."""
        adds = getattr(self.kernel(x), "adds", None)
        return adds is not None and adds(x)

    def takes_tops(self) -> bool:
        """Return whether the kernel accepts the largest absolute values of a row's parts (``GatedRow.tops``)."""
        return bool(getattr(self.made(), "takes_tops", False))

    def product(self, x: Tensor | Rounded) -> Tensor:
        """Return linear(x) [T, out], summed over processes and with the bias, for x in either form."""
        if not isinstance(x, Rounded):
            return self.linear(x)
        return self.linear.summed(self._kernel.of_rows(*x))


class NormedLinear(_Pair):
    """A linear layer that takes a Normed: a call returns linear(x) [T, out]."""

    def __call__(self, h: Normed) -> Tensor:
        kernel = self.kernel(h.x)
        if kernel is None and h.squares is not None and self.divides_adapted(h.x):
            linear = self.linear
            return linear.adapter.divided(linear.scheme.apply, h.x, h.squares, h.eps)
        if kernel is None:
            return self.product(h.finished())
        y, _ = kernel(h.x, h.squares, h.eps, **addition_of(h))
        return y


def joined(first: NormedLinear, second: NormedLinear) -> NormedLinear | None:
    """Return one layer that computes the products of two layers with the same input, or None.

    The weights of both become parts of its weight.  None if a weight is quantized, or if the number of outputs of the
    second layer would leave rows unaligned.
    """
    pair = (first.linear, second.linear)
    if any(type(one.scheme) is not Dense or one.bias is not None for one in pair):
        return None
    if second.linear.info.out_features % ALIGNED:
        return None
    weight = torch.cat([one.scheme.tensors["weight"] for one in pair])
    begin = 0
    parts: list[tuple[str, int]] = []
    for one in pair:
        end = begin + one.info.out_features
        rows = weight[begin:end]
        one.replace(Dense(one.info, first.fuse, rows))
        parts += one.info.parts
        begin = end
    info = replace(first.linear.info, parts=tuple(parts))
    scheme = Dense(info, first.fuse, weight)
    whole = Linear(info, scheme)
    whole.finish()
    return NormedLinear(whole, first.fuse)


class GatedLinear(_Pair):
    """A linear layer and a gate: a call with the result of a norm (Normed) returns activation(gate) * up [T, n].

    linear(x) [T, 2 n] is gate | up.  The result is a Tensor, or the form that the next product reads: Rounded (8 bits)
    or GatedRow (with the largest values of its parts)."""

    mode = 1

    def __init__(
        self,
        linear: Linear,
        gate_mul: Callable[..., Tensor],
        fuse: bool,
        activation: str = "silu",
        divides: bool = True,  # whether ``gate_mul`` is a kernel, which can also divide by the norm's root mean square
    ) -> None:
        super().__init__(linear, fuse)
        self.divides = divides
        self.gate_mul = partial(gate_mul, activation=activation)
        self.activation = activation

    def __call__(self, h: Normed) -> Any:
        kernel = self.kernel(h.x)
        if kernel is not None:
            y, tops = kernel(h.x, h.squares, h.eps, **addition_of(h))
            if tops is None or self.follower is None or not self.follower.takes_tops():
                return y
            return GatedRow(y, tops)
        linear = self.linear
        if linear.adapted:
            if h.squares is not None and self.divides_adapted(h.x):
                activation = self.activation if self.divides else None
                y = linear.adapter.divided(linear.scheme.apply, h.x, h.squares, h.eps, activation)
                return y if self.divides else self.gate_mul(y)
            gated = self._with_adapters(h)
            if gated is not None:
                return gated
        undivided = h.squares is not None and linear.bias is None
        if undivided and self.divides and linear.scheme.homogeneous:
            # the norm's division may follow the product, because it only scales a row
            return self.gate_mul(linear(h.x), h.squares, h.x.shape[1], h.eps)
        x = h.finished()
        rows = len(x.codes) if isinstance(x, Rounded) else len(x)
        dtype = None
        if self.follower is not None and self.divides:
            dtype = self.follower.rounds(rows)
        if dtype is None:
            y = self._of_many(x)
            return self.gate_mul(self.product(x)) if y is None else y
        return self._rounded(self.product(x), dtype)

    def _of_many(self, x: Tensor | Rounded) -> Tensor | None:
        """Return activation(gate) * up [T, n] by the kernel for many rows, or None if the product and the gate run
        separately."""
        linear = self.linear
        scheme = linear.scheme
        if isinstance(x, Rounded) or linear.adapted or linear.bias is not None or not self.divides:
            return None
        if not self.fuse or self.activation != "silu" or type(scheme) is not Dense or scheme.invariant:
            return None
        if not x.is_cuda or x.dtype != scheme.weight.dtype or not x.is_contiguous():
            return None
        kernel = gated_product()
        if kernel is None or not kernel.pays(len(x), len(scheme.weight) // 2):
            return None
        if not kernel.fits(scheme.weight) or not kernel.agrees(scheme.weight):
            return None
        y: Tensor = kernel.multiply(x, scheme.weight)
        return y

    def _with_adapters(self, h: Normed) -> Tensor | None:
        """Return activation(gate) * up, if one kernel after the product adds those of the step's adapters and applies
        the gate.

        Return None if there is no such kernel.
        """
        linear = self.linear
        if isinstance(h.x, Rounded) or linear.bias is not None:
            return None
        if linear.reduce or not self.divides:
            return None
        following = None
        if self.follower is not None and self.follower.linear.adapted:
            following = self.follower.linear.adapter
        return linear.adapter.gated(linear.scheme.apply, h.finished(), self.activation, following)

    def _rounded(self, y: Tensor, dtype: torch.dtype) -> Rounded:
        from minivllm.device.kernels.activation import gate_mul_rounded

        codes, scale = gate_mul_rounded(y, dtype, self.activation)
        return Rounded(codes, scale, y.dtype)


class Partial(_Pair):
    """A row-split linear layer without sum and bias: a call returns this process's part of linear(x) [T, out]."""

    def __init__(self, linear: Linear, fuse: bool) -> None:
        super().__init__(linear, False)
        self.fuse = fuse
        self.bias = None

    def __call__(self, x: Tensor | Rounded | GatedRow) -> Tensor:
        if isinstance(x, Rounded):
            return self._kernel.of_rows(*x)
        row, known = row_of(x)
        kernel = self.kernel(row)
        if kernel is None:
            return self.linear.partial(row)
        y, _ = kernel(row, **known)
        return y


class LinearNorm(_Pair):
    """A linear layer, the residual addition and an RMSNorm: ``(x, residual) -> (Normed(norm(sum)), sum)``.

    sum = residual + linear(x) [T, dim].  The addition may be in place, so the caller may not use ``residual`` again.
    ``whole`` means that the norm is computed fully, because the next module is no matrix product.

    If processes share the model and their GPUs can access each other's memory, one kernel after the product sums over
    the processes, adds to the residual and normalises.  It counts as a fused norm (``StepWiring.unfused``) and runs
    also if the products of few rows are not joined.
    """

    mode = 2

    def __init__(self, linear: Linear, norm: RMSNorm, fuse: bool, whole: bool) -> None:
        super().__init__(linear, fuse and not whole)
        self.norm = norm
        self.part: Partial | None = None
        if linear.reduce and norm.fused is not None:
            self.part = Partial(linear, fuse)

    def rounds(self, rows: int) -> torch.dtype | None:
        return super().rounds(rows) if self.part is None else self.part.rounds(rows)

    def takes_tops(self) -> bool:
        return super().takes_tops() if self.part is None else self.part.takes_tops()

    def __call__(self, x: Tensor | Rounded | GatedRow, residual: Tensor) -> NextInput:
        linear = self.linear
        if self.part is not None and linear.group.peers is not None:
            y = self.part(x)
            if not linear.group.peers.takes(y):
                return self._summed(y, residual)
            y = linear.group.add_norm(y, linear.bias, residual, self.norm)
            return Normed(y), residual
        row, known = row_of(x)
        kernel = self.kernel(row)
        if kernel is None:
            added = self._added(row, residual)
            if added is not None:
                return added
            return self._normed(self.branch(row), residual)
        y, squares = kernel(row, eps=self.norm.eps, residual=residual, norm=self.norm.weight, **known)
        return Normed(y, squares, self.norm.eps), residual

    def _added(self, x: Tensor | Rounded, residual: Tensor) -> NextInput | None:
        """Return the results of a call in a step with adapters, if the kernel that adds their products also adds to
        the residual stream and the next product divides by the root mean square; else None."""
        linear = self.linear
        if isinstance(x, Rounded) or not self.fuse or linear.bias is not None or not linear.adapted:
            return None
        if self.norm.fused is None:  # ``unfused`` has "norms"
            return None
        if self.follower is None or not self.follower.divides_adapted(residual):
            return None
        found = linear.adapter.added(linear.scheme.apply, x, residual, self.norm.weight)
        if found is None:
            return None
        y, squares = found
        return Normed(y, squares, self.norm.eps), residual

    def _summed(self, part: Tensor, residual: Tensor) -> NextInput:
        """Sum ``part``, this process's share of the product, over the processes, add it to the residual stream and
        normalise, each in its own kernel."""
        return self._normed(self.linear.summed(part), residual)

    def _normed(self, y: Tensor, residual: Tensor) -> NextInput:
        norm = self.norm
        if self.follower is not None and norm.fused is not None and self.follower.adds(y):
            from minivllm.device.kernels.fixed_rows import Addition

            stream = torch.empty_like(residual)
            before = Addition(residual, stream, norm.weight, norm.eps)
            return Normed(y, before=before), stream
        dtype = None
        if self.follower is not None and self.norm.fused is not None:
            dtype = self.follower.rounds(len(y))
        if dtype is None:
            y, residual = self.norm(y, residual)
            return Normed(y), residual
        codes, scale, residual = self.norm.rounded(y, residual, dtype)
        rows = Rounded(codes, scale, y.dtype)
        return Normed(rows), residual

    def branch(self, x: Tensor | Rounded | GatedRow) -> Tensor:
        """Return linear(x) [T, dim], the value that a call adds to the residual stream."""
        row, _ = row_of(x)
        if self.part is not None and isinstance(row, Rounded):
            return self.linear.summed(self.part(row))
        return self.product(row)

    def entry(self, residual: Tensor) -> Normed:
        """Return the next product's input for a residual stream to which ``branch`` has been added."""
        y, _ = self.norm(residual)
        return Normed(y)


class NormFusing:
    """A module, other than ``Linear``, whose kernel may include the following residual addition and norm."""

    def __call__(self, h: Any) -> Tensor:
        raise NotImplementedError

    def with_norm(self, norm: RMSNorm, whole: bool) -> Joined:
        """Join the module with the addition and ``norm``: ``(x, residual) -> (Normed(norm(sum)), sum)``.

        ``whole`` means that the norm is computed fully, because the next module is no matrix product.
        """
        raise NotImplementedError


class Joined:
    """A linear layer and the operations up to the next product: ``(x, residual) -> (Normed(before(sum)), sum)``.

    sum = residual + scale * after(linear(x)) [T, dim].  ``after`` or ``before`` None leaves that norm out.  Two
    RMSNorms with the addition between them run as one kernel."""

    def __init__(
        self,
        linear: Callable[[Any], Tensor],
        after: RMSNorm | LayerNorm | None,
        before: RMSNorm | LayerNorm | None,
        scale: float,
    ) -> None:
        self.linear = linear
        self.after = after
        self.before = before
        self.scale = scale
        self.kernel: Callable[..., tuple[Tensor, Tensor]] | None = None
        if isinstance(after, RMSNorm) and isinstance(before, RMSNorm) and scale == 1.0:
            self.kernel = before.fused

    def __call__(self, x: Any, residual: Tensor) -> NextInput:
        return self.add(self.linear(x), residual)

    def add(self, y: Tensor, residual: Tensor) -> NextInput:
        """Do the same as a call, but for a computed product y = linear(x) [T, dim]."""
        if self.kernel is not None:
            # one kernel for both norms exists only if there are both
            before: Any = self.before
            after: Any = self.after
            y, residual = self.kernel(y, residual, before.weight, before.eps, after.weight, after.eps)
            return Normed(y), residual
        y = self.scaled(y)
        if self.before is None:
            residual = residual + y
            return Normed(residual), residual
        y, residual = self.before(y, residual)
        return Normed(y), residual

    def scaled(self, y: Tensor) -> Tensor:
        """Return scale * after(y) [T, dim], the product ``y`` after its norm and factor."""
        if self.after is not None:
            y, _ = self.after(y)
        if self.scale == 1.0:
            return y
        return y * self.scale

    def branch(self, x: Tensor) -> Tensor:
        """Return scale * after(linear(x)) [T, dim], the value that a call adds to the residual stream."""
        return self.scaled(self.linear(x))

    def entry(self, residual: Tensor) -> Normed:
        """Return the next product's input for a residual stream to which ``branch`` has been added."""
        if self.before is None:
            return Normed(residual)
        y, _ = self.before(residual)
        return Normed(y)
