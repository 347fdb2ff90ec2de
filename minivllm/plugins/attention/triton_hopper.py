"""Paged attention of long rows on a Hopper (compute capability 9.0), in Gluon: FlashAttention-3 over pages.

    a tile is M = 128 lines: up to 128 / G tokens of one row, with all G query heads of one KV head
    line m of a tile: token m // G, query head m % G

    warp          copies keys and values      page ──TMA──► shared memory, STAGES tiles of N keys each
    warp group 0  lines  0 .. 63     k, v ──► s = q k (wgmma) ──► softmax ──► p v (wgmma), one key tile behind
    warp group 1  lines 64 .. 127    k, v ──► the same

The copies of a key tile, the products and the softmax of another tile run at the same time: a warp group starts the
scores of key tile i, starts the product of the probabilities and values of tile i - 1, and computes the softmax of tile
i meanwhile.  Barriers in shared memory hand the tiles over: ``full`` counts the copied bytes, ``empty`` the two warp
groups that have read the tile.

Key tiles are at multiples of N positions.  They are read from the last to the first, so only the first few of a tile
need a mask.

There is at most one program for each multiprocessor.  The tiles of all heads, those with the most keys first, are dealt
to the programs in turns, and every second turn in the opposite order.  So all programs have about equal work.  Tiles
dealt in one order, head by head, took 1.6 times as long for a prompt of 4,000 tokens.

Source: FlashAttention-3 (arXiv:2407.08608), sections 3.1 and 3.2, without its order between the two warp groups.
Reference: ``sdpa.attend_explicit``; ``triton_prefill`` has the same interface for all devices and layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta
from minivllm.device.kernels.launch import multiprocessors

from .hopper_choice import Variant
from .triton_decode import numbers_of
from .triton_prefill import Tiles

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEVER = gl.constexpr(-1.0e30)


@gluon.jit
def _place(
    turn, works, tile_row, tile_token, cu_q, kv_len,
    KH: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Return the place of the tile that this program computes in turn ``turn``, as i32 scalars.

    The scalars are the row (-1 means no tile), the head, the tile's first token in the row, the row's first token in q,
    its tokens in this step, its length, the position of the tile's first query, and the first and the last + 1 key
    tile.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    work = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    tile = gl.minimum(work, works - 1) // KH
    head = work % KH
    some = gl.load(tile_row + tile)
    row = gl.where(work < works, some, -1)
    token = gl.load(tile_token + tile)
    begin = gl.load(cu_q + some)
    count = gl.load(cu_q + some + 1) - begin
    length = gl.load(kv_len + some)
    low = length - count + token
    end = gl.minimum(low + TOKENS, length)
    first = low * 0
    if WINDOW > 0:
        first = gl.maximum(low - WINDOW + 1, 0) // N
    last = (end + N - 1) // N
    return row, head, token, begin, count, length, low, first, last


@gluon.jit
def _produce(
    k_tiles, v_tiles, k_parts, v_parts, k_full, k_empty, v_full, v_empty, table, table_stride, slots,
    works, tile_row, tile_token, cu_q, kv_len,
    KH: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, PIECE: gl.constexpr, N: gl.constexpr,
    TOKENS: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the key and value tiles of all tiles of a program to shared memory, as soon as a stage is empty.

    A copy has PIECE tokens, which lie in one block, and 64 elements, the width of the swizzle.  Positions from
    ``length`` on are copied from the row's last block."""
    PANELS: gl.constexpr = D // 64
    PIECES: gl.constexpr = N // PIECE
    done = 0
    for turn in range((works + gl.num_programs(0) - 1) // gl.num_programs(0)):
        row, head, _token, _begin, _count, length, _low, first, last = _place(
            turn, works, tile_row, tile_token, cu_q, kv_len, KH, TOKENS, WINDOW, N
        )
        if row >= 0:
            blocks = table + gl.load(slots + row).to(gl.int64) * table_stride
            for i in range(last - first):
                stage, phase = (done + i) % STAGES, (done + i) // STAGES & 1
                key = (last - 1 - i) * N
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), N * D * 2)
                for piece in gl.static_range(PIECES):
                    at = key + piece * PIECE
                    place = gl.load(blocks + gl.minimum(at, length - 1) // BLOCK) * BLOCK + at % BLOCK
                    for panel in gl.static_range(PANELS):
                        part = k_parts.index((stage * PANELS + panel) * PIECES + piece)
                        tma.async_copy_global_to_shared(
                            k_tiles, [place, head * D + panel * 64], k_full.index(stage), part
                        )
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), N * D * 2)
                for piece in gl.static_range(PIECES):
                    at = key + piece * PIECE
                    place = gl.load(blocks + gl.minimum(at, length - 1) // BLOCK) * BLOCK + at % BLOCK
                    for panel in gl.static_range(PANELS):
                        part = v_parts.index((stage * PANELS + panel) * PIECES + piece)
                        tma.async_copy_global_to_shared(
                            v_tiles, [place, head * D + panel * 64], v_full.index(stage), part
                        )
            done += last - first


@gluon.jit
def _clean(v_parts, stage, key, least, length, D: gl.constexpr, PIECE: gl.constexpr, N: gl.constexpr):
    """Replace the values of positions outside [least, length) in a stage by 0.

    The memory there may hold NaN, and a probability of 0 times NaN is NaN."""
    PANELS: gl.constexpr = D // 64
    PIECES: gl.constexpr = N // PIECE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    on = gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT))
    for part in range(PANELS * PIECES):
        at = key + part % PIECES * PIECE + on
        tile = v_parts.index(stage * PANELS * PIECES + part)
        old = tile.load(LAYOUT)
        tile.store(gl.where(((at >= least) & (at < length))[:, None], old, gl.zeros_like(old)))
    fence_async_shared()


@gluon.jit
def _scores(s, key, position, scale, softcap, on, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr):
    """Return the scores f32 [64, N] of the keys from position ``key`` on, capped and masked, without ``scale`` if not
    SOFTCAP.

    ``position`` i32 [64] is that of the queries, and ``on`` i32 [N] counts the keys."""
    if SOFTCAP:
        e = gl.exp2(-2.0 * LOG2E * gl.abs(s * scale) / softcap)
        t = (1.0 - e) / (1.0 + e)
        s = softcap * gl.where(s < 0, -t, t)
    if MASK:
        seen = (key + on)[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= (key + on)[None, :] > position[:, None] - WINDOW
        s = gl.where(seen, s, NEVER)
    return s


@gluon.jit
def _softmax(s, m, total, by, GUARD: gl.constexpr):
    """Add the scores f32 [64, N] to a running softmax.

    Return the probabilities before division f32 [64, N], the largest score so far, the sum of the probabilities, and
    the factor of earlier sums, f32 [64].  ``by`` is the factor from scores to powers of two.  GUARD means that a line
    may have seen no key yet."""
    peak = gl.maximum(m, gl.max(s, 1))
    bias = peak * by
    if GUARD:
        bias = gl.where(peak == NEVER, 0.0, bias)
    p = gl.exp2(s * by - bias[:, None])
    fade = gl.exp2((m - peak) * by)
    total = total * fade + gl.sum(p, 1)
    return p, peak, total, fade


@gluon.jit
def _turn(
    i, q, k_whole, v_whole, k_full, k_empty, v_full, v_empty, done, last, position, on, scale, softcap, by,
    p32, fade, m, total, acc,
    N: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    dtype: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Compute the scores and the softmax of key tile ``i`` while the values of tile ``i - 1`` are added to ``acc``.

    Key tiles are counted from the last one down.  ``p32`` and ``fade`` are results of ``_softmax`` for tile i - 1, and
    ``done`` is the number of key tiles of earlier tiles.  Return the arguments p32, fade, m, total and acc of the next
    turn."""
    stage, phase = (done + i) % STAGES, (done + i) // STAGES & 1
    before, past = (done + i - 1) % STAGES, (done + i - 1) // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = gl.zeros([64, N], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q, k_whole.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    p = gl.convert_layout(p32.to(dtype), P_LAYOUT)
    mbarrier.wait(v_full.index(before), past)
    acc = warpgroup_mma(p, v_whole.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(stage))
    s = _scores(s, (last - 1 - i) * N, position, scale, softcap, on, WINDOW, SOFTCAP, MASK)
    p32, m, total, fade = _softmax(s, m, total, by, MASK and WINDOW > 0)
    mbarrier.wait(v_full.index(before), past)  # prevents the compiler from moving the softmax after the wait
    acc, p32 = warpgroup_mma_wait(0, deps=[acc, p32])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return p32, fade, m, total, acc


@gluon.jit
def _consume(
    q, q_stride, out, lse, sinks, q_tile, k_whole, v_whole, v_parts, k_full, k_empty, v_full, v_empty,
    works, tile_row, tile_token, cu_q, kv_len, scale, softcap,
    WG: gl.constexpr, KH: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PIECE: gl.constexpr, N: gl.constexpr,
    TOKENS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute attention for the lines of warp group WG (64 of 128) in all tiles of this program, and store the
    results.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    om = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    on = gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))
    qm = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
    qd = gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT))
    dtype: gl.constexpr = q.dtype.element_ty
    by = scale * LOG2E
    if SOFTCAP:
        by = LOG2E * 1.0
    done = 0
    for turn in range((works + gl.num_programs(0) - 1) // gl.num_programs(0)):
        row, head, token, begin, count, length, low, first, last = _place(
            turn, works, tile_row, tile_token, cu_q, kv_len, KH, TOKENS, WINDOW, N
        )
        if row >= 0:
            mine = token + qm // G
            real = (qm // G < TOKENS) & (mine < count)
            heads = head * G + qm % G
            q_at = q + (begin + mine).to(gl.int64)[:, None] * q_stride + heads[:, None] * D + qd[None, :]
            q_tile.store(gl.load(q_at, mask=real[:, None], other=0.0))
            fence_async_shared()
            whole = gl.minimum((low + 1) // N, last - 1)
            left, least = first, low * 0
            if WINDOW > 0:
                least = gl.maximum(low - WINDOW + 1, 0)
                left = gl.minimum(gl.maximum((gl.maximum(low + TOKENS - WINDOW, 0) + N - 1) // N, first), whole)
            position = low + om // G
            m = gl.full([64], NEVER, gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
            total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)

            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = gl.zeros([64, N], gl.float32, layout=S_LAYOUT)
            s = warpgroup_mma(q_tile, k_whole.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            s = _scores(s, (last - 1) * N, position, scale, softcap, on, WINDOW, SOFTCAP, True)
            p32, m, total, fade = _softmax(s, m, total, by, True)
            if last * N > length:
                mbarrier.wait(v_full.index(stage), phase)
                _clean(v_parts, stage, (last - 1) * N, 0, length, D, PIECE, N)

            for i in range(1, last - whole):
                p32, fade, m, total, acc = _turn(
                    i, q_tile, k_whole, v_whole, k_full, k_empty, v_full, v_empty, done, last, position, on, scale,
                    softcap, by, p32, fade, m, total, acc, N, S_LAYOUT, O_LAYOUT, P_LAYOUT, dtype, WINDOW, SOFTCAP,
                    STAGES, True,
                )  # fmt: skip
            for i in range(last - whole, last - left):
                p32, fade, m, total, acc = _turn(
                    i, q_tile, k_whole, v_whole, k_full, k_empty, v_full, v_empty, done, last, position, on, scale,
                    softcap, by, p32, fade, m, total, acc, N, S_LAYOUT, O_LAYOUT, P_LAYOUT, dtype, WINDOW, SOFTCAP,
                    STAGES, False,
                )  # fmt: skip
            if WINDOW > 0:
                for i in range(last - left, last - first):
                    p32, fade, m, total, acc = _turn(
                        i, q_tile, k_whole, v_whole, k_full, k_empty, v_full, v_empty, done, last, position, on,
                        scale, softcap, by, p32, fade, m, total, acc, N, S_LAYOUT, O_LAYOUT, P_LAYOUT, dtype, WINDOW,
                        SOFTCAP,
                        STAGES, True,
                    )  # fmt: skip

            done += last - first
            stage, phase = (done - 1) % STAGES, (done - 1) // STAGES & 1
            p = gl.convert_layout(p32.to(dtype), P_LAYOUT)
            mbarrier.wait(v_full.index(stage), phase)
            if WINDOW > 0:  # noqa: SIM102  (a constant: the inner branch is compiled with a window only)
                if first * N < least:
                    _clean(v_parts, stage, first * N, least, length, D, PIECE, N)
            acc = warpgroup_mma(p, v_whole.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage))

            mine = token + om // G
            real = (om // G < TOKENS) & (mine < count)
            heads = head * G + om % G
            m = m * by
            if SINKS:
                sink = gl.load(sinks + heads, mask=real, other=0.0) * LOG2E
                peak = gl.maximum(m, sink)
                fade = gl.exp2(m - peak)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT))[:, None]
                total = total * fade + gl.exp2(sink - peak)
                m = peak
            some = gl.where(total > 0, total, 1.0)
            if LSE:
                gl.store(lse + (begin + mine).to(gl.int64) * (KH * G) + heads, (m + gl.log2(some)) * LN2, mask=real)
            o = (acc * gl.convert_layout(1.0 / some, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(out.dtype.element_ty)
            if D <= 128:  # exchange lines, so that a thread stores 16 bytes
                o = gl.convert_layout(o, Q_LAYOUT)
                pm = qm
                od = qd
            else:
                pm = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
                od = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
            mine = token + pm // G
            real = (pm // G < TOKENS) & (mine < count)
            at = (begin + mine).to(gl.int64) * (KH * G) + head * G + pm % G
            gl.store(out + at[:, None] * D + od[None, :], o, mask=real[:, None])


CHANGING = ["slots", "kv_len", "cu_q", "tile_row", "tile_token", "tiles"]


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=CHANGING)
def _attend(
    q, k_tiles, v_tiles, table, slots, kv_len, cu_q, tile_row, tile_token, tiles, sinks, out, lse, scale, softcap,
    q_stride, table_stride,
    KH: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, PIECE: gl.constexpr, N: gl.constexpr,
    TOKENS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of the first ``tiles[0]`` tiles for all KH heads."""
    works = gl.load(tiles) * KH
    PARTS: gl.constexpr = STAGES * (D // 64) * (N // PIECE)
    dtype: gl.constexpr = q.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q0 = gl.allocate_shared_memory(dtype, [64, D], tile_layout)
    q1 = gl.allocate_shared_memory(dtype, [64, D], tile_layout)
    k_parts = gl.allocate_shared_memory(dtype, [PARTS, PIECE, 64], tile_layout)
    v_parts = gl.allocate_shared_memory(dtype, [PARTS, PIECE, 64], tile_layout)
    k_whole = k_parts._reinterpret(dtype, [STAGES, N, D], tile_layout)
    v_whole = v_parts._reinterpret(dtype, [STAGES, N, D], tile_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), 2)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                q, q_stride, out, lse, sinks, q0, k_whole, v_whole, v_parts, k_full, k_empty, v_full, v_empty,
                works, tile_row, tile_token, cu_q, kv_len, scale, softcap,
                0, KH, G, D, PIECE, N, TOKENS, WINDOW, SOFTCAP, SINKS, LSE, STAGES)),
            (_consume, (
                q, q_stride, out, lse, sinks, q1, k_whole, v_whole, v_parts, k_full, k_empty, v_full, v_empty,
                works, tile_row, tile_token, cu_q, kv_len, scale, softcap,
                1, KH, G, D, PIECE, N, TOKENS, WINDOW, SOFTCAP, SINKS, LSE, STAGES)),
            (_produce, (
                k_tiles, v_tiles, k_parts, v_parts, k_full, k_empty, v_full, v_empty, table, table_stride, slots,
                works, tile_row, tile_token, cu_q, kv_len,
                KH, D, BLOCK, PIECE, N, TOKENS, WINDOW, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def boxes_of(x: Tensor, piece: int) -> TensorDescriptor:
    """Return the descriptor of keys or values [blocks, block, kv_heads, D] in boxes of ``piece`` tokens by 64
    elements."""
    elements = x.shape[2] * x.shape[3]
    tokens = x.view(-1, elements)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor.from_tensor(tokens, [piece, 64], layout)


def attend(
    layer: AttnLayer,
    q: Tensor,
    meta: AttnMeta,
    out: Tensor,
    lse: Tensor | None,
    tiles: Tiles,
    variant: Variant,
) -> None:
    """Compute the outputs [T, heads, D] of the rows in ``tiles``, of 128 lines each, from q [T, heads, D].

    q, keys and values are all bfloat16 or all float16.  ``variant`` is the result of ``hopper_choice.choose``.
    """
    spec = layer.spec
    group = spec.heads // spec.kv_heads
    piece = min(variant.keys, meta.block)
    keys = boxes_of(layer.cache["k"], piece)
    values = boxes_of(layer.cache["v"], piece)
    row, token, lines, count = tiles
    sinks = layer.sinks if spec.sinks else out
    norms = out if lse is None else lse  # the kernel neither reads nor writes absent tensors
    constants: dict[str, Any] = {"KH": spec.kv_heads, "G": group, "D": spec.dim_qk}
    constants["TOKENS"] = lines // group
    constants["BLOCK"] = meta.block
    constants["PIECE"] = piece
    constants["N"] = variant.keys
    constants["STAGES"] = variant.stages
    constants["WINDOW"] = spec.window or 0
    constants["SOFTCAP"] = spec.softcap is not None
    constants["SINKS"] = spec.sinks
    constants["LSE"] = lse is not None
    constants["num_warps"] = 4
    group_of_layer = layer.group
    inputs = (q, keys, values, meta.table[group_of_layer], meta.slots)
    of_rows = (meta.kv_len[group_of_layer], meta.cu_q, row, token, count)
    work = len(row) * spec.kv_heads
    programs = min(work, multiprocessors(q.device))
    _attend[(programs,)](*inputs, *of_rows, sinks, out, norms, *numbers_of(layer, q, meta), **constants)
