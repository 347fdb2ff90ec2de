"""The decoder that a ``DecoderSpec`` describes, built of ``ModuleParts`` and with fused kernels where possible.

One object (``device.layers.fused``) does the work between two matrix products: it adds to the residual stream and
returns the input of the next product.  So a norm runs where the stream is written::

    embed ─ n1 ─► qkv ─ attention ─► out  ┐                  ┌► gate_up ─► down ┐
      └─ stream ───────────────────────── + ─ after, before ─┤                  + ─ after, before ─► next layer ... norm
                                                             └── stream ────────┘

If a request reads or changes a value inside a layer (a tap), that layer runs unfused (``DecoderBlock.tapped``).  The
other layers run as usual, and so do layers of which only the router is tapped (``DecoderBlock.routed``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.core.interfaces.decoder import (
    ACTIVATIONS,
    AFTER,
    AROUND,
    BEFORE,
    CHOSEN_SOFTMAX,
    CLAMPED,
    HEAD,
    HEADS,
    MLP,
    ROPE_KINDS,
    SIGMOID,
    SOFTMAX,
    WIDTH,
    DecoderSpec,
    Experts,
    GatedDelta,
    LayerSpec,
)
from minivllm.core.interfaces.model import StepTaps, StepTensors
from minivllm.errors import ModelError, shown

from .experts import Mixture
from .fused import GatedLinear, Joined, LinearNorm, NextInput, Normed
from .module_parts import ModuleParts
from .rotary import order_of_halves
from .taps import LayerTaps

# ``LayerSpec.norms`` -> names of the norms after attention, before the MLP and after the MLP; None means no norm
NORMS = {
    BEFORE: (None, "norm2", None),
    AFTER: ("norm1", None, "norm2"),
    AROUND: ("norm2", "norm3", "norm4"),
}


class Decoder:
    """A decoder-only model.  A call turns the step's ids [T] into hidden states [T, H]; ``logits`` returns [N, V].

    If the step has ``logits_indices`` i64 [N], a call returns the hidden states [N, H] of these tokens only."""

    takes_logits_indices = True

    def __init__(self, spec: DecoderSpec, parts: ModuleParts) -> None:
        self.spec = spec
        check(spec)
        hidden = spec.hidden
        self.embed = parts.embedding("embed", spec.vocab, hidden, packable=True)
        self.embed_norm = _norm(parts, spec, "embed_norm" if spec.embed_norm else None)
        self.positions = None
        if spec.positions:
            self.positions = parts.embedding("positions", spec.positions, hidden, whole=True)
        # the factor is rounded to the model's dtype, as if it were a tensor of this dtype
        rounded = torch.tensor(spec.embed_scale, dtype=parts.dtype)
        self.scale = float(rounded)
        entries = []
        for i, layer in enumerate(spec.layers):
            name = None if layer.norms == AFTER else f"layers.{i}.norm1"
            entries.append(_norm(parts, spec, name))
        self.norm = parts.norm("norm", hidden, spec.norm)
        self.first = entries[0]
        follows = [*entries[1:], self.norm]
        self.blocks = [DecoderBlock(spec, i, parts, norm) for i, norm in enumerate(follows)]
        for block, following in itertools.pairwise(self.blocks):
            block.before(following)
        tied = self.embed if spec.tied else None
        self.head = parts.lm_head("lm_head", hidden, spec.vocab, tied)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the scaled embeddings [T, H] of ids [T]."""
        x = self.embed(ids)
        if self.spec.embed_scale == 1.0:
            return x
        return x * self.scale

    def __call__(self, step: StepTensors) -> Tensor:
        x = self.embedded(step.ids)
        if self.positions is not None:
            index = step.position + self.spec.first_position
            x = x + self.positions(index)
        if self.embed_norm is not None:
            x = self.embed_norm(x)[0]
        taps = step.taps
        watch = step.watch
        if taps is not None:
            x = taps("embedding", x)
            x = taps("layers.0.input", x)
        if self.first is None:
            h = Normed(x)
            residual = x
        else:
            x, residual = self.first(x)
            h = Normed(x)
        if taps is None and watch is None:
            for block in self.blocks:
                h, residual = block(h, residual, step)
            return h.x
        tapped = frozenset() if taps is None else taps.points
        for block in self.blocks:
            points = tapped & block.points.keys()
            run = block.run_for(points)
            h, residual = run(h, residual, step)
            if watch is not None and block.follower in watch.points:
                h = h.added()
                watch(block.follower, residual)
        x = h.x if taps is None else taps("norm", h.x)
        if watch is not None and "norm" in watch.points:
            watch("norm", x)
        return x

    @property
    def state_points(self) -> dict[str, int]:
        """Return name -> number of elements for each token, of the hidden states that a drafter may read: the inputs of
        layers, and "norm"."""
        names = [block.follower for block in self.blocks if block.follower is not None]
        return dict.fromkeys([*names, "norm"], self.spec.hidden)

    @property
    def tap_points(self) -> dict[str, int]:
        """Return tap point (named value of the model) -> number of elements for each token, in the order of
        computation."""
        hidden = self.spec.hidden
        points = {"embedding": hidden, "layers.0.input": hidden}
        for block in self.blocks:
            points |= block.points
        return {**points, "norm": hidden}

    @property
    def given_points(self) -> list[str]:
        """Return the tap points of routers at which requests may set the experts of their tokens.

        With a router hook there is none, because the hook computes the weights of experts itself."""
        if self.spec.router_hook is not None:
            return []
        return [block.name + "experts" for block in self.blocks if block.experts is not None]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        spec = self.spec
        if spec.logit_scale != 1.0:
            logits = logits.mul_(spec.logit_scale)
        cap = spec.logit_cap
        if cap is None:
            return logits
        return logits.div_(cap).tanh_().mul_(cap)


class DecoderBlock:
    """A decoder layer.  A call maps (normed input of its first product, residual stream) to the same for the next
    layer.

    ``follows`` is the norm before the first product of the next layer, or the final norm, or None.
    """

    inputs = 1  # number of vectors of the hidden size that the first product reads for each token

    def __init__(self, spec: DecoderSpec, i: int, parts: ModuleParts, follows: Any) -> None:
        layer = spec.layers[i]
        name = f"layers.{i}."
        self.last = i + 1 == len(spec.layers)
        self.parallel = layer.parallel
        self.name = name
        self.hidden = spec.hidden
        self.follower = None if self.last else f"layers.{i + 1}.input"
        width = self._mixer(spec, layer, i, parts)
        out = parts.linear(name + "attn.o", width, [("", spec.hidden)], bias=layer.out_bias, split="row")
        hook = None if spec.router_hook is None else partial(spec.router_hook, i)
        down = self._mlp(spec.hidden, layer.mlp, name + "mlp", parts, hook)
        self.points = self._points()
        scale = layer.residual_scale
        if layer.parallel:
            self.out = out
            self.both = Joined(down, None, follows, scale)
            self.mlp_norm = _norm(parts, spec, name + "norm2" if layer.mlp_norm else None)
            return
        first, middle, second = norm_names(name, layer)
        after_attention = _norm(parts, spec, first)
        after_mlp = _norm(parts, spec, second)
        before_mlp = _norm(parts, spec, middle)
        self.o = parts.linear_norm(out, before_mlp, after=after_attention, scale=scale)
        self.down = parts.linear_norm(down, follows, whole=self.last, after=after_mlp, scale=scale)
        for one, other in ((self.o, self.up), (self.up, self.down)):
            if isinstance(one, LinearNorm | GatedLinear):
                one.follow(other)

    def before(self, following: DecoderBlock) -> None:
        """Connect this layer's last product to the first product of ``following``, the next layer.

        The output can then have the 8-bit form that the next product reads.  This needs a single reader: in a parallel
        layer, or one with a gated delta net, two products read the output, so nothing is connected."""
        if self.parallel or following.parallel:
            return
        if following.recurrent is None and isinstance(self.down, LinearNorm):
            self.down.follow(following.qkv)

    def _points(self) -> dict[str, int]:
        """Return tap point (named value) -> number of elements for each token, for this layer and the input of the next
        one."""
        widths: dict[str, int] = {}
        # q, k and v are no tap points if their heads are split over processes
        if not self.shared and not self.recurrent:
            widths |= zip("qkv", self.sizes[:3], strict=True)
        widths["attention"] = self.hidden
        if self.experts is not None:
            widths["router"] = self.experts.spec.count
            widths["experts"] = self.experts.spec.chosen
        widths["mlp"] = self.hidden
        widths["residual"] = self.hidden
        points = {self.name + point: width for point, width in widths.items()}
        if self.follower is not None:
            points[self.follower] = self.hidden
        return points

    def _mixer(self, spec: DecoderSpec, layer: LayerSpec, i: int, parts: ModuleParts) -> int:
        """Make the attention or the recurrent layer, and return the number of elements of its output over all
        processes."""
        self.shared = parts.shard.size > 1
        self.wide = list[Any]()
        self.clip = layer.qkv_clip
        self.order: tuple[Tensor, Tensor] | None = None
        self.recurrent: Callable[[Normed, StepTensors], Tensor] | None = None
        name = f"layers.{i}.attn"
        mixer = layer.attention
        if isinstance(mixer, AttnSpec):
            self._attention(spec, layer, mixer, name, parts)
            return mixer.heads * mixer.dim_v
        make: Any = parts.delta_net if isinstance(mixer, GatedDelta) else parts.short_conv
        self.recurrent = make(name, spec.hidden, mixer)
        return mixer.inner

    def _attention(self, spec: DecoderSpec, layer: LayerSpec, a: AttnSpec, name: str, parts: ModuleParts) -> None:
        """Make the projection of q, k and v, their norms, the rotary tables and the attention of a layer."""
        self.gated = layer.gated
        inputs = self.inputs * spec.hidden
        linear = parts.qkv(name + ".qkv", inputs, a, layer.qkv_bias, layer.gated)
        self.sizes = [rows for _, rows in linear.info.parts]
        self.gate_out = parts.gate_out
        self.qkv = parts.normed_linear(linear)
        self.attn = parts.attention(len(parts.layers), a, name)
        self.pre = QKPre(eps=spec.norm.eps)
        if layer.qk_norm == HEAD:
            self.pre.q_norm = parts.norm(name + ".q_norm", a.dim_qk, spec.norm).weight
            self.pre.k_norm = parts.norm(name + ".k_norm", a.dim_qk, spec.norm).weight
        elif layer.qk_norm is not None:
            make = parts.width_norm if layer.qk_norm == WIDTH else parts.heads_norm
            q = make(name + ".q_norm", a.heads, a.dim_qk, spec.norm, keys=False)
            k = make(name + ".k_norm", a.kv_heads, a.dim_qk, spec.norm, keys=True)
            self.wide = [q, k]
        rope = layer.rope
        if rope is None:
            return
        twice = spec.switch is not None
        tables = parts.rotary(rope, twice)
        self.pre.cos, self.pre.sin = tables
        parts.rotations[self.attn.layer.index] = tables
        self.attn.factors = parts.query_factors(rope, twice)
        if rope.interleaved:
            back = order_of_halves(a.dim_qk, rope.dim)
            there = back.argsort()
            self.order = there.to(parts.device), back.to(parts.device)

    def _mlp(self, hidden: int, mlp: MLP | Experts, name: str, parts: ModuleParts, hook: Any) -> Any:
        """Make the MLP of a layer, and return its last linear layer, or the whole mixture of experts.

        The function that computes the input of the last linear layer is stored as ``up``."""
        self.experts: Mixture | None = None
        if isinstance(mlp, Experts):
            self.experts = Mixture(name, hidden, mlp, parts, hook)
            self.up: Any = lambda h: h
            return self.experts
        self.up = parts.mlp_up(name, hidden, mlp)
        return parts.mlp_down(name, hidden, mlp)

    def __call__(self, h: Normed, residual: Tensor, step: StepTensors) -> NextInput:
        x = self._mixed(h, step)
        read = step.logits_indices
        if self.last and read is not None:
            x = x[read]
            residual = residual[read]
            if self.parallel:
                h = Normed(h.finished()[read])
        if not self.parallel:
            h, residual = self.o(x, residual)
            return self.down(self.up(h), residual)
        y = self.out(x)
        beside = self._beside(h, residual)
        y.add_(self.both.linear(self.up(beside)))
        return self.both.add(y, residual)

    def _mixed(self, h: Normed, step: StepTensors, taps: StepTaps | None = None) -> Tensor:
        """Return the result of attention, or of a recurrent layer, before the output projection."""
        if self.recurrent is not None:
            return self.recurrent(h, step)
        qkv = self.qkv(h)
        if self.clip is not None:
            qkv = qkv.clamp_(-self.clip, self.clip)
        q, k, v, *gate = qkv.split(self.sizes, dim=-1)
        if taps is not None:
            q = self._tap_head(taps, "q", q)
            k = self._tap_head(taps, "k", k)
            v = taps(self.name + "v", v)
        if self.wide:
            q_norm, k_norm = self.wide
            q, _ = q_norm(q)
            k, _ = k_norm(k)
        x = self.attn(q, k, v, step, self.pre)
        if not self.gated:
            return x
        return self.gate_out(x, gate[0])

    def _beside(self, h: Normed, residual: Tensor) -> Normed:
        """Return the input of a parallel layer's MLP: the input of attention, or a separate norm of the residual
        stream."""
        if self.mlp_norm is None:
            return h
        x, _ = self.mlp_norm(residual)
        return Normed(x)

    def run_for(self, points: Set[str]) -> Callable[[Any, Tensor, StepTensors], NextInput]:
        """Return the method that computes this layer in a step whose rows read or change the values at tap
        ``points``."""
        if not points:
            return self
        router = {self.name + "router", self.name + "experts"}
        if self.experts is not None and points <= router:
            return self.routed
        return self.tapped

    def routed(self, h: Normed, residual: Tensor, step: StepTensors) -> NextInput:
        """Compute the same as a call, with the same operations, and pass the points of the router through
        ``step.taps``."""
        assert self.experts is not None and step.taps is not None
        taps = LayerTaps(step.taps, self.name)
        with self.experts.tapped(taps):
            return self(h, residual, step)

    def tapped(self, h: Normed, residual: Tensor, step: StepTensors) -> NextInput:
        """Compute the same as a call, without fused kernels, and pass the value of each tap point to ``step.taps``.

        The layer continues with the value that this returns."""
        taps = step.taps
        assert taps is not None
        down: Any = self.both if self.parallel else self.down
        x = self._mixed(h, step, taps)
        if self.parallel:
            beside = self._beside(h, residual)
            attended = taps(self.name + "attention", down.scaled(self.out(x)))
            y = attended + self._branch(beside, down, taps)
        else:
            attended = taps(self.name + "attention", self.o.branch(x))
            residual = residual + attended
            y = self._branch(self.o.entry(residual), down, taps)
        residual = taps(self.name + "residual", residual + y)
        if self.follower is not None:
            residual = taps(self.follower, residual)
        return down.entry(residual), residual

    def _branch(self, h: Normed, down: Any, taps: StepTaps) -> Tensor:
        """Return the output [T, H] of the MLP or of the experts, which is added to the residual stream, as the taps of
        the point "mlp" change it."""
        x = self.up(h)
        if self.experts is None:
            y = down.branch(x)
        else:
            chosen = self.experts(x, LayerTaps(taps, self.name))
            y = down.scaled(chosen)
        return taps(self.name + "mlp", y)

    def _tap_head(self, taps: StepTaps, which: str, x: Tensor) -> Tensor:
        """Pass q or k [T, heads * dim] to the taps of the point ``which``, and return the value that these return.

        The taps get the elements of a head in the order of the checkpoint.  They are reordered before and after,
        because the rotary embedding here uses another order for interleaved pairs."""
        point = self.name + which
        if self.order is None:
            return taps(point, x)
        there, back = self.order
        heads = x.unflatten(1, (-1, len(there)))
        ordered = heads[..., there].flatten(1)
        changed = taps(point, ordered).unflatten(1, heads.shape[1:])
        return changed[..., back].flatten(1)


def norm_names(prefix: str, layer: LayerSpec) -> list[str | None]:
    """Return the names of a layer's norms after attention, before the MLP and after the MLP; None means no norm.

    ``prefix`` begins the names of the layer's modules."""
    return [None if name is None else prefix + name for name in NORMS[layer.norms]]


def _norm(parts: ModuleParts, spec: DecoderSpec, name: str | None) -> Any:
    """Make a norm over the hidden size; return None for the name None."""
    if name is None:
        return None
    return parts.norm(name, spec.hidden, spec.norm)


def check(spec: DecoderSpec) -> None:
    """Raise ModelError for a value that a table may not have, and for values that are not implemented together."""
    if spec.norm.bias and not spec.norm.centered:
        raise ModelError("norm: an RMSNorm has no bias: expected bias=False, or centered=True for LayerNorm")
    for i, layer in enumerate(spec.layers):
        for name, word, known in _words(layer):
            if word not in known:
                raise ModelError(f"layer {i}: {name}={shown(word)}: expected one of {', '.join(map(str, known))}")
        if layer.qk_norm == HEAD and spec.norm.centered:
            raise ModelError(f"layer {i}: LayerNorm of each head is not implemented: expected RMSNorm")
        if layer.gated and layer.rope is not None and layer.rope.interleaved:
            raise ModelError(f"layer {i}: gated=True is not implemented with rope.interleaved=True")
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            _check_experts(i, mlp)
        if layer.parallel and layer.norms != BEFORE:
            raise ModelError(f"layer {i}: parallel=True is only implemented with norms='before'")
        if layer.mlp_norm and not layer.parallel:
            raise ModelError(f"layer {i}: mlp_norm=True is only for parallel=True")


def _check_experts(i: int, mlp: Experts) -> None:
    """Raise ModelError for fields of the experts of layer ``i`` that contradict each other."""
    if not 1 <= mlp.chosen <= mlp.count:
        raise ModelError(f"layer {i}: mlp.chosen={mlp.chosen}: expected between 1 and mlp.count={mlp.count}")
    if mlp.shared_gate and mlp.shared is None:
        raise ModelError(f"layer {i}: mlp.shared_gate=True needs the MLP mlp.shared")
    if mlp.limit is not None and mlp.activation != CLAMPED:
        raise ModelError(f"layer {i}: mlp.limit={shown(mlp.limit)} is only for mlp.activation={CLAMPED!r}")


def _words(layer: LayerSpec) -> Iterator[tuple[str, Any, Collection[Any]]]:
    """Yield (field, value, accepted values) of the fields of a layer that select one of several computations."""
    yield "norms", layer.norms, tuple(NORMS)
    yield "qk_norm", layer.qk_norm, (None, HEAD, WIDTH, HEADS)
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        yield "mlp.activation", mlp.activation, (*ACTIVATIONS, CLAMPED)
        if mlp.shared:
            yield "mlp.shared.activation", mlp.shared.activation, ACTIVATIONS
        yield "mlp.router.score", mlp.router.score, (SOFTMAX, CHOSEN_SOFTMAX, SIGMOID)
    else:
        yield "mlp.activation", mlp.activation, ACTIVATIONS
    if layer.rope is not None:
        yield "rope.kind", layer.rope.kind, ROPE_KINDS
