"""A factory of the modules of a model.

They apply quantization, tensor parallelism and the attention back end, so that a model need not handle them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttnLayer, AttnSpec
from minivllm.core.interfaces.decoder import MLP, GatedDelta, Norm, Rope, ShortConv
from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource, Quantizer, Shard, WeightScheme
from minivllm.errors import ModelError, PluginError, from_file, shown

from . import invariant
from .activation import APPLY, gate_mul, gate_out
from .attention import AttentionLayer
from .communicator import share_of
from .delta_net import DeltaNet
from .embedding import Embedding, LMHead, TiedLMHead, VocabRange
from .expert_linear import DenseExperts, ExpertLinear, RouterLinear
from .fused import GatedLinear, Joined, LinearNorm, Normed, NormedLinear, NormFusing
from .linear import Dense, Linear
from .module import Module, Tensors
from .norm import HeadsNorm, LayerNorm, RMSNorm, SplitNorm
from .rotary import query_factors, rotary_tables
from .short_conv import ShortConvolution
from .state_layer import StateLayer

PartSizes = Sequence[tuple[str, int]]  # (name, outputs) of each part of a merged linear layer
WeightShapes = Mapping[str, tuple[Sequence[int], str | None]]  # name of a weight -> (shape, dtype)
CosSin = tuple[Tensor, Tensor]  # rotary tables of cos and sin, f32 [positions, dim]
AnyNorm = RMSNorm | LayerNorm


class Found(NamedTuple):
    """The checkpoint's tensors of each module, by module name, in the form of ``ModuleInfo.sources`` and ``.names``.

    ``sources`` None means that the checkpoint has not been read."""

    sources: Mapping[str, Mapping[str, PartSource]] | None = None
    names: Mapping[str, Mapping[str, str]] = {}


def no_rows(info: ModuleInfo) -> int:
    """Return 0, the number of further rows behind a weight if no adapter method needs any."""
    return 0


class ModuleParts:
    """A factory of modules that also stores them: ``modules`` by name for the loader, ``layers`` for the KV cache.

    A model passes the full sizes to every method; the methods compute this process's share.  ``group`` is the
    communicator of the processes that share the model.  None means that nothing is communicated: there is one process,
    or ``shard`` sets the share.  ``groups`` lists the attention layers of each KV group; None puts layers of equal
    geometry into one group, in the order in which they are made.  With ``batch_invariant`` the result of a row has the
    same bits for every batch that contains the row.  ``unfused`` names the fused kernels that are not used, as in
    ``StepWiring``.
    """

    def __init__(
        self,
        device: str,
        dtype: str | torch.dtype,
        quantizer: Quantizer,
        backend: AttentionBackend,
        shard: Shard | None = None,
        group: Any = None,
        groups: Sequence[Sequence[int]] | None = None,
        fuse: bool = False,
        batch_invariant: bool = False,
        unfused: Sequence[str] = (),
    ) -> None:
        self.device = str(device)
        self.shard = shard or share_of(group)
        self.group = group
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.arch: Any = None  # the architecture plug-in (``ModelArch``), which builds the model with this factory
        self.quantizer = quantizer
        self.backend = backend
        self.fuse = fuse
        self.invariant = batch_invariant
        # ``pairs``: whether a linear layer and its neighbours may run as one kernel for few rows.  The bits of a result
        # then depend on the number of rows.
        pairs = fuse and "pairs" not in unfused
        self.pairs = pairs and not batch_invariant
        self.fuse_norms = fuse and "norms" not in unfused
        self.fuse_gate = fuse and "gate" not in unfused
        # ``fixed_gates``: whether a gate runs in the product's kernel for any number of rows, with equal bits
        fixed = batch_invariant and self.device != "cpu"
        self.fixed_gates = fixed and pairs and self.fuse_gate
        self.described = False  # whether the model is a plain ``Decoder`` of its architecture's ``DecoderSpec``
        self.found = Found()
        self.loaded: Any = None  # ``loading.weights.LoadedRules``, once the weights are loaded
        self.modules: dict[str, Module] = {}
        self.layers: list[AttnLayer] = []  # layers[i].index == i
        self.states: list[StateLayer] = []  # memory of the layers with recurrent states
        self._group_of: dict[int, int] = {}  # KV group of each attention layer; empty if ``groups`` is None
        for number, members in enumerate(groups or ()):
            self._group_of |= dict.fromkeys(members, number)
        self._geometries: list[tuple] = []
        # returns the number of further rows behind the weight of a linear layer (``AdapterMethod.rows_behind``)
        self.rows_behind: Callable[[ModuleInfo], int] = no_rows
        self.free_rows = 0  # rows of the rotary tables behind those of positions, for positions inside of images
        self._tables: dict[tuple[Rope, bool], CosSin] = {}
        self._factors: dict[tuple[Rope, bool], Tensor | None] = {}
        # index of an attention layer -> its (cos, sin) tables, for layers that rotate keys
        self.rotations: dict[int, CosSin] = {}

    def add(self, module: Any) -> Any:
        """Store a module for the loader, and return it.  ValueError if another module has the same name."""
        if module.name in self.modules:
            raise ValueError(f"two modules are named {module.name!r}")
        self.modules[module.name] = module
        return module

    def _share(self, n: int, what: str) -> int:
        size = self.shard.size
        if n % size:
            raise ModelError(f"{what}={n} cannot be split over {size} processes: expected a divisor of {n}")
        return n // size

    def _info(self, name: str, kind: str, inp: int, parts: PartSizes, **fields: Any) -> ModuleInfo:
        found = self.found
        fields["names"] = found.names.get(name, {})
        if found.sources is not None:
            fields["sources"] = found.sources.get(name, {})
        fields["shard"] = self.shard
        fields["dtype"] = str(self.dtype).removeprefix("torch.")
        fields["device"] = self.device
        return ModuleInfo(name, kind, inp, tuple(parts), **fields)

    def heads(self, n: int) -> int:
        """Return how many of the model's n query heads this process has.  ModelError if n is no multiple of the
        processes."""
        return self._share(n, "heads")

    def kv_heads(self, n: int) -> int:
        """Return the number of this process's KV heads, of n in the model.

        With fewer KV heads than processes each process has one head, and neighbouring processes have copies of it.
        ModelError if neither number divides the other."""
        if self._copies(n) > 1:
            return 1
        return self._share(n, "KV heads")

    def _copies(self, kv_heads: int) -> int:
        """Return how many processes have a copy of the same KV head; 0 or 1 means that no head is copied."""
        size = self.shard.size
        if size % kv_heads:
            return 1
        return size // kv_heads

    def linear(self, name: str, inp: int, parts: PartSizes, *, bias: bool = False, split: str | None = None) -> Linear:
        """Make a linear layer of ``inp`` inputs.  ``parts`` are (name, outputs), stacked in one weight matrix.

        ``split`` is the part that the processes divide: "column" for the outputs of each part, "row" for the inputs, or
        None.  ModelError if the processes do not divide a size evenly.
        """
        inp, parts = self._shares(name, inp, parts, split)
        return self._linear(name, inp, parts, bias=bias, split=split)

    def _linear(self, name: str, inp: int, parts: PartSizes, **fields: Any) -> Linear:
        """Make a linear layer from this process's sizes.  ``fields`` are further fields of ``ModuleInfo``."""
        info = self._info(name, "linear", inp, parts, **fields)
        scheme = self._scheme(info)
        if scheme is None:
            behind = self.rows_behind(info)
            scheme = Dense(info, self.pairs, invariant=self.invariant, behind=behind)
        return self.add(Linear(info, scheme, self.group))

    def qkv(self, name: str, inp: int, spec: AttnSpec, bias: bool, gated: bool = False) -> Linear:
        """Make one projection with the parts "q", "k" and "v".

        ``gated`` adds the part "gate"; the output of attention is multiplied by its sigmoid.
        """
        heads = self.heads(spec.heads)
        kv_heads = self.kv_heads(spec.kv_heads)
        sizes = [("q", heads * spec.dim_qk)]
        sizes.append(("k", kv_heads * spec.dim_qk))
        sizes.append(("v", kv_heads * spec.dim_v))
        if gated:
            sizes.append(("gate", heads * spec.dim_v))
        copies = dict.fromkeys("kv", self._copies(spec.kv_heads))
        return self._linear(name, inp, sizes, bias=bias, split="column", copies=copies)

    def delta_net(self, name: str, hidden: int, spec: GatedDelta) -> DeltaNet:
        """Make a gated delta net without its output projection: Normed -> [T, value_heads * value_dim] of this process.

        The module of its input projection is named ``name.in``, that of its gates ``name.gates``, and that of its other
        weights ``name.delta``.  ModelError if the processes do not divide the key heads."""
        self._share(spec.key_heads, f"{name}: key heads")
        keys = spec.key_heads * spec.key_dim
        values = spec.inner
        mixed = [("q", keys), ("k", keys), ("v", values), ("z", values)]
        gates = [(part, spec.value_heads) for part in "ba"]
        project = self._column(name + ".in", hidden, mixed)
        gate = self._column(name + ".gates", hidden, gates)
        where = self.dtype, self.device
        made = DeltaNet(name + ".delta", spec, self.shard, project, gate, *where, self.fuse, self.invariant)
        self.states.append(made.layer)
        return self.add(made)

    def _column(self, name: str, hidden: int, parts: PartSizes, bias: bool = False) -> NormedLinear:
        """Make a linear layer of a norm's result, whose outputs the processes divide."""
        linear = self.linear(name, hidden, parts, bias=bias, split="column")
        return self.normed_linear(linear)

    def short_conv(self, name: str, hidden: int, spec: ShortConv) -> ShortConvolution:
        """Make a gated short convolution without its output projection: Normed -> [T, inner] of this process.

        The module of its input projection is named ``name.in``, and that of the convolution ``name.conv``.  ModelError
        if the processes do not divide the channels."""
        parts = [(part, spec.inner) for part in "bcx"]
        project = self._column(name + ".in", hidden, parts, spec.bias)
        where = self.dtype, self.device
        made = ShortConvolution(name + ".conv", spec, self.shard, project, *where, self.fuse)
        self.states.append(made.layer)
        return self.add(made)

    def _shares(self, name: str, inp: int, parts: PartSizes, split: str | None) -> tuple[int, PartSizes]:
        if split == "column":
            shares = [(part, self._share(rows, f"{name}.{part} outputs")) for part, rows in parts]
            return inp, shares
        if split == "row":
            return self._share(inp, f"{name} inputs"), parts
        if split is not None:
            raise ValueError(f"split={split!r}: expected None, 'column' or 'row'")
        return inp, parts

    def _scheme(self, info: ModuleInfo) -> WeightScheme | None:
        """Return the quantizer's scheme for a module; None means that the module stays unquantized.

        PluginError if the quantizer returns any other type."""
        scheme = self.quantizer.scheme(info)
        if scheme is not None and not isinstance(scheme, WeightScheme):
            kind = type(self.quantizer).__name__
            who = f"quantizer {kind}{from_file(self.quantizer)}"
            raise PluginError(f"{who}: scheme() gave {shown(scheme)} for {info.name}; expected a WeightScheme, or None")
        return scheme

    def _scheme_or_dense(self, info: ModuleInfo) -> WeightScheme:
        """Return the quantizer's scheme for a module, or the scheme of an unquantized weight."""
        scheme = self._scheme(info)
        if scheme is not None:
            return scheme
        return Dense(info, self.pairs, invariant=self.invariant)

    def router(
        self, name: str, inp: int, outputs: int = 1, bias: bool = False, choice_bias: bool = False
    ) -> RouterLinear:
        """Make a router: x [T, inp] -> logits [T, outputs].

        There is one output per expert, or a single output that gates a shared expert.  ``choice_bias`` adds a number
        per expert that affects only the choice of experts.
        """
        parts = [("", outputs)]
        info = self._info(name, "router", inp, parts, bias=bias)
        scheme = self._scheme_or_dense(info)
        return self.add(RouterLinear(info, scheme, choice_bias))

    def expert_linear(self, name: str, inp: int, count: int, parts: PartSizes, bias: bool, split: str) -> ExpertLinear:
        """Make one linear layer that stacks the weights of ``count`` experts.

        Each expert has all of ``parts`` (name, outputs); the layer's parts are "0.gate", "0.up", "1.gate" ...
        ``split`` is as in ``linear``.  PluginError if the quantizer's scheme cannot store experts."""
        inp, parts = self._shares(name, inp, parts, split)
        every = []
        for e in range(count):
            for part, rows in parts:
                stacked = f"{e}.{part}" if part else str(e)
                every.append((stacked, rows))
        info = self._info(name, "experts", inp, every, bias=bias, split=split, experts=count)
        scheme = self._scheme(info)
        if scheme is None:
            scheme = DenseExperts(info, self.fuse)
        kind = type(scheme)
        if kind.expert is WeightScheme.expert:
            raise PluginError(
                f"{kind.__name__} stores no experts ({name}): use a quantizer that does, or leaves them out"
            )
        if isinstance(scheme, DenseExperts):
            scheme.invariant = self.invariant
        return self.add(ExpertLinear(info, scheme, self.group))

    def tensors(self, name: str, shapes: WeightShapes) -> Mapping[str, Tensor]:
        """Make uninitialized weights that the architecture itself computes with, unsplit on every process.

        ``shapes`` maps a weight's name to its shape and dtype; a dtype of None means the model's."""
        made = {}
        for param, (shape, kind) in shapes.items():
            dtype = getattr(torch, kind) if kind else self.dtype
            made[param] = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        module = Tensors(name, made)
        return self.add(module).tensors

    def embedding(self, name: str, rows: int, dim: int, whole: bool = False, packable: bool = False) -> Embedding:
        """Make an embedding of ``rows`` vectors of ``dim`` elements, split by rows over the processes.

        ``whole`` keeps all rows on every process, which is better for a small table.  ``packable`` lets the quantizer
        store it: the model must then read rows only by calling the module."""
        group = None if whole else self._ranks
        here = VocabRange(rows, share_of(group)).rows
        info = self._info(name, "embedding", dim, [("", here)])
        scheme = self._scheme(info) if packable else None
        if scheme is not None and type(scheme).gather is WeightScheme.gather:
            scheme = None
        return self.add(Embedding(info, rows, scheme, group))

    @property
    def _ranks(self) -> Any:
        """Return the communicator of the processes that share the model; None if one process has all of it."""
        return self.group if self.shard.size > 1 else None

    def lm_head(self, name: str, inp: int, vocab: int, tied: Embedding | None = None) -> LMHead | TiedLMHead:
        """Make the output head: hidden states [N, inp] -> logits [N, vocab].

        ``tied`` is the embedding whose weight the head shares; None gives the head its own.  ModelError for a quantized
        checkpoint whose vocabulary the processes do not divide."""
        group = self._ranks
        size = share_of(group).size
        even = vocab % size == 0
        split = "column" if even and size > 1 else None
        here = -(-vocab // size)
        info = self._info(name, "lm_head", inp, [("", here)], split=split)
        if not even and _is_packed(info):
            raise ModelError(
                f"{name} comes quantized, and its {vocab} outputs cannot be shared by {size} processes: expected a "
                "tensor_parallel_size that divides them"
            )
        if tied is not None:
            return self.add(TiedLMHead(info, tied, self._scheme, self.pairs, self.invariant))
        scheme = self._scheme_or_dense(info)
        return self.add(LMHead(info, scheme, vocab, group))

    def norm(self, name: str, dim: int, kind: Norm | float) -> AnyNorm:
        """Make a norm over ``dim`` elements.  A ``kind`` that is a number means an RMSNorm with that epsilon."""
        kind = kind if isinstance(kind, Norm) else Norm(kind)
        make = LayerNorm if kind.centered else RMSNorm
        return self.add(make(name, dim, kind, self.dtype, self.device, self.fuse_norms))

    def width_norm(self, name: str, heads: int, dim: int, kind: Norm, keys: bool) -> AnyNorm | SplitNorm:
        """Make one norm over all ``heads`` heads of ``dim`` elements together, as a projection returns them.

        ``keys`` means that they are KV heads, of which processes may have copies.  ModelError for a LayerNorm that is
        split over processes.
        """
        width = heads * dim
        if self.shard.size == 1:
            return self.norm(name, width, kind)
        if kind.centered:
            raise ModelError(f"{name}: LayerNorm over all heads is not split: set tensor_parallel_size=1")
        copies = self._copies(heads) if keys else 1
        norm = SplitNorm(name, width, kind, self.dtype, self.device, self.group, copies)
        return self.add(norm)

    def heads_norm(self, name: str, heads: int, dim: int, kind: Norm, keys: bool) -> HeadsNorm:
        """Make a norm that normalises each of ``heads`` heads of ``dim`` elements separately, with its own weights.

        ``keys`` means that they are KV heads, of which processes may have copies.
        """
        if keys:
            copies = self._copies(heads)
            count = self.kv_heads(heads)
        else:
            copies = 1
            count = self.heads(heads)
        first = self.shard.rank // copies * count
        here = range(first, first + count)
        norm = HeadsNorm(name, heads, here, dim, kind, self.dtype, self.device)
        return self.add(norm)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return the elementwise activation of an MLP without a gate, by its name in ``decoder.ACTIVATIONS``."""
        if self.invariant:
            return partial(invariant.activate, activation=name)
        return APPLY[name]

    @property
    def gate_mul(self) -> Callable[..., Tensor]:
        """Return the function that gates an MLP: [T, 2 n] = gate | up -> activation(gate) * up [T, n]."""
        if not self.fuse_gate:
            return invariant.gate_mul if self.invariant else gate_mul
        from minivllm.device.kernels.activation import gate_mul as fused

        return fused

    @property
    def gate_out(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function that gates the output of attention: x, gate [T, n] -> x * sigmoid(gate)."""
        if self.fuse_gate:
            from minivllm.device.kernels.activation import gate_out as fused

            return fused
        # torch's sigmoid on a CPU rounds an element differently at different positions
        positional = self.invariant and self.device == "cpu"
        return invariant.gate_out if positional else gate_out

    def mlp_up(self, name: str, hidden: int, mlp: MLP) -> Callable[[Normed], Tensor]:
        """Make the first half of an MLP: Normed -> activation(gate) * up [T, inner]; without a gate, activation(up)."""
        if mlp.gated:
            sizes = [(part, mlp.inner) for part in ("gate", "up")]
            linear = self.linear(name + ".gate_up", hidden, sizes, bias=mlp.bias, split="column")
            return self.gated_linear(linear, mlp.activation)
        plain = self._column(name + ".up", hidden, [("", mlp.inner)], mlp.bias)
        activation = self.activation(mlp.activation)

        def up(h: Normed) -> Tensor:
            return activation(plain(h))

        return up

    def mlp_down(self, name: str, hidden: int, mlp: MLP) -> Linear:
        out = [("", hidden)]
        return self.linear(name + ".down", mlp.inner, out, bias=mlp.bias, split="row")

    def normed_linear(self, linear: Linear) -> NormedLinear:
        """Wrap a linear layer to take a Normed input: Normed -> linear(x) [T, out]; see ``device.layers.fused``."""
        return NormedLinear(linear, self._fuses(linear))

    def _fuses(self, linear: Linear) -> bool:
        """Return whether a product may run as one kernel with the norm before it and the gate behind it."""
        return self.pairs or (self.fixed_gates and isinstance(linear.scheme, Dense))

    def gated_linear(self, linear: Linear, activation: str = "silu") -> GatedLinear:
        """Join a linear layer and the gate behind it: Normed -> activation(gate) * up [T, n].

        The output of ``linear`` is gate | up, [T, 2 n]."""
        return GatedLinear(linear, self.gate_mul, self._fuses(linear), activation, divides=self.fuse_gate)

    def linear_norm(
        self,
        linear: Linear | NormFusing,
        norm: AnyNorm | None,
        whole: bool = False,
        after: AnyNorm | None = None,
        scale: float = 1.0,
    ) -> LinearNorm | Joined:
        """Join a linear layer, the addition to the residual stream and the norm of the next product.

        The result is ``(x, residual) -> (Normed(norm(sum)), sum)`` with sum = residual + scale * after(linear(x)).
        ``whole`` means that the norm is computed fully, because no product follows that could divide by the root mean
        square.  With ``norm`` None the Normed holds the sum itself; ``after`` None is left out.
        """
        plain = after is None and scale == 1.0
        if not plain or not isinstance(norm, RMSNorm):
            return Joined(linear, after, norm, scale)
        if isinstance(linear, NormFusing):
            return linear.with_norm(norm, whole)
        return LinearNorm(linear, norm, self.pairs, whole)

    def attention(self, index: int, spec: AttnSpec, name: str | None = None) -> AttentionLayer:
        """Make an attention layer and append it to ``layers`` with this process's share of the heads.

        ``index`` counts the layers with attention from 0; they must be made in order (ValueError).  ``spec`` has the
        sizes of the whole model.  ``name`` is the module's; None means "layers.INDEX.attn"."""
        made = len(self.layers)
        if index != made:
            raise ValueError(f"attention layer {index} made after {made} others: make them in order")
        heads = self.heads(spec.heads)
        kv_heads = self.kv_heads(spec.kv_heads)
        slopes = self._slopes(index, spec)
        local = replace(spec, heads=heads, kv_heads=kv_heads, alibi=slopes)
        group = self._kv_group(index, spec)
        layer = AttnLayer(index, group, local)
        self.layers.append(layer)
        name = name or f"layers.{index}.attn"
        return self.add(AttentionLayer(name, layer, self.backend, self.device, self.shard))

    def _kv_group(self, index: int, spec: AttnSpec) -> int:
        """Return the KV group of attention layer ``index``."""
        if self._group_of:
            return self._group_of[index]
        geometry = spec.geometry
        if geometry not in self._geometries:
            self._geometries.append(geometry)
        return self._geometries.index(geometry)

    def _slopes(self, index: int, spec: AttnSpec) -> tuple[float, ...] | None:
        """Return the ALiBi slopes of this process's heads; None if the layer has none.

        ModelError if the number of slopes is not the number of heads of the whole model."""
        slopes = spec.alibi
        if slopes is None:
            return None
        if len(slopes) != spec.heads:
            raise ModelError(
                f"layer {index}: alibi has {len(slopes)} slopes: expected one for each of {spec.heads} heads"
            )
        heads = self.heads(spec.heads)
        first = self.shard.rank * heads
        return slopes[first : first + heads]

    def rotary(self, rope: Rope, twice: bool = False) -> CosSin:
        """Return the cos and sin tables of ``rotary.rotary_tables`` for all positions that the engine allows.

        Layers of equal ``rope`` share the tables.  ModelError for a rope that changes with the length of a request
        (``rope.switch``) unless ``twice`` makes the tables of both lengths."""
        if rope.switch is not None and not twice:
            raise ModelError(
                f"rope_type={rope.kind!r} needs other tables above {rope.switch} tokens, which only a Decoder supports"
            )
        key = (rope, twice)
        if key not in self._tables:
            cos, sin = rotary_tables(rope, self._positions, self.device, twice)
            if self.free_rows:
                free = cos.new_zeros(self.free_rows, cos.shape[1])
                cos = torch.cat((cos, free))
                sin = torch.cat((sin, free))
            self._tables[key] = cos, sin
        return self._tables[key]

    @property
    def _positions(self) -> int:
        """Return the number of positions that the engine allows."""
        return self.backend.ctx.max_len + 1

    def query_factors(self, rope: Rope, twice: bool = False) -> Tensor | None:
        """Return the factors of ``rotary.query_factors`` for the rows of ``rotary``, None if queries have none.

        Layers of equal ``rope`` and ``twice`` share them.
        """
        key = (rope, twice)
        if key not in self._factors:
            factors = query_factors(rope, self._positions, self.device, self.dtype, twice)
            if factors is not None and self.free_rows:
                free = factors.new_ones(self.free_rows)
                factors = torch.cat((factors, free))
            self._factors[key] = factors
        return self._factors[key]

    def rotary_tables(self) -> list[CosSin]:
        """Return the cos and sin of all rotary tables.  ``free_rows`` rows of zeros follow the rows of positions."""
        return list(self._tables.values())


def _is_packed(info: ModuleInfo) -> bool:
    """Return whether the checkpoint has other tensors of a module than a plain weight and bias."""
    sources = info.sources or {}
    params = {param for source in sources.values() for param in source.tensors}
    return not params <= {"weight", "bias"}
