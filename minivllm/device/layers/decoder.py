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
from collections.abc import Callable, Set
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
from .fused import GatedLinear, Joined, LinearNorm, Normed
from .module_parts import ModuleParts
from .rotary import order_of_halves
from .taps import LayerTaps


class Decoder:
    """A decoder-only model.  A call turns the step's ids [T] into hidden states [T, H]; ``logits`` returns [N, V].

    If the step has ``logits_indices`` i64 [N], a call returns the hidden states [N, H] of these tokens only."""

    takes_logits_indices = True

    def __init__(self, spec: DecoderSpec, parts: ModuleParts) -> None:
        self.spec = spec
        check(spec)
        self.embed = parts.embedding("embed", spec.vocab, spec.hidden, packable=True)
        self.embed_norm = _norm(parts, spec, "embed_norm", spec.embed_norm)
        self.positions = None
        if spec.positions:
            self.positions = parts.embedding("positions", spec.positions, spec.hidden, whole=True)
        # the factor is rounded to the model's dtype, as if it were a tensor of this dtype
        self.scale = float(torch.tensor(spec.embed_scale, dtype=parts.dtype))
        entries = [_norm(parts, spec, f"layers.{i}.norm1", layer.norms != AFTER) for i, layer in enumerate(spec.layers)]
        self.norm = parts.norm("norm", spec.hidden, spec.norm)
        self.first = entries[0]
        follows = [*entries[1:], self.norm]
        self.blocks = [DecoderBlock(spec, i, parts, follows[i]) for i in range(len(spec.layers))]
        for block, following in itertools.pairwise(self.blocks):
            block.before(following)
        self.head = parts.lm_head("lm_head", spec.hidden, spec.vocab, self.embed if spec.tied else None)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the scaled embeddings [T, H] of ids [T]."""
        x = self.embed(ids)
        return x if self.spec.embed_scale == 1.0 else x * self.scale

    def __call__(self, step: StepTensors) -> Tensor:
        x = self.embedded(step.ids)
        if self.positions is not None:
            x = x + self.positions(step.position + self.spec.first_position)
        if self.embed_norm is not None:
            x = self.embed_norm(x)[0]
        taps = step.taps
        watch = step.watch
        if taps is not None:
            x = taps("layers.0.input", taps("embedding", x))
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
            run = block.run_for(tapped & block.points.keys())
            h, residual = run(h, residual, step)
            if watch is not None and block.follower in watch.points:
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
        cap = self.spec.logit_cap
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


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
            self.mlp_norm = _norm(parts, spec, name + "norm2", layer.mlp_norm)
            return
        around = layer.norms == AROUND
        named = ["norm1", "norm2"] if layer.norms == AFTER else ["norm2", "norm4"]
        after = [_norm(parts, spec, name + n, around or layer.norms == AFTER) for n in named]
        middle = _norm(parts, spec, name + ("norm3" if around else "norm2"), layer.norms != AFTER)
        self.o = parts.linear_norm(out, middle, after=after[0], scale=scale)
        self.down = parts.linear_norm(down, follows, whole=self.last, after=after[1], scale=scale)
        for one, other in ((self.o, self.up), (self.up, self.down)):
            if isinstance(one, LinearNorm | GatedLinear):
                one.follow(other)

    def before(self, following: DecoderBlock) -> None:
        """Connect this layer's last product to the first product of ``following``, the next layer.

        The output can then have the 8-bit form that the next product reads.  This needs a single reader: in a parallel
        layer, or one with a gated delta net, two products read the output, so nothing is connected."""
        one = not self.parallel and not following.parallel and following.recurrent is None
        if one and isinstance(self.down, LinearNorm):
            self.down.follow(following.qkv)

    def _points(self) -> dict[str, int]:
        """Return tap point (named value) -> number of elements for each token, for this layer and the input of the next
        one."""
        # q, k and v are no tap points if their heads are split over processes
        widths = {} if self.shared or self.recurrent else dict(zip("qkv", self.sizes[:3], strict=True))
        widths["attention"] = self.hidden
        if self.experts is not None:
            widths |= {"router": self.experts.spec.count, "experts": self.experts.spec.chosen}
        widths |= dict.fromkeys(("mlp", "residual"), self.hidden)
        points = {self.name + point: width for point, width in widths.items()}
        return points if self.follower is None else {**points, self.follower: self.hidden}

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
        twice = spec.switch is not None
        self.gated = layer.gated
        linear = parts.qkv(name + ".qkv", self.inputs * spec.hidden, a, layer.qkv_bias, layer.gated)
        self.sizes = [rows for _, rows in linear.info.parts]
        self.gate_out = parts.gate_out
        self.qkv = parts.normed_linear(linear)
        self.attn = parts.attention(len(parts.layers), a, name)
        norms: list[Any] = [None, None]
        if layer.qk_norm == HEADS:
            self.wide = [
                parts.heads_norm(f"{name}.{x}_norm", n, a.dim_qk, spec.norm, keys=x == "k")
                for x, n in (("q", a.heads), ("k", a.kv_heads))
            ]
        elif layer.qk_norm == WIDTH:
            self.wide = [
                parts.width_norm(f"{name}.{x}_norm", n, a.dim_qk, spec.norm, keys=x == "k")
                for x, n in (("q", a.heads), ("k", a.kv_heads))
            ]
        elif layer.qk_norm == HEAD:
            norms = [parts.norm(f"{name}.{x}_norm", a.dim_qk, spec.norm).weight for x in "qk"]
        cos = sin = None
        if layer.rope is not None:
            cos, sin = parts.rotations[self.attn.layer.index] = parts.rotary(layer.rope, twice)
            self.attn.factors = parts.query_factors(layer.rope, twice)
        self.pre = QKPre(cos, sin, norms[0], norms[1], spec.norm.eps)
        if layer.rope is not None and layer.rope.interleaved:
            back = order_of_halves(a.dim_qk, layer.rope.dim)
            self.order = back.argsort().to(parts.device), back.to(parts.device)

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

    def __call__(self, h: Normed, residual: Tensor, step: StepTensors) -> tuple[Normed, Tensor]:
        x = self._mixed(h, step)
        if self.last and step.logits_indices is not None:
            x = x[step.logits_indices]
            residual = residual[step.logits_indices]
            if self.parallel:
                h = Normed(h.finished()[step.logits_indices])
        if self.parallel:
            return self.both.add(self.out(x).add_(self.both.linear(self.up(self._beside(h, residual)))), residual)
        h, residual = self.o(x, residual)
        return self.down(self.up(h), residual)

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
            q = self.wide[0](q)[0]
            k = self.wide[1](k)[0]
        x = self.attn(q, k, v, step, self.pre)
        return self.gate_out(x, gate[0]) if self.gated else x

    def _beside(self, h: Normed, residual: Tensor) -> Normed:
        """Return the input of a parallel layer's MLP: the input of attention, or a separate norm of the residual
        stream."""
        return h if self.mlp_norm is None else Normed(self.mlp_norm(residual)[0])

    def run_for(self, points: Set[str]) -> Callable[[Any, Tensor, StepTensors], tuple[Normed, Tensor]]:
        """Return the method that computes this layer in a step whose rows read or change the values at tap
        ``points``."""
        if not points:
            return self
        routing = self.experts is not None and points <= {self.name + "router", self.name + "experts"}
        return self.routed if routing else self.tapped

    def routed(self, h: Normed, residual: Tensor, step: StepTensors) -> tuple[Normed, Tensor]:
        """Compute the same as a call, with the same operations, and pass the points of the router through
        ``step.taps``."""
        assert self.experts is not None and step.taps is not None
        with self.experts.tapped(LayerTaps(step.taps, self.name)):
            return self(h, residual, step)

    def tapped(self, h: Normed, residual: Tensor, step: StepTensors) -> tuple[Normed, Tensor]:
        """Compute the same as a call, without fused kernels, and pass the value of each tap point to ``step.taps``.

        The layer continues with the value that this returns."""
        taps = step.taps
        name = self.name
        assert taps is not None
        x = self._mixed(h, step, taps)
        if self.parallel:
            down: Any = self.both
            z = self._beside(h, residual)
            y = taps(name + "attention", down.scaled(self.out(x))) + taps(name + "mlp", self._branch(z, down, taps))
        else:
            residual = residual + taps(name + "attention", self.o.branch(x))
            down = self.down
            y = taps(name + "mlp", self._branch(self.o.entry(residual), down, taps))
        residual = taps(name + "residual", residual + y)
        if self.follower is not None:
            residual = taps(self.follower, residual)
        return down.entry(residual), residual

    def _branch(self, h: Normed, down: Any, taps: StepTaps) -> Tensor:
        """Return the output [T, H] of the MLP or of the experts, which is added to the residual stream."""
        if self.experts is None:
            return down.branch(self.up(h))
        return down.scaled(self.experts(self.up(h), LayerTaps(taps, self.name)))

    def _tap_head(self, taps: StepTaps, which: str, x: Tensor) -> Tensor:
        """Pass q or k [T, heads * dim] to the taps of the point ``which``, and return the value that these return.

        The taps get the elements of a head in the order of the checkpoint.  They are reordered before and after,
        because the rotary embedding here uses another order for interleaved pairs."""
        if self.order is None:
            return taps(self.name + which, x)
        there, back = self.order
        heads = x.unflatten(1, (-1, len(there)))
        return taps(self.name + which, heads[..., there].flatten(1)).unflatten(1, heads.shape[1:])[..., back].flatten(1)


def _norm(parts: ModuleParts, spec: DecoderSpec, name: str, there: bool) -> Any:
    """Make a norm over the hidden size; return None unless ``there``."""
    return parts.norm(name, spec.hidden, spec.norm) if there else None


def check(spec: DecoderSpec) -> None:
    """Raise ModelError for a value that a table may not have, and for values that are not implemented together."""
    for i, layer in enumerate(spec.layers):
        kind = "default" if layer.rope is None else layer.rope.kind
        experts = layer.mlp if isinstance(layer.mlp, Experts) else None
        shared = experts and experts.shared
        for name, word, known in (
            ("norms", layer.norms, (BEFORE, AFTER, AROUND)),
            ("qk_norm", layer.qk_norm, (None, HEAD, WIDTH, HEADS)),
            ("mlp.activation", layer.mlp.activation, (*ACTIVATIONS, CLAMPED) if experts else ACTIVATIONS),
            ("mlp.shared.activation", shared.activation if shared else ACTIVATIONS[0], ACTIVATIONS),
            ("mlp.router.score", experts.router.score if experts else SOFTMAX, (SOFTMAX, CHOSEN_SOFTMAX, SIGMOID)),
            ("rope.kind", kind, ROPE_KINDS),
        ):
            if word not in known:
                raise ModelError(f"layer {i}: {name}={shown(word)}: expected one of {', '.join(map(str, known))}")
        if layer.qk_norm == HEAD and spec.norm.centered:
            raise ModelError(f"layer {i}: LayerNorm of each head is not implemented: expected RMSNorm")
        if experts and not 1 <= experts.chosen <= experts.count:
            raise ModelError(
                f"layer {i}: mlp.chosen={experts.chosen}: expected between 1 and mlp.count={experts.count}"
            )
        if layer.parallel and layer.norms != BEFORE:
            raise ModelError(f"layer {i}: parallel=True is only implemented with norms='before'")
        if layer.mlp_norm and not layer.parallel:
            raise ModelError(f"layer {i}: mlp_norm=True is only for parallel=True")
