"""Batch-invariant attention of the reference on a CPU, in which the bits of a query depend only on its row's tokens.

    queries of a row, heads of a KV head together ──► items of ``LINES`` lines           q [LINES, D]
    keys from the cache, cut at multiples of ``KEYS`` ──► s = q k^T by pairs of an item and a tile    [LINES, KEYS]
    peak over all tiles, p = exp(s - peak) ──► p v by pairs, added up tile after tile, first to last

Tiles begin at absolute positions, so a chunk, a prefix hit and a whole prompt have the same tiles.  A tile that a query
does not see adds exact zeros.  The keys of a row are read from the cache once, for all of its items.  All arithmetic is
float32.  Products are calls for ``PAIRS`` pairs, always of one shape.  ``same_at_every_place`` checks once for each
head size that the position of a line or pair in the call does not change its bits.  A column of ones behind the values
makes the softmax's denominator a sum in the same order.

The reference is ``sdpa.attend_explicit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.core.interfaces.kvformat import KVFormat
from minivllm.device.layers.invariant import same_at_every_place
from minivllm.errors import PluginError

LINES = 16  # queries of an item
KEYS = 64  # keys of a tile
PAIRS = 16  # pairs of an item and a tile in a call of the matrix library
# largest number of (item, key tile) pairs that are computed in a call; it limits the memory and does not affect results
MOST_PAIRS = 1024
# largest number of key tiles, over all KV heads, that several rows read together; a single row may have more
MOST_TILES = 1024


Array = np.ndarray
Tensors = tuple[Tensor, Tensor]  # keys and values, or outputs and lse


class Lines(NamedTuple):
    """The lines [I, LINES] of some items: token and head of each query, whether it is real, and its position."""

    token: Array
    head: Array
    real: Array
    position: Array


@dataclass(frozen=True)
class Items:
    """I items (tiles of LINES queries) that attend to up to J tiles of keys each.

    ``token`` i64 [I, LINES] are the indices of the queries among the tokens of the step, and ``head`` i64 [I, LINES]
    their query heads within the group of a KV head.  ``real`` bool [I, LINES] marks lines with a query; items without
    one only complete a batch.  ``tile`` i64 [I, J] are indices of tiles in ``Keys``.  ``hidden`` bool [I, 1, J, LINES,
    KEYS] marks keys that a query does not see.
    """

    token: Tensor
    head: Tensor
    real: Tensor
    tile: Array
    hidden: Tensor
    # float32 in the shape of ``hidden``, the key's position minus the query's, for layers with slopes
    ahead: Tensor | None


@dataclass(frozen=True)
class Keys:
    """The T tiles of keys of some rows, and the items that attend to them.  ``slots`` i64 [T, KEYS] are cache slots."""

    slots: Tensor
    items: list[Items]


def by_token(cache: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the tensors of a layer's cache as blocks of one token, [tokens, 1, ...]."""
    views = {}
    for name, blocks in cache.items():
        of_token = blocks.shape[2:]
        views[name] = blocks.view(-1, 1, *of_token)
    return views


def make_keys(meta: AttnMeta, group: int, spec: AttnSpec) -> list[Keys]:
    """Divide a step into groups of whole rows, in order, and the groups into items.

    A group has at most ``MOST_TILES`` tiles, or one row.
    """
    q_len = meta.q_len.numpy().astype(np.int64)
    kv_len = meta.kv_len[group].numpy().astype(np.int64)
    rows = len(q_len)
    first = np.maximum(kv_len - q_len, 0)
    low = np.zeros(rows, np.int64)
    if spec.window is not None:
        low = np.maximum(first - spec.window + 1, 0)
    last = np.maximum(kv_len - 1, 0)
    begin = low // KEYS
    tiles = last // KEYS - begin + 1
    most = MOST_TILES // spec.kv_heads
    total = np.cumsum(tiles)
    found = []
    start = 0
    while start < rows:
        before = total[start - 1] if start else 0
        fitting = np.searchsorted(total, most + before, "right")
        stop = max(int(fitting), start + 1)
        some = np.arange(start, stop)
        counts = tiles[some]
        slots = _slots(meta, group, some, counts, low[some], last[some])
        offset = np.cumsum(counts) - counts
        shift = begin[some] - offset
        items = _make_items(meta, spec, some, first[some], shift)
        found.append(Keys(slots, items))
        start = stop
    return found


def _slots(meta: AttnMeta, group: int, rows: Array, tiles: Array, low: Array, last: Array) -> Tensor:
    """Return the cache slots [T, KEYS] of the tiles of these rows, clipped to the positions [low, last] of each row."""
    row, nth = _numbered(tiles)
    begin = low // KEYS
    tile = nth + begin[row]
    begin_of_tile = tile[:, None] * KEYS
    position = begin_of_tile + np.arange(KEYS)
    clipped = np.clip(position, low[row, None], last[row, None])
    key = torch.from_numpy(clipped)
    slots = meta.slots[torch.from_numpy(rows)]
    table = meta.table[group].index_select(0, slots)
    row_of_tile = torch.from_numpy(row)
    column = key // meta.block
    blocks = table[row_of_tile[:, None], column]
    return blocks.long() * meta.block + key % meta.block


def _numbered(counts: Array) -> tuple[Array, Array]:
    """Return the index of each element's group and its index in the group, for groups of ``counts`` elements."""
    groups = np.arange(len(counts))
    group = np.repeat(groups, counts)
    before = np.cumsum(counts) - counts
    index = np.arange(len(group))
    return group, index - before[group]


def _make_items(meta: AttnMeta, spec: AttnSpec, rows: Array, first: Array, shift: Array) -> list[Items]:
    """Divide the queries of these rows into items, and group items of a similar number of key tiles.

    ``first`` is the position of each row's first query.  ``shift`` is subtracted from the index of a key tile in its
    row to give its index in the ``Keys``.
    """
    heads = spec.heads // spec.kv_heads
    every = meta.q_len.numpy().astype(np.int64)
    starts = np.cumsum(every) - every
    lines = every[rows] * heads
    items_of_row = -(-lines // LINES)
    row, nth = _numbered(items_of_row)
    begin_of_item = nth[:, None] * LINES
    line = begin_of_item + np.arange(LINES)
    last_line = lines[row, None] - 1
    real = line <= last_line
    line = np.minimum(line, last_line)
    query = line // heads
    start = starts[rows]
    token = start[row, None] + query
    position = first[row, None] + query
    low = np.zeros(len(row), np.int64)
    if spec.window is not None:
        low = np.maximum(position[:, 0] - spec.window + 1, 0)
    last_tile = position[:, -1] // KEYS
    tiles = sizes(last_tile - low // KEYS + 1)
    found = []
    for n in np.unique(tiles).tolist():
        at = np.flatnonzero(tiles == n)
        pairs = n * spec.kv_heads
        whole = PAIRS // gcd(PAIRS, pairs)
        batches = MOST_PAIRS // pairs // whole
        step = max(whole, batches * whole)
        for i in range(0, len(at), step):
            part = at[i : i + step]
            missing = -len(part) % whole
            spare = np.repeat(part[-1:], missing)
            pick = np.concatenate([part, spare])
            shown = real[pick]
            shown[len(part) :] = False
            picked = Lines(token[pick], line[pick] % heads, shown, position[pick])
            made = _items(spec, picked, low[pick], n, shift[row[pick]])
            found.append(made)
    return found


def sizes(n: Array) -> Array:
    """Round up to 1, 2, 3, 4, 6, 8, 12 or 16, and above that to one of eight sizes between powers of two.

    This gives few different sizes, and adds at most an eighth to many tiles.
    """
    exponent = np.ceil(np.log2(n)).astype(np.int64)
    power = 1 << exponent
    three_quarters = power * 3 // 4
    enough = (n > 2) & (n <= three_quarters)
    few = np.where(enough, three_quarters, power)
    step = np.maximum(power // 16, 1)
    many = -(-n // step) * step
    return np.where(n > 16, many, few)


def _items(spec: AttnSpec, lines: Lines, low: Array, n: int, shift: Array) -> Items:
    """Return items with ``n`` key tiles each; ``low`` is the first position that a query of each item sees."""
    position = lines.position
    first = low[:, None] // KEYS
    first_key = first * KEYS
    key = first_key + np.arange(n * KEYS)
    ahead = key[:, None] - position[:, :, None]
    hidden = ahead > 0
    if spec.window is not None:
        hidden |= ahead <= -spec.window

    def by_tile(x: Array) -> Tensor:
        tiles = x.reshape(len(x), LINES, n, KEYS)
        tiled = tiles.swapaxes(1, 2)
        return _tensor(tiled[:, None])

    # a tile after the item's last one is masked completely, so any existing tile can replace it
    last = position[:, -1:] // KEYS
    existing = np.minimum(first + np.arange(n), last)
    tile = existing - shift[:, None]
    token = _tensor(lines.token)
    head = _tensor(lines.head)
    real = _tensor(lines.real)
    distance = None
    if spec.alibi is not None:
        distance = by_tile(ahead.astype(np.float32))
    return Items(token, head, real, tile, by_tile(hidden), distance)


def _tensor(x: Array) -> Tensor:
    contiguous = np.ascontiguousarray(x)
    return torch.from_numpy(contiguous)


def attend(fmt: KVFormat, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None) -> None:
    """Compute attention as ``AttentionBackend.forward``."""
    spec = layer.spec
    key = ("invariant", layer.group, spec.window, spec.heads, spec.alibi is None)
    every = meta.work.get(key)
    if every is None:
        every = make_keys(meta, layer.group, spec)
        meta.work[key] = every
    if not every:
        return
    cache = by_token(layer.cache)
    tokens = len(q)
    by_head = out.view(tokens, spec.kv_heads, -1, spec.dim_v)
    lse_by_head = None
    if lse is not None:
        lse_by_head = lse.view(tokens, spec.kv_heads, -1)
    most = max(len(keys.slots) for keys in every)
    room = _room(meta, spec, most)
    for keys in every:
        k, v = _tiles(fmt, cache, keys.slots, spec, room)
        for items in keys.items:
            result, total = _softmax_product(layer, q, k, v, items)
            real = items.real
            token = items.token[real]
            head = items.head[real]
            lines = result.transpose(1, 2)[real]
            by_head[token, :, head] = lines.to(out.dtype)
            if lse_by_head is not None:
                lse_by_head[token, :, head] = total.transpose(1, 2)[real]


def _room(meta: AttnMeta, spec: AttnSpec, tiles: int) -> Tensors:
    """Return memory for ``tiles`` tiles of keys and of values, which the layers of a step share.

    Allocating memory for each layer would take longer than writing it.  A column of ones follows the values.
    """
    key = ("invariant room", spec.dim_qk, spec.dim_v)
    most = tiles * spec.kv_heads
    found = meta.work.get(key)
    if found is None or len(found[0]) < most:
        keys = torch.empty(most, spec.dim_qk, KEYS)
        values = torch.zeros(most, KEYS, width(spec.dim_v))
        values[..., spec.dim_v] = 1.0
        found = keys, values
        meta.work[key] = found
    return found


def _tiles(fmt: KVFormat, cache: Mapping[str, Tensor], slots: Tensor, spec: AttnSpec, room: Tensors) -> Tensors:
    """Return keys f32 [kv_heads * T, dim_qk, KEYS] and values f32 [kv_heads * T, KEYS, width] of the tiles of ``slots``
    [T, KEYS].

    A column of ones follows the values.  Both tensors are contiguous.
    """
    k, v = fmt.load(cache, slots, torch.float32)
    kv_heads = spec.kv_heads
    dim_v = spec.dim_v
    tiles = len(slots)
    used = kv_heads * tiles
    keys = room[0][:used]
    keys_by_head = keys.view(kv_heads, tiles, spec.dim_qk, KEYS)
    keys_by_head.copy_(k.permute(2, 0, 3, 1))
    values = room[1][:used]
    values_by_head = values.view(kv_heads, tiles, KEYS, -1)
    loaded = v[..., :dim_v].permute(2, 0, 1, 3)
    values_by_head[..., :dim_v].copy_(loaded)
    return keys, values


def _scores(spec: AttnSpec, q: Tensor, k: Tensor, items: Items, pairs: Array) -> Tensor:
    """Return the scaled and capped scores f32 [I, kv_heads, J, LINES, KEYS] of ``pairs`` of items and key tiles."""
    n, lines = items.token.shape
    tiles = items.hidden.shape[2]
    kv_heads = spec.kv_heads
    dim = spec.dim_qk
    by_head = q.view(len(q), kv_heads, -1, dim)
    of_items = by_head[items.token, :, items.head].float()
    queries = of_items.transpose(1, 2).unsqueeze(2)
    queries = queries.expand(n, kv_heads, tiles, lines, dim)
    queries_of_pairs = queries.reshape(-1, lines, dim)
    products_of_pairs = products(queries_of_pairs, k, pairs)
    s = products_of_pairs.view(n, kv_heads, tiles, lines, KEYS)
    s.mul_(spec.softmax_scale)
    if spec.softcap is not None:
        s.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return s


def _softmax_product(layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, items: Items) -> Tensors:
    """Return the outputs [I, kv_heads, LINES, dim_v] and lse [I, kv_heads, LINES].  ``k`` and ``v`` are results of
    ``_tiles``."""
    spec = layer.spec
    n, lines = items.token.shape
    tiles = items.hidden.shape[2]
    kv_heads = spec.kv_heads
    tiles_of_head = len(k) // kv_heads
    heads = np.arange(kv_heads)
    first_tile = heads[:, None] * tiles_of_head
    pairs = items.tile[:, None] + first_tile
    pairs = pairs.reshape(-1)
    s = _scores(spec, q, k, items, pairs)

    def of_lines(per_head: Tensor) -> Tensor:
        by_group = per_head.view(kv_heads, -1)
        by_line = by_group[:, items.head].transpose(0, 1)
        return by_line.reshape(n, kv_heads, 1, lines, 1)

    if items.ahead is not None:
        slopes = of_lines(layer.slopes)  # type: ignore[arg-type]  # a layer with ``ahead`` has slopes
        s.add_(items.ahead * slopes)
    s.masked_fill_(items.hidden, -torch.inf)
    peak = s.amax(dim=(2, 4), keepdim=True)
    sink = None
    if spec.sinks:
        sink = of_lines(layer.sinks)  # type: ignore[arg-type]  # as its spec says
        peak = torch.maximum(peak, sink)
    p = s.sub_(peak).exp_()
    p = p.view(-1, lines, KEYS)
    parts = products(p, v, pairs)
    parts = parts.view(n, kv_heads, tiles, lines, -1)
    acc = parts[:, :, 0]
    for j in range(1, tiles):
        acc = acc + parts[:, :, j]
    dim_v = spec.dim_v
    total = acc[..., dim_v : dim_v + 1]
    peak = peak[:, :, 0]
    if sink is not None:
        of_sink = sink[:, :, 0] - peak
        total = total + of_sink.exp_()
    lse = peak + total.log()
    result = acc[..., :dim_v] / total
    return result, lse.squeeze(-1)


def width(dim: int) -> int:
    """Return the number of columns of the values with the column of ones, rounded up to a multiple of 16.

    Matrix libraries compute columns after the last multiple of 16 in another way, which changes other columns in narrow
    matrices.
    """
    columns = dim + 1
    return -(-columns // 16) * 16


def products(a: Tensor, b: Tensor, at: Array) -> Tensor:
    """Return the products a[i] b[at[i]], [P, m, n], of a [P, m, k] and the matrices of b [.., k, n] with the indices
    ``at`` i64 [P].

    P is a multiple of PAIRS.
    """
    count, m, k = a.shape
    n = b.shape[2]
    check(m, k, n, torch.get_num_threads())
    out = a.new_empty(count, m, n)
    index = torch.from_numpy(at)
    room = b.new_empty(PAIRS, k, n)
    calls = at.reshape(-1, PAIRS)
    firsts = calls[:, 0].tolist()
    adjacent = np.diff(calls, axis=1) == 1
    runs = adjacent.all(axis=1).tolist()  # a call with consecutive matrices needs no copy of them
    start = 0
    for run, first in zip(runs, firsts, strict=True):
        some = slice(start, start + PAIRS)
        if run:
            part = b[first : first + PAIRS]
        else:
            part = torch.index_select(b, 0, index[some], out=room)
        torch.bmm(a[some], part, out=out[some])
        start += PAIRS
    return out


@lru_cache(maxsize=256)
def check(m: int, k: int, n: int, threads: int) -> None:
    """Raise PluginError if the bits of the library's product of this shape depend on the position in the call."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(k, n, generator=generator)
    b = matrix.expand(PAIRS, k, n).contiguous()
    a_like = torch.empty(PAIRS, m, k)
    if not same_at_every_place(lambda a: torch.bmm(a, b), a_like):
        raise PluginError(
            f"sdpa: batch_invariant=true: on this machine a product of {m} x {k} x {n} gives a row other bits at "
            f"another position in the call: set batch_invariant=false, or use another number of threads than {threads}"
        )
