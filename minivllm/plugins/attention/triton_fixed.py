"""Paged attention in which the bits of a query do not depend on the other queries of the step (``batch_invariant``).

The keys of a row are cut into parts at fixed positions, multiples of ``PART``.  Each part has its own softmax sums, and
they are merged in the order of the parts::

    part i:  maximum m_i, denominator l_i, sum a_i [DV]      over tiles of 32 keys, first to last
    query:   (m, l, a) = merge((m, l, a), (m_i, l_i, a_i))   for each i, ascending; then a / l

The tiles of queries and their lines are those of ``triton_prefill``.  If a step has many tiles, a program computes a
tile and merges the parts in registers.  If it has few, several programs share the parts of a tile.  Each of them stores
the sums of its parts, and ``_join`` merges them with the same operations.  So a prompt, its chunks, a token behind a
cached prefix and a decoded token have equal bits.

No multiply-adds are fused, because the compiler would fuse them in one kernel and not in the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, release, settle

from .triton_decode import (
    LOG2E,
    NEVER,
    finish,
    head_sizes,
    in_float32,
    keys_and_values,
    layer_constants,
    numbers_of,
    page_of,
)
from .triton_prefill import KEYS, Tiles, by_tma, inputs_of, load_scales, load_tile, see

PART = 128  # keys
SHORT_LINES = 16  # least number of lines of a tile if each row has one token; a warp computes 16
SHORT_STAGES = 4, 3  # tiles of keys that are loaded at the same time by programs that share a row, and by others
AT_ONCE = tl.constexpr(8)  # number of parts whose sums are loaded together
PROGRAMS = 264  # number of programs among which few tiles are divided: two for each multiprocessor of an H200
MOST_PROGRAMS = 32  # largest number of programs of one tile and KV head
MOST_BYTES = 64 << 20  # of stored sums


class KeyParts(NamedTuple):
    """The number of programs for each tile and KV head, and the memory for the sums that they store."""

    programs: int  # number of programs of a tile; 1 means that no partial results are stored
    sums: Tensor  # float32 [tiles * KV heads * lines * most, DV], the probability-weighted sums of values
    norms: Tensor  # float32 [tiles * KV heads * lines * most, 2], softmax maximum and denominator of each sum
    most: int  # number of parts of the longest row


@triton.jit
def _merge(m, total, acc, part_m, part_total, part_acc):
    """Merge the sums [n] and [n, DV] of a part into the sums of the preceding parts."""
    peak = tl.maximum(m, part_m)
    fade, weight = tl.exp2(m - peak), tl.exp2(part_m - peak)
    return peak, total * fade + part_total * weight, acc * fade[:, None] + part_acc * weight[:, None]


@triton.jit
def _keep(sums, norms, to, part_m, part_total, part_acc, real, DV: tl.constexpr, DVP: tl.constexpr):
    """Store the sums of a part in the lines ``to`` [n]."""
    to, ov = to.to(tl.int64), tl.arange(0, DVP)
    tl.store(sums + to[:, None] * DV + ov[None, :], part_acc, mask=real[:, None] & (ov < DV)[None, :])
    tl.store(norms + to * 2, part_m, mask=real)
    tl.store(norms + to * 2 + 1, part_total, mask=real)


@kernel("slots", "kv_len", "cu_q", "tile_row", "tile_token", "most")
def _attend(
    q, k_cache, v_cache, k_tiles, v_tiles, k_scales, v_scales, table, slots, kv_len, cu_q, tile_row, tile_token,
    sinks, slopes, sums, norms, out, lse, scale, softcap, q_stride, table_stride, most,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VS: tl.constexpr,
    DVP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, LSE: tl.constexpr,
    STAGES: tl.constexpr, IEEE: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr,
    LINES: tl.constexpr, STORE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile, or with STORE of a share of its parts.  A part has EACH tiles of N keys.

    Sums are stored for LINES lines of a tile and KV head: M of them, or G if each tile has one token.  No row has more
    than ``most`` parts, except rows that have ended, whose results are dropped.  EARLY means that an earlier layer used
    the same tiles, which are then loaded before q is ready.
    """
    # Wait before the release: ``_join`` and later layers load the tiles without a wait of their own.
    if not EARLY:
        settle(PDL)
    release(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_row + tile)
    if row < 0:
        if EARLY:
            settle(PDL)
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
    low = length - (after - begin) + token  # position of the tile's first query
    end = tl.minimum(low + TOKENS, length)
    # all queries attend to the tiles of keys before ``whole``
    first, whole, stop = 0, (low + 1) // N, (end + N - 1) // N
    least = low * 0  # the first position that a query of the tile attends to; earlier blocks may be the null block
    if WINDOW > 0:
        least = tl.maximum(low - WINDOW + 1, 0)
        first = least // N
        whole = first
    if STORE:  # each program has a contiguous share of the visible parts
        begin_part, parts = first // EACH, (stop + EACH - 1) // EACH
        share = (parts - begin_part + tl.num_programs(2) - 1) // tl.num_programs(2)
        begin_part += tl.program_id(2) * share
        first = tl.maximum(first, begin_part * EACH)
        stop = tl.minimum(stop, tl.minimum(begin_part + share, most) * EACH)
        if first >= stop:
            if EARLY:
                settle(PDL)
            return
    slope = scale
    if SLOPES:
        slope = tl.load(slopes + heads, mask=real, other=0.0) * LOG2E
    last = tl.maximum(length - 1, 0)
    page = page_of(blocks, first * N, on, last, BLOCK, N)
    if EARLY:
        settle(PDL)
    q_at = q + (begin + mine).to(tl.int64)[:, None] * q_stride + heads[:, None] * D + od[None, :]
    queries = tl.load(q_at, mask=real[:, None] & (od < D)[None, :], other=0.0)  # [M, DP]
    lines = ((tile * KH + head) * LINES + om) * most  # of stored sums

    m = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    masked = tl.minimum(tl.maximum(whole, first), stop)  # the first tile that needs a mask
    part_m = tl.full([M], NEVER, tl.float32)
    part_total = tl.zeros([M], tl.float32)
    part_acc = tl.zeros([M, DVP], tl.float32)
    # One loop for all parts, because the first loads of a separate loop are not hidden.
    for j in tl.range(first, masked, num_stages=STAGES):
        key = j * N + on
        if TMA:  # no mask is needed, because every key was written and the tile lies in one block
            place = page * BLOCK + j * N % BLOCK
            k, v = k_tiles.load([place, head * D]).T, v_tiles.load([place, head * VS])
        else:
            k, v = load_tile(k_cache, v_cache, page, key, head, least, end, KH, D, DP, DV, VS, DVP, BLOCK, True)
        by_k, by_v = load_scales(k_scales, v_scales, page, key, head, least, end, KH, BLOCK, SCALED)
        page = page_of(blocks, j * N + N, on, last, BLOCK, N)  # the block number of the next tile
        part_m, part_total, part_acc = see(
            queries, k, v, by_k, by_v, key, position, position, slope, part_m, part_total, part_acc, scale, softcap,
            WINDOW, SOFTCAP, SLOPES, IEEE, True, SCALED,
        )  # fmt: skip
        if (j + 1) % EACH == 0 or j + 1 == stop:
            if STORE:
                _keep(sums, norms, lines + j // EACH, part_m, part_total, part_acc, real, DV, DVP)
            else:
                m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)
            part_m = tl.full([M], NEVER, tl.float32)
            part_total = tl.zeros([M], tl.float32)
            part_acc = tl.zeros([M, DVP], tl.float32)
    for j in tl.range(masked, stop, num_stages=STAGES):
        key = j * N + on
        k, v = load_tile(k_cache, v_cache, page, key, head, least, end, KH, D, DP, DV, VS, DVP, BLOCK, False)
        by_k, by_v = load_scales(k_scales, v_scales, page, key, head, least, end, KH, BLOCK, SCALED)
        page = page_of(blocks, j * N + N, on, last, BLOCK, N)
        part_m, part_total, part_acc = see(
            queries, k, v, by_k, by_v, key, position, position, slope, part_m, part_total, part_acc, scale, softcap,
            WINDOW, SOFTCAP, SLOPES, IEEE, False, SCALED,
        )  # fmt: skip
        if (j + 1) % EACH == 0 or j + 1 == stop:
            if STORE:
                _keep(sums, norms, lines + j // EACH, part_m, part_total, part_acc, real, DV, DVP)
            else:
                m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)
            part_m = tl.full([M], NEVER, tl.float32)
            part_total = tl.zeros([M], tl.float32)
            part_acc = tl.zeros([M, DVP], tl.float32)
    if not STORE:
        at = (begin + mine) * (KH * G) + heads
        finish(acc, m, total, at, real, heads, sinks, out, lse, DV, DVP, SINKS, LSE, True)


@kernel("kv_len", "cu_q", "tile_row", "tile_token", "most")
def _join(
    kv_len, cu_q, tile_row, tile_token, sinks, sums, norms, out, lse, most,
    KH: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, EACH: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the stored sums of a tile and KV head, and finish its L >= LINES lines."""
    release(PDL)
    tile, head, om = tl.program_id(0), tl.program_id(1), tl.arange(0, L)
    row = tl.load(tile_row + tile)
    if row < 0:
        settle(PDL)
        return
    begin, after = tl.load(cu_q + row), tl.load(cu_q + row + 1)
    length, token = tl.load(kv_len + row), tl.load(tile_token + tile)
    settle(PDL)
    mine = token + om // G
    real = (om // G < TOKENS) & (mine < after - begin) & (om < LINES)
    low = length - (after - begin) + token
    first, end = low * 0, tl.minimum(low + TOKENS, length)
    if WINDOW > 0:
        first = tl.maximum(low - WINDOW + 1, 0) // N // EACH
    heads, ov = head * G + om % G, tl.arange(0, DVP)
    lines = ((tile * KH + head) * LINES + om) * most
    m = tl.full([L], NEVER, tl.float32)
    total = tl.zeros([L], tl.float32)
    acc = tl.zeros([L, DVP], tl.float32)
    stop = tl.minimum((end + N * EACH - 1) // (N * EACH), most)
    for begin_part in tl.range(first, stop, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):  # their loads do not wait for each other
            part = begin_part + nth
            on = real & (part < stop)  # the sums of a part that does not exist are 0, which changes no bit
            at = (lines + part).to(tl.int64)
            part_m = tl.load(norms + at * 2, mask=on, other=NEVER)
            part_total = tl.load(norms + at * 2 + 1, mask=on, other=0.0)
            inside = on[:, None] & (ov < DV)[None, :]
            part_acc = tl.load(sums + at[:, None] * DV + ov[None, :], mask=inside, other=0.0)
            m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)
    finish(acc, m, total, (begin + mine) * (KH * G) + heads, real, heads, sinks, out, lse, DV, DVP, SINKS, LSE, True)


def parts_of(spec: AttnSpec, tiles: int, lines: int, longest: int, device: torch.device) -> KeyParts:
    """Return the programs for each tile and KV head of a step, and the memory of their sums.

    ``lines`` of a tile are stored for each KV head.  No context is longer than ``longest`` tokens.  Programs share a
    tile only if few tiles occupy the device, and if the sums need at most ``MOST_BYTES``.  The bits are the same."""
    most = cdiv(max(longest, 1), PART)
    occupied = max(tiles * spec.kv_heads, 1)
    programs = min(MOST_PROGRAMS, most, PROGRAMS // occupied)
    stored = tiles * spec.kv_heads * lines * most
    if programs < 2 or stored * (spec.dim_v + 2) * 4 > MOST_BYTES:
        programs = 1
        stored = 1
    sums = torch.empty(stored, spec.dim_v, dtype=torch.float32, device=device)
    norms = torch.empty(stored, 2, dtype=torch.float32, device=device)
    return KeyParts(programs, sums, norms, most)


def _parts(meta: AttnMeta, layer: AttnLayer, tiles: int, lines: int, device: torch.device) -> KeyParts:
    """Return the number of programs per tile and the memory for their sums (``KeyParts``).  All layers of a step with
    equal sizes share one result, because they run one after another.
    """
    spec = layer.spec
    key = ("parts", layer.group, spec.kv_heads, spec.dim_v, tiles, lines)
    if key not in meta.work:
        longest = int(meta.host_kv_len[layer.group].max())
        meta.work[key] = parts_of(spec, tiles, lines, longest, device)
    found: KeyParts = meta.work[key]
    return found


def short_lines(spec: AttnSpec) -> int:
    """Return the number of lines of a tile that has one token, with all query heads of a KV head."""
    return max(SHORT_LINES, power(spec.heads // spec.kv_heads))


def _warps_and_stages(spec: AttnSpec, lines: int, exact: bool, short: bool, programs: int) -> tuple[int, int]:
    """Return the warps of a program, and the tiles of keys that it loads at the same time.

    With ``exact``, products are in float32.  ``short`` means that a tile has few ``lines``, and ``programs`` share it.
    """
    if short:
        return lines // 16, SHORT_STAGES[programs == 1]
    return 4, 3 if not exact and spec.dim_qk <= 128 else 2


def attend(
    layer: AttnLayer,
    q: Tensor,
    meta: AttnMeta,
    out: Tensor,
    lse: Tensor | None,
    tiles: Tiles,
    single: bool,
    early: bool = False,
    short: bool = False,
) -> None:
    """Compute the outputs [T, heads, DV] of the rows in ``tiles`` from q [T, heads, D].

    ``single`` means that each row of the step has at most one token.  ``early`` means that an earlier layer used the
    same ``tiles``.  ``short`` means that single tokens have tiles of fewer lines, with ``short_lines_agree``."""
    spec = layer.spec
    row, token, lines, _ = tiles
    group = spec.heads // spec.kv_heads
    exact = in_float32(q)
    short = short and single
    if short:
        lines = short_lines(spec)
    k, v = keys_and_values(layer)
    scaled = "k_scale" in layer.cache
    tma = not scaled and by_tma(spec, k.dtype, q.device, meta.block)
    stored = group if single else lines
    parts = _parts(meta, layer, len(row), stored, q.device)
    sinks = layer.sinks if spec.sinks else out
    slopes = layer.slopes if spec.alibi is not None else out
    norms = out if lse is None else lse  # the kernels do not write absent tensors
    ends = (parts.sums, parts.norms, out, norms)
    of_row = (meta.kv_len[layer.group], meta.cu_q, row, token)
    warps, stages = _warps_and_stages(spec, lines, exact, short, parts.programs)
    common = pdl(q)
    common["N"] = KEYS
    common["TOKENS"] = lines // group
    common["WINDOW"] = spec.window or 0
    common["SINKS"] = spec.sinks
    common["LSE"] = lse is not None
    common["EACH"] = PART // KEYS
    common["LINES"] = stored
    common["num_warps"] = warps
    common["enable_fp_fusion"] = False
    constants = layer_constants(spec) | common
    constants["VS"] = v.shape[-1]
    constants["BLOCK"] = meta.block
    constants["M"] = lines
    constants["STAGES"] = stages
    constants["IEEE"] = exact
    constants["TMA"] = tma
    constants["SCALED"] = scaled
    constants["STORE"] = parts.programs > 1
    constants["EARLY"] = early
    inputs = inputs_of(layer, q, meta, tma)
    grid = (len(row), spec.kv_heads, parts.programs)
    _attend[grid](*inputs, *of_row, sinks, slopes, *ends, *numbers_of(layer, q, meta), parts.most, **constants)
    if parts.programs > 1:
        common["L"] = power(stored)
        common["num_warps"] = 4
        _join[grid[:2]](*of_row, sinks, *ends, parts.most, **head_sizes(spec), **common)
