"""The kernel between the two products of an MLP in a long step with adapters (LoRA).

    y = gate | up, h ──► activation(gate + h B^T) * (up + h B^T), and h of the next layer

A program has a tile of tokens with the same adapter, or with none, and a range of gates.  h of the next layer is in
parts, one for each range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.activation import NUMBER, gate_rounded
from minivllm.device.kernels.launch import cdiv, kernel, pdl, wait

from .triton_lora import LoraProduct, TokenGroups, of_outputs, of_tile

GATES, LOOP = 64, 14  # gates that a program computes at a time, and number of times


@triton.jit
def _inner(h, part, rank, used, t, T, R: tl.constexpr, SPLITS: tl.constexpr):
    """Return h f32 [tokens, R] of a part, summed over the splits, 0 for a rank of 0."""
    total = tl.zeros((t.shape[0], R), tl.float32)
    for split in tl.static_range(SPLITS):
        at = h + ((split * 2 + part) * tl.cast(T, tl.int64) + t)[:, None] * R + tl.arange(0, R)[None, :]
        total += tl.load(at, mask=used[:, None] & (rank > 0), other=0.0)
    return total


@kernel("T", "sizes", "places", "ranks", "next_ranks", "layers")
def _gated(
    h, b, a, rows, sizes, places, ranks, next_ranks, y, out, inner, T, b_place, a_place, layers,
    INNER: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, LOOP: tl.constexpr,
    SPLITS: tl.constexpr, NEXT: tl.constexpr, ACT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    if tl.load(sizes + tile) == 0:
        return
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, tl.arange(0, BT), BT)
    next_rank = tl.load(next_ranks + tile * layers)
    dtype: tl.constexpr = y.dtype.element_ty
    r = tl.arange(0, R)
    of_gate = _inner(h, 0, rank, used, t, T, R, SPLITS).to(dtype)
    of_up = _inner(h, 1, rank, used, t, T, R, SPLITS).to(dtype)
    first = a + tl.cast(place, tl.int64) * a_place
    sums = tl.zeros((BT, R), tl.float32)
    for i in tl.range(0, LOOP, num_stages=STAGES):
        n = (block * LOOP + i) * BN + tl.arange(0, BN)
        there = used[:, None] & (n < INNER)[None, :]
        at = y + tl.cast(t, tl.int64)[:, None] * (2 * INNER) + n[None, :]
        gate = tl.load(at, mask=there, other=0.0).to(tl.float32)
        up = tl.load(at + INNER, mask=there, other=0.0).to(tl.float32)
        ws = of_outputs(b, b_place, place, n, n < INNER, rank, RANK, R)
        gate += tl.dot(of_gate, tl.trans(ws), input_precision=PRECISION)
        ws = of_outputs(b, b_place, place, INNER + n, n < INNER, rank, RANK, R)
        up += tl.dot(of_up, tl.trans(ws), input_precision=PRECISION)
        value = gate_rounded(gate, up, dtype, ACT).to(dtype)
        tl.store(out + tl.cast(t, tl.int64)[:, None] * INNER + n[None, :], value, mask=there)
        if NEXT:
            columns = (r < next_rank)[:, None] & (n < INNER)[None, :]
            ws = tl.load(first + r[:, None] * INNER + n[None, :], mask=columns, other=0.0)
            sums = tl.dot(value, tl.trans(ws), sums, input_precision=PRECISION)
    if NEXT:
        to = inner + (block * tl.cast(T, tl.int64) + t)[:, None] * R + r[None, :]
        tl.store(to, sums, mask=used[:, None])


def gated(
    of: LoraProduct, after: LoraProduct | None, h: Tensor, y: Tensor, activation: str, groups: TokenGroups
) -> tuple[Tensor, Tensor | None]:
    """Return activation(gate) * up [T, n] of y [T, 2 n] = gate | up plus the products of h and B.

    The second result is h of ``after``, the layer that reads the first one; without a layer it is None."""
    tiles, tile = groups.rows.shape
    tokens = y.shape[0]
    n = y.shape[1] // 2
    ranges = cdiv(n, GATES * LOOP)
    out = torch.empty((tokens, n), dtype=y.dtype, device=y.device)
    inner = None
    if after is not None:
        shape = ranges, 1, tokens, after.width
        inner = torch.empty(shape, dtype=torch.float32, device=y.device)
    following = of if after is None else after
    next_ranks = groups.ranks[:, following.number :]
    changed = out if inner is None else inner
    strides = of.b.stride(0), following.a.stride(0), groups.ranks.stride(0)
    sizes = {"INNER": n, "RANK": of.rank, "R": of.width}
    sizes |= {"BT": tile, "BN": GATES, "LOOP": LOOP}
    sizes |= {"SPLITS": len(h), "NEXT": after is not None}
    sizes |= {"ACT": NUMBER[activation], "STAGES": 3}
    options = {"PRECISION": of.precision, "num_warps": 4, **pdl(y)}
    tensors = of.b, following.a, *of.of_tiles(groups), next_ranks
    launch = _gated[(ranges, tiles)]
    launch(h, *tensors, y, out, changed, tokens, *strides, **sizes, **options)
    return out, inner
