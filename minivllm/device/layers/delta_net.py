"""Gated delta net (arXiv:2412.06464): linear attention whose state of a sequence has a fixed size.

    h ─ in ─► q | k | v ─ convolution, silu ─► delta rule ─► RMSNorm of a head ─ * silu(z) ─► out
      │  └──► z ──────────────────────────────────────────────────────────────────┘
      └ ab ─► b (how much a token writes), a (how much of the state it keeps)

State S [key_dim, value_dim] of each value head, behind each token, with q and k of unit length::

    S <- exp(-rate * softplus(a + dt_bias)) * S
    S <- S + k (v - S^T k)^T * sigmoid(b)            output: S^T q / sqrt(key_dim)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.decoder import GatedDelta
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import Shard
from minivllm.core.interfaces.states import StepStates
from minivllm.device.native import library, recurrent

from . import invariant
from .fused import Normed, NormedLinear, joined
from .module import Module, Wanted, check_shape, fill
from .state_layer import StateLayer, states_of

Sizes = tuple[int, int, int, int]  # key heads, value heads, key dim and value dim
Shapes = dict[tuple[str, str], tuple[int, ...]]
EPS = 1e-6  # added to the squared length of queries and keys before the division


class DeltaNet(Module):
    """A gated delta net: Normed [T, hidden] -> [T, value_heads * value_dim] for the heads of this process.

    ``spec`` has the sizes of the whole model.  ``project`` returns q | k | v | z, and ``gates`` returns b | a.
    """

    def __init__(
        self,
        name: str,
        spec: GatedDelta,
        shard: Shard,
        project: NormedLinear,
        gates: NormedLinear,
        dtype: torch.dtype,
        device: str,
        fuse: bool,
        invariant: bool,
    ) -> None:
        super().__init__(name)
        self.spec = spec
        self.invariant = invariant
        self.shard = shard
        self.project = project
        self.gates = gates
        self.key_heads = spec.key_heads // shard.size
        self.heads = spec.value_heads // shard.size
        keys = self.key_heads * spec.key_dim
        self.sizes: Sizes = (self.key_heads, self.heads, spec.key_dim, spec.value_dim)
        self.inner = self.heads * spec.value_dim
        self.widths = [keys, keys, self.inner]
        self.channels = 2 * keys + self.inner
        self.conv = torch.empty(self.channels, spec.width, dtype=dtype, device=device)
        self.norm = torch.empty(spec.value_dim, dtype=dtype, device=device)
        self.rates = torch.empty(self.heads, dtype=torch.float32, device=device)
        self.dt_bias = torch.empty_like(self.rates)
        self.tensors["conv"] = self.conv
        self.tensors["norm"] = self.norm
        self.tensors["A_log"] = self.rates
        self.tensors["dt_bias"] = self.dt_bias
        self.layer = StateLayer(spec.state(shard.size))
        self.fused: Any = None
        self.both: NormedLinear | None = None  # one layer with the products of ``project`` and ``gates``, or None
        # whether the native CPU library computes the delta rule; it reads the convolution's weight as f32 [width,
        # channels]
        plain = device == "cpu" and not fuse
        self.native = plain and library.load() is not None
        self.native_conv: Tensor | None = None
        if fuse:
            from minivllm.device.kernels import delta_rule

            if spec.width - 1 <= delta_rule.MOST_TAPS:
                self.fused = delta_rule

    def shapes(self) -> Shapes:
        """Return the shapes of the checkpoint's tensors by part and name."""
        spec = self.spec
        shapes: Shapes = {("conv", "weight"): (spec.channels, 1, spec.width)}
        shapes["norm", "weight"] = (spec.value_dim,)
        for param in ("A_log", "dt_bias"):
            shapes["", param] = (spec.value_heads,)
        return shapes

    def wanted(self) -> Wanted:
        return {**self.shapes()}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        rank = self.shard.rank
        size = self.shard.size
        shape = self.shapes()[part, param]
        check_shape(tensor, shape)
        if part == "conv":
            widths = [width * size for width in self.widths]
            sections = tensor.squeeze(1).split(widths)
            here = [section.chunk(size)[rank] for section in sections]
            fill(self.conv, torch.cat(here))
        elif part == "norm":
            fill(self.norm, tensor)
        else:
            mine = tensor.chunk(size)[rank]
            fill(self.tensors[param], mine)

    def finish(self) -> None:
        self.rates.exp_()
        if self.native:
            self.native_conv = recurrent.newest_first(self.conv)
        if self.fused is not None and not self.invariant:
            self.both = joined(self.project, self.gates)

    def refresh(self, params: Collection[str]) -> None:
        if "A_log" in params:
            self.rates.exp_()
        if self.native_conv is not None:
            self.native_conv.copy_(recurrent.newest_first(self.conv))
        if self.both is not None:
            self.both.linear.refresh(())

    def _inputs(self, h: Normed) -> tuple[Tensor, Tensor, Tensor]:
        """Return q | k | v [T, channels], z [T, value_heads * value_dim] and b | a [T, 2 * value_heads]."""
        widths = [self.channels, self.inner]
        if self.both is None or self.project.linear.adapted:
            mixed = self.project(h)
            x, z = mixed.split(widths, dim=-1)
            return x, z, self.gates(h)
        mixed = self.both(h)
        widths.append(2 * self.heads)
        x, z, ab = mixed.split(widths, dim=-1)
        return x, z, ab

    def structure(self) -> recurrent.DeltaLayer:
        """Return the struct by which the native library finds this layer's weights and the memory of its states."""
        assert self.native_conv is not None
        weights = self.native_conv, self.rates, self.dt_bias
        return recurrent.delta_layer(*weights, self.layer.memory, self.sizes)

    def __call__(self, h: Normed, step: StepTensors) -> Tensor:
        """Return the outputs [T, value_heads * value_dim] of this process's heads.  PluginError if the step has no
        states."""
        eps = self.spec.eps
        states = states_of(step)
        x, z, ab = self._inputs(h)
        if self.native_conv is not None:
            o = recurrent.scan(self.structure(), x, ab, states)
            silu = invariant.activate if self.invariant else F.silu
            return gated_norm(o, z, self.norm, eps, silu)
        weights = self.conv, self.rates, self.dt_bias
        at = self.layer.memory, self.sizes, states
        if self.fused is None:
            o = scan(x, ab, *weights, *at)
            return gated_norm(o, z, self.norm, eps)
        return self.fused.mix(x, ab, z, weights, self.norm, eps, *at, self.invariant)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, silu: Callable[..., Tensor] = F.silu) -> Tensor:
    """Return RMSNorm(o) * weight * silu(z) [T, heads * dim], of o [T, heads, dim] and z [T, heads * dim]."""
    wide = o.float()
    mean = wide.square().mean(-1, keepdim=True)
    scale = torch.rsqrt(mean + eps)
    normed = wide * scale
    weighted = weight * normed.to(o.dtype)
    gate = silu(z.float()).view(o.shape)
    gated = weighted.float() * gate
    narrow = gated.to(o.dtype)
    return narrow.flatten(1)


def scan(
    x: Tensor,
    ab: Tensor,
    weight: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    memory: dict[str, Tensor],
    sizes: Sizes,
    step: StepStates,
) -> Tensor:
    """Return the outputs of the delta rule [T, value heads, value dim], and bring states and rings up to date.

    ``x`` [T, channels] holds q | k | v before the convolution, ``weight`` [channels, width] is the convolution's,
    ``ab`` [T, 2 * heads] holds b | a, ``rates`` f32 [heads] is exp(A_log), and ``memory`` has ``state``
    [states, heads, key dim, value dim], ``ring`` [states, places, channels] and ``gates`` [states, places, 2 * heads].
    ``sizes`` are key heads, value heads, key dim and value dim.  Tokens of no row get zeros.
    """
    _, heads, _, value_dim = sizes
    packed = _FoldedTokens(x, ab, memory, step)
    mixed = packed.convolved(weight.float())
    q, k, v = _split_heads(F.silu(mixed), sizes)
    b, a = packed.gates.split(heads, dim=-1)
    decay = rates * F.softplus(a + dt_bias)
    keep = torch.exp(-decay)[..., None, None]
    write = b.sigmoid()[..., None]
    out = x.new_zeros(len(x), heads, value_dim)
    state = memory["state"]
    base = packed.base(state)
    for i in range(packed.longest):
        on = packed.on(i)  # rows that have a token i
        t = packed.first[on] + i
        kt = k[t]
        here = base[on] * keep[t]
        read = torch.einsum("rhkv,rhk->rhv", here, kt)
        error = (v[t] - read) * write[t]
        here = here + kt[..., None] * error[:, :, None, :]
        base[on] = here
        packed.store(state, base, i)
        new = i >= packed.fold[on]
        if bool(new.any()):
            fresh = t[new]
            o = torch.einsum("rhkv,rhk->rhv", here[new], q[fresh])
            out[packed.source[fresh]] = o.to(out.dtype)
    packed.keep(memory["ring"], x)
    packed.keep(memory["gates"], ab)
    return out


def _split_heads(mixed: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k [E, value heads, key dim] and v [E, value heads, value dim] of ``mixed``, q | k | v [E, channels].

    q and k have unit length, and q is divided by sqrt(key dim)."""
    key_heads, heads, key_dim, value_dim = sizes
    keys = key_heads * key_dim
    q, k, v = mixed.split([keys, keys, heads * value_dim], dim=-1)
    q = _unit(q.view(-1, key_heads, key_dim))
    k = _unit(k.view(-1, key_heads, key_dim))
    repeat = heads // key_heads
    q = q.repeat_interleave(repeat, 1)
    k = k.repeat_interleave(repeat, 1)
    v = v.reshape(-1, heads, value_dim)
    return q * key_dim**-0.5, k, v


def _unit(x: Tensor) -> Tensor:
    """Return x [..., dim] divided by its Euclidean length."""
    squares = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squares + EPS)


class _FoldedTokens:
    """The E tokens that the delta rule computes in a step: for each row first the earlier tokens that its stored state
    does not cover yet (folded tokens), then its new tokens."""

    def __init__(self, x: Tensor, ab: Tensor, memory: dict[str, Tensor], step: StepStates) -> None:
        self.step = step
        self.taps = 0
        starts = step.cu_q[:-1].long()
        self.n = step.cu_q[1:].long() - starts
        self.fold = step.behind.clamp(min=0).long()
        # position in its sequence of each row's first token, including the ``fold`` tokens that the state lacks
        self.begin = step.start.long() - self.fold
        size = self.n + self.fold
        self.first = size.cumsum(0) - size  # index of each row's first token among the E tokens
        self.size = size
        self.longest = max(size.tolist(), default=0)
        rows = torch.arange(len(size), device=x.device)
        self.row = torch.repeat_interleave(rows, size)
        index = torch.arange(len(self.row), device=x.device)
        offset = index - self.first[self.row]
        self.position = self.begin[self.row] + offset
        self.folded = offset < self.fold[self.row]
        first_new = starts - self.fold
        source = first_new[self.row] + offset
        self.source = source.clamp(min=0)  # index in x
        self.ring = memory["ring"]
        self.x = x
        gates = self._from(ab, memory["gates"], self.position, self.source, self.folded)
        self.gates = gates.float()

    def _from(self, new: Tensor, ring: Tensor, position: Tensor, source: Tensor, old: Tensor) -> Tensor:
        """Return the inputs of the tokens at ``position``: from ``ring`` where ``old`` is true, else ``new[source]``.

        Inputs before position 0 are zero."""
        state = self.step.rows[self.row]
        place = position % ring.shape[1]
        kept = ring[state, place]
        last = max(len(new) - 1, 0)
        given = new[source.clamp(0, last)]
        found = torch.where(old[:, None], kept, given)
        before = position < 0
        return found.masked_fill(before[:, None], 0)

    def convolved(self, weight: Tensor) -> Tensor:
        """Return the causal convolution f32 [E, channels] of the inputs, with ``weight`` [channels, width]."""
        width = weight.shape[1]
        self.taps = width - 1
        total = torch.zeros(len(self.row), len(weight), device=weight.device)
        first_new = self.step.start.long()[self.row]
        for lag in range(width):
            position = self.position - lag
            source = self.source - lag
            old = position < first_new
            inputs = self._from(self.x, self.ring, position, source, old)
            total += inputs.float() * weight[:, width - 1 - lag]
        return total

    def base(self, state: Tensor) -> Tensor:
        """Return the states f32 [R, heads, key dim, value dim] before the first token of each row: zeros for a new
        sequence, NaN for a state that does not fit."""
        is_first = self.begin == 0
        unusable = self.step.behind < 0
        found = state[self.step.rows]
        found = found.masked_fill(is_first.view(-1, 1, 1, 1), 0.0)
        return found.masked_fill(unusable.view(-1, 1, 1, 1), torch.nan)

    def on(self, i: int) -> Tensor:
        """Return the indices i64 [n] of the rows that have more than i tokens."""
        longer = self.size > i
        return longer.nonzero()[:, 0]

    def _certain(self) -> Tensor:
        """Return how many tokens of each row are certain: all, but of a row with drafts only those up to its first new
        token."""
        with_newest = self.fold + self.n.clamp(max=1)
        return torch.where(self.step.drafts, with_newest, self.size)

    def store(self, state: Tensor, base: Tensor, i: int) -> None:
        """Store the state after token i of each row if it is the last one, the last before its drafts, or one of which
        a copy is requested."""
        step = self.step
        kept = torch.where(step.drafts, self.fold, self.size)
        last = kept == i + 1
        state[step.rows[last]] = base[last]
        end = self.begin + i + 1
        certain = i < self._certain()
        requested = step.save_at == end[:, None]
        saved = requested & certain[:, None]
        row, which = saved.nonzero(as_tuple=True)
        copies = step.save_to[row, which]
        state[copies] = base[row]

    def keep(self, ring: Tensor, new: Tensor) -> None:
        """Store the newest inputs of each row in its ring; for a requested copy of a state also the inputs before
        it."""
        step = self.step
        places = ring.shape[1]
        end = self.begin + self._certain()
        after = step.save_at > self.begin[:, None]
        reached = step.save_at <= end[:, None]
        saved = after & reached
        for r, which in saved.nonzero().tolist():
            at = int(step.save_at[r, which])
            start = int(step.start[r])
            first_new = int(step.cu_q[r]) - start
            to = step.save_to[r, which]
            begin = max(at - self.taps, 0)
            for p in range(begin, at):
                place = p % places
                if p >= start:
                    ring[to, place] = new[first_new + p]
                else:
                    ring[to, place] = ring[step.rows[r], place].clone()
        index = torch.arange(len(self.row), device=new.device)
        offset = index - self.first[self.row]
        first = (self.size - places)[self.row]
        newest = ~self.folded & (offset >= first)
        state = step.rows[self.row[newest]]
        place_of = self.position[newest] % places
        ring[state, place_of] = new[self.source[newest]]
