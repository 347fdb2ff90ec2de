"""Keys and values of one byte, copied as numbers of 16 bits for the long rows of a step, which read them many times.

    cache      block table[slots[row]][i] ── element * scale, rounded ──► copy      block starts[row] + i

A program of ``triton_prefill`` would make a number of every byte that it reads, and of the same one as often as tiles
of queries see it: 512 tokens in float8 took 2.3 times as long as in bfloat16 on an H100.  The copy has a table of its
own, no scales, and lives as long as one layer's attention.  What is rounded here is rounded by ``sdpa`` too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta
from minivllm.kernels.launch import kernel

from .triton_decode import scales_of

PAYS = 64  # queries that read a key on average, from which on a copy takes less time than it saves
LEAST = 1 << 27  # pairs of a query head and a key; with fewer, the host would take longer to launch it
SHARE = 128  # of the device's memory a copy takes at most one part of so many
CHUNK = 4096  # elements of a program


@triton.jit
def _copied(x, scales, to, block, place, at, E: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr):
    """Elements ``at`` of a block of E, heads of D, into block ``place``."""
    on = at < E
    value = tl.load(x + block * E + at, mask=on, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scales + block * (E // D) + at // D, mask=on, other=0.0)
    tl.store(to + place * E + at, value.to(to.dtype.element_ty), mask=on)


@kernel("slots", "row", "nth")
def _widen(
    k, v, k_scales, v_scales, k_to, v_to, table, slots, row, nth, table_stride,
    KE: tl.constexpr, VE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(0)`` of the copy, elements from CHUNK * program_id(1) on; a block has KE of keys and VE
    of values."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + tl.load(row + place))
    block = tl.load(table + slot * table_stride + tl.load(nth + place)).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    _copied(k, k_scales, k_to, block, place, at, KE, D, SCALED)
    _copied(v, v_scales, v_to, block, place, at, VE, DV, SCALED)


@lru_cache(maxsize=16)
def _most_bytes(device: torch.device) -> int:
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 33
    return whole // SHARE


def pays(layer: AttnLayer, q: Tensor, meta: AttnMeta) -> bool:
    """Whether to copy what the rows from ``decode_rows`` on read."""
    spec = layer.spec
    if layer.cache["k"].element_size() != 1 or q.element_size() != 2 or spec.v_in_k:
        return False
    key = ("to widen", layer.group, spec.heads, spec.window)
    if key not in meta.work:
        meta.work[key] = _pays(layer, q, meta)
    return bool(meta.work[key])


def _pays(layer: AttnLayer, q: Tensor, meta: AttnMeta) -> bool:
    spec, first = layer.spec, meta.decode_rows
    keys = meta.host_kv_len[layer.group][first:].astype(np.int64)
    seen = keys if spec.window is None else np.minimum(keys, spec.window)
    pairs, total = int((seen * meta.host_q_len[first:]).sum()), int((keys + meta.block).sum())
    size = total * spec.kv_heads * (spec.dim_qk + spec.dim_v) * q.element_size()
    return pairs >= PAYS * total and pairs * spec.heads >= LEAST and size <= _most_bytes(q.device)


def _places(meta: AttnMeta, group: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row, place in it) i32 of each block of the copy, its table i32 and the first block i64 of each row."""
    key = ("widened", group)
    if key not in meta.work:
        blocks = -(-meta.host_kv_len[group] // meta.block)
        blocks[: meta.decode_rows] = 0
        starts = np.cumsum(blocks) - blocks
        row = np.repeat(np.arange(len(blocks)), blocks)
        packed = np.concatenate([row, np.arange(len(row)) - starts[row], np.arange(len(row)), starts]).astype(np.int32)
        there = torch.from_numpy(packed).to(device, non_blocking=True)
        each = len(row)
        meta.work[key] = (*there[: 3 * each].view(3, each).unbind(), there[3 * each :].long())
    found: tuple[Tensor, Tensor, Tensor, Tensor] = meta.work[key]
    return found


def widened(layer: AttnLayer, q: Tensor, meta: AttnMeta) -> tuple[AttnLayer, AttnMeta]:
    """The layer with a copy in the dtype of q for a cache, and the step with the copy's table, for the rows from
    ``decode_rows`` on."""
    row, nth, table, starts = _places(meta, layer.group, q.device)
    k, v = layer.cache["k"], layer.cache["v"]
    cache = {name: x.new_empty((len(row), *x.shape[1:]), dtype=q.dtype) for name, x in (("k", k), ("v", v))}
    sizes = k[0].numel(), v[0].numel()
    _widen[(len(row), triton.cdiv(max(sizes), CHUNK))](
        k,
        v,
        *scales_of(layer),
        *cache.values(),
        meta.table[layer.group],
        meta.slots,
        row,
        nth,
        meta.table.stride(1),
        KE=sizes[0],
        VE=sizes[1],
        D=layer.spec.dim_qk,
        DV=layer.spec.dim_v,
        CHUNK=CHUNK,
        SCALED="k_scale" in layer.cache,
        num_warps=4,
    )
    # a row's "slot" is the place of its first block in the one list of all
    table = table[None, :, None].expand(len(meta.table), -1, 1)
    return replace(layer, cache=cache), replace(meta, table=table, slots=starts)
