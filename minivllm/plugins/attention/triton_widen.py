"""Copies of keys and values of one byte as 16-bit numbers, for the long rows of a step, which read them many times.

    cache      block table[slots[row]][i] ── element * scale, rounded ──► copy      block starts[row] + i

Without a copy, a program of ``triton_prefill`` converts every byte that it reads, and several programs convert the same
bytes.  512 tokens in float8 took 2.2 times as long as in bfloat16 on an H100.  The copy has its own table, no scales,
and is freed after the layer's attention.  The rounding is that of ``sdpa``.

For a layer with a window the copy begins at the first key that the row's first query sees.  ``starts`` may then be
negative.
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
from minivllm.device.kernels.launch import cdiv, kernel

from .triton_decode import scales_of
from .triton_prefill import KEYS

PAYS = 64  # mean number of queries per key from which a copy in 16 bits saves time
LEAST = 1 << 27  # number of (query head, key) pairs below which launching the copy takes longer than it saves
SHARE = 256  # a copy takes at most one part in SHARE of the device's memory
CHUNK = 4096  # number of elements that a program copies
Places = tuple[Tensor, Tensor, Tensor]  # the results of ``_places``


@triton.jit
def _copied(x, scales, to, block, place, at, E: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr):
    """Copy the elements ``at`` of a block of E elements, in heads of D, to block ``place``."""
    on = at < E
    value = tl.load(x + block * E + at, mask=on, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scales + block * (E // D) + at // D, mask=on, other=0.0)
    tl.store(to + place * E + at, value.to(to.dtype.element_ty), mask=on)


@kernel("slots", "row", "starts")
def _widen(
    k, v, k_scales, v_scales, k_to, v_to, table, slots, row, starts, table_stride,
    KE: tl.constexpr, VE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Copy a part of one block of the cache to block ``program_id(0)`` of the copy, in the dtype of the copy.

    The block belongs to row ``row[program_id(0)]`` of the step.  The part begins at element CHUNK * program_id(1).  A
    block has KE elements of keys and VE elements of values.
    """
    place = tl.program_id(0).to(tl.int64)
    of = tl.load(row + place)
    nth = place - tl.load(starts + of)
    block = tl.load(table + tl.load(slots + of) * table_stride + nth).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    _copied(k, k_scales, k_to, block, place, at, KE, D, SCALED)
    _copied(v, v_scales, v_to, block, place, at, VE, DV, SCALED)


@lru_cache(maxsize=16)
def _most_bytes(device: torch.device) -> int:
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 33
    return whole // SHARE


def pays(layer: AttnLayer, q: Tensor, meta: AttnMeta) -> bool:
    """Return whether to copy the keys and values of the rows from ``decode_rows`` on."""
    spec = layer.spec
    k = layer.cache["k"]
    if spec.v_in_k or k.element_size() != 1 or q.element_size() != 2:
        return False
    key = ("to widen", layer.group, spec.heads)
    if key not in meta.work:
        q_len = meta.host_q_len.astype(np.int64)
        begin = _first_blocks(layer, meta) * meta.block
        keys = meta.host_kv_len[layer.group] - begin
        keys[: meta.decode_rows] = 0
        seen = keys
        if spec.window is not None:
            seen = np.minimum(keys, spec.window)
        pairs = int((seen * q_len).sum())
        total = int(keys.sum())
        full = -(-total // meta.block)
        blocks = _room(full + len(keys))
        dims = spec.dim_qk + spec.dim_v
        elements = blocks * meta.block * spec.kv_heads * dims
        fits = elements * q.element_size() <= _most_bytes(q.device)
        long = pairs * spec.heads >= LEAST
        meta.work[key] = fits and long and pairs >= PAYS * total
    return bool(meta.work[key])


def _first_blocks(layer: AttnLayer, meta: AttnMeta) -> np.ndarray:
    """Return, for each row, the index in its block table of the block that holds the first key that its first query
    sees, i64 [R].
    """
    kv_len = meta.host_kv_len[layer.group].astype(np.int64)
    if layer.spec.window is None:
        return np.zeros_like(kv_len)
    first_query = kv_len - meta.host_q_len
    least = np.maximum(first_query - layer.spec.window + 1, 0)
    return least // KEYS * KEYS // meta.block


def _room(blocks: int) -> int:
    """Return the number of blocks to allocate for ``blocks`` blocks: the next power of two, so that a growing context
    can reuse freed memory.
    """
    return 1 << max(blocks - 1, 0).bit_length()


def _places(layer: AttnLayer, meta: AttnMeta, device: torch.device) -> Places:
    """Return the block table i32 [blocks] of the copy, the row of each block i64, and for each row the index of its
    block 0.
    """
    key = ("widened", layer.group)
    if key not in meta.work:
        first = _first_blocks(layer, meta)
        every_block = -(-meta.host_kv_len[layer.group] // meta.block)
        blocks = every_block - first
        blocks[: meta.decode_rows] = 0
        total = int(blocks.sum())
        starts = np.cumsum(blocks) - blocks - first
        packed = torch.from_numpy(np.stack([blocks, starts]))
        blocks_there, starts_there = packed.to(device, non_blocking=True)
        every = torch.arange(len(blocks), device=device)
        row = torch.repeat_interleave(every, blocks_there, output_size=total)
        table = torch.arange(total, dtype=torch.int32, device=device)
        meta.work[key] = table, row, starts_there
    found: Places = meta.work[key]
    return found


def widened(layer: AttnLayer, q: Tensor, meta: AttnMeta) -> tuple[AttnLayer, AttnMeta]:
    """Return the layer with a copy of its cache in the dtype of q, and the step with the table of the copy.

    They are for the rows from ``decode_rows`` on.
    """
    spec = layer.spec
    table, row, starts = _places(layer, meta, q.device)
    k = layer.cache["k"]
    v = layer.cache["v"]
    blocks = len(table)
    room = _room(blocks)
    k_block = k[0]
    v_block = v[0]
    k_to = k.new_empty((room, *k_block.shape), dtype=q.dtype)
    v_to = v.new_empty((room, *v_block.shape), dtype=q.dtype)
    constants = {"KE": k_block.numel(), "VE": v_block.numel()}
    most = max(constants.values())
    grid = (blocks, cdiv(most, CHUNK))
    constants["D"] = spec.dim_qk
    constants["DV"] = spec.dim_v
    constants["CHUNK"] = CHUNK
    constants["SCALED"] = "k_scale" in layer.cache
    constants["num_warps"] = 4
    k_scales, v_scales = scales_of(layer)
    stride = meta.table.stride(1)
    tensors = (k, v, k_scales, v_scales, k_to, v_to)
    _widen[grid](*tensors, meta.table[layer.group], meta.slots, row, starts, stride, **constants)
    # the "slot" of a row is the index of its block 0 in one list of all blocks
    groups = len(meta.table)
    table = table[None, :, None].expand(groups, -1, 1)
    copy = replace(layer, cache={"k": k_to, "v": v_to})
    return copy, replace(meta, table=table, slots=starts)
