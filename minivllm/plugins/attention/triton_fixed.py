"""Paged attention in which the bits of a query do not depend on the other queries of the step (``batch_invariant``).

The keys of a row are cut into parts at fixed positions, multiples of ``PART``.  Each part has its own softmax sums, and
they are merged in the order of the parts::

    part i:  maximum m_i, denominator l_i, sum a_i [DV]      over tiles of 32 keys, first to last
    query:   (m, l, a) = merge((m, l, a), (m_i, l_i, a_i))   for each i, ascending; then a / l

The tiles of queries and their lines are those of ``triton_prefill``.  If a step has many tiles, a program computes a
tile and merges the parts in registers.  If it has few, several programs share the parts of a tile.  Each of them stores
the sums of its parts, and ``_join`` merges them with the same operations.  So a prompt, its chunks, a token behind a
cached prefix and a decoded token have equal bits.

In steps of single tokens a program has four warps, one for each tile of a part.  Scores need no order, so each warp
computes those of a tile.  The maxima, sums and values are then added in the order of the tiles.

No multiply-adds are fused, because the compiler would fuse them in one kernel and not in the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, release, settle

from .triton_decode import (
    LOG2E,
    NEVER,
    base2,
    dot,
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
# Programs that compute the tiles of a part together have four warps.  A multiprocessor runs one of them at a time if
# heads have 128 elements of 16 bits, because its shared memory holds no more.
WHOLE_STAGES = 2
WHOLE_DIM = 128  # largest size of a head for which their registers suffice
# Their number among which few tiles are divided, and the largest number of such tiles times KV heads.  Dividing the 256
# tiles of 32 rows of Qwen3-0.6B took 1.69 ms a step in place of 1.46, and dividing those of 8 rows among half as many
# programs 1.03 in place of 1.00 (H200).
WHOLE_PROGRAMS, WHOLE_TILES = 528, 132
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


@triton.jit
def _quarters(x):
    """Return x[0], x[1], x[2] and x[3] of x [4, ..] with two or three axes."""
    if len(x.shape) == 2:
        even, odd = tl.split(tl.permute(x, (1, 0)).reshape(x.shape[1], 2, 2))
    else:
        even, odd = tl.split(tl.permute(x, (1, 2, 0)).reshape(x.shape[1], x.shape[2], 2, 2))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def _stacked(nth, zero, one, two, three):
    """Return the value of the four whose number is ``nth`` [4, 1], broadcast."""
    return tl.where(nth < 2, tl.where(nth == 0, zero, one), tl.where(nth == 2, two, three))


@triton.jit
def _pages(blocks, token, on, last, BLOCK: tl.constexpr, N: tl.constexpr):
    """Return the block numbers of four tiles of N tokens from ``token`` on, as ``page_of``."""
    first, second = page_of(blocks, token, on, last, BLOCK, N), page_of(blocks, token + N, on, last, BLOCK, N)
    third = page_of(blocks, token + 2 * N, on, last, BLOCK, N)
    return first, second, third, page_of(blocks, token + 3 * N, on, last, BLOCK, N)


@triton.jit
def _values(v_cache, page, key, head, least, end, KH: tl.constexpr, DV: tl.constexpr, VS: tl.constexpr,
            DVP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Load the values [N, DVP] of the positions ``key`` [N] in [least, end), and 0 for other positions."""
    ov = tl.arange(0, DVP)
    at = page.to(tl.int64) * BLOCK + key % BLOCK
    inside = ((key >= least) & (key < end))[:, None] & (ov < DV)[None, :]
    return tl.load(v_cache + (at[:, None] * KH + head) * VS + ov[None, :], mask=inside, other=0.0)


@triton.jit
def _see_part(
    queries, k, v0, v1, v2, v3, key, position, slope, scale, softcap, DVP: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Return the sums of a part of four tiles, with the bits that ``see`` gives for one tile after another.

    ``queries`` are [4, M, DP], and k [4, DP, N].  Each of four warps computes the scores of a tile, and then a quarter
    of the sums of values."""
    M: tl.constexpr = queries.shape[1]
    nth = tl.arange(0, 4)[:, None]
    s = dot(queries, k, tl.zeros([4, M, k.shape[2]], tl.float32), queries.dtype, IEEE)
    s = base2(s, scale, softcap, SOFTCAP)
    away = key[:, None, :] - position[None, :, None]
    if SLOPES:
        s += slope[None, :, None] * away.to(tl.float32)
    seen = away <= 0
    if WINDOW > 0:
        seen &= away > -WINDOW
    s = tl.where(seen, s, NEVER)
    m0, m1, m2, m3 = _quarters(tl.max(s, 2))
    m1 = tl.maximum(m0, m1)
    m2 = tl.maximum(m1, m2)
    m3 = tl.maximum(m2, m3)
    peak = _stacked(nth, m0[None, :], m1[None, :], m2[None, :], m3[None, :])
    p = tl.where(seen, tl.exp2(s - peak[:, :, None]), 0.0)
    total, t1, t2, t3 = _quarters(tl.sum(p, 2))
    fade1, fade2, fade3 = tl.exp2(m0 - m1), tl.exp2(m1 - m2), tl.exp2(m2 - m3)
    total = total * fade1 + t1
    total = total * fade2 + t2
    total = total * fade3 + t3
    if not IEEE:
        p = p.to(queries.dtype)
    p0, p1, p2, p3 = _quarters(p)
    acc = dot(p0, v0, tl.zeros([M, DVP], tl.float32), queries.dtype, IEEE)
    acc = dot(p1, v1, acc * fade1[:, None], queries.dtype, IEEE)
    acc = dot(p2, v2, acc * fade2[:, None], queries.dtype, IEEE)
    acc = dot(p3, v3, acc * fade3[:, None], queries.dtype, IEEE)
    return m3, total, acc


@kernel("slots", "kv_len", "cu_q", "tile_row", "tile_token", "most")
def _attend(
    q, k_cache, v_cache, k_tiles, v_tiles, k_scales, v_scales, table, slots, kv_len, cu_q, tile_row, tile_token,
    sinks, slopes, sums, norms, out, lse, scale, softcap, q_stride, table_stride, most,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VS: tl.constexpr,
    DVP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, LSE: tl.constexpr,
    STAGES: tl.constexpr, IEEE: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr,
    LINES: tl.constexpr, STORE: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile, or with STORE of a share of its parts.  A part has EACH tiles of N keys.

    WHOLE means that four warps compute the four tiles of a part together (``_see_part``).

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
    if WHOLE:
        nth, part_keys = tl.arange(0, EACH)[:, None], N * EACH
        several = tl.broadcast_to(queries[None, :, :], [EACH, M, DP])
        token = first // EACH * part_keys
        page0, page1, page2, page3 = _pages(blocks, token, on, last, BLOCK, N)
        for part in tl.range(first // EACH, (stop + EACH - 1) // EACH, num_stages=STAGES):
            token = part * part_keys  # the first of the part
            keys = token + nth * N + on[None, :]  # [EACH, N]
            pages = _stacked(nth, page0, page1, page2, page3)
            inside = ((keys >= least) & (keys < end))[:, None, :] & (od < D)[None, :, None]
            places = pages.to(tl.int64) * BLOCK + keys % BLOCK
            k_at = k_cache + (places[:, None, :] * KH + head) * D + od[None, :, None]
            k = tl.load(k_at, mask=inside, other=0.0)
            v0 = _values(v_cache, page0, token + on, head, least, end, KH, DV, VS, DVP, BLOCK)
            v1 = _values(v_cache, page1, token + N + on, head, least, end, KH, DV, VS, DVP, BLOCK)
            v2 = _values(v_cache, page2, token + 2 * N + on, head, least, end, KH, DV, VS, DVP, BLOCK)
            v3 = _values(v_cache, page3, token + 3 * N + on, head, least, end, KH, DV, VS, DVP, BLOCK)
            page0, page1, page2, page3 = _pages(blocks, token + part_keys, on, last, BLOCK, N)  # of the next part
            part_m, part_total, part_acc = _see_part(
                several, k, v0, v1, v2, v3, keys, position, slope, scale, softcap, DVP, WINDOW, SOFTCAP, SLOPES, IEEE
            )
            if STORE:
                _keep(sums, norms, lines + part, part_m, part_total, part_acc, real, DV, DVP)
            else:
                m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)
    else:
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


def parts_of(spec: AttnSpec, tiles: int, lines: int, longest: int, device: torch.device, at_once: int) -> KeyParts:
    """Return the programs for each tile and KV head of a step, and the memory of their sums.

    ``lines`` of a tile are stored for each KV head.  No context is longer than ``longest`` tokens.  Programs share a
    tile only if few tiles occupy the device, and if the sums need at most ``MOST_BYTES``.  The bits are the same.
    ``at_once`` is the number of programs that the device runs at the same time."""
    most = cdiv(max(longest, 1), PART)
    occupied = max(tiles * spec.kv_heads, 1)
    programs = min(MOST_PROGRAMS, most, at_once // occupied)
    stored = tiles * spec.kv_heads * lines * most
    if programs < 2 or stored * (spec.dim_v + 2) * 4 > MOST_BYTES:
        programs = 1
        stored = 1
    sums = torch.empty(stored, spec.dim_v, dtype=torch.float32, device=device)
    norms = torch.empty(stored, 2, dtype=torch.float32, device=device)
    return KeyParts(programs, sums, norms, most)


def _parts(meta: AttnMeta, layer: AttnLayer, tiles: int, lines: int, device: torch.device, at_once: int) -> KeyParts:
    """Return the number of programs per tile and the memory for their sums (``KeyParts``).  All layers of a step with
    equal sizes share one result, because they run one after another.
    """
    spec = layer.spec
    key = ("parts", layer.group, spec.kv_heads, spec.dim_v, tiles, lines, at_once)
    if key not in meta.work:
        longest = int(meta.host_kv_len[layer.group].max())
        meta.work[key] = parts_of(spec, tiles, lines, longest, device, at_once)
    found: KeyParts = meta.work[key]
    return found


def short_lines(spec: AttnSpec) -> int:
    """Return the number of lines of a tile that has one token, with all query heads of a KV head."""
    return max(SHORT_LINES, power(spec.heads // spec.kv_heads))


def _whole(spec: AttnSpec, lines: int) -> bool:
    """Return whether a program with few ``lines`` computes the tiles of a part together."""
    return lines == SHORT_LINES and PART == 4 * KEYS and max(spec.dim_qk, spec.dim_v) <= WHOLE_DIM


def _warps_and_stages(spec: AttnSpec, lines: int, exact: bool, short: bool, programs: int) -> tuple[int, int]:
    """Return the warps of a program, and the tiles of keys that it loads at the same time.

    With ``exact``, products are in float32.  ``short`` means that a tile has few ``lines``, and ``programs`` share it.
    """
    if short:
        return lines // 16, SHORT_STAGES[programs == 1]
    return 4, 3 if not exact and spec.dim_qk <= 128 else 2


def _common(spec: AttnSpec, q: Tensor, lines: int, stored: int) -> dict[str, Any]:
    """Return the constants that both kernels have, for tiles of ``lines`` lines, of which ``stored`` have sums."""
    constants = pdl(q)
    constants["N"] = KEYS
    constants["TOKENS"] = lines // (spec.heads // spec.kv_heads)
    constants["WINDOW"] = spec.window or 0
    constants["SINKS"] = spec.sinks
    constants["EACH"] = PART // KEYS
    constants["LINES"] = stored
    constants["enable_fp_fusion"] = False
    return constants


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
    whole = short and _whole(spec, lines)
    divided = whole and len(row) * spec.kv_heads <= WHOLE_TILES
    parts = _parts(meta, layer, len(row), stored, q.device, WHOLE_PROGRAMS if divided else PROGRAMS)
    sinks = layer.sinks if spec.sinks else out
    slopes = layer.slopes if spec.alibi is not None else out
    norms = out if lse is None else lse  # the kernels do not write absent tensors
    ends = (parts.sums, parts.norms, out, norms)
    of_row = (meta.kv_len[layer.group], meta.cu_q, row, token)
    warps, stages = 4, WHOLE_STAGES
    if not whole:
        warps, stages = _warps_and_stages(spec, lines, exact, short, parts.programs)
    common = _common(spec, q, lines, stored)
    common["LSE"] = lse is not None
    common["num_warps"] = warps
    constants = layer_constants(spec) | common
    constants["VS"] = v.shape[-1]
    constants["BLOCK"] = meta.block
    constants["M"] = lines
    constants["STAGES"] = stages
    constants["IEEE"] = exact
    constants["TMA"] = tma
    constants["SCALED"] = scaled
    constants["STORE"] = parts.programs > 1
    constants["WHOLE"] = whole
    constants["EARLY"] = early
    inputs = inputs_of(layer, q, meta, tma)
    grid = (len(row), spec.kv_heads, parts.programs)
    _attend[grid](*inputs, *of_row, sinks, slopes, *ends, *numbers_of(layer, q, meta), parts.most, **constants)
    if parts.programs > 1:
        common["L"] = power(stored)
        common["num_warps"] = 4
        _join[grid[:2]](*of_row, sinks, *ends, parts.most, **head_sizes(spec), **common)
