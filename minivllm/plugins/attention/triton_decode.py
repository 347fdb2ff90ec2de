"""Paged attention of rows with one query each, which reads their keys and values once from the cache.

    kv_len ──_deal──► entries: (row, part of parts, slot, length), long parts first     grid (kv_heads, entries)
                        │
    table[slot] ──► blocks ──► k [N, D] · q [D, G] = s [N, G] ──► running softmax over N ──► v [DV, N] · p [N, G]
                        │
    parts == 1: final        else: partial sum, maximum and denominator ──_merge──► final

The entries are computed on the device, so a captured step fits rows of any lengths.  Many rows have one entry each.
Few rows, or very long ones, are split if that is faster, by a model of the time.  Entries that are not needed end at
once.  Layers share the entries, so all layers but the first read them before their queries are ready (EARLY; the rules
are in ``device.kernels.launch``).

G query heads share a KV head (padded to ``GP``).  The N tokens of a tile are on the M side of the matrix unit, so a
small group wastes little of it.  A row reads 2 * kv_len * kv_heads * D * 2 bytes, which determines the time.  At batch
256 the kernel reaches the speed of the memory.

The reference is ``sdpa.attend_explicit``.  The running softmax is Milakov & Gimelshein's (arXiv:1805.02867), in base 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.device.kernels.launch import cdiv, keep_room, kernel, multiprocessors, pdl, power, release, settle, wait

from .triton_bytes import numbers, quarters, together

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEVER: tl.constexpr = tl.constexpr(-1.0e30)  # a score below every real score; finite, so that no NaN can result
# factor that packs (index of a part, number of parts) into one number, PART * part + parts
PART: tl.constexpr = tl.constexpr(1 << 16)
AT_ONCE: tl.constexpr = tl.constexpr(16)  # number of partial sums that are loaded together
PROGRAMS = 3 * 132  # number of programs that an H200 runs at the same time
LEAST_VECTOR = 128  # least size of a vector over the rows of a step with shared prefixes
LONG = 8192  # if contexts may be longer, each row is split into parts even in a step of many rows


@triton.jit
def base2(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Scale scores for a softmax in base 2, with an optional cap softcap * tanh(s / softcap)."""
    if SOFTCAP:  # tanh by exp, because the interpreter lacks libdevice
        e = tl.exp(-2.0 * tl.abs(s * scale) / softcap)
        t = (1.0 - e) / (1.0 + e)
        return softcap * tl.where(s < 0, -t, t) * LOG2E
    else:
        return s * (scale * LOG2E)


@triton.jit
def dot(a, b, acc, dtype: tl.constexpr, IEEE: tl.constexpr):
    """Return acc + a b in ``dtype`` with float32 sums, with IEEE entirely in float32."""
    if IEEE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a.to(dtype), b.to(dtype), acc)


@triton.jit
def _in_float16(queries):
    """Divide each query of [D, G] by its largest magnitude, to the range of float16.

    Return it with the divisors f32 [G].
    """
    wide = queries.to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    return (wide / largest[None, :]).to(tl.float16), largest


@triton.jit
def _exponent(x):
    """Return the least whole number above the binary logarithm of positive float32 x, at least -100."""
    return tl.maximum((x.to(tl.int32, bitcast=True) >> 23).to(tl.float32) - 126.0, -100.0)


@triton.jit
def scaled_values(v, p, by, V_ROWS: tl.constexpr, dtype: tl.constexpr):
    """Return values and probabilities, one of which is multiplied by the scales ``by`` [N] of the values.

    The probabilities are fewer, so they are multiplied if the range of the dtype allows it.  V_ROWS means that tokens
    are rows of v, otherwise its columns.
    """
    if dtype == tl.float16:
        return (v.to(tl.float32) * _along(by, V_ROWS)).to(dtype), p
    else:
        return v, p * _along(by, not V_ROWS)


@triton.jit
def page_of(blocks, token, on, last, BLOCK: tl.constexpr, N: tl.constexpr):
    """Return the block numbers of N tokens from ``token`` on, or a single number if a tile lies within a block."""
    if BLOCK % N == 0:
        return tl.load(blocks + tl.minimum(token, last) // BLOCK)
    else:
        return tl.load(blocks + tl.minimum(token + on, last) // BLOCK)


@triton.jit
def _tiles(length, WINDOW: tl.constexpr, N: tl.constexpr):
    """Return the first tile and the number of tiles of the keys that the last of ``length`` tokens sees."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // N
    return first, (length + N - 1) // N - first


@triton.jit
def _part_of(tiles, most, at_once, capacity):
    """Return the number of tiles per part with the least estimated time.

    ``tiles`` [P] are the tiles of each row, and ``most`` those of the longest row.  ``at_once`` parts fill the device.
    The unit of time is the time of a tile on a full device; on an empty device a tile takes 0.3.  The estimate was
    fitted on an H200 to 1 to 48 rows of 200 to 4,096 tokens, where its choices are 0 to 11 % slower than the best size.
    """
    total = tl.sum(tiles, 0).to(tl.float32) / at_once
    size, least = most, 1e30
    each = most
    while each > 0:
        parts = tl.sum((tiles + each - 1) // each, 0)
        full = parts.to(tl.float32) / at_once
        time = each * (0.3 + 0.67 * full)
        # The parts do not fit on the device at the same time.  They run in order of length, and the first loads of each
        # part are not hidden.
        if full > 1.0:
            time = total + 0.25 * each + 0.5 * full
        if each < most:
            # the time to merge the sums, AT_ONCE parts of a row at a time
            time += 0.37 + (most - 1) // (each * AT_ONCE)
        better = (time < least) & (parts <= capacity)
        size, least = tl.where(better, each, size), tl.where(better, time, least)
        each = each * 2 // 3
    return size


@kernel("kv_len", "q_len", "slots", "rows", "capacity")
def _deal(
    kv_len, q_len, slots, shared, entries, first, rows, at_once, capacity, N: tl.constexpr, WINDOW: tl.constexpr,
    P: tl.constexpr, WP: tl.constexpr, CUT: tl.constexpr, MIXED: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the parts of row ``program_id`` after the parts of all rows with longer parts.

    With SHARED, the parts of a row begin after its shared prefix.
    """
    wait(PDL)
    row, at = tl.program_id(0), tl.arange(0, P)
    length, slot = tl.load(kv_len + row), tl.load(slots + row).to(tl.int32)
    _, tiles = _tiles(tl.load(kv_len + at, mask=at < rows, other=0), WINDOW, N)
    if SHARED:
        tiles -= tl.load(shared + 2 * at, mask=at < rows, other=0) // N
    on = at < rows
    if MIXED:  # rows with several tokens, or without one, are not computed by the decode kernel
        on &= tl.load(q_len + at, mask=at < rows, other=0) == 1
    tiles = tl.where(on, tl.maximum(tiles, 1), 0)
    each = tl.maximum(tiles, 1)
    if CUT:
        most = _part_of(tiles, tl.maximum(tl.max(tiles, 0), 1), at_once, capacity)
        cuts = tl.maximum((tiles + most - 1) // most, 1)
        each = tl.maximum((tiles + cuts - 1) // cuts, 1)
    parts = (tiles + each - 1) // each
    mine = tl.sum(tl.where(at == row, parts, 0), 0)
    size = tl.sum(tl.where(at == row, each, 0), 0)
    to = tl.sum(tl.where((each > size) | ((each == size) & (at < row)), parts, 0), 0)
    tl.store(first + 2 * row, to)
    tl.store(first + 2 * row + 1, mine)
    for part in tl.range(0, mine):
        entry = entries + 4 * (to + part)
        tl.store(entry, row)
        tl.store(entry + 1, mine + part * PART)
        tl.store(entry + 2, slot)
        tl.store(entry + 3, length)
    if row == 0:
        ow = tl.arange(0, WP)
        tl.store(entries + 4 * ow, tl.full([WP], -1, tl.int32), mask=(ow >= tl.sum(parts, 0)) & (ow < capacity))


@kernel("rows")
def _decode(
    q, k_cache, v_cache, k_scales, v_scales, table, entries, shared, shared_sums, shared_norms, sums, norms, sinks,
    out, lse, slopes, scale, softcap, q_stride, table_stride, rows,
    KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    VS: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    IEEE: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr, ROOM: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a part of a row's attention.

    WORDS means that keys and values are bytes and that ``v_cache`` has four in a word (``triton_bytes``).  VS is the
    size of a value in elements of ``v_cache``.  ROOM is not read; each value compiles a kernel of its own for
    ``launch.keep_room``.  SHARED means that the kernel ``_shared``, which runs at the same time, computes the first
    tokens of rows.  ``_shared`` waits for all earlier kernels before this one starts, so only its sums are waited for.
    """
    # Wait before the release: the merge and later layers read these entries without a wait of their own, so the entries
    # must be complete when those kernels may start.
    if not EARLY and not SHARED:
        settle(PDL)
    release(PDL)
    head, entry = tl.program_id(0), tl.program_id(1)
    row, share = tl.load(entries + 4 * entry), tl.load(entries + 4 * entry + 1)
    slot, length = tl.load(entries + 4 * entry + 2), tl.load(entries + 4 * entry + 3)
    if row < 0:
        if EARLY or SHARED:
            settle(PDL)
        return
    part, parts = share // PART, share % PART
    blocks = table + slot.to(tl.int64) * table_stride
    first, tiles = _tiles(length, WINDOW, N)
    if SHARED:
        first = tl.load(shared + 2 * row) // N
        tiles -= first
    each = (tiles + parts - 1) // parts
    start = first + part * each
    end = tl.minimum(first + tiles, start + each)

    og, od, ov, on = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, N)
    heads = head * G + og
    last = tl.maximum(length - 1, 0)
    page = page_of(blocks, start * N, on, last, BLOCK, N)
    if EARLY and not SHARED:
        settle(PDL)
    q_at = q + row.to(tl.int64) * q_stride + heads[None, :] * D + od[:, None]
    queries = tl.load(q_at, mask=(og < G)[None, :] & (od < D)[:, None], other=0.0)  # [DP, GP]
    if WORDS and not IEEE:
        queries, largest = _in_float16(queries)
    slope = scale
    if SLOPES:
        slope = tl.load(slopes + heads, mask=og < G, other=0.0) * LOG2E
    m = tl.full([GP], NEVER, tl.float32)
    total = tl.zeros([GP], tl.float32)
    wide: tl.constexpr = 4 if WORDS else 1
    ow = tl.arange(0, DVP // wide)
    acc = tl.zeros([DVP // wide, GP], tl.float32)
    b, c, d = acc, acc, acc
    for tile in tl.range(start, end, num_stages=STAGES):
        token = tile * N + on
        at = page.to(tl.int64) * BLOCK + token % BLOCK
        seen = token < length
        if WINDOW > 0:
            seen &= token >= length - WINDOW
        k_at = k_cache + (at[:, None] * KH + head) * D + od[None, :]
        v_at = v_cache + (at[None, :] * KH + head) * VS + ow[:, None]
        if D == DP:
            k = tl.load(k_at, mask=seen[:, None], other=0.0)
        else:
            k = tl.load(k_at, mask=seen[:, None] & (od < D)[None, :], other=0.0)
        if DV == DVP:
            v = tl.load(v_at, mask=seen[None, :], other=0)
        else:
            v = tl.load(v_at, mask=seen[None, :] & (wide * ow < DV)[:, None], other=0)
        if SCALED:
            by_k = tl.load(k_scales + at * KH + head, mask=seen, other=0.0)
            by_v = tl.load(v_scales + at * KH + head, mask=seen, other=0.0)
        # loads the next tile's block numbers now, so that this tile hides their latency
        page = page_of(blocks, tile * N + N, on, last, BLOCK, N)
        if WORDS:
            k = numbers(k, ASM)
        s = dot(k, queries, tl.zeros([N, GP], tl.float32), queries.dtype, IEEE)
        if WORDS and not IEEE:
            s = s * largest[None, :]
        if SCALED:
            s = s * by_k[:, None]
        s = base2(s, scale, softcap, SOFTCAP)
        if SLOPES:
            s += slope[None, :] * (token - last)[:, None].to(tl.float32)
        s = tl.where(seen[:, None], s, NEVER)
        if WORDS and SCALED:  # scaled, so that no product of a probability and the scale of its values exceeds 1
            peak = tl.maximum(m, tl.max(s + _exponent(by_v)[:, None], 0))
        else:
            peak = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - peak[None, :])
        fade = tl.exp2(m - peak)
        total = total * fade + tl.sum(p, 0)
        if SCALED and WORDS:
            p = p * by_v[:, None]
        elif SCALED:
            v, p = scaled_values(v, p, by_v, False, queries.dtype)
        if WORDS:
            v, v1, v2, v3 = quarters(v, FLOAT8, ASM)
            b = dot(v1, p, b * fade[None, :], queries.dtype, IEEE)
            c = dot(v2, p, c * fade[None, :], queries.dtype, IEEE)
            d = dot(v3, p, d * fade[None, :], queries.dtype, IEEE)
        acc = dot(v, p, acc * fade[None, :], queries.dtype, IEEE)
        m = peak

    if WORDS:
        acc = together(acc, b, c, d, DVP // 4, GP)
    if SHARED:
        settle(PDL)
    if parts == 1:
        if SHARED:
            for chunk in tl.range(0, tl.load(shared + 2 * row + 1)):
                nth = (chunk * rows + row).to(tl.int64) * (KH * G) + heads
                ms = tl.load(shared_norms + nth * 2, mask=og < G, other=NEVER)
                totals = tl.load(shared_norms + nth * 2 + 1, mask=og < G, other=0.0)
                sums_at = shared_sums + nth[None, :] * DV + ov[:, None]
                theirs = tl.load(sums_at, mask=(og < G)[None, :] & (ov < DV)[:, None], other=0.0)
                peak = tl.maximum(m, ms)
                fade, weight = tl.exp2(m - peak), tl.exp2(ms - peak)
                acc = acc * fade[None, :] + theirs * weight[None, :]
                total = total * fade + totals * weight
                m = peak
        finish(acc, m, total, row * KH * G + heads, og < G, heads, sinks, out, lse, DV, DVP, SINKS, LSE, False)
    else:
        at = (entry * KH + head).to(tl.int64) * G + og
        tl.store(sums + at[None, :] * DV + ov[:, None], acc, mask=(og < G)[None, :] & (ov < DV)[:, None])
        tl.store(norms + at * 2, m, mask=og < G)
        tl.store(norms + at * 2 + 1, total, mask=og < G)


@kernel("rows")
def _merge(
    first, shared, shared_sums, shared_norms, sums, norms, sinks, out, lse, rows, KH: tl.constexpr, G: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row and query head in their order, with weights 2 ** (m - max m).

    With SHARED, the chunks of the row's shared prefix follow.
    """
    release(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    # An early kernel of the first layer has waited for the kernel that writes these numbers, so no wait is needed here.
    entry, parts = tl.load(first + 2 * row), tl.load(first + 2 * row + 1)
    settle(PDL)
    if parts < 2:
        return
    oi, ov = tl.arange(0, AT_ONCE), tl.arange(0, DVP)
    m = tl.full([1], NEVER, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DVP], tl.float32)
    for i in tl.range(0, parts, AT_ONCE):
        at = ((entry + i + oi) * KH + head // G).to(tl.int64) * G + head % G
        some = i + oi < parts
        ms = tl.load(norms + at * 2, mask=some, other=NEVER)
        totals = tl.load(norms + at * 2 + 1, mask=some, other=0.0)
        these = tl.load(sums + at[:, None] * DV + ov[None, :], mask=some[:, None] & (ov < DV)[None, :], other=0.0)
        peak = tl.maximum(m, tl.max(ms, 0))
        fade, weight = tl.exp2(m - peak), tl.exp2(ms - peak)
        acc = acc * fade[:, None] + tl.sum(these * weight[:, None], 0)[None, :]
        total = total * fade + tl.sum(totals * weight, 0)
        m = peak
    if SHARED:
        at = ((oi * rows + row) * KH + head // G).to(tl.int64) * G + head % G
        some = oi < tl.load(shared + 2 * row + 1)
        ms = tl.load(shared_norms + at * 2, mask=some, other=NEVER)
        totals = tl.load(shared_norms + at * 2 + 1, mask=some, other=0.0)
        sums_at = shared_sums + at[:, None] * DV + ov[None, :]
        these = tl.load(sums_at, mask=some[:, None] & (ov < DV)[None, :], other=0.0)
        peak = tl.maximum(m, tl.max(ms, 0))
        fade, weight = tl.exp2(m - peak), tl.exp2(ms - peak)
        acc = acc * fade[:, None] + tl.sum(these * weight[:, None], 0)[None, :]
        total = total * fade + tl.sum(totals * weight, 0)
        m = peak
    one = tl.arange(0, 1)
    heads = head + one
    finish(acc, m, total, row * KH * G + heads, one < 1, heads, sinks, out, lse, DV, DVP, SINKS, LSE, True)


@triton.jit
def _along(x, ROWS: tl.constexpr):
    """Return x [n] as a column for acc [n, DVP] (ROWS), or as a row for acc [DVP, n]."""
    if ROWS:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def finish(acc, m, total, at, on, heads, sinks, out, lse, DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr,
           LSE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Divide acc, [n, DVP] if ROWS, else [DVP, n], by its denominators, and store it in the rows ``at`` [n] of out [..,
    DV].
    """
    if SINKS:
        sink = tl.load(sinks + heads, mask=on, other=0.0) * LOG2E
        peak = tl.maximum(m, sink)
        fade = tl.exp2(m - peak)
        acc = acc * _along(fade, ROWS)
        total = total * fade + tl.exp2(sink - peak)
        m = peak
    some = tl.where(total > 0, total, 1.0)
    ov = tl.arange(0, DVP)
    to = out + _along(at.to(tl.int64) * DV, ROWS) + _along(ov, not ROWS)
    tl.store(to, (acc / _along(some, ROWS)).to(out.dtype.element_ty), mask=_along(on, ROWS) & _along(ov < DV, not ROWS))
    if LSE:
        tl.store(lse + at, (m + tl.log2(some)) * LN2, mask=on)


def vector(n: int) -> int:
    """Return the vector size of a kernel over n rows or entries.

    Steps of few rows have the same size, so they run the same compiled kernels.
    """
    return max(LEAST_VECTOR, power(n))


def in_float32(q: Tensor) -> bool:
    """Return whether products are computed in float32, which is so for float32 itself and under the interpreter.

    The interpreter cannot multiply bfloat16.
    """
    return q.element_size() == 4 or q.device.type == "cpu"


def scales_of(layer: AttnLayer) -> tuple[Tensor, Tensor]:
    """Return the scales of keys and values, f32 [blocks, block, kv_heads].

    Without scales, return other tensors of the cache, which the kernels do not read.
    """
    cache = layer.cache
    k = cache.get("k_scale", cache["k"])
    return k, k if layer.spec.v_in_k else cache.get("v_scale", k)


def keys_and_values(layer: AttnLayer) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer's cache; with ``v_in_k`` the values are in the tensor of the keys."""
    k = layer.cache["k"]
    return k, k if layer.spec.v_in_k else layer.cache["v"]


def numbers_of(layer: AttnLayer, q: Tensor, meta: AttnMeta) -> tuple[float, float, int, int]:
    """Return a layer's scale and soft cap, and the distances of adjacent tokens of q and of adjacent columns of the
    block table in elements, the numbers of all kernels that compute scores.
    """
    spec = layer.spec
    softcap = spec.softcap or 1.0
    return spec.softmax_scale, softcap, q.stride(0), meta.table.stride(1)


@lru_cache(maxsize=256)
def head_sizes(spec: AttnSpec) -> dict[str, Any]:
    """Return the constants of kernels that merge outputs: KV heads, query heads of a KV head, and the sizes of values.

    The caller does not change the result, which is cached.
    """
    sizes = {"KH": spec.kv_heads}
    sizes["G"] = spec.heads // spec.kv_heads
    sizes["DV"] = spec.dim_v
    sizes["DVP"] = power(max(spec.dim_v, 16))
    return sizes


@lru_cache(maxsize=256)
def layer_constants(spec: AttnSpec) -> dict[str, Any]:
    """Return the constants of kernels that compute scores: ``head_sizes``, the sizes of keys, soft caps and slopes.

    The caller does not change the result, which is cached.
    """
    constants = dict(head_sizes(spec))
    constants["D"] = spec.dim_qk
    constants["DP"] = power(max(spec.dim_qk, 16))
    constants["SOFTCAP"] = spec.softcap is not None
    constants["SLOPES"] = spec.alibi is not None
    return constants


def keys_a_tile(spec: AttnSpec, exact: bool) -> int:
    return 64 if spec.dim_qk <= 128 and not exact else 32


class SharedParts(NamedTuple):
    """The partial sums over the shared prefixes of a step's rows (``triton_shared``)."""

    rows: Tensor  # i32 [rows, 2], the tokens of each row's shared prefix and its chunks
    sums: Tensor  # float32 [chunks * rows * heads, DV], probability-weighted sums of values
    norms: Tensor  # float32 [chunks * rows * heads, 2], softmax maximum and denominator of each sum


class DecodeWork(NamedTuple):
    """The division of the keys of decode rows into parts, one part for each program.  The layers of a step share it."""

    entries: Tensor  # i32 [E, 4] row or -1, PART * part + parts, slot, length
    first: Tensor  # i32 [rows, 2], each row's first entry and its number of parts
    cut: bool  # whether at least one row has more than one part
    sums: Tensor  # float32 [E * heads, DV], probability-weighted sums of values, one for each entry and head
    norms: Tensor  # float32 [E * heads, 2], softmax maximum and denominator of each sum
    shared: SharedParts | None  # partial sums over the first tokens of rows; None if every row is read separately


def deal(
    spec: AttnSpec,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    rows: int,
    longest: int,
    mixed: bool,
    exact: bool,
    shared: SharedParts | None = None,
) -> DecodeWork:
    """Divide rows into parts for the decode kernel.

    ``kv_len`` and ``q_len`` are i32 and ``slots`` i64 [rows or more], on the device.  No context is longer than
    ``longest``.  With ``mixed``, only rows of exactly one token have parts.  With ``exact``, products are in float32
    and tiles have fewer keys.  The parts of a row begin after its prefix in ``shared``.
    """
    device = kv_len.device
    seen = min(longest, spec.window or longest)
    programs = rows * spec.kv_heads
    cut = programs <= PROGRAMS or seen > LONG
    at_once = max(1, PROGRAMS // spec.kv_heads)
    capacity, stored = rows, 1
    if cut:
        capacity += min(at_once, 31 * rows)
        stored = capacity * spec.heads
    entries = torch.empty(capacity, 4, dtype=torch.int32, device=device)
    first = torch.empty(rows, 2, dtype=torch.int32, device=device)
    sums = torch.empty(stored, spec.dim_v, dtype=torch.float32, device=device)
    norms = torch.empty(stored, 2, dtype=torch.float32, device=device)
    size = power if shared is None else vector
    prefixes = first if shared is None else shared.rows
    constants = pdl(kv_len)
    constants["N"] = keys_a_tile(spec, exact)
    constants["WINDOW"] = spec.window or 0
    constants["P"] = size(rows)
    constants["WP"] = size(capacity)
    constants["CUT"] = cut
    constants["MIXED"] = mixed
    constants["SHARED"] = shared is not None
    columns = (kv_len, q_len, slots, prefixes, entries, first)
    _deal[(rows,)](*columns, rows, at_once, capacity, num_warps=1, **constants)
    return DecodeWork(entries, first, cut, sums, norms, shared)


def decode(
    layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None, work: DecodeWork, early: bool
) -> None:
    """Compute the outputs [T, heads, DV] of the rows of ``work``, whose queries q are the first tokens of a step.

    ``q`` is [T, heads, D]. ``early`` means that the decode kernel of an earlier layer has used this ``work``.
    """
    spec = layer.spec
    k, v = keys_and_values(layer)
    exact = in_float32(q)
    tile = keys_a_tile(spec, exact)
    rows, entries = len(work.first), len(work.entries)
    sinks = layer.sinks if spec.sinks else out
    slopes = layer.slopes if spec.alibi is not None else out
    norm = out if lse is None else lse  # the kernels do not write absent tensors
    sums = (work.sums, work.norms)
    shared = work.shared or (work.first, *sums)
    ends = (*shared, *sums, sinks, out, norm)
    common = pdl(q)
    common["SINKS"] = spec.sinks
    common["LSE"] = lse is not None
    common["SHARED"] = work.shared is not None
    constants = layer_constants(spec) | common
    words = False
    if k.element_size() == 1:
        words = spec.dim_qk % 4 == spec.dim_v % 4 == 0
    elements = v.shape[-1]
    if words:
        v = v.view(torch.int32)
        elements //= 4
    room = 0
    # With one row, shared memory is reserved only for the programs of this launch.  The rest stays first-level cache,
    # through which the products of quantized weights before and after this kernel load (``keep_room``).
    if rows == 1:
        programs = spec.kv_heads * entries
        room = cdiv(programs, multiprocessors(q.device))
    constants["GP"] = power(max(constants["G"], 8))
    constants["VS"] = elements
    constants["BLOCK"] = meta.block
    constants["N"] = tile
    constants["WINDOW"] = spec.window or 0
    constants["STAGES"] = 2 if exact else 3
    constants["IEEE"] = exact
    constants["SCALED"] = "k_scale" in layer.cache
    constants["WORDS"] = words
    constants["FLOAT8"] = k.dtype == torch.float8_e4m3fn
    constants["ASM"] = q.device.type == "cuda"
    constants["EARLY"] = early
    constants["ROOM"] = room
    constants["num_warps"] = 2 if tile == 64 else 4
    table = meta.table[layer.group]
    inputs = (q, k, v, *scales_of(layer), table, work.entries)
    grid = (spec.kv_heads, entries)
    launched = _decode[grid](*inputs, *ends, slopes, *numbers_of(layer, q, meta), rows, **constants)
    keep_room(launched, room, q.device)
    if work.cut:
        grid = (spec.heads, rows)
        common["num_warps"] = 2
        _merge[grid](work.first, *ends, rows, **head_sizes(spec), **common)
