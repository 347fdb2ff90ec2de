"""A mixture of experts: the choice of k experts for each token, and the products of the chosen experts.

    x [T, H] ── router ─► logits [T, E] ─ route ─► weights, ids [T, k]
      │                                              │
      └──► gate|up of expert ids[t, s] ──► down ──► y [T, k, H] ──► sum over the k places, in their order (+ shared(x))

The sum is in float32 and is rounded once.  Here the host reads how many tokens each expert has.  On a GPU with Triton
``device.kernels.experts``, or for quantized weights ``device.kernels.packed_experts``, computes the same without a wait
of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.decoder import CHOSEN_SOFTMAX, CLAMPED, SIGMOID, Experts, Router

from .fused import Joined, NextInput, Normed, NormedLinear, NormFusing
from .linear import Dense, Linear, stored_by
from .module_parts import ModuleParts
from .norm import RMSNorm
from .taps import LayerTaps

# ``DecoderSpec.router_hook`` of one layer: (hidden states, weight of the router, logits) -> (weights, ids)
RouterHook = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


Choice = tuple[Tensor, Tensor]  # (weights f32 [T, k], ids i32 [T, k]) of the chosen experts of each token


def route(
    logits: Tensor, chosen: int, router: Router, choice_bias: Tensor | None = None, given: Tensor | None = None
) -> Choice:
    """Choose experts for each token: logits [T, E] -> weights f32 [T, chosen] and ids i32 [T, chosen], best first.

    Of equal scores the lower id comes first.  An expert whose logit is -inf is chosen only after all others.
    ``choice_bias`` f32 [E] is added to the scores for the choice only, not for the weights; None means no bias.
    ``given`` i32 [T, chosen] has experts to use in place of the chosen ones, -1 for none; the weights are computed as
    for chosen experts."""
    scores = logits.float()
    if router.score == SIGMOID:
        # the rounding of ``torch.sigmoid`` depends on the position of an element
        scores = scores.neg().exp_().add_(1.0).reciprocal_()
    elif router.score != CHOSEN_SOFTMAX:
        scores = torch.softmax(scores, dim=-1)
    choice = scores if choice_bias is None else scores + choice_bias
    excluded = logits == -torch.inf
    choice = choice.masked_fill(excluded, -torch.inf)
    order = torch.sort(choice, dim=-1, descending=True, stable=True)
    ids = order.indices[:, :chosen]
    if given is not None:
        ids = torch.where(given >= 0, given.long(), ids)
    weights = scores.gather(1, ids)
    if router.score == CHOSEN_SOFTMAX:
        weights = torch.softmax(weights, dim=-1)
    if router.normalize:
        total = weights[:, 0]
        for s in range(1, chosen):  # a loop, because the bits of ``torch.sum`` for a row depend on the other rows
            total = total + weights[:, s]
        total = total + floor_of(router)
        weights = weights / total[:, None]
    if router.scale != 1.0:
        weights = weights * router.scale
    if router.rounded:
        weights = weights.to(logits.dtype).float()
    return weights, ids.int()


def floor_of(router: Router) -> float:
    """Return the number that is added to the sum of a token's expert weights before they are divided by it.

    It is 0 for a softmax, whose weights are never all 0.
    """
    if router.floor is not None:
        return router.floor
    return 1e-20 if router.score == SIGMOID else 0.0


def clamped_gate(x: Tensor, limit: float | None, alpha: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) [T, n] for x [T, 2 n] = gate | up (``decoder.CLAMPED``).

    ``gate`` is clamped to at most ``limit`` and ``up`` to -limit .. limit; None means no clamp.  The arithmetic is
    float32, in operations whose result does not depend on an element's position."""
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    divisor = (gate * -alpha).exp_().add_(1.0)
    gate = gate / divisor
    y = gate * (up + 1.0)
    return y.to(x.dtype)


def kernels_serve(parts: ModuleParts, hidden: int, inner: int) -> bool:
    """Return whether the kernels of ``device.kernels.experts`` can compute the experts of a model.

    They read 16 bytes at a time, and their tiles do not fit the shared memory of compute capability 12.  ``inner`` is
    the width of this process's share."""
    if not parts.device.startswith("cuda"):
        return False
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability(parts.device)
        if major >= 12:
            return False
    if parts.invariant:
        return True
    whole = all(n * parts.dtype.itemsize % 16 == 0 for n in (hidden, inner))
    return parts.fuse and whole


class Mixture(NormFusing):
    """The experts of a layer, their router and the shared MLP: Normed x [T, H] -> [T, H]."""

    def __init__(
        self, name: str, hidden: int, spec: Experts, parts: ModuleParts, hook: RouterHook | None = None
    ) -> None:
        self.name = name
        self.spec = spec
        self.hook = hook
        n = spec.count
        router = spec.router
        self.router = parts.router(name + ".router", hidden, n, router.bias, router.choice_bias)
        self.logits = parts.normed_linear(self.router)
        inner = spec.inner
        both = [(part, inner) for part in ("gate", "up")]
        out = [("", hidden)]
        self.gate_up = parts.expert_linear(name + ".experts.gate_up", hidden, n, both, spec.bias, "column")
        self.down = parts.expert_linear(name + ".experts.down", inner, n, out, spec.bias, "row")
        self.gate = partial(parts.gate_mul, activation=spec.activation)
        if spec.activation == CLAMPED:
            self.gate = partial(clamped_gate, limit=spec.limit, alpha=spec.alpha)
        self._serves = kernels_serve(parts, hidden, self.down.info.in_features)
        self.invariant = parts.invariant
        self._kernel: Any = None
        self.taps: LayerTaps | None = None  # reads or changes values of the running call; see ``tapped``
        self._shared(name, hidden, parts)

    def _shared(self, name: str, hidden: int, parts: ModuleParts) -> None:
        """Make the MLP that every token passes (shared expert), and the gate of its output, if the layer has them."""
        mlp = self.spec.shared
        self.shared: tuple[Callable[[Normed], Tensor], Linear] | None = None
        if mlp is not None:
            prefix = name + ".shared"
            up = parts.mlp_up(prefix, hidden, mlp)
            down = parts.mlp_down(prefix, hidden, mlp)
            self.shared = up, down
        self.shared_gate: NormedLinear | None = None
        if self.spec.shared_gate:
            gate = parts.router(name + ".shared_gate", hidden)
            self.shared_gate = parts.normed_linear(gate)

    def __call__(self, h: Normed, tap: LayerTaps | None = None) -> Tensor:
        """Return the weighted sum [T, H] of the chosen experts, and the shared MLP if there is one.

        ``tap`` is called as ``tap("router", logits)``, and its result replaces the logits; then as ``tap("experts",
        ids)`` with the chosen ids as float32 [T, k].  Its ``given("experts")`` replaces the choice of the router, if a
        table has no router hook.  None means the taps of ``tapped``."""
        if not self.fast:
            h = Normed(h.finished())
        weights, ids = self.choose(h, tap)
        if self.adds_shared:
            shared = self._shared_output(h)
            y, _ = self.kernel()(h.x, ids, weights, h.squares, h.eps, None, shared)
            return y
        y = self.products(h, ids, weights)
        if self.down.reduce:
            self.down.group.all_reduce(y)
        if self.shared is None:
            return y
        up, down = self.shared
        return y.add_(self._of_shared(h, up, down))

    @contextmanager
    def tapped(self, taps: LayerTaps) -> Iterator[None]:
        """Pass the router's logits and the chosen experts through ``taps`` in the calls of the ``with`` block.

        The operations are those of a call without taps, so the values keep their bits."""
        self.taps = taps
        try:
            yield
        finally:
            self.taps = None

    def choose(self, h: Normed, tap: LayerTaps | None = None) -> Choice:
        """Choose k experts for each token of ``h``: weights f32 [T, k] and ids i32 [T, k].

        ``tap`` may record or change the logits of the router, set the experts if there is no router hook, and record
        their ids.  The hook replaces weights and ids.
        """
        logits = self.logits(h)
        given = None
        tap = tap or self.taps
        if tap is not None:
            logits = tap("router", logits)
            if self.hook is None:
                given = tap.given("experts")
        weights, ids = self.route(logits, given)
        if self.hook is not None:
            replaced = self.hook(logits, weights, ids)
            weights, ids = self._hooked(replaced, ids)
        if tap is not None:
            tap("experts", ids.float())
        return weights, ids

    @property
    def adds_shared(self) -> bool:
        """Return whether the kernel of the experts can add the output of a shared MLP, multiplied by its gate.

        The weight of the gate must be unquantized, and the step must not have adapters of it."""
        if self.shared is None or not self.fast or self.down.reduce:
            return False
        if self.shared_gate is None:
            return True
        gate = self.shared_gate.linear
        plain = isinstance(gate.scheme, Dense) and gate.bias is None
        return plain and not gate.adapted

    def _shared_output(self, h: Normed) -> Any:
        """Return the output of the shared MLP in the form that the kernel of the experts adds; None without a shared
        MLP."""
        if self.shared is None:
            return None
        from minivllm.device.kernels.experts import SharedOutput

        up, down = self.shared
        y = down(up(h))
        gate = None
        if self.shared_gate is not None:
            gate = self.shared_gate.linear.scheme.tensors["weight"]
        return SharedOutput(y, gate)

    def _of_shared(self, h: Normed, up: Callable[[Normed], Tensor], down: Linear) -> Tensor:
        y = down(up(h))
        if self.shared_gate is None:
            return y
        gate = self.shared_gate(h).float()
        gate = gate.neg_().exp_().add_(1.0).reciprocal_()
        return y.mul_(gate.to(y.dtype))

    @cached_property
    def fast(self) -> bool:
        """Return whether one kernel launch can multiply by the weights of all experts.

        The weights must be unquantized, or quantized in a form that the kernels read.  Read this only after the weights
        are loaded, because the value is cached."""
        schemes = self.gate_up.scheme, self.down.scheme
        dense = all(isinstance(scheme, Dense) for scheme in schemes)
        if not self._serves or dense:
            return self._serves
        if self.invariant or find_spec("triton") is None:
            return False
        from minivllm.device.kernels.packed_experts import runs, takes

        for scheme in schemes:
            stored = stored_by(scheme)
            if stored is None or not takes(stored) or not runs(stored.weight):
                return False
        return True

    @property
    def joins(self) -> bool:
        """Return whether the kernels of the experts can also add their result to the residual stream."""
        if not self.fast or self.down.reduce:
            return False
        return self.shared is None or self.adds_shared

    def onto(self, h: Normed, stream: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the experts and add the result in place to the residual of ``stream``, a ``ResidualNorm``.

        Return (y, squares) as for a Normed: y [T, H] is the norm of the new residual.  Requires ``joins``."""
        weights, ids = self.choose(h)
        shared = self._shared_output(h)
        return self.kernel()(h.x, ids, weights, h.squares, h.eps, stream, shared)

    def route(self, logits: Tensor, given: Tensor | None = None) -> Choice:
        spec = self.spec
        bias = self.router.choice_bias
        if not self.fast:
            return route(logits, spec.chosen, spec.router, bias, given)
        from minivllm.device.kernels.router import route as fast_route

        how = spec.router
        floor = floor_of(how)
        return fast_route(logits, spec.chosen, how.score, how.normalize, how.scale, bias, how.rounded, floor, given)

    def _hooked(self, given: Any, like: Tensor) -> Choice:
        """Check the result of a router hook, and return it as weights f32 [T, k] and ids i32 [T, k].

        ValueError unless the result is a pair of tensors with the shape and device of ``like``.  An id without an
        expert gets the weight NaN, so that only the request of this token fails.
        """
        wanted = _described(like)
        is_pair = isinstance(given, tuple) and len(given) == 2
        found = [_described(one) for one in given] if is_pair else [type(given).__name__]
        if found != [wanted, wanted]:
            raise ValueError(
                f"the router hook gave {', '.join(found)} for {self.name}: expected (weights, ids), each {wanted}"
            )
        weights, ids = given
        count = self.spec.count
        wrong = (ids < 0) | (ids >= count)  # checked before the cast from 64 to 32 bits, which could wrap
        weights = weights.float().masked_fill(wrong, torch.nan)
        ids = ids.clamp(0, count - 1).int()
        return weights.contiguous(), ids.contiguous()

    def with_norm(self, norm: RMSNorm, whole: bool) -> Joined:
        return ExpertsNorm(self, norm, whole)

    def kernel(self) -> Any:
        if self._kernel is None:  # built at the first use, because it needs loaded weights
            self._kernel = self._make()
        return self._kernel

    def products(self, h: Normed, ids: Tensor, weights: Tensor) -> Tensor:
        """Return [T, H]: for each token t the sum over s of weights[t, s] times the output of expert ids[t, s]."""
        if self.fast:
            y, _ = self.kernel()(h.x, ids, weights, h.squares, h.eps)
            return y
        x = h.x
        (tokens, k) = ids.shape
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            y = self._all(x, ids)
        else:
            chosen = ids.flatten().long()
            y = self._hit(x, chosen).view(tokens, k, x.shape[1])
        total = y[:, 0].float() * weights[:, :1]
        for s in range(1, k):
            weight = weights[:, s, None]
            total = total + y[:, s].float() * weight
        return total.to(x.dtype)

    def _make(self) -> Any:
        from minivllm.device.kernels import experts as kernels

        spec = self.spec
        linears = (self.gate_up, self.down)
        up_bias, down_bias = [None if one.bias is None else one.bias.view(spec.count, -1) for one in linears]
        gate = spec.activation, spec.limit, spec.alpha
        if not isinstance(self.down.scheme, Dense):
            from minivllm.device.kernels.packed_experts import PackedExperts

            first, last = [stored_by(one.scheme) for one in linears]
            assert first is not None and last is not None  # ``fast`` is True
            return PackedExperts(spec.count, first, last, up_bias, down_bias, *gate)
        weights = []
        for one in linears:
            weight = one.scheme.tensors["weight"]
            inputs = one.info.in_features
            weights.append(weight.view(spec.count, -1, inputs))
        up, down = weights
        return kernels.ExpertProducts(up, down, up_bias, down_bias, *gate, self.invariant)

    def _one(self, x: Tensor, e: int) -> Tensor:
        """Return the output [n, H] of expert ``e`` for x [n, H]."""
        both = self.gate_up.expert(x, e)
        inner = self.gate(both)
        return self.down.expert(inner, e)

    def _hit(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the expert outputs [T * k, H] for ids i64 [T * k], computed for one chosen expert at a time."""
        order = ids.argsort(stable=True)
        k = len(ids) // max(1, len(x))
        y = x.new_empty(len(ids), x.shape[1])
        start = 0
        counts = ids.bincount(minlength=self.spec.count)
        for e, n in enumerate(counts.tolist()):
            if n:
                places = order[start : start + n]
                y[places] = self._one(x[places // k], e)
                start += n
        return y

    def _all(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the expert outputs [T, k, H] for ids [T, k] by multiplying all tokens by all experts.

        A captured step needs this, because the host cannot read there which experts are chosen."""
        y = x.new_zeros(*ids.shape, x.shape[1])
        for e in range(self.spec.count):
            chosen = ids == e
            output = self._one(x, e)
            y = torch.where(chosen[..., None], output[:, None], y)
        return y


def _described(x: Any) -> str:
    """Return the shape and device of a tensor, or the name of another object's type."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{list(x.shape)} on {x.device}"


class ExpertsNorm(Joined):
    """A ``Joined`` of experts whose kernels also do the residual addition and the norm.

    ``whole`` means that the norm is computed fully, because the next module is no matrix product, which could divide by
    the root mean square.
    """

    def __init__(self, experts: Mixture, norm: RMSNorm, whole: bool) -> None:
        super().__init__(experts, None, norm, 1.0)
        self.experts = experts
        self.norm = norm
        self.whole = whole

    def __call__(self, h: Any, residual: Tensor) -> NextInput:
        norm = self.norm
        if not self.experts.joins or norm.fused is None:
            return super().__call__(h, residual)
        from minivllm.device.kernels.experts import ResidualNorm

        stream = ResidualNorm(residual, norm.weight, norm.eps, self.whole)
        y, squares = self.experts.onto(h, stream)
        return Normed(y, squares, norm.eps), residual
