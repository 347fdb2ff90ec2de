"""The makers of a model's modules: quantization, tensor parallelism and the attention back end are inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttnLayer, AttnSpec
from minivllm.core.interfaces.decoder import MLP, GatedDelta, Norm, Rope
from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource, Quantizer, Shard, WeightScheme
from minivllm.errors import ModelError, PluginError, from_file, shown

from . import invariant
from .activation import APPLY, gate_mul
from .attention import AttentionLayer
from .communicator import share_of
from .delta_net import DeltaNet, StateLayer
from .embedding import Embedding, LMHead, TiedLMHead, VocabRange
from .expert_linear import DenseExperts, ExpertLinear, RouterLinear
from .fused import GatedLinear, Joined, LinearNorm, Normed, NormedLinear, NormFusing
from .linear import Dense, Linear
from .module import Module, Tensors
from .norm import HeadsNorm, LayerNorm, RMSNorm, SplitNorm
from .rotary import rotary_tables


class Found(NamedTuple):
    """What is known of a checkpoint's tensors, by module: as ``ModuleInfo.sources`` and ``ModuleInfo.names``."""

    sources: Mapping[str, Mapping[str, PartSource]] | None = None
    names: Mapping[str, Mapping[str, str]] = {}


class ModuleParts:
    """Makes modules and remembers them: ``modules`` by name for the loader, ``layers`` for the KV cache.

    ``batch_invariant``: what they give a row has the same bits whatever rows are beside it.
    A model gives full sizes everywhere; this process's share is taken here, ``group`` being its end of the communicator
    of those that share the model (None: it is alone, or ``shard`` says what it would have).  ``groups`` names the
    layers of each KV group; without it layers of equal geometry form one, in the order they come.  ``unfused``: as in
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
        self.device, self.shard, self.group = str(device), shard or share_of(group), group
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.arch: Any = None  # the plug-in that describes or builds the model
        self.quantizer, self.backend, self.fuse, self.invariant = quantizer, backend, fuse, batch_invariant
        # the kernels for pairs go by the number of rows
        self.pairs = fuse and not batch_invariant and "pairs" not in unfused
        self.fuse_norms, self.fuse_gate = (fuse and which not in unfused for which in ("norms", "gate"))
        self.described = False  # the model is what its architecture's table says, and nothing else
        self.found = Found()
        self.modules: dict[str, Module] = {}
        self.layers: list[AttnLayer] = []  # layers[i].index == i
        self.states: list[StateLayer] = []  # layers with a recurrent state
        self._group_of = None if groups is None else {layer: g for g, members in enumerate(groups) for layer in members}
        self._geometries: list[tuple] = []
        self._tables: dict[tuple[Rope, bool], tuple[Tensor, Tensor]] = {}

    def _add(self, module: Any) -> Any:
        if module.name in self.modules:
            raise ValueError(f"two modules are named {module.name!r}")
        self.modules[module.name] = module
        return module

    def _share(self, n: int, what: str) -> int:
        if n % self.shard.size:
            raise ModelError(f"{what}={n} cannot be split over {self.shard.size} processes: want a divisor of {n}")
        return n // self.shard.size

    def _info(self, name: str, kind: str, inp: int, parts: Sequence[tuple[str, int]], **more: Any) -> ModuleInfo:
        dtype = str(self.dtype).removeprefix("torch.")
        sources = None if self.found.sources is None else self.found.sources.get(name, {})
        known = {"shard": self.shard, "sources": sources, "names": self.found.names.get(name, {})}
        return ModuleInfo(name, kind, inp, tuple(parts), dtype, self.device, **known, **more)

    def heads(self, n: int) -> int:
        """This process's share of n heads.  ModelError if they cannot be split evenly."""
        return self._share(n, "heads")

    def kv_heads(self, n: int) -> int:
        """Likewise of n KV heads; where there are fewer than processes each has one, the same as its neighbours."""
        return 1 if self._copies(n) > 1 else self._share(n, "KV heads")

    def _copies(self, kv_heads: int) -> int:
        """Processes that have the same KV head."""
        return 1 if self.shard.size % kv_heads else self.shard.size // kv_heads

    def linear(
        self, name: str, inp: int, parts: Sequence[tuple[str, int]], *, bias: bool = False, split: str | None = None
    ) -> Linear:
        """``parts``: (name, outputs) stacked in one matrix; ``split`` None, "column" (outputs) or "row" (inputs)."""
        inp, parts = self._shares(name, inp, parts, split)
        return self._linear(name, inp, parts, bias, split)

    def _linear(
        self,
        name: str,
        inp: int,
        parts: Sequence[tuple[str, int]],
        bias: bool,
        split: str | None,
        copies: Mapping[str, int] | None = None,
    ) -> Linear:
        info = self._info(name, "linear", inp, parts, bias=bias, split=split, copies=copies or {})
        return self._add(Linear(info, self._scheme(info) or self._dense(info), self.group))

    def qkv(self, name: str, inp: int, spec: AttnSpec, bias: bool, gated: bool = False) -> Linear:
        """Make one matrix for queries, keys and values, as parts "q", "k" and "v", and "gate" if ``gated``."""
        heads, kv_heads, copies = self.heads(spec.heads), self.kv_heads(spec.kv_heads), self._copies(spec.kv_heads)
        sizes = [("q", heads * spec.dim_qk), ("k", kv_heads * spec.dim_qk), ("v", kv_heads * spec.dim_v)]
        if gated:
            sizes.append(("gate", heads * spec.dim_v))
        return self._linear(name, inp, sizes, bias, "column", {"k": copies, "v": copies})

    def delta_net(self, name: str, hidden: int, spec: GatedDelta) -> DeltaNet:
        """Make a gated delta net without its last product: Normed -> [T, value_heads * value_dim] of this process.

        Its projections are the modules ``name.in`` and ``name.gates``, its own weights ``name.delta``."""
        self._share(spec.key_heads, f"{name}: key heads")
        keys, values = spec.key_heads * spec.key_dim, spec.inner
        mixed = [("q", keys), ("k", keys), ("v", values), ("z", values)]
        gates = [("b", spec.value_heads), ("a", spec.value_heads)]
        project, gate = (
            self.normed_linear(self.linear(name + end, hidden, parts, split="column"))
            for end, parts in ((".in", mixed), (".gates", gates))
        )
        made = DeltaNet(
            name + ".delta",
            spec,
            self.shard,
            project,
            gate,
            self.dtype,
            self.device,
            self.fuse,
            self.invariant,
        )
        self.states.append(made.layer)
        return self._add(made)

    def _shares(
        self, name: str, inp: int, parts: Sequence[tuple[str, int]], split: str | None
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        if split == "column":
            return inp, [(part, self._share(rows, f"{name}.{part} outputs")) for part, rows in parts]
        if split == "row":
            return self._share(inp, f"{name} inputs"), parts
        if split is not None:
            raise ValueError(f"split={split!r}: want None, 'column' or 'row'")
        return inp, parts

    def _scheme(self, info: ModuleInfo) -> WeightScheme | None:
        """The quantizer's, None: it leaves the module as it is.  PluginError for what is neither."""
        scheme = self.quantizer.scheme(info)
        if scheme is not None and not isinstance(scheme, WeightScheme):
            who = f"quantizer {type(self.quantizer).__name__}{from_file(self.quantizer)}"
            raise PluginError(f"{who}: scheme() gave {shown(scheme)} for {info.name}; want a WeightScheme, or None")
        return scheme

    def _dense(self, info: ModuleInfo) -> Dense:
        return Dense(info, self.pairs, invariant=self.invariant)

    def router(
        self, name: str, inp: int, outputs: int = 1, bias: bool = False, choice_bias: bool = False
    ) -> RouterLinear:
        """x [T, inp] -> logits [T, outputs]: of experts, or of the gate of a shared one."""
        info = self._info(name, "router", inp, [("", outputs)], bias=bias)
        return self._add(RouterLinear(info, self._scheme(info) or self._dense(info), choice_bias))

    def expert_linear(
        self, name: str, inp: int, count: int, parts: Sequence[tuple[str, int]], bias: bool, split: str
    ) -> ExpertLinear:
        """The weights of ``count`` experts one after another, each of ``parts``: "0.gate", "0.up", "1.gate" ..."""
        inp, parts = self._shares(name, inp, parts, split)
        each = [(f"{e}.{part}" if part else str(e), rows) for e in range(count) for part, rows in parts]
        info = self._info(name, "experts", inp, each, bias=bias, split=split, experts=count)
        scheme = self._scheme(info)
        if scheme is not None and type(scheme).expert is WeightScheme.expert:
            raise PluginError(
                f"{type(scheme).__name__} stores no experts ({name}): want a quantizer that does, or leaves them out"
            )
        scheme = scheme or DenseExperts(info, self.fuse)
        if isinstance(scheme, DenseExperts):
            scheme.invariant = self.invariant
        return self._add(ExpertLinear(info, scheme, self.group))

    def tensors(self, name: str, shapes: Mapping[str, tuple[Sequence[int], str | None]]) -> Mapping[str, Tensor]:
        """Weights of the architecture's own, whole on every process: name -> shape and dtype (None: the model's)."""
        made = {
            param: torch.empty(tuple(shape), dtype=getattr(torch, dtype) if dtype else self.dtype, device=self.device)
            for param, (shape, dtype) in shapes.items()
        }
        return self._add(Tensors(name, made)).tensors

    def embedding(self, name: str, rows: int, dim: int, whole: bool = False, packable: bool = False) -> Embedding:
        """``whole``: processes that share the model have all of it each, as is better where it is small; ``packable``:
        it is looked up by calling it alone, so that a quantizer may hold it."""
        group = self.group if self.shard.size > 1 and not whole else None
        scheme, info = None, self._info(name, "embedding", dim, [("", VocabRange(rows, share_of(group)).rows)])
        if packable and (scheme := self._scheme(info)) is not None:
            scheme = None if type(scheme).gather is WeightScheme.gather else scheme
        return self._add(Embedding(info, rows, scheme, group))

    def lm_head(self, name: str, inp: int, vocab: int, tied: Embedding | None = None) -> LMHead | TiedLMHead:
        """``tied``: the embedding whose weight it shares, made before it."""
        group = self.group if self.shard.size > 1 else None
        size = share_of(group).size
        even = "column" if size > 1 and vocab % size == 0 else None
        info = self._info(name, "lm_head", inp, [("", -(-vocab // size))], split=even)
        packed = any(set(source.tensors) - {"weight", "bias"} for source in (info.sources or {}).values())
        if size > 1 and even is None and packed:
            raise ModelError(
                f"{name} comes quantized, and its {vocab} outputs cannot be shared by {size} processes: want a "
                "tensor_parallel_size that divides them"
            )
        if tied is not None:
            return self._add(TiedLMHead(info, tied, self._scheme, self.pairs, self.invariant))
        return self._add(LMHead(info, self._scheme(info) or self._dense(info), vocab, group))

    def norm(self, name: str, dim: int, kind: Norm | float) -> RMSNorm | LayerNorm:
        """``kind``: a number is the epsilon of a plain RMSNorm."""
        kind = kind if isinstance(kind, Norm) else Norm(kind)
        if kind.centered:
            return self._add(LayerNorm(name, dim, kind, self.dtype, self.device, self.fuse_norms))
        return self._add(RMSNorm(name, dim, kind, self.dtype, self.device, self.fuse_norms))

    def width_norm(self, name: str, heads: int, dim: int, kind: Norm, keys: bool) -> RMSNorm | LayerNorm | SplitNorm:
        """Over all ``heads`` of ``dim`` that a projection gives, ``keys``: to KV heads, which may be copied."""
        if self.shard.size == 1:
            return self.norm(name, heads * dim, kind)
        if kind.centered:
            raise ModelError(f"{name}: LayerNorm over all heads is not split: want tensor_parallel_size=1")
        copies = self._copies(heads) if keys else 1
        return self._add(SplitNorm(name, heads * dim, kind, self.dtype, self.device, self.group, copies))

    def heads_norm(self, name: str, heads: int, dim: int, kind: Norm, keys: bool) -> HeadsNorm:
        """Make the norm of each of ``heads`` heads of ``dim`` by itself, with weights for each.

        ``keys`` says that they are KV heads, of which processes may have copies."""
        copies = self._copies(heads) if keys else 1
        here = self.kv_heads(heads) if keys else self.heads(heads)
        first = self.shard.rank // copies * here
        return self._add(HeadsNorm(name, heads, range(first, first + here), dim, kind, self.dtype, self.device))

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Of an MLP without a gate, by its name in ``decoder.ACTIVATIONS``."""
        return partial(invariant.activate, activation=name) if self.invariant else APPLY[name]

    @property
    def gate_mul(self) -> Callable[..., Tensor]:
        """The gate of an MLP: [T, 2 n] = gate | up -> activation(gate) * up [T, n]."""
        if not self.fuse_gate:
            return invariant.gate_mul if self.invariant else gate_mul
        from minivllm.device.kernels.activation import gate_mul as fused

        return fused

    def mlp_up(self, name: str, hidden: int, mlp: MLP) -> Callable[[Normed], Tensor]:
        """The first half of an MLP, Normed -> activation(gate) * up, or without a gate activation(up) [T, inner]."""
        if mlp.gated:
            sizes = [("gate", mlp.inner), ("up", mlp.inner)]
            linear = self.linear(name + ".gate_up", hidden, sizes, bias=mlp.bias, split="column")
            return self.gated_linear(linear, mlp.activation)
        linear = self.linear(name + ".up", hidden, [("", mlp.inner)], bias=mlp.bias, split="column")
        plain, activation = self.normed_linear(linear), self.activation(mlp.activation)
        return lambda h: activation(plain(h))

    def mlp_down(self, name: str, hidden: int, mlp: MLP) -> Linear:
        return self.linear(name + ".down", mlp.inner, [("", hidden)], bias=mlp.bias, split="row")

    def normed_linear(self, linear: Linear) -> NormedLinear:
        """Normed -> linear(x) [T, out]; see ``device.layers.fused``."""
        return NormedLinear(linear, self.pairs)

    def gated_linear(self, linear: Linear, activation: str = "silu") -> GatedLinear:
        """Normed -> activation(gate) * up [T, n], where linear(x) [T, 2 n] = gate | up."""
        return GatedLinear(linear, self.gate_mul, self.pairs, activation, divides=self.fuse_gate)

    def linear_norm(
        self,
        linear: Linear | NormFusing,
        norm: RMSNorm | LayerNorm | None,
        whole: bool = False,
        after: RMSNorm | LayerNorm | None = None,
        scale: float = 1.0,
    ) -> LinearNorm | Joined:
        """Return ``(x, residual) -> (Normed of residual + scale * after(linear(x)), that sum)``.

        ``whole`` says that the norm is computed fully.  Without a ``norm`` the next product takes the sum itself."""
        if after is None and scale == 1.0 and isinstance(norm, RMSNorm):
            if isinstance(linear, NormFusing):
                return linear.with_norm(norm, whole)
            return LinearNorm(linear, norm, self.pairs, whole)
        return Joined(linear, after, norm, scale)

    def attention(self, index: int, spec: AttnSpec, name: str | None = None) -> AttentionLayer:
        """Make the attention of layer ``index``, which counts layers with attention from 0 in order.

        ``spec`` is the whole model's; ``layers`` keeps the share of this process.  ``name`` is the module's; None means
        that every layer has attention."""
        if index != len(self.layers):
            raise ValueError(f"attention layer {index} made after {len(self.layers)} others: want them in order")
        if self._group_of is None:
            if spec.geometry not in self._geometries:
                self._geometries.append(spec.geometry)
            group = self._geometries.index(spec.geometry)
        else:
            group = self._group_of[index]
        heads, slopes = self.heads(spec.heads), spec.alibi
        if slopes is not None:
            if len(slopes) != spec.heads:
                raise ModelError(
                    f"layer {index}: alibi has {len(slopes)} slopes: want one for each of {spec.heads} heads"
                )
            slopes = slopes[self.shard.rank * heads : (self.shard.rank + 1) * heads]
        local = replace(spec, heads=heads, kv_heads=self.kv_heads(spec.kv_heads), alibi=slopes)
        layer = AttnLayer(index, group, local)
        self.layers.append(layer)
        name = name or f"layers.{index}.attn"
        return self._add(AttentionLayer(name, layer, self.backend, self.device, self.shard))

    def rotary(self, rope: Rope, twice: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin for every position that the engine may ask for, as ``rotary.rotary_tables`` makes them; once for
        layers of equal rope.  ModelError for one table of a rope that changes with the length of a request."""
        if rope.switch is not None and not twice:
            raise ModelError(f"rope_type={rope.kind!r} changes at {rope.switch} tokens: want a model that is described")
        key = (rope, twice)
        if key not in self._tables:
            self._tables[key] = rotary_tables(rope, self.backend.ctx.max_len + 1, self.device, twice)
        return self._tables[key]
