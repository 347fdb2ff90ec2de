"""Translation of a decoder into operations of the native library, which runs a step on a CPU in one call.

The operations (``device.native.program``) have the order of ``device.layers.decoder.Decoder``.  A norm before a matrix
product is part of the product's operation::

    x        the stream             ┌────────────── o, + ─────────────┐┌── down, + ──┐
    qkv  ◄── norm1, product ─ x ────┤ ─► attend ─► attn ─┘            ├┤ norm2, gate ─► mid
    hidden ◄─ norm ─ x  (after PICK: of the tokens that sample)       x
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import (
    AFTER,
    AROUND,
    BEFORE,
    HEADS,
    MLP,
    WIDTH,
    DecoderSpec,
    Experts,
    GatedDelta,
    LayerSpec,
)
from minivllm.device.native.program import ACTIVATIONS, FORMATS, Program, low_rank
from minivllm.device.native.recurrent import newest_first

from .decoder import Decoder, DecoderBlock
from .embedding import LMHead, TiedLMHead
from .heads import PredictionHead
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .short_conv import ShortConvolution
from .stored_product import PLAIN, readable, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.attention import AttnLayer

    from .delta_net import DeltaNet
    from .module import Module


# names of the cache tensors with scales of int8 keys and values (plugins/kvformat/scaled.py)
SCALES = ("k_scale", "v_scale")


class NotLowered(Exception):
    """The error of a model that cannot run as a native program; its message is the reason, in one line."""


class Lowering:
    """The translation of one model to a native CPU program: the constructor adds the operations of ``model`` to
    ``program``.

    It raises NotLowered if no operation computes some part of the model.  FORWARD writes the final normed hidden
    states of the tokens that sample to ``hidden`` f32 [most_tokens, H].  SAMPLE writes their logits to ``logits`` f32
    [rows, V].  ``block`` is the tokens of a KV block, and ``room`` the most bytes that copies of weights may take.
    ``adapters`` is the index of the adapter method whose low-rank products the program computes; None means no
    adapters. ``narrowed`` maps the address of a weight to (weight, tensor to read): the copies of another program,
    which are reused.
    """

    def __init__(
        self,
        model: Any,
        modules: Mapping[str, Module],
        layers: Sequence[AttnLayer],
        program: Program,
        rows: int,
        block: int,
        room: int,
        narrowed: dict[int, tuple[Tensor, Tensor]] | None = None,
        adapters: int | None = None,
    ) -> None:
        self.adapters = adapters
        self.spec: DecoderSpec = model.spec
        self.model, self.blocks = self._served(model)
        if type(self.model) is not Decoder or any(type(block) is not DecoderBlock for block in self.blocks):
            raise NotLowered(f"the model {type(model).__name__} is not a Decoder, which a DecoderSpec describes")
        self.modules = modules
        self.program = program
        self.block = block  # number of tokens of a KV block
        self._room = room
        self.copied = 0  # bytes of the copies of weights that the program reads
        self.narrowed = narrowed if narrowed is not None else {}
        tokens = program.most_tokens
        self.hidden = torch.zeros(tokens, self.spec.hidden)
        self.logits = torch.zeros(rows, self.spec.vocab)
        remaining = iter(layers)  # layers with attention, in order
        self._layers = [None if layer.recurrent else next(remaining) for layer in self.spec.layers]
        for i, layer in enumerate(self.spec.layers):
            self._check(i, layer, self._layers[i])
        widths = {
            "qkv": max(map(self._wide, range(len(self._layers)))),
            "attn": max(self._inner(layer) for layer in self.spec.layers),
            "mid": max(layer.mlp.inner for layer in self.spec.layers),
        }
        mixers = [layer.recurrent for layer in self.spec.layers]
        heads = [mixer.value_heads for mixer in mixers if isinstance(mixer, GatedDelta)]
        if heads:
            widths["gates"] = 2 * max(heads)
        self._memory = {name: torch.zeros(tokens, width) for name, width in widths.items()}
        self._views: dict[tuple[str, int, int], int] = {}
        self._inner_registers: dict[int, int] = {}  # width of the inner values of adapters -> their register
        self.x = program.register(torch.zeros(tokens, self.spec.hidden))
        self.branch = program.register(torch.zeros(tokens, self.spec.hidden))
        self.out = program.register(self.hidden)
        self._embed()
        for i, layer in enumerate(self.spec.layers):
            self._layer(i, layer)
        program.add("norm", in_=self.x, out=self.out, **self._norm("norm"))
        self._head(program.register(self.logits))

    def keep_states(self, memory: Tensor) -> None:
        """Store the hidden states that FORWARD returns also in ``memory`` [places, H], at the tokens' places in KV
        group 0."""
        places, width = memory.shape
        self.program.add("store", in_=self.out, data=memory, format=FORMATS[memory.dtype], n=places, k=width)

    def _served(self, model: Any) -> tuple[Any, Sequence[Any]]:
        """Return the model that has the embedding and the output layer, and the layers of ``model``."""
        return model, getattr(model, "blocks", ())

    def _wide(self, i: int) -> int:
        """Return the number of outputs of the first linear layer of layer i."""
        part = "in" if self._layers[i] is None else "qkv"
        module: Any = self.modules[f"layers.{i}.attn.{part}"]
        return int(module.info.out_features)

    def _inner(self, layer: LayerSpec) -> int:
        """Return the number of elements that attention, or a recurrent layer, computes for each token."""
        mixer = layer.attention
        return mixer.heads * mixer.dim_v if isinstance(mixer, AttnSpec) else mixer.inner

    def _check(self, i: int, layer: LayerSpec, attention: AttnLayer | None) -> None:
        """Raise NotLowered for a layer that the operations cannot compute."""
        if isinstance(layer.mlp, Experts):
            raise NotLowered(f"layer {i} is a mixture of experts")
        if attention is None:
            return
        a = attention.spec
        cache = attention.cache
        if a.alibi is not None or layer.qkv_clip is not None or layer.qk_norm == HEADS:
            raise NotLowered(
                f"layer {i} has slopes of distance, a clip of q, k and v, or a norm with weights of each head"
            )
        if layer.rope is not None and layer.rope.query_growth is not None:
            raise NotLowered(f"layer {i} multiplies queries by a factor of their position")
        if a.v_in_k or set(cache) not in ({"k", "v"}, {"k", "v", *SCALES}):
            raise NotLowered(f"layer {i} has a KV cache of {', '.join(cache)}")
        k = cache["k"]
        v = cache["v"]
        scaled = SCALES[0] in cache
        accepted = (torch.int8,) if scaled else PLAIN
        if k.dtype not in accepted or k.dtype != v.dtype:
            raise NotLowered(f"layer {i} has a KV cache of {k.dtype} and {v.dtype}".replace("torch.", ""))
        token = (self.block, a.kv_heads)
        scales = [cache[name] for name in SCALES] if scaled else []
        if any(x.shape[1:] != token or x.dtype != torch.float32 or not whole(x) for x in scales):
            raise NotLowered(f"layer {i} has scales of keys and values that are not ordered by tokens")
        key_shape = (*token, a.dim_qk)
        value_shape = (*token, a.dim_v)
        if k.shape[1:] != key_shape or v.shape[1:] != value_shape or not whole(k, v):
            raise NotLowered(f"layer {i} has a KV cache whose memory is not ordered by tokens")

    def _view(self, name: str, first: int, width: int) -> int:
        """Return the index of the native program's register for columns [first, first + width) of the buffer
        ``name``."""
        key = (name, first, width)
        if key not in self._views:
            columns = self._memory[name][:, first : first + width]
            self._views[key] = self.program.register(columns)
        return self._views[key]

    # ---- operands ----------------------------------------------------------------------------------------------------

    def _qkv(self, i: int) -> Any:
        return self.modules[f"layers.{i}.attn.qkv"]

    def _norm(self, name: str | None) -> dict[str, Any]:
        """Return the operation fields of the norm module ``name``; ``name`` None means no norm and no fields.

        NotLowered for a kind of norm that no operation computes."""
        if name is None:
            return {}
        norm = self.modules[name]
        if isinstance(norm, RMSNorm):
            return {"norm_weight": norm.weight.float(), "eps": norm.eps}
        if isinstance(norm, LayerNorm):
            bias = None if norm.bias is None else norm.bias.float()
            return {"norm_weight": norm.weight.float(), "norm_bias": bias, "eps": norm.eps, "centered": 1}
        raise NotLowered(f"{name} is a {type(norm).__name__}")

    def _weight(self, module: Any) -> dict[str, Any]:
        """Return the operation fields of the weight and bias of a linear layer or head.

        NotLowered for a layer that sums over processes, and for a storage form that the kernels cannot read."""
        sums = isinstance(module, Linear) and module.reduce
        if sums or not isinstance(module, (Linear, LMHead, TiedLMHead)):
            raise NotLowered(f"{module.name} is a {type(module).__name__}, which native code cannot multiply by")
        outputs = module.info.out_features
        inputs = module.info.in_features
        stored = module.stored()
        if stored is None or not readable(stored, outputs, inputs):
            raise NotLowered(f"the weight of {module.name} is stored in a form that native code does not read")
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias = bias.float()
        weight = self._narrow(stored.weight)
        fields = {"format": FORMATS[weight.dtype], "n": outputs, "k": inputs, "group": stored.group or inputs}
        return {**fields, "data": weight, "scale": stored.scale, "zero": stored.zero, "bias": bias}

    def _narrow(self, weight: Tensor) -> Tensor:
        """Return a bfloat16 copy of a float32 weight if it has exactly the same numbers, else the weight itself.

        The copy halves the bytes to read; most checkpoints have bfloat16 numbers.  No copy is made if it would exceed
        the room for copies."""
        if weight.dtype != torch.float32:
            return weight
        key = weight.data_ptr()
        if key not in self.narrowed:  # the weight is stored with its copy, so that no other tensor gets its address
            if self.copied + weight.nbytes // 2 > self._room:
                return weight
            copy = weight.bfloat16()
            pieces = zip(copy.split(4096), weight.split(4096), strict=True)
            same = all(torch.equal(narrow.float(), wide) for narrow, wide in pieces)
            self.narrowed[key] = weight, copy if same else weight
            if same:
                self.copied += copy.nbytes
        return self.narrowed[key][1]

    def _product(self, linear: Any, x: int, out: int, norm: str | None, **fields: Any) -> None:
        """Add the operations that multiply the register ``x`` by a linear layer, with the norm before it and its
        adapters."""
        normed = self._norm(norm)
        if (made := self._low_rank(linear)) is not None:
            layer, inner = made
            self.program.add("shrink", in_=x, out=inner, data=ctypes.addressof(layer), **normed)
            fields |= {"low_rank": ctypes.addressof(layer), "inner": inner}
        self.program.add("product", in_=x, out=out, **self._weight(linear), **normed, **fields)

    def _low_rank(self, linear: Any) -> tuple[ctypes.Structure, int] | None:
        """Return the native struct of a layer's adapters, and the register of their inner values; None if it has none.

        NotLowered for adapters that the program cannot compute."""
        if self.adapters is None or not isinstance(linear, Linear) or linear.adapter is None:
            return None
        found = linear.adapter.low_rank(self.adapters)
        if found is None or found.a.dtype not in PLAIN or not whole(found.a[0], found.b[0]):
            raise NotLowered(f"adapters of {linear.name} are no low-rank products that native code reads")
        begins = [rows.start for rows in linear.info.rows.values()]
        starts = torch.tensor([*begins, linear.info.out_features])
        layer = low_rank(found.a, found.b, found.ranks, starts)
        self.program.hold(layer, found, starts)
        _, parts, rank, _ = found.a.shape
        width = parts * rank
        if width not in self._inner_registers:
            inner = torch.zeros(self.program.most_tokens, width)
            self._inner_registers[width] = self.program.register(inner)
        return layer, self._inner_registers[width]

    # ---- operations --------------------------------------------------------------------------------------------------

    def _embed(self) -> None:
        if self.model.embed.scheme is not None:
            raise NotLowered("the embedding is quantized")
        embed = self._narrow(self.model.embed.weight)
        positions = self.model.positions
        learned: dict[str, Any] = {}
        if positions is not None:
            table = positions.weight
            learned = {"positions": table, "positions_format": FORMATS[table.dtype]}
        self.program.add(
            "embed",
            out=self.x,
            data=embed,
            format=FORMATS[embed.dtype],
            k=self.spec.hidden,
            alpha=self.model.scale,
            first_position=self.spec.first_position,
            **learned,
        )
        if self.spec.embed_norm:
            self.program.add("norm", in_=self.x, out=self.x, **self._norm("embed_norm"))

    def _layer(self, i: int, layer: LayerSpec) -> None:
        name = f"layers.{i}."
        last = i + 1 == len(self.spec.layers)
        before = layer.norms != AFTER
        attn = self._mixer(i, layer, name + "norm1" if before else None)
        if last:  # behind the last attention only tokens from which a token is drawn are computed
            self.program.add("pick", in_=self.x, out=attn)
        o = self.modules[name + "attn.o"]
        down = self.modules[name + "mlp.down"]
        if layer.parallel:
            mid = self._mlp(name, layer, name + ("norm2" if layer.mlp_norm else "norm1"))
            self._add(attn, o, None, layer)
            self._add(mid, down, None, layer)
            return
        first = None
        second = None
        middle = None
        if layer.norms == AROUND:
            first = name + "norm2"
            middle = name + "norm3"
            second = name + "norm4"
        elif layer.norms == AFTER:
            first = name + "norm1"
            second = name + "norm2"
        elif layer.norms == BEFORE:
            middle = name + "norm2"
        self._add(attn, o, first, layer)
        self._add(self._mlp(name, layer, middle), down, second, layer)

    def _mixer(self, i: int, layer: LayerSpec, norm: str | None) -> int:
        """Add the operations of attention, or of a recurrent layer, in layer i; return the register of their
        outputs."""
        attention = self._layers[i]
        name = f"layers.{i}.attn."
        if attention is not None:
            return self._attention(i, layer, attention, norm)
        kind = "delta" if isinstance(layer.recurrent, GatedDelta) else "conv"
        module: Any = self.modules[name + kind]
        mixed = self._view("qkv", 0, self._wide(i))
        self._product(self.modules[name + "in"], self.x, mixed, norm)
        if isinstance(module, ShortConvolution):
            return self._convolution(module, mixed)
        gates = self._view("gates", 0, 2 * module.heads)
        self._product(self.modules[name + "gates"], self.x, gates, norm)
        return self._delta_net(module, gates)

    def _delta_net(self, module: DeltaNet, gates: int) -> int:
        """Add the operations of a delta rule and its gated norm; return the register of the outputs.

        The register ``gates`` holds b | a.

        NotLowered if the delta rule runs as a Triton kernel."""
        if module.native_conv is None:
            raise NotLowered(f"{module.name} runs as a Triton kernel")
        x = self._view("qkv", 0, module.channels)
        out = self._view("attn", 0, module.inner)
        z = self._view("qkv", module.channels, module.inner)
        layer = module.structure()
        memory = module.layer.memory
        self.program.hold(layer)
        self.program.add("delta", in_=x, n=gates, out=out, data=ctypes.addressof(layer))
        for register, ring in ((x, memory["ring"]), (gates, memory["gates"])):
            self._keep(register, ring, module.spec.width)
        weight = module.norm.float()
        heads = module.heads
        eps = module.spec.eps
        self.program.add(
            "gate", in_=out, out=z, heads=heads, norm_weight=weight, eps=eps, activation=ACTIVATIONS["silu"]
        )
        return z

    def _convolution(self, module: ShortConvolution, mixed: int) -> int:
        """Add the operations of a short convolution of the register ``mixed``, b | c | x; return the register of the
        outputs."""
        channels, width = module.weight.shape
        ring = module.layer.memory["ring"]
        out = self._view("attn", 0, channels)
        weight = newest_first(module.weight)
        bias = None if module.bias is None else module.bias.float()
        places = ring.shape[1]
        kind = FORMATS[ring.dtype]
        self.program.add("conv", in_=mixed, out=out, data=ring, n=places, k=width, format=kind, scale=weight, bias=bias)
        self._keep(self._view("qkv", 2 * channels, channels), ring, width)
        return out

    def _keep(self, register: int, ring: Tensor, width: int) -> None:
        """Add the operation that stores the newest inputs of each row in a ring; a token reads ``width`` inputs."""
        self.program.add("keep", in_=register, data=ring, n=ring.shape[1], k=width, format=FORMATS[ring.dtype])

    def _attention(self, i: int, layer: LayerSpec, attention: AttnLayer, norm: str | None) -> int:
        """Add the operations of the projection and of attention in layer i; return the register of the heads'
        outputs."""
        a = attention.spec
        block = self.blocks[i]
        widths = (a.heads * a.dim_qk, a.kv_heads * a.dim_qk, a.kv_heads * a.dim_v)
        qkv = self._view("qkv", 0, self._wide(i))
        attn = self._view("attn", 0, a.heads * a.dim_v)
        self._product(self._qkv(i), self.x, qkv, norm)
        if layer.qk_norm == WIDTH:
            for which, first, width in (("q", 0, widths[0]), ("k", widths[0], widths[1])):
                part = self._view("qkv", first, width)
                norm_of = self._norm(f"layers.{i}.attn.{which}_norm")
                self.program.add("norm", in_=part, out=part, **norm_of)
        fields: dict[str, Any] = {"heads": a.heads, "kv_heads": a.kv_heads, "dim_qk": a.dim_qk, "dim_v": a.dim_v}
        fields["kv_group"] = attention.group
        fields["window"] = a.window or 0
        fields["cap"] = a.softcap or 0.0
        fields["sinks"] = attention.sinks
        fields["softmax_scale"] = a.softmax_scale
        fields |= self._prepared(block.pre)
        fields |= self._cached(attention.cache)
        self.program.add("attend", in_=qkv, out=attn, **fields)
        if not layer.gated:
            return attn
        gate = self._view("qkv", sum(widths), a.heads * a.dim_v)
        self.program.add("gate", in_=attn, out=gate, heads=a.heads, activation=ACTIVATIONS["sigmoid"])
        return gate

    def _prepared(self, pre: Any) -> dict[str, Any]:
        """Return the fields of the attention operation for rotary embeddings, and for norms of q and k."""
        fields = {"cos": pre.cos, "sin": pre.sin, "rope_dim": 0, "eps": pre.eps}
        if pre.cos is not None:
            fields["rope_dim"] = pre.cos.shape[1]
        for name in ("q_norm", "k_norm"):
            weight = getattr(pre, name)
            fields[name] = None if weight is None else weight.float()
        return fields

    def _cached(self, cache: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the fields of the attention operation for the tensors of the KV cache of a layer."""
        keys = cache["k"]
        fields = {"keys": keys, "values": cache["v"], "kv_format": FORMATS[keys.dtype]}
        return {**fields, "key_scales": cache.get("k_scale"), "value_scales": cache.get("v_scale")}

    def _mlp(self, name: str, layer: LayerSpec, norm: str | None) -> int:
        """Add the operation of an MLP's first linear layer and activation; return the register that its last layer
        reads."""
        mlp = layer.mlp
        assert isinstance(mlp, MLP)  # a layer of experts is not lowered
        out = self._view("mid", 0, mlp.inner)
        first = "mlp.gate_up" if mlp.gated else "mlp.up"
        up = self.modules[name + first]
        self._product(up, self.x, out, norm, gated=int(mlp.gated), activation=ACTIVATIONS[mlp.activation])
        return out

    def _add(self, x: int, linear: Any, after: str | None, layer: LayerSpec) -> None:
        """Add the operations for stream += scale * after(linear(x)); ``after`` names a norm, None means none."""
        scale = layer.residual_scale
        if after is None:
            self._product(linear, x, self.x, None, adds=1, alpha=scale)
            return
        self._product(linear, x, self.branch, None)
        self.program.add("norm", in_=self.branch, out=self.x, adds=1, alpha=scale, **self._norm(after))

    def _head(self, logits: int) -> None:
        weight = self._weight(self.model.head)
        spec = self.spec
        self.program.add("product", sampling=True, in_=self.out, out=logits, alpha=spec.logit_scale, **weight)
        if spec.logit_cap is not None:
            self.program.add("cap", sampling=True, in_=logits, out=logits, cap=spec.logit_cap)


class HeadLowering(Lowering):
    """The translation of a drafter's ``PredictionHead``, which uses the embedding and output layer of the served model.

    FORWARD reads the hidden states of the served model from ``states`` f32 [most_tokens, H], and the columns have
    ``ahead`` = 1."""

    states: Tensor

    def _served(self, model: Any) -> tuple[Any, Sequence[Any]]:
        if type(model) is not PredictionHead:
            raise NotLowered(f"the drafter's head {type(model).__name__} is not a PredictionHead")
        return model.target, [model.block]

    def _embed(self) -> None:
        """Add the operations that norm the embedding and the hidden states, and multiply both by one matrix."""
        tokens = self.program.most_tokens
        hidden = self.spec.hidden
        both = torch.zeros(tokens, 2 * hidden)
        self.states = torch.zeros(tokens, hidden)
        left = self.program.register(both[:, :hidden])
        right = self.program.register(both[:, hidden:])
        stream = self.x
        self.x = left
        super()._embed()
        self.x = stream
        self.program.add("norm", in_=left, out=left, **self._norm("embedding_norm"))
        states = self.program.register(self.states)
        self.program.add("norm", in_=states, out=right, **self._norm("hidden_norm"))
        weight = self._weight(self.modules["fc"])
        joined = self.program.register(both)
        self.program.add("product", in_=joined, out=self.x, **weight)


def lower(
    model: Any,
    modules: Mapping[str, Module],
    layers: Sequence[AttnLayer],
    columns: Mapping[str, Any],
    threads: int,
    most_tokens: int,
    rows: int,
    room: int,
    narrowed: dict[int, tuple[Tensor, Tensor]] | None = None,
    adapters: int | None = None,
) -> Lowering:
    """Translate a model into a native program for steps of up to ``most_tokens`` tokens, ``rows`` of which sample.

    The program runs on ``threads`` threads and reads the worker's ``columns`` of row state.  Copies of weights take up
    to ``room`` bytes; ``narrowed`` and ``adapters`` as in ``Lowering``.  NotLowered, with the reason, for a model that
    cannot be translated."""
    kind = HeadLowering if columns["ahead"] else Lowering
    program = Program(threads, most_tokens, columns)
    return kind(model, modules, layers, program, rows, columns["block"], room, narrowed, adapters)
