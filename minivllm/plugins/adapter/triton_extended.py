"""Adapters (LoRA) of a linear layer whose weight has the matrices A of all adapters behind it.

    x, weight | A ──► y [T, out + n] = the product of the weight | h of all adapters
    expand         y ──► [T, out]      the product of the weight + h B^T, h of the token's adapter
    gate           y ──► [T, out / 2]  activation(gate) * up of the same

Steps of few tokens read all weights anyway, so the products of A cost little there, and no launch of their own.  A
program has a tile of tokens with the same adapter, or with none, and a range of outputs.  It reads its part of B before
it waits for the product: B and the tiles do not change while the layers run.

With ``Sums``, x was multiplied before its division by the root mean square.  The kernels divide the result instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.activation import NUMBER, gate_rounded
from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, wait

from .triton_lora import LoraProduct, TokenGroups, of_outputs, of_tile


class Sums(NamedTuple):
    """What the division of a row by its root mean square needs: sums of squares f32 [T, parts] of parts of the row, the
    number of its elements, and the eps of the norm."""

    squares: Tensor
    elements: int
    eps: float

    def constants(self) -> dict[str, int]:
        parts = self.squares.shape[1]
        return {"SUMS": parts, "SUMS_P": power(parts), "DIM": self.elements}


UNDIVIDED = {"SUMS": 0, "SUMS_P": 1, "DIM": 1}  # constants of a kernel that does not divide


@triton.jit
def _factor(sums, t, used, eps, SUMS: tl.constexpr, SUMS_P: tl.constexpr, DIM: tl.constexpr):
    """Return the factor [tokens, 1] by which the products of tokens t are multiplied."""
    part = tl.arange(0, SUMS_P)
    there = used[:, None] & (part < SUMS)[None, :]
    squares = tl.load(sums + t[:, None] * SUMS + part[None, :], mask=there, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / DIM + eps)[:, None]


@kernel("sizes", "places", "ranks", "layers")
def _expand(
    x, b, rows, sizes, places, ranks, blocks, y, residual, norm, squares, sums, eps, x_row, y_row, b_place, layers,
    OUT: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    UNIT: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr, SUMS_P: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the products of the adapters to those of the weight.  With ADD the sum is added to ``residual`` [T, OUT], y
    is the new residual times ``norm``, and ``squares`` f32 [T, blocks] are its sums of squares."""
    block, tile = tl.program_id(0), tl.program_id(1)
    part = tl.load(blocks + 3 * block)
    # the factor proves to the compiler that outputs can be read and written 16 bytes at a time
    n = tl.load(blocks + 3 * block + 1) * UNIT + tl.arange(0, BN)
    stop = tl.load(blocks + 3 * block + 2) * UNIT
    size = tl.load(sizes + tile)
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, tl.arange(0, BT), BT)
    r = tl.arange(0, R)
    ws = of_outputs(b, b_place, place, n, n < stop, rank, RANK, R)
    wait(PDL)
    if size == 0:
        return
    there = used[:, None] & (n < stop)[None, :]
    row = x + tl.cast(t, tl.int64)[:, None] * x_row
    old = tl.load(row + n[None, :], mask=there, other=0.0)
    inner = row + OUT + (place * PARTS + part) * RANK + r[None, :]
    inner = tl.load(inner, mask=used[:, None] & (r < rank)[None, :], other=0.0)
    added = tl.dot(inner, tl.trans(ws), input_precision=PRECISION)
    if SUMS > 0:
        total = old.to(tl.float32) + added
        value = (total * _factor(sums, t, used, eps, SUMS, SUMS_P, DIM)).to(y.dtype.element_ty)
    else:
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
    x, b, rows, sizes, places, ranks, y, sums, eps, x_row, b_place, layers,
    INNER: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr,
    SUMS: tl.constexpr, SUMS_P: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes + tile)
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, tl.arange(0, BT), BT)
    dtype: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, R)
    n = block * BN + tl.arange(0, BN)
    of_gates = of_outputs(b, b_place, place, n, n < INNER, rank, RANK, R)
    of_ups = of_outputs(b, b_place, place, INNER + n, n < INNER, rank, RANK, R)
    wait(PDL)
    if size == 0:
        return
    there = used[:, None] & (n < INNER)[None, :]
    row = x + tl.cast(t, tl.int64)[:, None] * x_row
    gate = tl.load(row + n[None, :], mask=there, other=0.0).to(tl.float32)
    up = tl.load(row + INNER + n[None, :], mask=there, other=0.0).to(tl.float32)
    inner = row + 2 * INNER + 2 * place * RANK + r[None, :]
    adapted = used[:, None] & (r < rank)[None, :]
    of_gate = tl.load(inner, mask=adapted, other=0.0)
    of_up = tl.load(inner + RANK, mask=adapted, other=0.0)
    gate += tl.dot(of_gate, tl.trans(of_gates), input_precision=PRECISION)
    up += tl.dot(of_up, tl.trans(of_ups), input_precision=PRECISION)
    if SUMS > 0:
        factor = _factor(sums, t, used, eps, SUMS, SUMS_P, DIM)
        gate *= factor
        up *= factor
    value = gate_rounded(gate, up, dtype, ACT)
    tl.store(y + tl.cast(t, tl.int64)[:, None] * INNER + n[None, :], value.to(dtype), mask=there)


def expand_behind(of: LoraProduct, x: Tensor, groups: TokenGroups, sums: Sums | None = None) -> Tensor:
    """Return the changed product [T, out] of a layer, for x [T, out + n] of ``ExtendedWeight``.

    With ``sums`` it is divided by the root mean square of the layer's input."""
    return _launch(of, x, groups, sums=sums)


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
    sums: Sums | None = None,
) -> Tensor:
    tiles, tile = groups.rows.shape
    tokens = x.shape[0]
    outputs = of.b.shape[1]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    # the kernel does not read absent tensors
    added: list[Any] = [y if one is None else one for one in (residual, norm, squares)]
    blocks = of.blocks[of.block]
    options = {"OUT": outputs, "BT": tile, "BN": of.block, "UNIT": of.unit}
    options |= {"ADD": residual is not None, "num_warps": 4}
    options |= UNDIVIDED if sums is None else sums.constants()
    if sums is None:
        added += [y, 0.0]
    else:
        added += [sums.squares, sums.eps]
    strides = x.stride(0), y.stride(0), of.b.stride(0), groups.ranks.stride(0)
    launch = _expand[(len(blocks), tiles)]
    launch(x, of.b, *of.of_tiles(groups), blocks, y, *added, *strides, **of.shape, **options, **pdl(y))
    return y


def gate_behind(of: LoraProduct, x: Tensor, activation: str, groups: TokenGroups, sums: Sums | None = None) -> Tensor:
    """Return activation(gate) * up [T, out / 2] of the changed product gate | up, for x [T, out + n] of
    ``ExtendedWeight``.

    With ``sums`` the product is divided by the root mean square of the layer's input."""
    tiles, tile = groups.rows.shape
    tokens = x.shape[0]
    inner = of.b.shape[1] // 2
    y = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    size = of.block  # number of outputs of a program
    sizes = {"INNER": inner, "RANK": of.rank, "R": of.width, "BT": tile, "BN": size}
    options = {"ACT": NUMBER[activation], "PRECISION": of.precision, "num_warps": 4}
    options |= UNDIVIDED if sums is None else sums.constants()
    given = (y, 0.0) if sums is None else (sums.squares, sums.eps)
    strides = x.stride(0), of.b.stride(0), groups.ranks.stride(0)
    launch = _gate[(cdiv(inner, size), tiles)]
    launch(x, of.b, *of.of_tiles(groups), y, *given, *strides, **sizes, **options, **pdl(y))
    return y
