"""Decode attention over shared prefixes: the rows of a group read the blocks that they share once.

    block tables ──_find──► level, first row ──_group──► shared tokens, members ──_cut──► entries, chunks of each row

    entry: [M lines: member, query head] · k [D, N]     grid (kv_heads, entries); partial sums of each row and chunk
    the rest of each row ──``triton_decode``──► its own sum, joined with the partial sums of its chunks

The groups are found on the device, so a captured step serves any rows.  Rows share blocks if their block tables have
the same block numbers.  Full blocks are never written again, so equal numbers are equal keys and values.  A row may
share its first blocks with many rows and more blocks with few of them.  ``_find`` looks at the block at the end of each
of a few depths, which double.  It takes the depth that saves most, and then compares all blocks up to the first
difference.

The lines of an entry are computed as those of ``triton_prefill``, over keys that every line sees.  Partial sums are in
float32.  ``_decode`` or ``_merge`` joins them by their maxima and denominators (log-sum-exp).

References: Hydragen (arXiv:2402.05099) and the cascade of FlashInfer (arXiv:2501.01005) split a softmax in this way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.device.kernels.launch import kernel, pdl, power, release, settle, wait

from .triton_decode import (
    LOG2E,
    NEVER,
    PROGRAMS,
    SharedParts,
    in_float32,
    keys_a_tile,
    keys_and_values,
    layer_constants,
    numbers_of,
    page_of,
    scales_of,
    vector,
)
from .triton_prefill import by_tma, load_scales, load_tile, see

LEAST_TOKENS = 256  # fewest tokens of a prefix that rows read together
FEWEST_ROWS = 4  # fewest rows of a group, which limits the entries of a step
MOST_CHUNKS = 8  # largest number of chunks of a row's shared prefix; not above ``triton_decode.AT_ONCE``
LEAST_CHUNK = 128  # tokens
ENTRY: tl.constexpr = tl.constexpr(8)  # size of an entry in numbers


class Tile(NamedTuple):
    """The sizes of the kernel's tiles.  They were chosen without a measurement of speed."""

    lines: int = 64  # M, at most
    keys: int = 64  # N
    warps: int = 4
    stages: int = 3
    programs: int = PROGRAMS  # aimed at


TILE = Tile()


@kernel("slots", "kv_len", "q_len", "rows", "columns")
def _find(
    slots, kv_len, q_len, table, label, same, rows, table_stride, columns, BLOCK: tl.constexpr, LEAST: tl.constexpr,
    LEVELS: tl.constexpr, FEWEST: tl.constexpr, P: tl.constexpr, C: tl.constexpr, MIXED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find the rows with which row ``program_id`` shares the longest prefix.

    Write their label, 0 for none, and the number of leading blocks that the row shares with the first of them.  LEAST
    is the first depth in blocks.  The last block of a row is not shared, because the step writes it.
    """
    wait(PDL)
    row, at = tl.program_id(0), tl.arange(0, P)
    on = at < rows
    slot = tl.load(slots + at, mask=on, other=0).to(tl.int64)
    whole = tl.maximum(tl.load(kv_len + at, mask=on, other=0) - 1, 0) // BLOCK
    own_slot = tl.load(slots + row).to(tl.int64)
    own_whole = tl.maximum(tl.load(kv_len + row) - 1, 0) // BLOCK
    if MIXED:
        whole = tl.where(tl.load(q_len + at, mask=on, other=0) == 1, whole, 0)
        own_whole = tl.where(tl.load(q_len + row) == 1, own_whole, 0)
    whole = tl.minimum(whole, columns)
    own_whole = tl.minimum(own_whole, columns)
    most, level, first = 0.0, -1, row
    for i in tl.static_range(LEVELS):
        depth = LEAST << i
        page = tl.load(table + slot * table_stride + depth - 1, mask=on & (whole >= depth), other=0)
        own = tl.load(table + own_slot * table_stride + depth - 1, mask=own_whole >= depth, other=0)
        alike = (page == own) & (page != 0)
        count = tl.sum(alike.to(tl.int32), 0)
        saved = depth * (1.0 - 1.0 / tl.maximum(count, 1).to(tl.float32))
        better = (count >= FEWEST) & (saved > most)
        most, level = tl.where(better, saved, most), tl.where(better, i, level)
        first = tl.where(better, tl.min(tl.where(alike, at, P), 0), first)
    until = tl.minimum(own_whole, tl.maximum(tl.load(kv_len + first) - 1, 0) // BLOCK)
    until = tl.where(level >= 0, until, 0)
    first_slot = tl.load(slots + first).to(tl.int64)
    shared = until
    for start in tl.range(0, until, C):
        index = start + tl.arange(0, C)
        a = tl.load(table + own_slot * table_stride + index, mask=index < until, other=0)
        b = tl.load(table + first_slot * table_stride + index, mask=index < until, other=0)
        differs = (index < until) & ((a != b) | (a == 0))
        shared = tl.minimum(shared, tl.min(tl.where(differs, index, until), 0))
    tl.store(label + row, tl.where(shared >= LEAST, first * 32 + level + 1, 0))
    tl.store(same + row, shared)


@kernel("rows")
def _group(
    label, same, groups, members, rows, BLOCK: tl.constexpr, N: tl.constexpr, FEWEST: tl.constexpr, P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write (shared tokens, members, place of the first member, first member) of the group of row ``program_id``.

    Rows without a group have 0 tokens.  The rows are written to ``members`` group by group.
    """
    wait(PDL)
    row, at = tl.program_id(0), tl.arange(0, P)
    labels = tl.load(label + at, mask=at < rows, other=0)
    mine = tl.load(label + row)
    alike = (labels == mine) & (mine > 0)
    count = tl.sum(alike.to(tl.int32), 0)
    blocks = tl.min(tl.where(alike, tl.load(same + at, mask=at < rows, other=0), 1 << 24), 0)
    tokens = tl.where(count >= FEWEST, blocks, 0) * BLOCK // N * N
    place = tl.sum(((labels > 0) & (labels < mine)).to(tl.int32), 0)
    if mine > 0:
        tl.store(members + place + tl.sum((alike & (at < row)).to(tl.int32), 0), row)
    tl.store(groups + 4 * row, tokens)
    tl.store(groups + 4 * row + 1, count)
    tl.store(groups + 4 * row + 2, place)
    tl.store(groups + 4 * row + 3, tl.min(tl.where(alike, at, P), 0))


@kernel("slots", "rows", "capacity")
def _cut(
    slots, groups, entries, shared, rows, aim, capacity, N: tl.constexpr, CHUNKS: tl.constexpr, LEAST: tl.constexpr,
    EACH: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Divide the prefix of each group into chunks of equal length, at most CHUNKS, and write the group's entries.

    An entry is (place of the first member, members, slot, begin, end, chunk) and has at most EACH members.  Entries
    without members are not needed.  Write (shared tokens, chunks) of row ``program_id``.  With about ``aim`` entries
    each multiprocessor has work.
    """
    wait(PDL)
    row, at = tl.program_id(0), tl.arange(0, P)
    tokens = tl.load(groups + 4 * at, mask=at < rows, other=0)
    count = tl.load(groups + 4 * at + 1, mask=at < rows, other=0)
    leads = (tokens > 0) & (tl.load(groups + 4 * at + 3, mask=at < rows, other=0) == at)
    tiles = tl.where(leads, (count + EACH - 1) // EACH, 0)
    size = tl.maximum((tl.sum(tiles * tokens, 0) + aim - 1) // aim, (tl.max(tokens, 0) + CHUNKS - 1) // CHUNKS)
    size = tl.maximum((size + N - 1) // N * N, LEAST)
    chunks = (tokens + size - 1) // size
    mine = tl.sum(tl.where(at == row, tokens, 0), 0)
    cuts = tl.sum(tl.where(at == row, chunks, 0), 0)
    tl.store(shared + 2 * row, mine)
    tl.store(shared + 2 * row + 1, cuts)
    own_tiles = tl.sum(tl.where(at == row, tiles, 0), 0)
    before = tl.sum(tl.where(at < row, tiles * chunks, 0), 0)
    place = tl.load(groups + 4 * row + 2)
    of_group = tl.load(groups + 4 * row + 1)
    slot = tl.load(slots + row).to(tl.int32)
    for i in tl.range(0, own_tiles * cuts):  # consecutive tiles of a chunk read the same keys
        chunk, tile = i // own_tiles, i % own_tiles
        entry = entries + ENTRY * (before + i)
        tl.store(entry, place + tile * EACH)
        tl.store(entry + 1, tl.minimum(of_group - tile * EACH, EACH))
        tl.store(entry + 2, slot)
        tl.store(entry + 3, chunk * size)
        tl.store(entry + 4, tl.minimum(mine, chunk * size + size))
        tl.store(entry + 5, chunk)
    if row == 0:
        ow = tl.arange(0, WP)
        unused = (ow >= tl.sum(tiles * chunks, 0)) & (ow < capacity)
        tl.store(entries + ENTRY * ow + 1, tl.zeros([WP], tl.int32), mask=unused)


@kernel("entries", "members", "kv_len", "rows")
def _shared(
    q, k_cache, v_cache, k_tiles, v_tiles, k_scales, v_scales, table, entries, members, kv_len, sums, norms, slopes,
    scale, softcap, q_stride, table_stride, rows,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VS: tl.constexpr,
    DVP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr, TMA: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of an entry's rows over its chunk.

    It waits for all earlier kernels before it lets ``_decode`` start, so ``_decode`` may read queries and the cache
    without waiting.
    """
    settle(PDL)
    release(PDL)
    head, entry = tl.program_id(0), entries + ENTRY * tl.program_id(1)
    count = tl.load(entry + 1)
    if count == 0:
        return
    place, slot = tl.load(entry), tl.load(entry + 2)
    begin, end, chunk = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    blocks = table + slot.to(tl.int64) * table_stride

    om, od, on, ov = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N), tl.arange(0, DVP)
    real = om // G < count
    row = tl.load(members + place + om // G, mask=real, other=0)
    heads = head * G + om % G
    position = tl.load(kv_len + row, mask=real, other=1) - 1
    slope = scale
    if SLOPES:
        slope = tl.load(slopes + heads, mask=real, other=0.0) * LOG2E
    q_at = q + row.to(tl.int64)[:, None] * q_stride + heads[:, None] * D + od[None, :]
    queries = tl.load(q_at, mask=real[:, None] & (od < D)[None, :], other=0.0)  # [M, DP]

    m = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    last = end - 1
    page = page_of(blocks, begin, on, last, BLOCK, N)
    for j in tl.range(begin // N, end // N, num_stages=STAGES):
        if TMA:
            at = page * BLOCK + j * N % BLOCK
            k, v = k_tiles.load([at, head * D]).T, v_tiles.load([at, head * VS])
        else:
            k, v = load_tile(k_cache, v_cache, page, j * N + on, head, 0, end, KH, D, DP, DV, VS, DVP, BLOCK, True)
        by_k, by_v = load_scales(k_scales, v_scales, page, j * N + on, head, 0, end, KH, BLOCK, SCALED)
        page = page_of(blocks, j * N + N, on, last, BLOCK, N)  # load the next tile's block number early
        m, total, acc = see(
            queries,
            k,
            v,
            by_k,
            by_v,
            j * N + on,
            position,
            position,
            slope,
            m,
            total,
            acc,
            scale,
            softcap,
            0,
            SOFTCAP,
            SLOPES,
            IEEE,
            True,
            SCALED,
        )
    to = (chunk * rows + row).to(tl.int64) * (KH * G) + heads
    tl.store(sums + to[:, None] * DV + ov[None, :], acc, mask=real[:, None] & (ov < DV)[None, :])
    tl.store(norms + to * 2, m, mask=real)
    tl.store(norms + to * 2 + 1, total, mask=real)


class SharedWork(NamedTuple):
    """The shared prefixes of a step, which its layers use."""

    entries: Tensor  # i32 [E, 8]
    members: Tensor  # i32 [rows], the rows group by group
    parts: SharedParts


def lines_of(spec: AttnSpec) -> int:
    """Return the lines M of a tile: ``TILE.lines``, and at least a row's query heads of a KV head."""
    return max(TILE.lines, power(spec.heads // spec.kv_heads))


def keys_of(block: int, exact: bool) -> int:
    """Return the number N of keys of a tile, such that a tile lies in one block.

    With ``exact`` tiles have fewer keys, because products in float32 take longer.
    """
    keys = min(TILE.keys, 32) if exact else TILE.keys
    within = block & -block
    return min(keys, within) if within >= 16 else keys


def find_shared(
    spec: AttnSpec, kv_len: Tensor, meta: AttnMeta, table: Tensor, rows: int, mixed: bool, exact: bool
) -> SharedWork:
    """Find the shared prefixes of the first ``rows`` rows of a step.

    ``kv_len`` i32 [rows or more] and ``table`` i32 [slots, columns] are those of the layer's KV group.  With ``mixed``,
    only rows of exactly one token share.  ``exact`` means that products are computed in float32.
    """
    device, block = kv_len.device, meta.block

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    keys = keys_of(block, exact)
    group = spec.heads // spec.kv_heads
    each = lines_of(spec) // group
    aim = max(1, TILE.programs // spec.kv_heads)
    # the last terms are for rounding up the number of tiles and of chunks in each group
    capacity = aim + rows // FEWEST_ROWS + rows // each + 1
    columns = table.shape[1]
    least = -(-LEAST_TOKENS // block)
    levels = (columns // least).bit_length()
    chunks = aim * each // rows
    most_chunks = max(2, min(MOST_CHUNKS, chunks))
    common = pdl(kv_len)
    common["P"] = vector(rows)
    common["num_warps"] = 1
    of_groups = common | {"BLOCK": block, "FEWEST": FEWEST_ROWS}
    grid = (rows,)
    label = make(rows)
    same = make(rows)
    depths = {"LEAST": least, "LEVELS": max(1, levels), "C": 64}
    slots = meta.slots
    stride = table.stride(0)
    q_len = meta.q_len
    of_rows = (slots, kv_len, q_len, table, label, same, rows, stride, columns)
    _find[grid](*of_rows, MIXED=mixed, **depths, **of_groups)
    groups = make(rows, 4)
    members = make(rows)
    # multiple of tokens at which a shared prefix ends, so that ``_decode`` begins the rest of a row at one of its tiles
    step = max(keys, keys_a_tile(spec, exact))
    _group[grid](label, same, groups, members, rows, N=step, **of_groups)
    entries = make(capacity, ENTRY.value)
    shared = make(rows, 2)
    least_chunk = max(LEAST_CHUNK, keys)
    common["WP"] = vector(capacity)
    cuts = {"N": keys, "CHUNKS": most_chunks, "LEAST": least_chunk, "EACH": each}
    _cut[grid](slots, groups, entries, shared, rows, aim, capacity, **cuts, **common)
    stored = most_chunks * rows * spec.heads
    sums = make(stored, spec.dim_v, dtype=torch.float32)
    norms = make(stored, 2, dtype=torch.float32)
    parts = SharedParts(shared, sums, norms)
    return SharedWork(entries, members, parts)


def _whole(x: Tensor, keys: int, dim: int) -> TensorDescriptor:
    tokens = x.view(-1, x.shape[2] * x.shape[3])
    return TensorDescriptor.from_tensor(tokens, [keys, dim])


def attend_shared(layer: AttnLayer, q: Tensor, meta: AttnMeta, work: SharedWork) -> None:
    """Compute the partial sums of ``work``.  The first tokens of q [T, heads, D] are the queries of its rows."""
    spec = layer.spec
    k, v = keys_and_values(layer)
    exact = in_float32(q)
    scaled = "k_scale" in layer.cache
    lines = lines_of(spec)
    keys = keys_of(meta.block, exact)
    tma = False
    if not scaled and meta.block % keys == 0:
        tma = by_tma(spec, k.dtype, q.device, meta.block)
    constants = layer_constants(spec) | pdl(q)
    constants["VS"] = v.shape[-1]
    constants["BLOCK"] = meta.block
    constants["M"] = lines
    constants["N"] = keys
    constants["EACH"] = lines // constants["G"]
    constants["STAGES"] = TILE.stages if not exact and spec.dim_qk <= 128 else 2
    constants["IEEE"] = exact
    constants["TMA"] = tma
    constants["SCALED"] = scaled
    constants["num_warps"] = TILE.warps
    k_tiles, v_tiles = k, v
    if tma:
        k_tiles = _whole(k, keys, spec.dim_v)
        v_tiles = _whole(v, keys, spec.dim_v)
    k_scales, v_scales = scales_of(layer)
    entries, members, parts = work
    group = layer.group
    slopes = layer.slopes if spec.alibi is not None else parts.norms
    rows = len(members)
    inputs = (q, k, v, k_tiles, v_tiles, k_scales, v_scales, meta.table[group])
    of_rows = (entries, members, meta.kv_len[group])
    results = (parts.sums, parts.norms)
    grid = (spec.kv_heads, len(entries))
    _shared[grid](*inputs, *of_rows, *results, slopes, *numbers_of(layer, q, meta), rows, **constants)
