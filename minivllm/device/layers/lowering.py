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

from .decoder import Decoder, DecoderBlock, norm_names
from .embedding import LMHead, TiedLMHead
from .heads import PredictionHead
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .stored_product import PLAIN, readable, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.attention import AttnLayer

    from .delta_net import DeltaNet
    from .module_parts import ModuleParts
    from .short_conv import ShortConvolution


# names of the cache tensors with scales of int8 keys and values (plugins/kvformat/scaled.py)
SCALES = ("k_scale", "v_scale")
# address of a weight -> (weight, tensor to read in its place)
Narrowed = dict[int, tuple[Tensor, Tensor]]
Fields = dict[str, Any]  # fields of an operation (``device.native.program.Op``)


class NotLowered(Exception):
    """The error of a model that cannot run as a native program; its message is the reason, in one line."""


class Lowering:
    """The translation of one model to a native CPU program: the constructor adds the operations of ``model`` to
    ``program``.  ``parts`` is the factory that made the model's modules.

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
        parts: ModuleParts,
        program: Program,
        rows: int,
        block: int,
        room: int,
        narrowed: Narrowed | None = None,
        adapters: int | None = None,
    ) -> None:
        self.adapters = adapters
        self.spec: DecoderSpec = model.spec
        self.model, self.blocks = self._served(model)
        kinds = {type(one) for one in self.blocks}
        if type(self.model) is not Decoder or not kinds <= {DecoderBlock}:
            raise NotLowered(f"the model {type(model).__name__} is not a Decoder, which a DecoderSpec describes")
        self.modules = parts.modules
        self.program = program
        self.block = block  # number of tokens of a KV block
        self._room = room
        self.copied = 0  # bytes of the copies of weights that the program reads
        self.narrowed = {} if narrowed is None else narrowed
        remaining = iter(parts.layers)  # layers with attention, in order
        self._layers = [None if layer.recurrent else next(remaining) for layer in self.spec.layers]
        for i, layer in enumerate(self.spec.layers):
            self._check(i, layer, self._layers[i])
        tokens = program.most_tokens
        self._memory = {}
        for name, width in self._widths().items():
            self._memory[name] = torch.zeros(tokens, width)
        self._views: dict[tuple[str, int, int], int] = {}
        self._inner_registers: dict[int, int] = {}  # width of the inner values of adapters -> their register
        self.hidden = torch.zeros(tokens, self.spec.hidden)
        self.logits = torch.zeros(rows, self.spec.vocab)
        stream = torch.zeros_like(self.hidden)
        branch = torch.zeros_like(self.hidden)
        self.x = program.register(stream)
        self.branch = program.register(branch)
        self.out = program.register(self.hidden)
        self._embed()
        for i, layer in enumerate(self.spec.layers):
            self._layer(i, layer)
        final_norm = self._norm("norm")
        program.add("norm", in_=self.x, out=self.out, **final_norm)
        logits = program.register(self.logits)
        self._head(logits)

    def _widths(self) -> dict[str, int]:
        """Return the numbers of columns of the buffers, by name: the most that a layer needs."""
        layers = self.spec.layers
        wide = [self._wide(i) for i in range(len(layers))]
        inner = [self._inner(layer) for layer in layers]
        mid = [layer.mlp.inner for layer in layers]
        widths = {"qkv": max(wide), "attn": max(inner), "mid": max(mid)}
        mixers = [layer.recurrent for layer in layers]
        heads = [mixer.value_heads for mixer in mixers if isinstance(mixer, GatedDelta)]
        if heads:
            widths["gates"] = 2 * max(heads)
        return widths

    def keep_states(self, memory: Tensor) -> None:
        """Store the hidden states that FORWARD returns also in ``memory`` [places, H], at the tokens' places in KV
        group 0."""
        places, width = memory.shape
        kind = FORMATS[memory.dtype]
        self.program.add("store", in_=self.out, data=memory, format=kind, n=places, k=width)

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
        if isinstance(mixer, AttnSpec):
            return mixer.heads * mixer.dim_v
        return mixer.inner

    def _check(self, i: int, layer: LayerSpec, attention: AttnLayer | None) -> None:
        """Raise NotLowered for a layer that the operations cannot compute."""
        if isinstance(layer.mlp, Experts):
            raise NotLowered(f"layer {i} is a mixture of experts")
        if attention is None:
            return
        sloped = attention.spec.alibi is not None
        clipped = layer.qkv_clip is not None
        if sloped or clipped or layer.qk_norm == HEADS:
            raise NotLowered(
                f"layer {i} has slopes of distance, a clip of q, k and v, or a norm with weights of each head"
            )
        if layer.rope is not None and layer.rope.query_growth is not None:
            raise NotLowered(f"layer {i} multiplies queries by a factor of their position")
        self._check_cache(i, attention.spec, attention.cache)

    def _check_cache(self, i: int, spec: AttnSpec, cache: Mapping[str, Tensor]) -> None:
        """Raise NotLowered for a KV cache of layer i that the operation of attention cannot read."""
        plain = {"k", "v"}
        names = set(cache)
        known = names in (plain, {*plain, *SCALES})
        if spec.v_in_k or not known:
            raise NotLowered(f"layer {i} has a KV cache of {', '.join(cache)}")
        k = cache["k"]
        v = cache["v"]
        scaled = SCALES[0] in cache
        accepted = (torch.int8,) if scaled else PLAIN
        if k.dtype not in accepted or k.dtype != v.dtype:
            raise NotLowered(f"layer {i} has a KV cache of {k.dtype} and {v.dtype}".replace("torch.", ""))
        token = (self.block, spec.kv_heads)
        for name in names - plain:
            scale = cache[name]
            by_token = scale.shape[1:] == token and whole(scale)
            if not by_token or scale.dtype != torch.float32:
                raise NotLowered(f"layer {i} has scales of keys and values that are not ordered by tokens")
        keys_fit = k.shape[1:] == (*token, spec.dim_qk)
        values_fit = v.shape[1:] == (*token, spec.dim_v)
        if not keys_fit or not values_fit or not whole(k, v):
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

    def _norm(self, name: str | None) -> Fields:
        """Return the operation fields of the norm module ``name``; ``name`` None means no norm and no fields.

        NotLowered for a kind of norm that no operation computes."""
        if name is None:
            return {}
        norm = self.modules[name]
        if not isinstance(norm, RMSNorm | LayerNorm):
            raise NotLowered(f"{name} is a {type(norm).__name__}")
        fields: Fields = {"norm_weight": norm.weight.float(), "eps": norm.eps}
        if isinstance(norm, LayerNorm):
            fields["norm_bias"] = _widened(norm.bias)
            fields["centered"] = 1
        return fields

    def _weight(self, module: Any) -> Fields:
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
        weight = self._narrow(stored.weight)
        fields: Fields = {"data": weight, "format": FORMATS[weight.dtype]}
        fields["n"] = outputs
        fields["k"] = inputs
        fields["group"] = stored.group or inputs
        fields["scale"] = stored.scale
        fields["zero"] = stored.zero
        bias = getattr(module, "bias", None)
        fields["bias"] = _widened(bias)
        return fields

    def _narrow(self, weight: Tensor) -> Tensor:
        """Return a bfloat16 copy of a float32 weight if it has exactly the same numbers, else the weight itself.

        The copy halves the bytes to read; most checkpoints have bfloat16 numbers.  No copy is made if it would exceed
        the room for copies."""
        if weight.dtype != torch.float32:
            return weight
        key = weight.data_ptr()
        if key not in self.narrowed:  # the weight is stored with its copy, so that no other tensor gets its address
            needed = weight.nbytes // 2
            if self.copied + needed > self._room:
                return weight
            copy = weight.bfloat16()
            if _equal(copy, weight):
                self.copied += needed
                self.narrowed[key] = weight, copy
            else:
                self.narrowed[key] = weight, weight
        return self.narrowed[key][1]

    def _product(self, linear: Any, x: int, out: int, norm: str | None, **fields: Any) -> None:
        """Add the operations that multiply the register ``x`` by a linear layer, with the norm before it and its
        adapters."""
        normed = self._norm(norm)
        adapters = self._low_rank(linear)
        if adapters is not None:
            layer, inner = adapters
            address = ctypes.addressof(layer)
            self.program.add("shrink", in_=x, out=inner, data=address, **normed)
            fields["low_rank"] = address
            fields["inner"] = inner
        weight = self._weight(linear)
        self.program.add("product", in_=x, out=out, **weight, **normed, **fields)

    def _low_rank(self, linear: Any) -> tuple[ctypes.Structure, int] | None:
        """Return the native struct of a layer's adapters, and the register of their inner values; None if it has none.

        NotLowered for adapters that the program cannot compute."""
        if self.adapters is None or not isinstance(linear, Linear):
            return None
        if linear.adapter is None:
            return None
        found = linear.adapter.low_rank(self.adapters)
        if found is None or found.a.dtype not in PLAIN or not whole(found.a[0], found.b[0]):
            raise NotLowered(f"adapters of {linear.name} are no low-rank products that native code reads")
        begins = [rows.start for rows in linear.info.rows.values()]
        starts = torch.tensor([*begins, linear.info.out_features])
        layer = low_rank(found.a, found.b, found.ranks, starts)
        self.program.hold(layer, found, starts)
        _, parts, rank, _ = found.a.shape
        inner = self._inner_register(parts * rank)
        return layer, inner

    def _inner_register(self, width: int) -> int:
        """Return the register of ``width`` inner values of adapters for each token."""
        registers = self._inner_registers
        if width not in registers:
            inner = torch.zeros(self.program.most_tokens, width)
            registers[width] = self.program.register(inner)
        return registers[width]

    # ---- operations --------------------------------------------------------------------------------------------------

    def _embed(self) -> None:
        if self.model.embed.scheme is not None:
            raise NotLowered("the embedding is quantized")
        spec = self.spec
        embed = self._narrow(self.model.embed.weight)
        fields: Fields = {"data": embed, "format": FORMATS[embed.dtype]}
        fields["k"] = spec.hidden
        fields["alpha"] = self.model.scale
        fields["first_position"] = spec.first_position
        learned = self.model.positions
        if learned is not None:
            fields["positions"] = learned.weight
            fields["positions_format"] = FORMATS[learned.weight.dtype]
        self.program.add("embed", out=self.x, **fields)
        if spec.embed_norm:
            norm = self._norm("embed_norm")
            self.program.add("norm", in_=self.x, out=self.x, **norm)

    def _layer(self, i: int, layer: LayerSpec) -> None:
        name = f"layers.{i}."
        last = i + 1 == len(self.spec.layers)
        entry = None if layer.norms == AFTER else name + "norm1"
        attn = self._mixer(i, layer, entry)
        if last:  # behind the last attention only tokens from which a token is drawn are computed
            self.program.add("pick", in_=self.x, out=attn)
        o = self.modules[name + "attn.o"]
        down = self.modules[name + "mlp.down"]
        if layer.parallel:
            norm = "norm2" if layer.mlp_norm else "norm1"
            mid = self._mlp(name, layer, name + norm)
            self._add(attn, o, None, layer)
            self._add(mid, down, None, layer)
            return
        first, middle, second = norm_names(name, layer)
        self._add(attn, o, first, layer)
        mid = self._mlp(name, layer, middle)
        self._add(mid, down, second, layer)

    def _mixer(self, i: int, layer: LayerSpec, norm: str | None) -> int:
        """Add the operations of attention, or of a recurrent layer, in layer i; return the register of their
        outputs."""
        attention = self._layers[i]
        if attention is not None:
            return self._attention(i, layer, attention, norm)
        name = f"layers.{i}.attn."
        mixed = self._view("qkv", 0, self._wide(i))
        project = self.modules[name + "in"]
        self._product(project, self.x, mixed, norm)
        if not isinstance(layer.recurrent, GatedDelta):
            conv: Any = self.modules[name + "conv"]
            return self._convolution(conv, mixed)
        delta: Any = self.modules[name + "delta"]
        gates = self._view("gates", 0, 2 * delta.heads)
        self._product(self.modules[name + "gates"], self.x, gates, norm)
        return self._delta_net(delta, gates)

    def _delta_net(self, module: DeltaNet, gates: int) -> int:
        """Add the operations of a delta rule and its gated norm; return the register of the outputs.

        The register ``gates`` holds b | a.

        NotLowered if the delta rule runs as a Triton kernel."""
        if module.native_conv is None:
            raise NotLowered(f"{module.name} runs as a Triton kernel")
        x = self._view("qkv", 0, module.channels)
        out = self._view("attn", 0, module.inner)
        z = self._view("qkv", module.channels, module.inner)
        memory = module.layer.memory
        layer = module.structure()
        self.program.hold(layer)
        address = ctypes.addressof(layer)
        self.program.add("delta", in_=x, n=gates, out=out, data=address)
        width = module.spec.width
        self._keep(x, memory["ring"], width)
        self._keep(gates, memory["gates"], width)
        fields: Fields = {"heads": module.heads, "eps": module.spec.eps}
        fields["norm_weight"] = module.norm.float()
        fields["activation"] = ACTIVATIONS["silu"]
        self.program.add("gate", in_=out, out=z, **fields)
        return z

    def _convolution(self, module: ShortConvolution, mixed: int) -> int:
        """Add the operations of a short convolution of the register ``mixed``, b | c | x; return the register of the
        outputs."""
        channels, width = module.weight.shape
        ring = module.layer.memory["ring"]
        out = self._view("attn", 0, channels)
        fields: Fields = {"data": ring, "format": FORMATS[ring.dtype]}
        fields["n"] = ring.shape[1]
        fields["k"] = width
        fields["scale"] = newest_first(module.weight)
        fields["bias"] = _widened(module.bias)
        self.program.add("conv", in_=mixed, out=out, **fields)
        x = self._view("qkv", 2 * channels, channels)
        self._keep(x, ring, width)
        return out

    def _keep(self, register: int, ring: Tensor, width: int) -> None:
        """Add the operation that stores the newest inputs of each row in a ring; a token reads ``width`` inputs."""
        places = ring.shape[1]
        kind = FORMATS[ring.dtype]
        self.program.add("keep", in_=register, data=ring, n=places, k=width, format=kind)

    def _attention(self, i: int, layer: LayerSpec, attention: AttnLayer, norm: str | None) -> int:
        """Add the operations of the projection and of attention in layer i; return the register of the heads'
        outputs."""
        spec = attention.spec
        queries = spec.heads * spec.dim_qk
        keys = spec.kv_heads * spec.dim_qk
        values = spec.kv_heads * spec.dim_v
        outputs = spec.heads * spec.dim_v
        qkv = self._view("qkv", 0, self._wide(i))
        attn = self._view("attn", 0, outputs)
        self._product(self._qkv(i), self.x, qkv, norm)
        if layer.qk_norm == WIDTH:
            q = self._view("qkv", 0, queries)
            k = self._view("qkv", queries, keys)
            for which, part in (("q", q), ("k", k)):
                norm_of = self._norm(f"layers.{i}.attn.{which}_norm")
                self.program.add("norm", in_=part, out=part, **norm_of)
        fields = self._geometry(attention)
        fields |= self._prepared(self.blocks[i].pre)
        fields |= self._cached(attention.cache)
        self.program.add("attend", in_=qkv, out=attn, **fields)
        if not layer.gated:
            return attn
        gate = self._view("qkv", queries + keys + values, outputs)
        self.program.add("gate", in_=attn, out=gate, heads=spec.heads, activation=ACTIVATIONS["sigmoid"])
        return gate

    def _geometry(self, attention: AttnLayer) -> Fields:
        """Return the fields of the attention operation for the heads, the window and the softmax of a layer."""
        spec = attention.spec
        fields: Fields = {"kv_group": attention.group}
        for name in ("heads", "kv_heads", "dim_qk", "dim_v", "softmax_scale"):
            fields[name] = getattr(spec, name)
        fields["window"] = spec.window or 0
        fields["cap"] = spec.softcap or 0.0
        fields["sinks"] = attention.sinks
        return fields

    def _prepared(self, pre: Any) -> Fields:
        """Return the fields of the attention operation for rotary embeddings, and for norms of q and k."""
        fields: Fields = {"cos": pre.cos, "sin": pre.sin}
        fields["rope_dim"] = 0 if pre.cos is None else pre.cos.shape[1]
        fields["eps"] = pre.eps
        fields["q_norm"] = _widened(pre.q_norm)
        fields["k_norm"] = _widened(pre.k_norm)
        return fields

    def _cached(self, cache: Mapping[str, Tensor]) -> Fields:
        """Return the fields of the attention operation for the tensors of the KV cache of a layer."""
        keys = cache["k"]
        fields: Fields = {"keys": keys, "values": cache["v"]}
        fields["kv_format"] = FORMATS[keys.dtype]
        fields["key_scales"] = cache.get("k_scale")
        fields["value_scales"] = cache.get("v_scale")
        return fields

    def _mlp(self, name: str, layer: LayerSpec, norm: str | None) -> int:
        """Add the operation of an MLP's first linear layer and activation; return the register that its last layer
        reads."""
        mlp = layer.mlp
        assert isinstance(mlp, MLP)  # a layer of experts is not lowered
        out = self._view("mid", 0, mlp.inner)
        first = "mlp.gate_up" if mlp.gated else "mlp.up"
        activation = ACTIVATIONS[mlp.activation]
        up = self.modules[name + first]
        self._product(up, self.x, out, norm, gated=int(mlp.gated), activation=activation)
        return out

    def _add(self, x: int, linear: Any, after: str | None, layer: LayerSpec) -> None:
        """Add the operations for stream += scale * after(linear(x)); ``after`` names a norm, None means none."""
        scale = layer.residual_scale
        if after is None:
            self._product(linear, x, self.x, None, adds=1, alpha=scale)
            return
        self._product(linear, x, self.branch, None)
        norm = self._norm(after)
        self.program.add("norm", in_=self.branch, out=self.x, adds=1, alpha=scale, **norm)

    def _head(self, logits: int) -> None:
        fields = self._weight(self.model.head)
        fields["alpha"] = self.spec.logit_scale
        self.program.add("product", sampling=True, in_=self.out, out=logits, **fields)
        cap = self.spec.logit_cap
        if cap is not None:
            self.program.add("cap", sampling=True, in_=logits, out=logits, cap=cap)


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
        norm = self._norm("embedding_norm")
        self.program.add("norm", in_=left, out=left, **norm)
        states = self.program.register(self.states)
        norm = self._norm("hidden_norm")
        self.program.add("norm", in_=states, out=right, **norm)
        weight = self._weight(self.modules["fc"])
        joined = self.program.register(both)
        self.program.add("product", in_=joined, out=self.x, **weight)


def _widened(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor in float32; None for None."""
    if tensor is None:
        return None
    return tensor.float()


def _equal(copy: Tensor, weight: Tensor) -> bool:
    """Return whether a narrower copy of a weight has the same numbers; compares 4096 rows at a time."""
    pieces = zip(copy.split(4096), weight.split(4096), strict=True)
    return all(torch.equal(narrow.float(), wide) for narrow, wide in pieces)
