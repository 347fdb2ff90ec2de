"""Paged attention for rows of several tokens: prompts, chunks of prompts behind a cached prefix, and mixed steps.

    grid (tiles, kv_heads); a tile is up to M / G tokens of one row, with all G query heads of one KV head

    tile ──► (row, first token)      q [M, D] · k [D, N] = s [M, N] ──► running softmax ──► p [M, N] · v [N, DV]
    line m of a tile: token m // G, query head m % G

Keys and values are always read from the cache, so a chunk, a prefix hit and a whole prompt are the same computation.
Flops: 4 * D * (query-key pairs) * heads.  Tiles beyond the last one (of a captured graph) have row -1 and end at once.

Reference: ``sdpa.attend_explicit``.  FlashAttention-2's loop (arXiv:2307.08691) over pages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.device.kernels.launch import capability, cdiv, kernel, power

from .triton_decode import (
    LOG2E,
    NEVER,
    base2,
    dot,
    finish,
    in_float32,
    keys_and_values,
    layer_constants,
    numbers_of,
    page_of,
    scaled_values,
    scales_of,
)

KEYS = 32  # N


class Tiles(NamedTuple):
    """The tiles of queries of a step: for each tile its row and its first token.

    A captured step has room for the largest number of tiles of its size.  Unused tiles have row -1 and come last.
    """

    row: Tensor  # i32 [tiles] the row of each tile, -1 for none
    token: Tensor  # i32 [tiles] the first token of each tile in its row
    lines: int  # M, lines of a tile: tokens times the query heads of a KV head
    count: Tensor | None = None  # i32 [1] the number of tiles with a row, for ``triton_hopper``


@triton.jit
def load_tile(
    k_cache, v_cache, page, key, head, low, end, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, VS: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Load keys [DP, N] and values [N, DVP] of the positions ``key`` [N] in [low, end), and 0 for other positions.

    Other positions are not loaded, because a probability of 0 times a stale NaN would be NaN. ALL means that all
    positions are inside.
    """
    od, ov = tl.arange(0, DP), tl.arange(0, DVP)
    inside = (key >= low) & (key < end)
    at = page.to(tl.int64) * BLOCK + key % BLOCK
    k_at = k_cache + (at[None, :] * KH + head) * D + od[:, None]
    v_at = v_cache + (at[:, None] * KH + head) * VS + ov[None, :]
    if ALL and D == DP:
        k = tl.load(k_at)
    elif ALL:
        k = tl.load(k_at, mask=(od < D)[:, None], other=0.0)
    else:
        k = tl.load(k_at, mask=inside[None, :] & (od < D)[:, None], other=0.0)
    if ALL and DV == DVP:
        v = tl.load(v_at)
    elif ALL:
        v = tl.load(v_at, mask=(ov < DV)[None, :], other=0.0)
    else:
        v = tl.load(v_at, mask=inside[:, None] & (ov < DV)[None, :], other=0.0)
    return k, v


@triton.jit
def load_scales(
    k_scales, v_scales, page, key, head, low, end, KH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):
    """Load the scales f32 [N] of the keys and values that ``load_tile`` loads."""
    if SCALED:
        inside = (key >= low) & (key < end)
        at = (page.to(tl.int64) * BLOCK + key % BLOCK) * KH + head
        return tl.load(k_scales + at, mask=inside, other=0.0), tl.load(v_scales + at, mask=inside, other=0.0)
    else:
        return key, key  # not read


@triton.jit
def see(
    queries, k, v, by_k, by_v, key, position, upto, slope, m, total, acc, scale, softcap, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, IEEE: tl.constexpr, ALL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys at positions ``key`` [N] to the running softmax.

    ``upto`` [M] is the last position that each query attends to.  ALL means that every query attends to every key.
    ``slope`` [M] is for SLOPES.
    """
    s = dot(queries, k, tl.zeros([queries.shape[0], k.shape[1]], tl.float32), queries.dtype, IEEE)
    if SCALED:
        s = s * by_k[None, :]
    s = base2(s, scale, softcap, SOFTCAP)
    if SLOPES:
        s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    if not ALL:
        seen = key[None, :] <= upto[:, None]
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        s = tl.where(seen, s, NEVER)
    peak = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - peak[:, None])
    if not ALL:
        p = tl.where(seen, p, 0.0)  # needed for a line without a visible key, whose largest score is NEVER too
    fade = tl.exp2(m - peak)
    total = total * fade + tl.sum(p, 1)
    if SCALED:
        v, p = scaled_values(v, p, by_v, True, queries.dtype)
    acc = dot(p, v, acc * fade[:, None], queries.dtype, IEEE)
    return peak, total, acc


@kernel("slots", "kv_len", "cu_q", "tile_row", "tile_token", "ahead")
def _prefill(
    q, k_cache, v_cache, k_tiles, v_tiles, k_scales, v_scales, table, slots, kv_len, cu_q, tile_row, tile_token,
    ahead, sinks, slopes, out, lse, scale, softcap, q_stride, table_stride,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VS: tl.constexpr,
    DVP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, LSE: tl.constexpr,
    STAGES: tl.constexpr, IEEE: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_row + tile)
    if row < 0:
        return
    begin, after = tl.load(cu_q + row), tl.load(cu_q + row + 1)
    length = tl.load(kv_len + row)
    token = tl.load(tile_token + tile)  # within the row
    blocks = table + tl.load(slots + row) * table_stride

    om, od, on = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N)
    mine = token + om // G
    real = (om // G < TOKENS) & (mine < after - begin)
    heads = head * G + om % G
    position = length - (after - begin) + mine  # of each query
    slope = scale
    if SLOPES:
        slope = tl.load(slopes + heads, mask=real, other=0.0) * LOG2E
    q_at = q + (begin + mine).to(tl.int64)[:, None] * q_stride + heads[:, None] * D + od[None, :]
    queries = tl.load(q_at, mask=real[:, None] & (od < D)[None, :], other=0.0)  # [M, DP]

    low = length - (after - begin) + token  # position of the tile's first query
    end = tl.minimum(low + TOKENS, length)
    upto = position
    if SPANS:  # tokens of an image attend to its later tokens, so more tiles are visible
        upto += tl.load(ahead + begin + mine, mask=real, other=0)
        end = tl.minimum(tl.maximum(end, tl.max(tl.where(real, upto, 0), 0) + 1), length)
    first, whole = 0, (low + 1) // N  # all queries attend to the tiles before ``whole``
    least = low * 0  # the first position that a query of the tile attends to; earlier blocks may be the null block
    if WINDOW > 0:
        least = tl.maximum(low - WINDOW + 1, 0)
        first = least // N
        whole = first
    m = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    last = tl.maximum(length - 1, 0)
    page = page_of(blocks, first * N, on, last, BLOCK, N)
    for j in tl.range(first, whole, num_stages=STAGES):
        if TMA:  # no mask is needed, because every key was written and the tile lies in one block
            place = page * BLOCK + j * N % BLOCK
            k, v = k_tiles.load([place, head * D]).T, v_tiles.load([place, head * VS])
        else:
            k, v = load_tile(k_cache, v_cache, page, j * N + on, head, least, end, KH, D, DP, DV, VS, DVP, BLOCK, True)
        by_k, by_v = load_scales(k_scales, v_scales, page, j * N + on, head, least, end, KH, BLOCK, SCALED)
        page = page_of(blocks, j * N + N, on, last, BLOCK, N)  # load the next tile's block number early
        m, total, acc = see(
            queries,
            k,
            v,
            by_k,
            by_v,
            j * N + on,
            position,
            upto,
            slope,
            m,
            total,
            acc,
            scale,
            softcap,
            WINDOW,
            SOFTCAP,
            SLOPES,
            IEEE,
            True,
            SCALED,
        )
    for j in tl.range(whole, (end + N - 1) // N, num_stages=STAGES):
        k, v = load_tile(k_cache, v_cache, page, j * N + on, head, least, end, KH, D, DP, DV, VS, DVP, BLOCK, False)
        by_k, by_v = load_scales(k_scales, v_scales, page, j * N + on, head, least, end, KH, BLOCK, SCALED)
        page = page_of(blocks, j * N + N, on, last, BLOCK, N)
        m, total, acc = see(
            queries,
            k,
            v,
            by_k,
            by_v,
            j * N + on,
            position,
            upto,
            slope,
            m,
            total,
            acc,
            scale,
            softcap,
            WINDOW,
            SOFTCAP,
            SLOPES,
            IEEE,
            False,
            SCALED,
        )
    at = (begin + mine) * (KH * G) + heads
    finish(acc, m, total, at, real, heads, sinks, out, lse, DV, DVP, SINKS, LSE, True)


def tile_lines(group: int, longest: int) -> int:
    """Return the lines M of a tile, at most 64, and fewer for short rows.

    64 lines by 32 keys let several programs share a multiprocessor, and were fastest on an H200 (512 tokens: 186 us,
    with 128 by 64: 216 us), also at 4,096 tokens.
    """
    return max(16, power(group), min(64, power(longest * group)))


def make_tiles(q_len: np.ndarray, kv_len: np.ndarray, first_row: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each tile and its first token in the row, i32, for the rows from ``first_row`` on.

    A tile has ``tokens`` tokens.  The tiles with the most keys come first, so that no long tile runs last and alone.
    ``q_len`` and ``kv_len`` are i32 [R]; both include the tokens of this step.
    """
    counts = -(-q_len[first_row:] // tokens)
    rows = np.arange(first_row, len(q_len), dtype=np.int32)
    row = np.repeat(rows, counts)
    before = np.cumsum(counts) - counts
    first_of_row = np.repeat(before, counts)
    nth = np.arange(len(row)) - first_of_row
    token = nth * tokens
    first_query = kv_len - q_len
    position = first_query[row] + token
    order = np.argsort(-position, kind="stable")
    sorted_tokens = token[order].astype(np.int32)
    return row[order], sorted_tokens


@kernel("q_len", "kv_len", "rows", "most")
def _tiles(
    q_len, kv_len, tile_row, tile_token, rows, most,
    TOKENS: tl.constexpr, P: tl.constexpr, B: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Write B tiles to their places in the order of ``make_tiles``.  A row of less than LEAST tokens has none.

    The place of a tile is the number of tiles that begin at a later position, or at the same position of an earlier
    row.  Program i counts it for the tiles from i * B on, in the order of rows.  Places beyond the last tile get row
    -1."""
    r = tl.arange(0, P)
    lens = tl.load(q_len + r, mask=r < rows, other=0)
    before = tl.load(kv_len + r, mask=r < rows, other=0) - lens  # position of each row's first query
    counts = tl.where(lens >= LEAST, (lens + TOKENS - 1) // TOKENS, 0)
    ends = tl.cumsum(counts, 0)
    at = tl.program_id(0) * B + tl.arange(0, B)
    passed = ends[None, :] <= at[:, None]  # bool [B, P] rows whose tiles all precede this tile
    row = tl.sum(passed.to(tl.int32), 1)
    token = (at - tl.sum(tl.where(passed, counts[None, :], 0), 1)) * TOKENS
    real = at < tl.sum(counts, 0)
    begin = tl.load(kv_len + row, mask=real, other=0) - tl.load(q_len + row, mask=real, other=0) + token
    ahead = begin[:, None] - before[None, :]  # [B, P] tokens of each row up to the position of this tile
    earlier = r[None, :] < row[:, None]
    smaller = tl.where(earlier, (ahead + TOKENS - 1) // TOKENS, ahead // TOKENS + 1)
    smaller = tl.where(ahead < 0, 0, tl.minimum(smaller, counts[None, :]))
    place = tl.where(real, tl.sum(counts[None, :] - smaller, 1), at)
    tl.store(tile_row + place, tl.where(real, row, -1), mask=place < most)
    tl.store(tile_token + place, tl.where(real, token, 0), mask=place < most)


def tiles_on_device(q_len: Tensor, kv_len: Tensor, most: int, tokens: int, least: int = 2) -> tuple[Tensor, Tensor]:
    """Return the row (-1 for none) and the first token i32 of ``most`` tiles, in the order of ``make_tiles``.

    It is used in captured steps, in which only the device has the lengths ``q_len`` and ``kv_len``, both i32 [R].
    Rows of less than ``least`` tokens have no tiles.
    """
    row = torch.empty(most, dtype=torch.int32, device=q_len.device)
    token = torch.empty_like(row)
    count = len(q_len)
    rows = power(count)
    at_once = max(1, min(32, 4096 // rows))
    programs = cdiv(most, at_once)
    sizes = {"TOKENS": tokens, "P": rows, "B": at_once, "LEAST": least, "num_warps": 4}
    _tiles[(programs,)](q_len, kv_len, row, token, count, most, **sizes)
    return row, token


def tokens_ahead(meta: AttnMeta, group: int, device: torch.device) -> Tensor | None:
    """Return the number of later positions that each token of a step attends to (``AttnMeta.host_sees``), i32 [T].

    None if there are none.
    """
    if meta.host_sees is None:
        return None
    q_len = meta.host_q_len.astype(np.int64)
    shift = meta.host_kv_len[group] - np.cumsum(q_len)
    total = int(q_len.sum())
    position = np.arange(total) + np.repeat(shift, q_len)
    ahead = meta.host_sees - position
    if not ahead.any():
        return None
    counts = torch.from_numpy(ahead.astype(np.int32))
    return counts.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def by_tma(spec: AttnSpec, dtype: torch.dtype, device: torch.device, block: int) -> bool:
    """Return whether TMA copies keys and values that all queries of a tile attend to.

    It does for heads of 128 elements, for which it was measured to be faster.  It also does on the CPU under the
    interpreter, so that tests cover it.
    """
    if device.type != "cpu" and (capability(device) < 9 or dtype.itemsize != 2):
        return False
    return spec.dim_qk == spec.dim_v == 128 and spec.window is None and block % KEYS == 0


def whole_cache(x: Tensor, spec: AttnSpec) -> TensorDescriptor:
    """Return a cache of keys or values for TMA, in tiles of ``KEYS`` tokens of a head."""
    elements = x.shape[2] * x.shape[3]
    tokens = x.view(-1, elements)
    return TensorDescriptor.from_tensor(tokens, [KEYS, spec.dim_v])


def inputs_of(layer: AttnLayer, q: Tensor, meta: AttnMeta, tma: bool) -> tuple[Any, ...]:
    """Return the first arguments of kernels that read keys in tiles of ``KEYS`` tokens: queries, cache and block table.

    With ``tma`` the cache is passed a second time as descriptors for the copy engine.
    """
    k, v = keys_and_values(layer)
    k_tiles, v_tiles = k, v
    if tma:
        k_tiles = whole_cache(k, layer.spec)
        v_tiles = whole_cache(v, layer.spec)
    k_scales, v_scales = scales_of(layer)
    return q, k, v, k_tiles, v_tiles, k_scales, v_scales, meta.table[layer.group], meta.slots


def prefill(
    layer: AttnLayer,
    q: Tensor,
    meta: AttnMeta,
    out: Tensor,
    lse: Tensor | None,
    tiles: Tiles,
    ahead: Tensor | None = None,
) -> None:
    """Compute the outputs [T, heads, DV] of the rows in ``tiles`` from q [T, heads, D] and ``tokens_ahead`` i32 [T]."""
    spec = layer.spec
    row, token, lines, _ = tiles
    k, v = keys_and_values(layer)
    exact = in_float32(q)
    scaled = "k_scale" in layer.cache
    tma = not scaled and by_tma(spec, k.dtype, q.device, meta.block)
    sinks = layer.sinks if spec.sinks else out
    slopes = layer.slopes if spec.alibi is not None else out
    constants = dict(layer_constants(spec))
    constants["SPANS"] = ahead is not None
    constants["VS"] = v.shape[-1]
    constants["BLOCK"] = meta.block
    constants["M"] = lines
    constants["N"] = KEYS
    constants["TOKENS"] = lines // constants["G"]
    constants["WINDOW"] = spec.window or 0
    constants["SINKS"] = spec.sinks
    constants["LSE"] = lse is not None
    constants["STAGES"] = 3 if not exact and spec.dim_qk <= 128 else 2
    constants["IEEE"] = exact
    constants["TMA"] = tma
    constants["SCALED"] = scaled
    constants["num_warps"] = 4
    # the kernel neither reads nor writes absent tensors
    later = row if ahead is None else ahead
    norms = out if lse is None else lse
    inputs = inputs_of(layer, q, meta, tma)
    of_row = (meta.kv_len[layer.group], meta.cu_q, row, token, later)
    ends = (sinks, slopes, out, norms)
    grid = (len(row), spec.kv_heads)
    _prefill[grid](*inputs, *of_row, *ends, *numbers_of(layer, q, meta), **constants)
