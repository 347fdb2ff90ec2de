"""Run steps of an attention back end over a small paged cache, as the engine does.

Such a *world* has a few layers, and sequences with known keys and values.  The blocks of a sequence are in random
order and may be shared.  The index of a row in a step differs from the slot of its sequence in the block table.
Everything that no query may see holds garbage: the null block, blocks that no sequence owns, the rest of a sequence's
last block, table entries beyond its length, and the table rows of other slots.
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
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout
from minivllm.registration.spec import Spec

from .attention_math import ExactAttention, TokenPlace, attend, check_selected, compare, visible

torch.set_num_threads(1)  # use one thread, because several threads only wait for each other on tiny tensors
GUARD = 3  # guard rows before and after an output tensor, which a back end must not change
MARK = 7.0  # the value of the elements of guard rows
UNOWNED = 4  # number of blocks of each KV group that no sequence owns
KeptTensors = dict[tuple[str, Any], Tensor]  # (field of the metadata, shape) -> tensor of an earlier step
Span = tuple[int, int]  # first position, position after the last


def make_meta(
    rows: Sequence[tuple[int, int, int]],
    table: np.ndarray,
    block: int,
    device: str = "cpu",
    ended: Collection[int] = (),
    ahead: int = 0,
) -> AttnMeta:
    """Return the metadata of a step.

    ``rows`` has (slot, q_len, kv_len) of each row, rows of one token first.  ``table`` is the block table, int32 [KV
    groups, slots, blocks], and ``block`` the tokens of a block.  The rows with the indices ``ended`` write to the null
    block, like a row that ended on the device before the host received its result.  The lengths of decode rows on the
    host are too large by ``ahead``.
    """
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    slots, q_len, kv_len = columns
    several = np.append(q_len, 2) != 1
    decode_rows = int(several.argmax())
    ends = np.cumsum(q_len)
    cu_q = np.append(0, ends)
    row = np.repeat(np.arange(len(rows)), q_len)
    shift = kv_len - ends  # position of a token in its sequence, less its position in the step
    position = shift[row] + np.arange(len(row))
    blocks = table[:, slots[row], position // block]
    slot_map = blocks.astype(np.int64) * block + position % block
    ended_tokens = np.isin(row, list(ended))
    slot_map[:, ended_tokens] = 0
    host_q_len = q_len.astype(np.int32)
    host_q_len.flags.writeable = False
    host_kv_len = kv_len.astype(np.int32)
    host_kv_len[:decode_rows] += ahead
    of_groups = (len(table), len(rows))
    int64 = {"slots": slots, "position": position, "row": row, "slot_map": slot_map}
    int32 = {"cu_q": cu_q, "q_len": q_len, "kv_len": kv_len, "table": table}
    tensors = {name: torch.tensor(x, device=device) for name, x in int64.items()}
    for name, x in int32.items():
        tensors[name] = torch.tensor(x, dtype=torch.int32, device=device)
    tensors["kv_len"] = tensors["kv_len"].expand(of_groups)
    host = {"host_q_len": host_q_len, "host_kv_len": np.broadcast_to(host_kv_len, of_groups)}
    return AttnMeta(**tensors, **host, block=block, decode_rows=decode_rows)


def allocate(layout: KVLayout, blocks: int, device: str, value: float = 0.0) -> dict[str, Tensor]:
    """Return the cache tensors of a layer for a number of blocks, with all elements equal to ``value``."""
    cache = {}
    for name, tensor in layout.tensors.items():
        shape = (blocks, *tensor.shape)
        dtype = getattr(torch, tensor.dtype)
        cache[name] = torch.full(shape, value, dtype=dtype, device=device)
    return cache


def number_of_blocks(tokens: int, block: int) -> int:
    """Return the number of blocks of ``block`` tokens that some tokens fill or begin."""
    return -(-tokens // block)


def values_of(spec: AttnSpec, k: Tensor, v: Tensor) -> Tensor:
    """Return the values of a layer [T, kv_heads, dim_v], which may be the first elements of its keys."""
    source = k if spec.v_in_k else v
    return source[..., : spec.dim_v]


def layer_copies(layer: AttnLayer) -> dict[str, Tensor]:
    """Return copies of the cache tensors of a layer."""
    return {name: x.clone() for name, x in layer.cache.items()}


@dataclass(frozen=True)
class Setting:
    """The configuration of a world: its layers, the dtype of the model, the KV format and the block size."""

    specs: tuple[AttnSpec, ...]  # AttnSpec of each layer
    dtype: str
    kv_format: str  # name of the KV format
    block: int  # tokens per block

    def __str__(self) -> str:
        specs = "; ".join(map(str, self.specs))
        return f"{self.dtype}, kv_format={self.kv_format}, block={self.block}, {specs}"


def keep_tensors(kept: KeptTensors, meta: AttnMeta, names: Collection[str] | None = None) -> None:
    """Replace the tensors of the metadata by the tensors of an earlier step, filled with the new values.

    A back end that recognises a step by the id or address of a tensor then takes the new step for an old one.
    ``kept`` has the tensors of earlier steps.  ``names`` are the fields to replace; None means all.
    """
    for item in fields(meta):
        value = getattr(meta, item.name)
        if not isinstance(value, Tensor):
            continue
        if names is not None and item.name not in names:
            continue
        key = (item.name, value.shape)
        if key not in kept:
            kept[key] = value.clone(memory_format=torch.contiguous_format)
        tensor = kept[key].copy_(value)
        setattr(meta, item.name, tensor)


@dataclass
class WorldSeq:
    """A sequence of a test: its slot in the block table, and q, k and v of all tokens that it will ever have.

    Each of q, k and v is a list with a tensor [capacity, heads, dim] for each layer, on the CPU in the model's dtype.
    """

    slot: int
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    length: int = 0  # number of tokens in the cache
    ended: bool = False  # the sequence has ended, so that its new keys and values go to the null block
    null: bool = False  # the sequence has no blocks: all its table entries are the null block

    @property
    def live(self) -> bool:
        """Return whether the results of the sequence are used."""
        return not (self.ended or self.null)


Rows = Sequence[tuple[WorldSeq, int]]  # a step: (sequence, number of its new tokens) of each row


def decode_first(rows: Rows) -> Rows:
    """Return the rows of a step with the rows of one token first."""

    def is_longer(row: tuple[WorldSeq, int]) -> bool:
        _, new = row
        return new != 1

    return sorted(rows, key=is_longer)


@dataclass(frozen=True)
class WorldOptions:
    """The options of a world."""

    seed: int = 0
    poison: float = 1e4  # size of the garbage, which may be NaN
    q_size: float = 1.0  # size of the queries
    batch_invariant: bool = False
    null_nan: bool = False  # the null block is full of NaN before each step, and rows that have ended write NaN to it
    # factor by which keys grow from the first to the last token of a sequence, or shrink in every second sequence
    slope: float = 1.0
    static: bool = False  # every tensor of the metadata is reused by all steps in which it has the same shape


WORLD_OPTIONS = frozenset(item.name for item in fields(WorldOptions))


@dataclass
class LayerResult:
    """The results of a back end for one layer of a step, on the CPU, and the expected results."""

    layer: AttnLayer
    out: Tensor  # [T, heads, dim_v]
    lse: Tensor | None
    places: list[TokenPlace] = field(default_factory=list)  # the place in the step of each row whose result counts
    exact: list[ExactAttention] = field(default_factory=list)  # the result of each live row, computed in float64
    # the result of each live row, computed in the model's dtype
    naive: list[ExactAttention] = field(default_factory=list)


class WorldSuite(Protocol):
    """The attributes of a conformance suite that ``World`` uses: the plug-in, its claims, and ``load``."""

    @property
    def spec(self) -> Spec: ...

    def place(self) -> str: ...
    def values(self, fact: str, *candidates: Any) -> list[Any]: ...
    def build(self, *context: Any) -> AttentionBackend: ...
    def attention_context(self, setting: Setting, rows: int, tokens: int, invariant: bool) -> AttentionContext: ...
    def load(self, backend: AttentionBackend, layer: AttnLayer, blocks: Tensor) -> tuple[Tensor, Tensor]: ...


class World:
    """A back end with a cache for ``rows`` sequences of up to ``tokens`` tokens.

    ``options`` are fields of ``WorldOptions``.  The scores grow and shrink with the keys.  The block table on the
    device is the same tensor in all steps, as in the engine.
    """

    def __init__(
        self, suite: WorldSuite, setting: Setting, rows: int, tokens: int, *, backend: Any = None, **options: Any
    ) -> None:
        self.suite = suite
        self.setting = setting
        self.options = WorldOptions(**options)
        self.block = setting.block
        self.tokens = tokens
        self.added = 0  # sequences so far
        self.key = GraphKey()  # of the steps
        # slot -> spans; the tokens of a span all attend to each other, as those of an image
        self.spans: dict[int, tuple[Span, ...]] = {}
        self.position_offset = 0  # added to AttnMeta.position, as for a request with a second rotary table
        self.kept: KeptTensors = {}
        self.rng = np.random.default_rng(self.options.seed)
        self.random = torch.Generator().manual_seed(self.options.seed)
        self.device = suite.place()
        self.dtype = getattr(torch, setting.dtype)
        slots = rows + 2
        self.per_row = number_of_blocks(tokens, self.block)  # blocks that each sequence has
        ctx = suite.attention_context(setting, slots, tokens, self.options.batch_invariant)
        if backend is None:
            self.backend = suite.build(ctx)
        else:
            self.backend = backend
        self.format = ctx.kv_format
        geometries = dict.fromkeys(spec.geometry for spec in setting.specs)
        self.geometries = list(geometries)  # one geometry per KV group
        self.layers = [self._layer(i, spec) for i, spec in enumerate(setting.specs)]
        self.blocks = 1 + rows * self.per_row + UNOWNED
        self.free: list[list[int]] = []  # blocks of each KV group that a sequence may get
        self.unowned: list[list[int]] = []  # blocks of each KV group that hold garbage
        for _ in self.geometries:
            self._divide_blocks()
        shape = (slots, self.per_row + 1)
        entries = [self.rng.choice(blocks, shape) for blocks in self.unowned]
        self.table = np.array(entries, np.int32)
        self.slots = [int(slot) for slot in self.rng.permutation(slots)]
        for layer in self.layers:
            layout = self.backend.layout(layer.spec, self.format, self.block)
            layer.cache = allocate(layout, self.blocks, self.device)
            self._poison(layer)

    def _divide_blocks(self) -> None:
        """Choose the blocks of another KV group that no sequence owns, and the order in which sequences get the others.

        The null block is among the blocks without an owner.
        """
        shuffled = 1 + self.rng.permutation(self.blocks - 1)
        free = list(shuffled)
        unowned = [free.pop() for _ in range(UNOWNED)]
        self.free.append(free)
        self.unowned.append([NULL_BLOCK, *unowned])

    def _layer(self, index: int, spec: AttnSpec) -> AttnLayer:
        """Return a layer with random sinks and the slopes of its spec, without a cache."""
        sinks = None
        if spec.sinks:
            random = self.randn(spec.heads).float()
            sinks = 2 * random.to(self.device)
        group = self.geometries.index(spec.geometry)
        layer = AttnLayer(index, group, spec, sinks=sinks)
        if spec.alibi is not None:
            layer.slopes = torch.tensor(spec.alibi, dtype=torch.float32, device=self.device)
        return layer

    def randn(self, *shape: int, size: float = 1.0) -> Tensor:
        """Return normally distributed numbers of a shape in the model's dtype, on the CPU, multiplied by ``size``."""
        x = torch.randn(*shape, generator=self.random)
        return (x * size).to(self.dtype)

    # ---- the cache -----------------------------------------------------------------------------------------------

    def _poison(self, layer: AttnLayer) -> None:
        """Fill every slot of a layer's cache with garbage, through ``write``.

        All values are large, and so are all keys or every second key.  The null block gets finite garbage here.
        """
        spec = layer.spec
        poison = self.options.poison
        is_nan = poison != poison
        format_dtype = getattr(torch, self.format.dtype, None)
        half = torch.float16 in (self.dtype, format_dtype)
        large_key = poison
        if half and not is_nan:
            large_key = 100.0  # larger keys would give infinite scores in float16
        every = 1 if spec.v_in_k or is_nan else 2
        all_slots = torch.arange(self.blocks * self.block)
        for slots in all_slots.split(self.tokens):
            n = len(slots)
            k = self.randn(n, spec.kv_heads, spec.dim_qk)
            v = self.randn(n, spec.kv_heads, spec.dim_v)
            k[::every] = large_key
            v.fill_(poison)
            null = slots < self.block
            k[null] = k[null].nan_to_num(100.0)
            v[null] = v[null].nan_to_num(1e4)
            meta = self._meta_of([(self.slots[0], n, n)])
            of_groups = slots.repeat(len(self.geometries), 1)
            meta.slot_map = of_groups.to(self.device)
            self._write(layer, k, v, meta)

    def _meta_of(self, rows: Sequence[tuple[int, int, int]]) -> AttnMeta:
        """Return the metadata of a step over the block table of the world; rows as for ``make_meta``."""
        return make_meta(rows, self.table, self.block, self.device)

    @torch.inference_mode()
    def _write(self, layer: AttnLayer, k: Tensor, v: Tensor, meta: AttnMeta) -> None:
        """Write k and v to the cache of a layer."""
        k = k.to(self.device)
        v = v.to(self.device)
        spec = layer.spec
        q = k.new_zeros(len(k), spec.heads, spec.dim_qk)
        self.backend.write(layer, q, k, v, meta, None)

    def _random_sequence(self, slot: int, ended: bool = False, null: bool = False) -> WorldSeq:
        """Return a sequence with random q, k and v, none of whose tokens is in the cache.

        With ``ended`` the device has ended it, and with ``null`` it has no block; in both cases its results do not
        count.
        """
        seq = WorldSeq(slot, [], [], [], ended=ended, null=null)
        n = self.tokens
        sizes = torch.linspace(1.0, self.options.slope, n)
        self.added += 1
        if self.added % 2 == 0:
            sizes = sizes.flip(0)
        for spec in self.setting.specs:
            normal = self.randn(n, spec.kv_heads, spec.dim_qk).float()
            k = normal * sizes[:, None, None]
            k = k.to(self.dtype)
            v = self.randn(n, spec.kv_heads, spec.dim_v)
            q = self.randn(n, spec.heads, spec.dim_qk, size=self.options.q_size)
            seq.q.append(q)
            seq.k.append(k)
            seq.v.append(values_of(spec, k, v))
        return seq

    def add(self, past: int = 0, like: WorldSeq | None = None, ended: bool = False) -> WorldSeq:
        """Add a sequence with ``past`` tokens in the cache, and return it.

        It shares with the sequence ``like`` their common full blocks at the start.  If ``ended``, the device has ended
        it, and its results do not count.
        """
        slot = self.slots.pop()
        seq = self._random_sequence(slot, ended=ended)
        shared = 0
        if like is not None:
            common = min(past, like.length)
            shared = self._share(seq, like, common // self.block)
        for table, free in zip(self.table, self.free, strict=True):
            own = [free.pop() for _ in range(shared, self.per_row)]
            entries = table[slot]
            entries[shared : self.per_row] = own
        seq.length = past
        start = shared * self.block
        if past > start:
            meta = self._meta_of([(seq.slot, past - start, past)])
            for layer, k, v in zip(self.layers, seq.k, seq.v, strict=True):
                self._write(layer, k[start:past], v[start:past], meta)
        return seq

    def add_rows(self, shapes: Sequence[tuple[int, int]]) -> list[tuple[WorldSeq, int]]:
        """Add a sequence for each (cached tokens, new tokens), and return the rows of a step with the new tokens."""
        rows = []
        for past, new in shapes:
            seq = self.add(past)
            rows.append((seq, new))
        return rows

    def _share(self, seq: WorldSeq, like: WorldSeq, blocks: int) -> int:
        """Give ``seq`` the first ``blocks`` blocks of ``like``, with their keys and values, and return their number."""
        tokens = blocks * self.block
        for layers, sources in ((seq.k, like.k), (seq.v, like.v)):
            for x, source in zip(layers, sources, strict=True):
                x[:tokens] = source[:tokens]
        shared = self.table[:, like.slot, :blocks]
        self.table[:, seq.slot, :blocks] = shared
        return blocks

    def add_null(self) -> WorldSeq:
        """Add and return a row without any block, as the engine pads a step."""
        slot = self.slots.pop()
        self.table[:, slot] = NULL_BLOCK
        return self._random_sequence(slot, null=True)

    def stored(self, layer: AttnLayer, seq: WorldSeq, length: int) -> tuple[Tensor, Tensor]:
        """Return the k and v that the cache should hold for a sequence, float64 [length, kv_heads, dim].

        For a plain KV format they are cast to its dtype.  Any other format decodes the data that the back end wrote.
        """
        if not self.plain:
            used = number_of_blocks(length, self.block)
            of_seq = self.table[layer.group, seq.slot]
            blocks = torch.from_numpy(of_seq[:used]).long()
            k, v = self.load(layer, blocks)
            return k[:length].double(), v[:length].double()
        dtype = getattr(torch, self.format.dtype)
        k = seq.k[layer.index][:length].to(dtype)
        v = seq.v[layer.index][:length].to(dtype)
        return k.double(), v.double()

    def load(self, layer: AttnLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [n * block, kv_heads, dim] of the cache blocks int64 [n], float32 on the CPU."""
        blocks = blocks.to(self.device)
        loaded = self.suite.load(self.backend, layer, blocks)
        k, v = (x.cpu() for x in loaded)
        return k, values_of(layer.spec, k, v)

    def load_all(self, layer: AttnLayer) -> tuple[Tensor, Tensor]:
        """Return k and v of all blocks of the cache, as ``load`` does."""
        return self.load(layer, torch.arange(self.blocks))

    @property
    def plain(self) -> bool:
        """Return whether the KV format only casts keys and values to its dtype."""
        default_layout = type(self.format).layout is KVFormat.layout
        return default_layout and self.format.dtype in ("float32", "bfloat16", "float16")

    # ---- a step --------------------------------------------------------------------------------------------------

    def meta(self, rows: Rows, ahead: int = 0) -> AttnMeta:
        """Return the metadata of a step whose rows of one token come first.

        In the block table, the null block replaces blocks that have left a window.  The entries after the end of each
        row name blocks that no sequence owns.  The lengths of decode rows on the host are too large by ``ahead``.
        """
        table = self.table.copy()
        for seq, new in rows:
            if not seq.null:
                self._set_unread(table, seq, new)
        lengths = [(seq.slot, new, seq.length + new) for seq, new in rows]
        ended = [i for i, (seq, _) in enumerate(rows) if not seq.live]
        meta = make_meta(lengths, table, self.block, self.device, ended, ahead)
        if self.spans:
            last = [self._last_seen(seq, new) for seq, new in rows]
            meta.host_sees = np.concatenate(last)
        meta.position = meta.position + self.position_offset
        names = None if self.options.static else ("table",)
        keep_tensors(self.kept, meta, names)
        return meta

    def _set_unread(self, table: np.ndarray, seq: WorldSeq, new: int) -> None:
        """Set the entries of a block table that no query of a row reads; the row has ``new`` tokens."""
        end = number_of_blocks(seq.length + new, self.block)
        beyond = table.shape[2] - end
        for group, geometry in enumerate(self.geometries):
            entries = table[group, seq.slot]
            entries[end:] = self.rng.choice(self.unowned[group], beyond)
            window = geometry[-1]
            if window is not None:
                left = max(seq.length - window + 1, 0)
                entries[: left // self.block] = NULL_BLOCK

    def _last_seen(self, seq: WorldSeq, new: int) -> np.ndarray:
        """Return the last position that each new token of a row sees, which is the end of its span if it has one."""
        last = np.arange(seq.length, seq.length + new)
        for first, end in self.spans.get(seq.slot, ()):
            inside = (last >= first) & (last < end)
            last[inside] = end - 1
        return last

    @torch.inference_mode()
    def step(self, rows: Rows, *, fused: bool = True, ahead: int = 0, lse: bool = False) -> list[LayerResult]:
        """Run a step through all layers as the engine does, and add the new tokens to the live sequences.

        If ``fused``, q, k and v are slices of one tensor, as a merged projection returns them.
        """
        rows = decode_first(rows)
        meta = self.meta(rows, ahead)
        before = {}
        for item in fields(meta):
            if item.name != "work":
                before[item.name] = _copy(getattr(meta, item.name))
        self.backend.plan(meta, self.key)
        results = []
        for layer in self.layers:
            q, k, v = self.inputs(layer, rows, fused)
            if self.options.null_nan:
                self._spoil_null_block(layer, rows, k, v)
            q_before = q.clone()
            v_before = v.clone()
            q = self.backend.write(layer, q, k, v, meta, None)
            assert same_bits(q_before, q), (
                "write returned another q, although there is no norm and no rotation to apply"
            )
            assert same_bits(v_before, v), "write changed v, which it must only read"
            result = self._forward(layer, q, meta, rows, lse)
            results.append(result)
        for name, value in before.items():
            same = same_bits(value, getattr(meta, name))
            assert same, f"meta.{name} was changed: it belongs to all layers of the step"
        for seq, new in rows:
            if seq.live:
                seq.length += new
        return results

    def check(self, rows: Rows, **how: Any) -> list[LayerResult]:
        """Run a step and compare the results with exact attention; ``how`` has the keyword arguments of ``step``."""
        results = self.step(rows, **how)
        for result in results:
            of_rows = zip(result.places, result.exact, result.naive, strict=True)
            for place, exact, naive in of_rows:
                compare(result.out, result.lse, exact, naive, place, self.dtype)
        return results

    def inputs(self, layer: AttnLayer, rows: Rows, fused: bool = True) -> list[Tensor]:
        """Return q, k and v of a step, on the device; slices of one tensor [T, q | k | v] if ``fused``."""
        parts = []
        for name in "qkv":
            of_rows = []
            for seq, new in rows:
                of_layer = getattr(seq, name)[layer.index]
                of_rows.append(of_layer[seq.length : seq.length + new])
            part = torch.cat(of_rows).to(self.device)
            parts.append(part)
        if not fused:
            return parts
        flat = [x.flatten(1) for x in parts]
        widths = [x.shape[1] for x in flat]
        joined = torch.cat(flat, dim=1)
        slices = joined.split(widths, dim=1)
        return [y.view(x.shape) for x, y in zip(parts, slices, strict=True)]

    def _forward(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, rows: Rows, lse: bool) -> LayerResult:
        """Run ``forward`` of one layer, with or without ``lse``, and fail if it changes any tensor except its outputs.

        Return the outputs together with the expected ones.
        """
        spec = layer.spec
        shape = (len(q), spec.heads, spec.dim_v)
        buffers = {"out": self._guarded(shape, self.dtype)}
        if lse:
            buffers["lse"] = self._guarded(shape[:2], torch.float32)
        outputs = {name: buffer[GUARD:-GUARD] for name, buffer in buffers.items()}
        q_before = q.clone()
        cache_before = layer_copies(layer)
        self.backend.forward(layer, q, meta, outputs["out"], outputs.get("lse"))
        assert same_bits(q_before, q), "forward changed q, which it must only read"
        for name, x in layer.cache.items():
            same = same_bits(cache_before[name], x)
            assert same, f"forward changed tensor {name!r} of the cache: only write may"
        for name, buffer in buffers.items():
            parts = [buffer[:GUARD], buffer[-GUARD:]]
            untouched = torch.cat(parts) == MARK
            assert bool(untouched.all()), f"forward wrote before the first or after the last row of {name}"
        found = {name: output.cpu() for name, output in outputs.items()}
        result = LayerResult(layer, found["out"], found.get("lse"))
        selected = self.selected(layer, q, meta, rows)
        self._add_expected(result, q_before.cpu(), selected, rows)
        return result

    def _add_expected(self, result: LayerResult, q: Tensor, selected: Sequence[Tensor | None], rows: Rows) -> None:
        """Add the expected results of the live rows of a step, and their places.

        q [T, heads, dim_qk] has the queries of the step.  ``selected`` has the keys that each row sees.
        """
        first = 0
        for i, (seq, new) in enumerate(rows):
            if seq.live:
                length = seq.length + new
                queries = q[first : first + new]
                exact, naive = self.expected(result.layer, seq, queries, length, selected[i])
                place = TokenPlace(i, first, new, length, self.block, str(self.setting))
                result.places.append(place)
                result.exact.append(exact)
                result.naive.append(naive)
            first += new

    def selected(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, rows: Rows) -> Sequence[Tensor | None]:
        """Return the keys to which each row attends, bool [q_len, heads, kv_len].

        An approximate back end selects them; in a test with spans of images they follow from the spans.

        None in place of a row's mask means all visible keys: the back end is exact, or the result of the row does not
        count.
        """
        approximate = self.suite.spec.approximate
        if self.spans and not approximate:
            return [self._spanned(layer, seq, new) for seq, new in rows]
        if not approximate:
            return [None] * len(rows)
        before = layer_copies(layer)
        masks = self.backend.selected(layer, q, meta)
        same = all(same_bits(before[name], x) for name, x in layer.cache.items())
        assert same, "selected changed the cache"
        assert len(masks) == len(meta.q_len), f"selected returned {len(masks)} tensors: expected one for each row"
        selected: list[Tensor | None] = []
        for (seq, new), mask in zip(rows, masks, strict=False):  # a captured step may end with rows without a token
            if not seq.live:
                selected.append(None)
                continue
            check_selected(self.backend, layer.spec, mask, new, seq.length + new)
            selected.append(mask.cpu())
        return selected

    def _spanned(self, layer: AttnLayer, seq: WorldSeq, new: int) -> Tensor:
        """Return the keys that a row with spans sees, bool [q_len, heads, kv_len]."""
        keys = seq.length + new
        seen = visible(new, keys, layer.spec)
        key = torch.arange(keys)
        query = torch.arange(seq.length, keys)[:, None]
        later = key > query
        for first, end in self.spans.get(seq.slot, ()):
            inside = (query >= first) & (query < end)
            of_span = later & (key < end)
            seen |= inside & of_span
        return seen[:, None].expand(-1, layer.spec.heads, -1)

    def _spoil_null_block(self, layer: AttnLayer, rows: Rows, k: Tensor, v: Tensor) -> None:
        """Fill the null block with NaN, and also the keys and values that the step will write to it."""
        for x in layer.cache.values():
            if x.is_floating_point():
                x[NULL_BLOCK] = torch.nan
        first = 0
        for seq, new in rows:
            if not seq.live:
                k[first : first + new] = torch.nan
                v[first : first + new] = torch.nan
            first += new

    def _guarded(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of NaN that lies between guard rows in memory, so that writes outside of it are noticed."""
        tokens, *sizes = shape
        x = torch.full((tokens + 2 * GUARD, *sizes), MARK, dtype=dtype, device=self.device)
        x[GUARD:-GUARD] = torch.nan
        return x

    def expected(
        self, layer: AttnLayer, seq: WorldSeq, q: Tensor, length: int, selected: Tensor | None
    ) -> tuple[ExactAttention, ExactAttention]:
        """Return the exact answer (float64) and the naive answer (dtype of ``q``) for the last tokens of a sequence.

        q [n, heads, dim_qk] has the queries of these tokens.  ``length`` is the number of keys.
        """
        k, v = self.stored(layer, seq, length)
        sinks = None if layer.sinks is None else layer.sinks.cpu()
        exact = attend(q.double(), k, v, layer.spec, sinks, selected)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        naive = attend(q, k, v, layer.spec, sinks, selected)
        return exact, naive


def _copy(x: Any) -> Any:
    """Return a copy of a tensor or an array."""
    if isinstance(x, Tensor):
        return x.clone()
    return np.array(x)


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two tensors or arrays have the same shape and the same bits, NaN included."""
    if not isinstance(a, Tensor):
        return bool(np.array_equal(a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = a.contiguous().view(torch.uint8)
    other_bits = b.contiguous().view(torch.uint8)
    return torch.equal(bits, other_bits)
