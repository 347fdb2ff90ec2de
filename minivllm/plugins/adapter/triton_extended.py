"""Adapters (LoRA) of a linear layer whose weight has the matrices A of all adapters behind it.

    x, weight | A ──► y [T, out + n] = the product of the weight | h of all adapters
    expand         y ──► [T, out]      the product of the weight + h B^T, h of the token's adapter
    gate           y ──► [T, out / 2]  activation(gate) * up of the same

Steps of few tokens read all weights anyway, so the products of A cost little there, and no launch of their own.  A
program has a tile of tokens with the same adapter, or with none, and a range of outputs.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.activation import NUMBER, activate
from minivllm.device.kernels.launch import cdiv, kernel, pdl, wait

from .triton_lora import LoraProduct, TokenGroups, of_tile


@kernel("sizes", "places", "ranks", "layers")
def _expand(
    x, b, rows, sizes, places, ranks, blocks, y, residual, norm, squares, x_row, y_row, b_place, layers,
    OUT: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    UNIT: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the products of the adapters to those of the weight.  With ADD the sum is added to ``residual`` [T, OUT], y
    is the new residual times ``norm``, and ``squares`` f32 [T, blocks] are its sums of squares."""
    block, tile = tl.program_id(0), tl.program_id(1)
    part = tl.load(blocks + 3 * block)
    # the factor proves to the compiler that outputs can be read and written 16 bytes at a time
    n = tl.load(blocks + 3 * block + 1) * UNIT + tl.arange(0, BN)
    stop = tl.load(blocks + 3 * block + 2) * UNIT
    wait(PDL)
    if tl.load(sizes + tile) == 0:
        return
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, tl.arange(0, BT), BT)
    r = tl.arange(0, R)
    there = used[:, None] & (n < stop)[None, :]
    row = x + tl.cast(t, tl.int64)[:, None] * x_row
    old = tl.load(row + n[None, :], mask=there, other=0.0)
    inner = row + OUT + (place * PARTS + part) * RANK + r[None, :]
    inner = tl.load(inner, mask=used[:, None] & (r < rank)[None, :], other=0.0)
    ws = b + tl.cast(place, tl.int64) * b_place + n[:, None] * RANK + r[None, :]
    ws = tl.load(ws, mask=(r < rank)[None, :] & (n < stop)[:, None], other=0.0)
    added = tl.dot(inner, tl.trans(ws), input_precision=PRECISION)
    value = tl.where(rank > 0, (old.to(tl.float32) + added).to(y.dtype.element_ty), old)
    if ADD:
        # rounded as by two kernels, first the product and then the sum; the squares are those of the rounded sum
        at = residual + tl.cast(t, tl.int64)[:, None] * OUT + n[None, :]
        value = (value + tl.load(at, mask=there, other=0.0)).to(y.dtype.element_ty)
        tl.store(at, value, mask=there)
        wide = value.to(tl.float32)
        total = tl.sum(tl.where(there, wide * wide, 0.0), 1)
        tl.store(squares + t * tl.num_programs(0) + block, total, mask=used)
        by = tl.load(norm + n, mask=n < stop, other=0.0).to(tl.float32)
        value = (wide * by[None, :]).to(y.dtype.element_ty)
    tl.store(y + tl.cast(t, tl.int64)[:, None] * y_row + n[None, :], value, mask=there)


@kernel("sizes", "places", "ranks", "layers")
def _gate(
    x, b, rows, sizes, places, ranks, y, x_row, b_place, layers,
    INNER: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    if tl.load(sizes + tile) == 0:
        return
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, tl.arange(0, BT), BT)
    dtype: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, R)
    n = block * BN + tl.arange(0, BN)
    there = used[:, None] & (n < INNER)[None, :]
    row = x + tl.cast(t, tl.int64)[:, None] * x_row
    gate = tl.load(row + n[None, :], mask=there, other=0.0).to(tl.float32)
    up = tl.load(row + INNER + n[None, :], mask=there, other=0.0).to(tl.float32)
    inner = row + 2 * INNER + 2 * place * RANK + r[None, :]
    adapted = used[:, None] & (r < rank)[None, :]
    of_gate = tl.load(inner, mask=adapted, other=0.0)
    of_up = tl.load(inner + RANK, mask=adapted, other=0.0)
    ws = b + tl.cast(place, tl.int64) * b_place + n[:, None] * RANK + r[None, :]
    columns = (r < rank)[None, :] & (n < INNER)[:, None]
    gate += tl.dot(of_gate, tl.trans(tl.load(ws, mask=columns, other=0.0)), input_precision=PRECISION)
    ws = tl.load(ws + INNER * RANK, mask=columns, other=0.0)
    up += tl.dot(of_up, tl.trans(ws), input_precision=PRECISION)
    value = activate(gate.to(dtype).to(tl.float32), ACT) * up.to(dtype).to(tl.float32)
    tl.store(y + tl.cast(t, tl.int64)[:, None] * INNER + n[None, :], value.to(dtype), mask=there)


def expand_behind(of: LoraProduct, x: Tensor, groups: TokenGroups) -> Tensor:
    """Return the changed product [T, out] of a layer, for x [T, out + n] of ``ExtendedWeight``."""
    return _launch(of, x, groups)


def add_behind(
    of: LoraProduct, x: Tensor, residual: Tensor, norm: Tensor, groups: TokenGroups
) -> tuple[Tensor, Tensor]:
    """Add the changed product of a layer to ``residual`` [T, out] in place, for x [T, out + n] of ``ExtendedWeight``.

    Return the new residual times ``norm`` [out], and its sums of squares f32 [T, parts]."""
    parts = len(of.blocks[of.block])
    squares = torch.empty((len(x), parts), dtype=torch.float32, device=x.device)
    y = _launch(of, x, groups, residual, norm, squares)
    return y, squares


def _launch(
    of: LoraProduct,
    x: Tensor,
    groups: TokenGroups,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    tiles, tile = groups.rows.shape
    tokens = x.shape[0]
    outputs = of.b.shape[1]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    # the kernel does not read absent tensors
    added = [y if one is None else one for one in (residual, norm, squares)]
    blocks = of.blocks[of.block]
    options = {"OUT": outputs, "BT": tile, "BN": of.block, "UNIT": of.unit}
    options |= {"ADD": residual is not None, "num_warps": 4}
    strides = x.stride(0), y.stride(0), of.b.stride(0), groups.ranks.stride(0)
    launch = _expand[(len(blocks), tiles)]
    launch(x, of.b, *of.of_tiles(groups), blocks, y, *added, *strides, **of.shape, **options, **pdl(y))
    return y


def gate_behind(of: LoraProduct, x: Tensor, activation: str, groups: TokenGroups) -> Tensor:
    """Return activation(gate) * up [T, out / 2] of the changed product gate | up, for x [T, out + n] of
    ``ExtendedWeight``."""
    tiles, tile = groups.rows.shape
    tokens = x.shape[0]
    inner = of.b.shape[1] // 2
    y = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    size = of.block  # number of outputs of a program
    sizes = {"INNER": inner, "RANK": of.rank, "R": of.width, "BT": tile, "BN": size}
    options = {"ACT": NUMBER[activation], "PRECISION": of.precision, "num_warps": 4}
    strides = x.stride(0), of.b.stride(0), groups.ranks.stride(0)
    launch = _gate[(cdiv(inner, size), tiles)]
    launch(x, of.b, *of.of_tiles(groups), y, *strides, **sizes, **options, **pdl(y))
    return y
