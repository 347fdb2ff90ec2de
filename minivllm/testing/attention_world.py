"""Sequences with known keys and values, scattered over a poisoned paged cache, and steps as the engine makes them.

A *world* is a back end with a few layers.  Blocks lie in random order and may be shared, rows stand in slots of other
numbers, and everything that no query may see holds garbage: the null block, blocks of nobody, the slots of a sequence's
last block beyond its length, table entries beyond its length, and the table rows of other slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import (
    NULL_BLOCK,
    AttentionBackend,
    AttentionContext,
    AttnLayer,
    AttnMeta,
    AttnSpec,
    GraphKey,
)
from minivllm.core.interfaces.kvformat import KVFormat
from minivllm.registration.spec import Spec

from .attention_math import ExactAttention, Place, attend, check_selected, compare

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
GUARD = 3  # rows before and behind an output that must stay as they are
MARK = 7.0  # what they hold
STRANGERS = 4  # blocks of nobody, in each group


def make_meta(
    rows: Sequence[tuple[int, int, int]],
    table: np.ndarray,
    block: int,
    device: str = "cpu",
    ended: Collection[int] = (),
    ahead: int = 0,
) -> AttnMeta:
    """``rows``: (slot, q_len, kv_len), those of one token first; ``table`` i32 [G, S, M].

    The rows ``ended`` write to the null block, as those do that met their end on the device.  The host's lengths of
    rows that decode are too large by ``ahead``.
    """
    slots, q_len, kv_len = (np.array(x, np.int64) for x in zip(*rows, strict=True))
    decode_rows = int(np.argmax(np.append(q_len, 2) != 1))
    groups = len(table)
    row = np.repeat(np.arange(len(rows)), q_len)
    position = (kv_len - np.cumsum(q_len))[row] + np.arange(len(row))
    slot_map = table[:, slots[row], position // block].astype(np.int64) * block + position % block
    slot_map[:, np.isin(row, list(ended))] = 0
    host_q_len = q_len.astype(np.int32)
    host_q_len.flags.writeable = False
    host_kv_len = (kv_len + ahead * (np.arange(len(rows)) < decode_rows)).astype(np.int32)
    i32, i64 = (lambda x: torch.tensor(x, dtype=torch.int32, device=device)), lambda x: torch.tensor(x, device=device)
    return AttnMeta(
        slots=i64(slots),
        cu_q=i32(np.concatenate([[0], np.cumsum(q_len)])),
        q_len=i32(q_len),
        kv_len=i32(kv_len).expand(groups, len(rows)),
        position=i64(position),
        row=i64(row),
        table=i32(table),
        slot_map=i64(slot_map),
        block=block,
        decode_rows=decode_rows,
        host_q_len=host_q_len,
        host_kv_len=np.broadcast_to(host_kv_len, (groups, len(rows))),
    )


@dataclass(frozen=True)
class Setting:
    """What a world is made for: some layers, the dtype of the model, the KV format's name and the block size."""

    specs: tuple[AttnSpec, ...]
    dtype: str
    kv_format: str
    block: int

    def __str__(self) -> str:
        return f"{self.dtype}, kv_format={self.kv_format}, block={self.block}, {'; '.join(map(str, self.specs))}"


def keep_tensors(kept: dict[tuple[str, Any], Tensor], meta: AttnMeta, names: Collection[str] | None = None) -> None:
    """Put what the metadata holds into tensors that earlier steps had, so that a new step is no new tensor: whoever
    knows a step by a tensor's id or address takes it for an old one.  ``names``: of which fields; None: of all."""
    for field_ in fields(meta):
        value = getattr(meta, field_.name)
        if isinstance(value, Tensor) and (names is None or field_.name in names):
            place = (field_.name, value.shape)
            if place not in kept:
                kept[place] = value.clone(memory_format=torch.contiguous_format)
            setattr(meta, field_.name, kept[place].copy_(value))


@dataclass
class WorldSeq:
    """One sequence: its slot, and for each layer q, k and v of all tokens it will ever have, exact in the model's
    dtype: [capacity, heads, dim] on the CPU."""

    slot: int
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    length: int = 0  # tokens in the cache
    ended: bool = False  # has met its end: what is computed for it goes to the null block
    null: bool = False  # has no block at all: its table is full of null blocks

    @property
    def live(self) -> bool:
        return not (self.ended or self.null)


Rows = Sequence[tuple[WorldSeq, int]]  # a step: sequences and how many tokens each brings


@dataclass
class Got:
    """What a back end gave for one layer of a step, on the CPU, and what it should be."""

    layer: AttnLayer
    out: Tensor  # [T, heads, dim_v]
    lse: Tensor | None
    places: list[Place] = field(default_factory=list)  # of the live rows
    want: list[ExactAttention] = field(default_factory=list)  # one a live row, float64
    naive: list[ExactAttention] = field(default_factory=list)


class WorldSuite(Protocol):
    """What a world needs of its suite: the plug-in, its claims, and the reader of its cache."""

    @property
    def spec(self) -> Spec: ...

    def place(self) -> str: ...
    def values(self, fact: str, *candidates: Any) -> list[Any]: ...
    def build(self, *context: Any) -> AttentionBackend: ...
    def attention_context(self, setting: Setting, rows: int, tokens: int, invariant: bool) -> AttentionContext: ...
    def load(self, backend: AttentionBackend, layer: AttnLayer, blocks: Tensor) -> tuple[Tensor, Tensor]: ...


class World:
    """A back end over a cache of its own.  ``rows`` sequences fit at once, with ``tokens`` each.

    ``poison`` is the size of the garbage, NaN allowed; ``q_size`` that of the queries.  ``null_nan``: before each
    step the null block is full of NaN, and rows that have ended write NaN to it, as rows do that have failed.
    ``slope``: keys become so many times larger along the first sequence, from its first token to the last that it has
    room for, smaller along the second, and so on; so do the scores.

    The block table on the device is one tensor for all steps, as in the engine; ``static``: so is every other tensor
    of the metadata, as long as its shape is the same.
    """

    def __init__(
        self,
        suite: WorldSuite,
        setting: Setting,
        rows: int,
        tokens: int,
        *,
        seed: int = 0,
        poison: float = 1e4,
        q_size: float = 1.0,
        batch_invariant: bool = False,
        backend: Any = None,
        null_nan: bool = False,
        slope: float = 1.0,
        static: bool = False,
    ) -> None:
        self.slope, self.static, self.made = slope, static, 0
        self.behind = 0  # what AttnMeta.position lies behind a token's position
        self.kept: dict[tuple[str, Any], Tensor] = {}  # (field of the metadata, shape) -> its tensor
        self.suite, self.setting, self.block = suite, setting, setting.block
        self.poison, self.q_size, self.tokens, self.null_nan = poison, q_size, tokens, null_nan
        self.rng, self.random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.device, self.dtype = suite.place(), getattr(torch, setting.dtype)
        slots, self.per_row = rows + 2, -(-tokens // self.block)
        ctx = suite.attention_context(setting, slots, tokens, batch_invariant)
        self.backend, self.format = (suite.build(ctx) if backend is None else backend), ctx.kv_format
        self.kinds = list(dict.fromkeys(s.geometry for s in setting.specs))  # one a KV group
        self.layers = [self._layer(i, spec) for i, spec in enumerate(setting.specs)]
        self.blocks = 1 + rows * self.per_row + STRANGERS
        self.free = [list(1 + self.rng.permutation(self.blocks - 1)) for _ in self.kinds]
        self.strangers = [[0, *(pile.pop() for _ in range(STRANGERS))] for pile in self.free]
        shape = (slots, self.per_row + 1)
        self.table = np.array([self.rng.choice(s, shape) for s in self.strangers], np.int32)
        self.slots = [int(s) for s in self.rng.permutation(slots)]
        for layer in self.layers:
            layout = self.backend.layout(layer.spec, self.format, self.block)
            layer.cache = {
                n: torch.zeros((self.blocks, *t.shape), dtype=getattr(torch, t.dtype), device=self.device)
                for n, t in layout.tensors.items()
            }
            self._poison(layer)

    def _layer(self, i: int, spec: AttnSpec) -> AttnLayer:
        sinks = self.randn(spec.heads).float().to(self.device) * 2 if spec.sinks else None
        layer = AttnLayer(i, self.kinds.index(spec.geometry), spec, sinks=sinks)
        if spec.alibi is not None:
            layer.slopes = torch.tensor(spec.alibi, dtype=torch.float32, device=self.device)
        return layer

    def randn(self, *shape: int, size: float = 1.0) -> Tensor:
        """Normal numbers in the model's dtype, on the CPU."""
        return (torch.randn(*shape, generator=self.random) * size).to(self.dtype)

    # ---- the cache -----------------------------------------------------------------------------------------------

    def _poison(self, layer: AttnLayer) -> None:
        """Garbage in every slot, put there by ``write``: large values behind keys that are large or like any other.
        What the null block holds is finite here."""
        spec, big = layer.spec, self.poison
        half = torch.float16 in (self.dtype, getattr(torch, self.format.dtype, None))
        for slots in torch.arange(self.blocks * self.block).split(self.tokens):
            n = len(slots)
            k, v = self.randn(n, spec.kv_heads, spec.dim_qk), self.randn(n, spec.kv_heads, spec.dim_v)
            k[:: 1 if spec.v_in_k or big != big else 2] = 100.0 if half and big == big else big  # no inf in float16
            v.fill_(big)
            null = slots < self.block
            k[null], v[null] = k[null].nan_to_num(100.0), v[null].nan_to_num(1e4)
            meta = make_meta([(self.slots[0], n, n)], self.table, self.block, self.device)
            meta.slot_map = slots.repeat(len(self.kinds), 1).to(self.device)
            self._write(layer, k, v, meta)

    @torch.inference_mode()
    def _write(self, layer: AttnLayer, k: Tensor, v: Tensor, meta: AttnMeta) -> None:
        q = torch.zeros(len(k), layer.spec.heads, layer.spec.dim_qk, dtype=self.dtype, device=self.device)
        self.backend.write(layer, q, k.to(self.device), v.to(self.device), meta, None)

    def _tokens(self, slot: int, **more: bool) -> WorldSeq:
        """A sequence of random tokens, none of them in the cache yet."""
        seq = WorldSeq(slot, [], [], [], **more)
        sizes = torch.linspace(1.0, self.slope, self.tokens)
        self.made += 1
        sizes = (sizes if self.made % 2 else sizes.flip(0))[:, None, None]
        for spec in self.setting.specs:
            k = (self.randn(self.tokens, spec.kv_heads, spec.dim_qk).float() * sizes).to(self.dtype)
            v = self.randn(self.tokens, spec.kv_heads, spec.dim_v)
            seq.q.append(self.randn(self.tokens, spec.heads, spec.dim_qk, size=self.q_size))
            seq.k.append(k)
            seq.v.append(k[..., : spec.dim_v] if spec.v_in_k else v)
        return seq

    def add(self, past: int = 0, like: WorldSeq | None = None, ended: bool = False) -> WorldSeq:
        """A sequence with ``past`` tokens in the cache; it shares the whole blocks of its start with ``like``."""
        seq = self._tokens(self.slots.pop(), ended=ended)
        whole = 0 if like is None else min(past, like.length) // self.block
        for mine, theirs in zip((*seq.k, *seq.v), (*like.k, *like.v), strict=True) if like else ():
            mine[: whole * self.block] = theirs[: whole * self.block]
        for g, pile in enumerate(self.free):
            self.table[g, seq.slot, whole : self.per_row] = [pile.pop() for _ in range(self.per_row - whole)]
            if like is not None:
                self.table[g, seq.slot, :whole] = self.table[g, like.slot, :whole]
        seq.length = past
        if past > whole * self.block:
            meta = make_meta([(seq.slot, past - whole * self.block, past)], self.table, self.block, self.device)
            for layer, k, v in zip(self.layers, seq.k, seq.v, strict=True):
                self._write(layer, k[whole * self.block : past], v[whole * self.block : past], meta)
        return seq

    def add_null(self) -> WorldSeq:
        """What pads a step: a row without any block."""
        slot = self.slots.pop()
        self.table[:, slot] = 0
        return self._tokens(slot, null=True)

    def stored(self, layer: AttnLayer, seq: WorldSeq, length: int) -> tuple[Tensor, Tensor]:
        """k and v [length, kv_heads, dim] of a sequence as the cache should hold them, float64: of a plain format by
        casting, of any other as it decodes what the back end wrote."""
        if self.plain:
            dtype = getattr(torch, self.format.dtype)
            return tuple(x[layer.index][:length].to(dtype).double() for x in (seq.k, seq.v))
        blocks = torch.tensor(self.table[layer.group, seq.slot, : -(-length // self.block)], device=self.device)
        return tuple(x[:length].double() for x in self.load(layer, blocks.long()))

    def load(self, layer: AttnLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n * block, kv_heads, dim] of blocks i64 [n] as they lie in the cache, float32 on the CPU."""
        spec = layer.spec
        k, v = (x.cpu() for x in self.suite.load(self.backend, layer, blocks.to(self.device)))
        return k, (k if spec.v_in_k else v)[..., : spec.dim_v]

    @property
    def plain(self) -> bool:
        """Whether the KV format does nothing but cast."""
        own = type(self.format).layout is KVFormat.layout
        return own and self.format.dtype in ("float32", "bfloat16", "float16")

    # ---- a step --------------------------------------------------------------------------------------------------

    def meta(self, rows: Rows, ahead: int = 0) -> AttnMeta:
        """``rows``: those of one token first.  Blocks that a window has left are gone from the table, and behind the
        end of each row it holds blocks of nobody."""
        table = self.table.copy()
        for seq, new in rows:
            behind = -(-(seq.length + new) // self.block)
            for g, geometry in enumerate(self.kinds):
                if seq.null:
                    continue
                table[g, seq.slot, behind:] = self.rng.choice(self.strangers[g], table.shape[2] - behind)
                window = geometry[-1]
                if window is not None:
                    table[g, seq.slot, : max(seq.length - window + 1, 0) // self.block] = 0
        at = [(seq.slot, new, seq.length + new) for seq, new in rows]
        gone = [i for i, (seq, _) in enumerate(rows) if not seq.live]
        meta = make_meta(at, table, self.block, self.device, gone, ahead)
        meta.position = meta.position + self.behind
        keep_tensors(self.kept, meta, None if self.static else ("table",))
        return meta

    @torch.inference_mode()
    def step(self, rows: Rows, *, fused: bool = True, ahead: int = 0, lse: bool = False) -> list[Got]:
        """Write and attend as the engine does, one layer after another; the sequences have grown afterwards.

        ``fused``: q, k and v are slices of one tensor, as a merged projection gives them.
        """
        rows = sorted(rows, key=lambda r: r[1] != 1)
        meta = self.meta(rows, ahead)
        before = {f.name: _copy(getattr(meta, f.name)) for f in fields(meta) if f.name != "work"}
        self.backend.plan(meta, GraphKey())
        every = []
        for layer in self.layers:
            q, k, v = self.inputs(layer, rows, fused)
            if self.null_nan:
                self._spoil_null_block(layer, rows, k, v)
            asked, given = q.clone(), v.clone()
            q = self.backend.write(layer, q, k, v, meta, None)
            assert _same(asked, q), "write returned another q than it was given, though there is nothing to do to it"
            assert _same(given, v), "write changed v, which it was given to read"
            every.append(self._forward(layer, q, meta, rows, lse))
        for name, value in before.items():
            assert _same(value, getattr(meta, name)), f"meta.{name} was changed: it belongs to all layers of the step"
        for seq, new in rows:
            seq.length += new if seq.live else 0
        return every

    def check(self, rows: Rows, **how: Any) -> list[Got]:
        """A step whose answers are compared with the definition."""
        every = self.step(rows, **how)
        for got in every:
            for place, want, naive in zip(got.places, got.want, got.naive, strict=True):
                compare(got.out, got.lse, want, naive, place, self.dtype)
        return every

    def inputs(self, layer: AttnLayer, rows: Rows, fused: bool = True) -> list[Tensor]:
        """q, k and v of a step, on the device; slices of one tensor [T, q | k | v] if ``fused``."""
        parts = [
            torch.cat([x[layer.index][seq.length : seq.length + new] for x, seq, new in column])
            for column in ([(getattr(seq, name), seq, new) for seq, new in rows] for name in "qkv")
        ]
        if not fused:
            return [x.to(self.device) for x in parts]
        joined = torch.cat([x.flatten(1) for x in parts], dim=1).to(self.device)
        slices = joined.split([x[0].numel() for x in parts], dim=1)
        return [y.view(x.shape) for x, y in zip(parts, slices, strict=True)]

    def _forward(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, rows: Rows, lse: bool) -> Got:
        """Run one layer; it must write all of its outputs and nothing else."""
        spec, t = layer.spec, len(q)
        whole = {"out": self._guarded((t, spec.heads, spec.dim_v), self.dtype)}
        if lse:
            whole["lse"] = self._guarded((t, spec.heads), torch.float32)
        given, cache = q.clone(), {n: x.clone() for n, x in layer.cache.items()}
        outs = {name: x[GUARD:-GUARD] for name, x in whole.items()}
        self.backend.forward(layer, q, meta, outs["out"], outs.get("lse"))
        assert _same(given, q), "forward changed q, which it was given to read"
        for name, x in layer.cache.items():
            assert _same(cache[name], x), f"forward changed tensor {name!r} of the cache: only write may"
        for name, x in whole.items():
            edge = torch.cat([x[:GUARD], x[-GUARD:]])
            assert bool((edge == MARK).all()), f"forward wrote before the first or behind the last row of {name}"
        got = Got(layer, *(outs[n].cpu() if n in outs else None for n in ("out", "lse")))
        selected = self.selected(layer, q, meta, rows)
        first = 0
        for i, (seq, new) in enumerate(rows):
            if seq.live:
                got.places.append(Place(i, first, new, seq.length + new, self.block, str(self.setting)))
                self._answer(got, seq, given[first : first + new].cpu(), seq.length + new, selected[i])
            first += new
        return got

    def selected(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, rows: Rows) -> Sequence[Tensor | None]:
        """Return which keys the queries of each row attend to, as an approximate back end says; None means all."""
        if not self.suite.spec.approximate:
            return [None] * len(rows)
        caches = {n: x.clone() for n, x in layer.cache.items()}
        given = self.backend.selected(layer, q, meta)
        assert all(_same(caches[n], x) for n, x in layer.cache.items()), "selected changed the cache"
        assert len(given) == len(meta.q_len), f"selected gave {len(given)} tensors: want one for each row"
        of_rows = list(zip(rows, given, strict=False))  # a captured step has rows of no token behind them
        for (seq, new), mask in of_rows:
            if seq.live:
                check_selected(self.backend, layer.spec, mask, new, seq.length + new)
        return [mask.cpu() if seq.live else None for (seq, _), mask in of_rows]

    def _spoil_null_block(self, layer: AttnLayer, rows: Rows, k: Tensor, v: Tensor) -> None:
        """NaN in all of it, and in what the step itself is about to write there."""
        for x in layer.cache.values():
            if x.is_floating_point():
                x[NULL_BLOCK] = torch.nan
        first = 0
        for seq, new in rows:
            if not seq.live:
                k[first : first + new] = v[first : first + new] = torch.nan
            first += new

    def _guarded(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """NaN, with guard rows before and behind."""
        x = torch.full((shape[0] + 2 * GUARD, *shape[1:]), MARK, dtype=dtype, device=self.device)
        x[GUARD:-GUARD] = torch.nan
        return x

    def _answer(self, got: Got, seq: WorldSeq, q: Tensor, length: int, selected: Tensor | None) -> None:
        k, v = self.stored(got.layer, seq, length)
        sinks = None if got.layer.sinks is None else got.layer.sinks.cpu()
        got.want.append(attend(q.double(), k, v, got.layer.spec, sinks, selected))
        got.naive.append(attend(q, k.to(q.dtype), v.to(q.dtype), got.layer.spec, sinks, selected))


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else np.array(x)


def _same(a: Any, b: Any) -> bool:
    """The same shape and bits, NaN included."""
    if not isinstance(a, Tensor):
        return bool(np.array_equal(a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
