"""Sums of the attention of many queries to each key, from the log-sum-exp that the attention kernel has computed.

    grid (key tiles, kv_heads, rows); a program adds up N keys of a row in one KV head

    k [N, D]  for each query head of the KV head, and each tile of M queries that see the keys:
              q [M, D] · k = s [M, N] ──► exp(s - lse) ──► added up [M, N]
              at the end: sum over M ──► sums [N]

The probabilities are never stored.  Each key has one program, so the sums do not depend on the order of programs.
Flops: 2 * D * (query-key pairs) * heads, which is half of those of attention.  Only the tiles at the diagonal and at
the end of a row have a mask.

Reference: ``device.worker.attention_sums.add_sums``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta

from .launch import capability, cdiv, kernel, power

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class SumTiles(NamedTuple):
    """The numbers of keys and queries of a program's tile, and its warps and stages."""

    keys: int  # N
    queries: int  # M
    warps: int
    stages: int  # number of tiles of queries that are in shared memory at a time


# the fastest of eight tiles on an H200: 2.35 ms for 16,000 tokens of 32 heads of 128 elements in bf16.  With keys as
# rows of the product, the fastest of seven took 2.65 ms.
TILES = SumTiles(128, 64, 4, 3)
WIDE = SumTiles(64, 64, 4, 2)  # for heads of more than 128 elements: the fastest of three for 256
NARROW = SumTiles(64, 32, 4, 2)  # for float32 queries


class SummedRows(NamedTuple):
    """The rows of a step whose attention is summed over queries."""

    # i64 [6, R]: first token in the step, tokens in the step, stored tokens after the step, slot, address of the row's
    # sums of the group's first layer, and their number of elements for each layer
    table: Tensor
    longest: int  # largest number of stored tokens of a row
    count: int  # R


@triton.jit
def _queries(q, q_tiles, begin, token, count, head, q_stride, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
             TMA: tl.constexpr):  # fmt: skip
    """Load M queries [M, DP] of a head, from the row's token ``token`` on."""
    if TMA:
        return q_tiles.load([begin + token, head * D])
    else:
        at, od = token + tl.arange(0, M), tl.arange(0, DP)
        place = q + (begin + at).to(tl.int64)[:, None] * q_stride + head * D + od[None, :]
        return tl.load(place, mask=(at < count)[:, None] & (od < D)[None, :], other=0.0)


@triton.jit
def _received(
    k, by_k, key, q, q_tiles, lse, begin, token, count, before, own, scale, softcap, q_stride, lse_stride,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
    IEEE: tl.constexpr, TMA: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Return the attention f32 [M, N] that keys get from each of M queries of head ``own``.

    ALL means that each query attends to every key, so that no probability is masked."""
    om = tl.arange(0, M)
    x = _queries(q, q_tiles, begin, token, count, own, q_stride, D, DP, M, TMA)
    at = lse + own * lse_stride + begin + token + om
    norm = tl.load(at) if ALL else tl.load(at, mask=token + om < count, other=0.0)
    if IEEE:
        s = tl.dot(x.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")
    else:
        s = tl.dot(x, tl.trans(k))
    if SCALED:
        s = s * by_k[None, :]
    if SOFTCAP:  # tanh by exp, because the interpreter lacks libdevice
        e = tl.exp(-2.0 * tl.abs(s * scale) / softcap)
        t = (1.0 - e) / (1.0 + e)
        s = softcap * tl.where(s < 0, -t, t) * LOG2E
    else:
        s = s * (scale * LOG2E)
    p = tl.exp2(s - norm[:, None])
    if not ALL:
        position = tl.where(token + om < count, before + token + om, -1)
        p = tl.where(key[None, :] <= position[:, None], p, 0.0)
    return p


@kernel("rows", "lse_stride", "layer", "R")
def _sums(
    q, q_tiles, k_cache, k_scales, table, lse, rows, layer, scale, softcap, q_stride, lse_stride, table_stride, R,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, IEEE: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(rows + R + row).to(tl.int32)
    length = tl.load(rows + 2 * R + row).to(tl.int32)
    if tile * N >= length:
        return
    begin = tl.load(rows + row).to(tl.int32)
    blocks = table + tl.load(rows + 3 * R + row) * table_stride
    sums = tl.load(rows + 4 * R + row).to(tl.pointer_type(tl.float32))
    sums += layer * tl.load(rows + 5 * R + row) + head * length.to(tl.int64)

    on, od = tl.arange(0, N), tl.arange(0, DP)
    key = tile * N + on
    inside = key < length
    page = tl.load(blocks + key // BLOCK, mask=inside, other=0).to(tl.int64)
    at = (page * BLOCK + key % BLOCK) * KH + head
    k = tl.load(k_cache + at[:, None] * D + od[None, :], mask=inside[:, None] & (od < D)[None, :], other=0.0)
    k = k.to(q.dtype.element_ty)
    by_k = tl.load(k_scales + at, mask=inside, other=0.0) if SCALED else on

    # Tiles of queries from ``first`` on attend to a key of this tile.  Those from ``whole`` on attend to every key, and
    # those from ``full`` on end outside of the row.  Masks take as many instructions as all else, so masked tiles have
    # a loop of their own.
    before = length - count  # position of the row's first query
    first, last = tl.maximum(tile * N - before, 0) // M, (count + M - 1) // M
    whole = tl.maximum(first, tl.minimum((tl.maximum(tile * N + N - 1 - before, 0) + M - 1) // M, last))
    full = tl.maximum(whole, count // M)
    total = tl.zeros([M, N], tl.float32)
    for i in tl.range(0, (whole - first + last - full) * G, num_stages=1):
        at_tile = first + i // G
        token = tl.where(at_tile < whole, at_tile, at_tile - whole + full) * M
        total += _received(
            k, by_k, key, q, q_tiles, lse, begin, token, count, before, head * G + i % G, scale, softcap, q_stride,
            lse_stride, D, DP, M, SOFTCAP, SCALED, IEEE, TMA, False,
        )  # fmt: skip
    for i in tl.range(0, (full - whole) * G, num_stages=STAGES):
        total += _received(
            k, by_k, key, q, q_tiles, lse, begin, (whole + i // G) * M, count, before, head * G + i % G, scale,
            softcap, q_stride, lse_stride, D, DP, M, SOFTCAP, SCALED, IEEE, TMA, True,
        )  # fmt: skip
    tl.store(sums + key, tl.load(sums + key, mask=inside, other=0.0) + tl.sum(total, 0), mask=inside)


def fits(cache: Mapping[str, Tensor], kv_heads: int, dim: int) -> bool:
    """Return whether the kernel can read the keys of a layer: k [blocks, block, kv_heads, dim], and k_scale if it is
    stored."""
    keys = cache.get("k")
    if keys is None or keys.shape[2:] != (kv_heads, dim):
        return False
    return keys.dtype.itemsize > 1 or "k_scale" in cache


def _by_tma(q: Tensor, dim: int) -> bool:
    """Return whether the copy engine loads queries.  Under the interpreter it does too, so that tests cover it."""
    if dim < 16 or dim & (dim - 1):
        return False
    if q.device.type == "cpu":
        return True
    return capability(q.device) >= 9 and q.dtype.itemsize == 2


def add_sums(
    layer: AttnLayer,
    number: int,
    q: Tensor,
    meta: AttnMeta,
    lse: Tensor,
    rows: SummedRows,
    tiles: SumTiles | None = None,
) -> None:
    """Add the attention of the queries q [T, heads, D] of ``rows`` to the sums f32 [kv_heads, stored tokens] of each
    row.

    ``lse`` f32 [T, heads] is the natural logarithm of the softmax's denominator for each query.  ``number`` is the
    index of the layer in its KV group.  ``tiles`` None means the measured choice."""
    spec = layer.spec
    # Triton's interpreter does not support products of bfloat16
    exact = q.element_size() == 4 or q.device.type == "cpu"
    dim = spec.dim_qk
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    norms = (lse * LOG2E.value).t().contiguous()
    tma = _by_tma(q, dim)
    chosen = tiles or (NARROW if exact else WIDE if dim > 128 else TILES)
    q_tiles = q
    if tma:
        flat = q.view(len(q), -1)
        q_tiles = TensorDescriptor.from_tensor(flat, [chosen.queries, dim])
    constants = {"KH": spec.kv_heads, "D": dim, "IEEE": exact, "TMA": tma}
    constants["G"] = spec.heads // spec.kv_heads
    constants["DP"] = power(max(dim, 16))
    constants["BLOCK"] = meta.block
    constants["N"] = chosen.keys
    constants["M"] = chosen.queries
    constants["SOFTCAP"] = spec.softcap is not None
    constants["SCALED"] = "k_scale" in layer.cache
    constants["STAGES"] = chosen.stages
    constants["num_warps"] = chosen.warps
    k = layer.cache["k"]
    scales = layer.cache.get("k_scale", q)
    tensors = (q, q_tiles, k, scales, meta.table[layer.group], norms)
    numbers = (number, spec.softmax_scale, spec.softcap or 1.0)
    strides = (q.stride(0), norms.stride(0), meta.table.stride(1))
    count = rows.count
    grid = (cdiv(rows.longest, chosen.keys), spec.kv_heads, count)
    _sums[grid](*tensors, rows.table, *numbers, *strides, count, **constants)
