"""Paged decode attention: one query a row, keys and values read once from the cache.

    grid (kv_heads, splits, rows); a program takes one row, one KV head and one part of its context

    table[slot] ──► blocks ──► k [N, D] · q [D, G] = s [N, G] ──► softmax over N, kept running ──► v [DV, N] · p [N, G]

G query heads share a KV head (padded to ``GP``).  The N tokens of a tile stand on the M side of the matrix unit, so a
small group wastes little of it.  Bytes: 2 * kv_len * kv_heads * D * 2 a row, which is all that matters: at batch 256 it
runs at the speed of the memory.  With one split the result is final; with more, each leaves a partial sum with its
running maximum and denominator, and ``_merge`` joins them.

Reference: ``sdpa.attend_explicit``.  The running softmax is Milakov & Gimelshein's (arXiv:1805.02867), in base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta
from minivllm.kernels.launch import pdl, wait

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEVER: tl.constexpr = tl.constexpr(-1.0e30)  # a score that no key reaches; finite, so that no NaN arises from it


@triton.jit
def base2(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores times ``scale``, capped if asked to (softcap * tanh(s / softcap)), for a softmax in base 2."""
    if SOFTCAP:  # tanh by exp: libdevice's is not there under the interpreter
        e = tl.exp(-2.0 * tl.abs(s * scale) / softcap)
        t = (1.0 - e) / (1.0 + e)
        return softcap * tl.where(s < 0, -t, t) * LOG2E
    else:
        return s * (scale * LOG2E)


@triton.jit
def dot(a, b, acc, dtype: tl.constexpr, IEEE: tl.constexpr):
    """acc + a b in ``dtype`` with float32 sums, or all of it in float32."""
    if IEEE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a.to(dtype), b.to(dtype), acc)


@triton.jit
def _page(blocks, token, on, last, BLOCK: tl.constexpr, N: tl.constexpr):
    """Block numbers of N tokens from ``token`` on; a single one where a tile lies within a block."""
    if BLOCK % N == 0:
        return tl.load(blocks + tl.minimum(token, last) // BLOCK)
    else:
        return tl.load(blocks + tl.minimum(token + on, last) // BLOCK)


@triton.jit
def _decode(
    q, k_cache, v_cache, table, slots, kv_len, q_len, order, sinks, out, lse, part, part_ml,
    scale, softcap, q_stride, table_stride,
    KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    VS: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    IEEE: tl.constexpr, MIXED: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDER:
        row = tl.load(order + row)
    if MIXED:  # noqa: SIM102  (a constant: nothing is compiled where it is False)
        if tl.load(q_len + row) != 1:
            return  # a row of several tokens, or none: not this kernel's
    length = tl.load(kv_len + row)
    blocks = table + tl.load(slots + row) * table_stride
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // N  # tile in which the window begins
    tiles = (length + N - 1) // N - first
    each = (tiles + SPLITS - 1) // SPLITS
    start = first + split * each
    end = tl.minimum(first + tiles, start + each)

    og, od, ov, on = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, N)
    heads = head * G + og
    q_at = q + row.to(tl.int64) * q_stride + heads[None, :] * D + od[:, None]
    queries = tl.load(q_at, mask=(og < G)[None, :] & (od < D)[:, None], other=0.0)  # [DP, GP]
    m = tl.full([GP], NEVER, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([DVP, GP], tl.float32)
    last = tl.maximum(length - 1, 0)
    page = _page(blocks, start * N, on, last, BLOCK, N)
    for tile in tl.range(start, end, num_stages=STAGES):
        token = tile * N + on
        at = page.to(tl.int64) * BLOCK + token % BLOCK
        seen = token < length
        if WINDOW > 0:
            seen &= token >= length - WINDOW
        k_at = k_cache + (at[:, None] * KH + head) * D + od[None, :]
        v_at = v_cache + (at[None, :] * KH + head) * VS + ov[:, None]
        if D == DP:
            k = tl.load(k_at, mask=seen[:, None], other=0.0)
        else:
            k = tl.load(k_at, mask=seen[:, None] & (od < D)[None, :], other=0.0)
        if DV == DVP:
            v = tl.load(v_at, mask=seen[None, :], other=0.0)
        else:
            v = tl.load(v_at, mask=seen[None, :] & (ov < DV)[:, None], other=0.0)
        # the next tile's blocks, asked for now: their latency hides behind this tile
        page = _page(blocks, tile * N + N, on, last, BLOCK, N)
        s = base2(dot(k, queries, tl.zeros([N, GP], tl.float32), queries.dtype, IEEE), scale, softcap, SOFTCAP)
        s = tl.where(seen[:, None], s, NEVER)
        peak = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - peak[None, :])
        fade = tl.exp2(m - peak)
        total = total * fade + tl.sum(p, 0)
        acc = dot(v, p, acc * fade[None, :], queries.dtype, IEEE)
        m = peak

    if SPLITS == 1:
        finish(acc, m, total, row * KH * G + heads, og < G, heads, sinks, out, lse, DV, DVP, SINKS, LSE, False)
    else:
        at = ((row * KH + head).to(tl.int64) * SPLITS + split) * G + og
        tl.store(part + at[None, :] * DV + ov[:, None], acc, mask=(og < G)[None, :] & (ov < DV)[:, None])
        tl.store(part_ml + at * 2, m, mask=og < G)
        tl.store(part_ml + at * 2 + 1, total, mask=og < G)


@triton.jit
def _along(x, ROWS: tl.constexpr):
    """x [n] as a column of acc [n, DVP] (ROWS), or as a row of acc [DVP, n]."""
    if ROWS:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def finish(acc, m, total, at, on, heads, sinks, out, lse, DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr,
           LSE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Divide acc, [n, DVP] if ROWS, else [DVP, n], by its denominators; store it at rows ``at`` [n] of out [.., DV]."""
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


@triton.jit
def _merge(
    part, part_ml, q_len, sinks, out, lse,
    KH: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, MIXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the partial sums of one row and query head: weights 2 ** (m - max m)."""
    wait(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    if MIXED:  # noqa: SIM102  (a constant: nothing is compiled where it is False)
        if tl.load(q_len + row) != 1:
            return
    split, ov = tl.arange(0, SPLITS), tl.arange(0, DVP)
    at = ((row * KH + head // G).to(tl.int64) * SPLITS + split) * G + head % G
    ms = tl.load(part_ml + at * 2)
    totals = tl.load(part_ml + at * 2 + 1)
    m = tl.max(ms, 0)
    weight = tl.exp2(ms - m)
    parts = tl.load(part + at[:, None] * DV + ov[None, :], mask=(ov < DV)[None, :], other=0.0)
    acc = tl.sum(parts * weight[:, None], 0)
    total = tl.sum(totals * weight, 0)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        peak = tl.maximum(m, sink)
        acc = acc * tl.exp2(m - peak)
        total = total * tl.exp2(m - peak) + tl.exp2(sink - peak)
        m = peak
    some = tl.where(total > 0, total, 1.0)
    tl.store(out + (row * KH * G + head).to(tl.int64) * DV + ov, (acc / some).to(out.dtype.element_ty), mask=ov < DV)
    if LSE:
        tl.store(lse + row * KH * G + head, (m + tl.log2(some)) * LN2)


@triton.jit
def _rank(kv_len, order, rows, P: tl.constexpr, PDL: tl.constexpr):
    """Row ``program_id`` goes behind all that are longer, and those of its length that come before it."""
    wait(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, P)
    lens = tl.load(kv_len + at, mask=at < rows, other=-1)
    mine = tl.load(kv_len + row)
    before = (lens > mine) | ((lens == mine) & (at < row))
    tl.store(order + tl.sum(before.to(tl.int32), 0), row)


def longest_first(kv_len: Tensor, rows: int) -> Tensor:
    """i32 [rows]: the rows by falling length; the last programs of a launch are then short ones."""
    order = torch.empty(rows, dtype=torch.int32, device=kv_len.device)
    _rank[(rows,)](kv_len, order, rows, P=power(rows), num_warps=1, **pdl(kv_len))
    return order


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def in_float32(q: Tensor) -> bool:
    """Whether products are formed in float32: float32 itself, and under the interpreter, whose bfloat16 knows none."""
    return q.element_size() == 4 or q.device.type == "cpu"


def decode(
    layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None, rows: int, splits: int,
    scratch: tuple[Tensor, Tensor] | None, mixed: bool = False, order: Tensor | None = None,
) -> None:  # fmt: skip
    """Rows [0, rows) of a step, whose queries are its first tokens: q [T, heads, D] -> out [T, heads, DV].  ``mixed``:
    rows that do not have exactly one token are left to ``prefill``.  ``order`` i32 [rows]: in which they are started.

    ``splits`` is a power of two; above 1, ``scratch`` holds float32 [rows * heads * splits, DV] and [.., 2].
    """
    spec = layer.spec
    group = spec.heads // spec.kv_heads
    k, v = layer.cache["k"], layer.cache["k" if spec.v_in_k else "v"]
    part, ml = scratch if splits > 1 else (out, out)
    flags = dict(SINKS=spec.sinks, LSE=lse is not None)
    sizes = dict(KH=spec.kv_heads, G=group, DV=spec.dim_v, DVP=power(max(spec.dim_v, 16)), SPLITS=splits)
    norm, sinks = lse if lse is not None else out, layer.sinks if spec.sinks else out
    exact = in_float32(q)
    tile = 64 if spec.dim_qk <= 128 and not exact else 32
    _decode[(spec.kv_heads, splits, rows)](
        q, k, v, meta.table[layer.group], meta.slots, meta.kv_len[layer.group], meta.q_len,
        meta.q_len if order is None else order, sinks, out, norm, part, ml,
        spec.softmax_scale, spec.softcap or 1.0, q.stride(0), meta.table.stride(1),
        GP=power(max(group, 8)), VS=v.shape[-1], D=spec.dim_qk, DP=power(max(spec.dim_qk, 16)), BLOCK=meta.block,
        N=tile, WINDOW=spec.window or 0, SOFTCAP=spec.softcap is not None, STAGES=3 if not exact else 2, IEEE=exact,
        MIXED=mixed, ORDER=order is not None, num_warps=2 if tile == 64 else 4, **sizes, **flags, **pdl(q),
    )  # fmt: skip
    if splits > 1:
        merge = _merge[(spec.heads, rows)]
        merge(part, ml, meta.q_len, sinks, out, norm, MIXED=mixed, **sizes, **flags, num_warps=2, **pdl(q))
