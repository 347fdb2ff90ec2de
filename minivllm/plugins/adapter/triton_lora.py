"""Adapters (LoRA) of a linear layer: y [T, out] += (x A^T) B^T, where each token uses the matrices A and B of its
adapter.

    places    2 0 2 -1 0 2          adapter of each token of the step
    groups    [0: 1 4] [2: 0 2 5]   tiles of tokens with one adapter, made once for all layers of the step
    shrink    x, A ──► h f32 [splits, parts, tiles, tile, rank]
    expand    h, summed over the splits, B ──► added to y

A program has one tile and one part of the layer, so it reads the A or B of one adapter.  The number of tiles is the
largest that a step of T tokens can have, so the launches have the same shape for every mixture of adapters, and can be
captured.  Programs of tiles without tokens end at once.  Rows and columns beyond an adapter's rank are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import kernel, pdl, release, settle, wait
from minivllm.device.kernels.low_rank import COLUMNS, FEW, LowRankRows, add_rows, fits_rows, gated_rows

# (most tokens of a step, tokens of a tile); batch-invariant steps always use the first tile
TILES = ((256, 16), (1024, 32), (1 << 62, 64))
SPLITS = 16  # largest number of programs that share the inputs of a tile
SPLIT_TO = 1024  # tokens of a step up to which the inputs are split
MANY_SPLITS = 2  # programs that share the inputs of a tile of all parts, in longer steps
SCANNED = 8192  # comparisons of a token with an adapter that a program of ``group`` makes at a time


class TokenGroups(NamedTuple):
    """The tokens of a step by adapter, in tiles.

    ``rows`` i32 [tiles, tile] are the tokens of each tile, of which the first ``sizes`` i32 [tiles] are set.
    ``adapters`` i32 [tiles] are the places of the adapters, and ``ranks`` i32 [tiles, layers] their ranks in each
    layer.  Tiles without tokens have the size 0 and ranks of 0."""

    rows: Tensor
    sizes: Tensor
    adapters: Tensor
    ranks: Tensor
    tokens: int
    invariant: bool
    slots: Tensor  # i32 [tokens] number of each token's adapter among those of the step, -1 for none
    present: Tensor  # i32 [places] place of each adapter of the step, in ascending order
    count: Tensor  # i32 [1] adapters of the step

    @property
    def few(self) -> bool:
        """Return whether the inputs of a tile are split over programs.  Batch-invariant steps always split them."""
        return self.tokens <= SPLIT_TO or self.rows.shape[1] == TILES[0][1]


@kernel("T", "places", "layers", "sizes", "adapters", "ranks", "slots", "present", "count")
def _group(
    of_token, of_place, rows, sizes, adapters, ranks, slots, present, count, T, places, layers,
    P: tl.constexpr, BT: tl.constexpr, SCAN: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    p = tl.arange(0, P)
    counts = tl.zeros((P,), tl.int32)
    for t0 in range(0, T, SCAN):
        t = t0 + tl.arange(0, SCAN)
        place = tl.load(of_token + t, mask=t < T, other=-1)
        counts += tl.sum((place[None, :] == p[:, None]).to(tl.int32), 1)
    counts = tl.where(p < places, counts, 0)
    if tile == 0:
        in_step = counts > 0
        number = tl.cumsum(in_step.to(tl.int32), 0) - 1
        tl.store(present + number, p, mask=in_step)
        tl.store(count, tl.sum(in_step.to(tl.int32), 0))
        for t0 in range(0, T, SCAN):
            t = t0 + tl.arange(0, SCAN)
            place = tl.load(of_token + t, mask=t < T, other=-1)
            mine = (place[None, :] == p[:, None]) & in_step[:, None]
            tl.store(slots + t, tl.sum(tl.where(mine, number[:, None] + 1, 0), 0) - 1, mask=t < T)
    tiles = (counts + BT - 1) // BT
    ends = tl.cumsum(tiles, 0)
    adapter = tl.sum((ends <= tile).to(tl.int32), 0)
    here = p == adapter
    first = (tile - tl.sum(tl.where(here, ends - tiles, 0), 0)) * BT
    size = tl.sum(tl.where(here, counts, 0), 0) - first
    size = tl.where(adapter < places, tl.minimum(size, BT), 0)
    adapter = tl.where(size > 0, adapter, 0)
    tl.store(sizes + tile, size)
    tl.store(adapters + tile, adapter)
    for l0 in range(0, layers, BL):
        layer = l0 + tl.arange(0, BL)
        rank = tl.load(of_place + adapter * layers + layer, mask=(layer < layers) & (size > 0), other=0)
        tl.store(ranks + tile * layers + layer, rank, mask=layer < layers)
    if size > 0:
        before = 0
        for t0 in range(0, T, SCAN):
            t = t0 + tl.arange(0, SCAN)
            chosen = tl.load(of_token + t, mask=t < T, other=-1) == adapter
            at = before + tl.cumsum(chosen.to(tl.int32), 0) - 1 - first
            tl.store(rows + tile * BT + at, t, mask=chosen & (at >= 0) & (at < BT))
            before += tl.sum(chosen.to(tl.int32), 0)


def group(tokens: Tensor, ranks: Tensor, invariant: bool) -> TokenGroups:
    """Group the tokens of a step by adapter.

    ``tokens`` i32 [T] are places of adapters, -1 for none.  ``ranks`` i32 [places, layers] are the ranks of the
    adapters.  With ``invariant`` the tiles have the same size for every number of tokens.
    """
    count = tokens.shape[0]
    places, layers = ranks.shape
    tile = next(tile for most, tile in TILES if count <= most or invariant)
    tiles = min(count, count // tile + min(places, count))
    sizes_of = [tiles * tile, tiles, tiles, tiles * layers, count, places, 1]
    ints = torch.empty(sum(sizes_of), dtype=torch.int32, device=tokens.device)
    rows, sizes, adapters, of_tiles, slots, present, used = ints.split(sizes_of)
    width = triton.next_power_of_2(places)
    scan = max(16, min(64 if count <= SPLIT_TO else 1024, SCANNED // width))
    shape = {"P": width, "BT": tile, "SCAN": scan, "BL": 128, "num_warps": 4}
    made = rows, sizes, adapters, of_tiles, slots, present, used
    _group[(tiles,)](tokens, ranks, *made, count, places, layers, **shape)
    of_tiles = of_tiles.view(tiles, layers)
    return TokenGroups(rows.view(tiles, tile), sizes, adapters, of_tiles, count, invariant, slots, present, used)


@triton.jit
def _of_tile(rows, sizes, places, ranks, tile, layers, j, BT: tl.constexpr):
    """Return the rank and place of a tile's adapter, and for each j whether it has a token, with its number or 0."""
    rank = tl.load(ranks + tile * layers)
    used = j < tl.load(sizes + tile)
    place = tl.load(places + tile)
    t = tl.load(rows + tile * BT + j)
    return rank, place, used, tl.where(used, t, 0)


@kernel("tiles", "sizes", "places", "ranks", "layers")
def _shrink(
    x, a, rows, sizes, places, ranks, h, tiles, K, x_row, a_place, layers,
    PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    j = tl.arange(0, BT)
    r = tl.arange(0, R)
    rank, place, used, t = _of_tile(rows, sizes, places, ranks, tile, layers, j, BT)
    if rank == 0:
        return
    weights = a + tl.cast(place, tl.int64) * a_place + part * RANK * K
    inputs = x + tl.cast(t, tl.int64)[:, None] * x_row
    acc = tl.zeros((BT, R), tl.float32)
    first = split * SPAN
    for k0 in range(first, tl.minimum(first + SPAN, K), BK):
        k = k0 + tl.arange(0, BK)
        xs = tl.load(inputs + k[None, :], mask=used[:, None] & (k < K)[None, :], other=0.0)
        ws = tl.load(weights + r[:, None] * K + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision=PRECISION)
    out = h + (((split * PARTS + part) * tl.cast(tiles, tl.int64) + tile) * BT + j)[:, None] * R + r[None, :]
    tl.store(out, acc)


@kernel("T", "sizes", "places")
def _shrink_rows(
    x, a, rows, sizes, places, h, T, K, x_row, a_place,
    PARTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of a tile by A of one part, or of all if C, the columns of h, is more than R."""
    part, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # the next kernel reads x without waiting, so it may start only now
    settle(PDL)
    release(PDL)
    j = tl.arange(0, BT)
    c = tl.arange(0, C)
    size = tl.load(sizes + tile)
    if size == 0:
        return
    place = tl.load(places + tile)
    used = j < size
    t = tl.load(rows + tile * BT + j, mask=used, other=0)
    weights = a + tl.cast(place, tl.int64) * a_place + part * R * K
    inputs = x + tl.cast(t, tl.int64)[:, None] * x_row
    there = c < PARTS * R
    acc = tl.zeros((BT, C), tl.float32)
    first = split * SPAN
    for k0 in range(first, tl.minimum(first + SPAN, K), BK):
        k = k0 + tl.arange(0, BK)
        xs = tl.load(inputs + k[None, :], mask=used[:, None] & (k < K)[None, :], other=0.0)
        ws = tl.load(weights + c[:, None] * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision=PRECISION)
    of = part + c // R
    out = h + ((split * PARTS + of)[None, :] * T + t[:, None]) * R + (c % R)[None, :]
    tl.store(out, acc, mask=used[:, None] & there[None, :])


@kernel("tiles", "sizes", "places", "ranks", "layers")
def _expand(
    h, b, rows, sizes, places, ranks, blocks, y, tiles, y_row, b_place, layers,
    PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    part = tl.load(blocks + 3 * block)
    # the factor proves to the compiler that outputs can be read and written 16 bytes at a time
    begin = tl.load(blocks + 3 * block + 1) * UNIT
    stop = tl.load(blocks + 3 * block + 2) * UNIT
    wait(PDL)
    j = tl.arange(0, BT)
    r = tl.arange(0, R)
    rank, place, used, t = _of_tile(rows, sizes, places, ranks, tile, layers, j, BT)
    if rank == 0:
        return
    n = begin + tl.arange(0, BN)
    there = used[:, None] & (n < stop)[None, :]
    out = y + tl.cast(t, tl.int64)[:, None] * y_row + n[None, :]
    ws = tl.load(
        b + tl.cast(place, tl.int64) * b_place + n[:, None] * RANK + r[None, :],
        mask=(r < rank)[None, :] & (n < stop)[:, None],
        other=0.0,
    )
    old = tl.load(out, mask=there, other=0.0)
    inner = tl.zeros((BT, R), tl.float32)
    for split in tl.static_range(SPLITS):
        at = h + (((split * PARTS + part) * tl.cast(tiles, tl.int64) + tile) * BT + j)[:, None] * R + r[None, :]
        inner += tl.load(at)
    added = tl.dot(inner.to(b.dtype.element_ty), tl.trans(ws), input_precision=PRECISION)
    tl.store(out, (old.to(tl.float32) + added).to(y.dtype.element_ty), mask=there)


class LoraProduct:
    """The product of the adapters of one layer.

    a [places, parts, rank, in] and b [places, out, rank] are views of the arena.  ``number`` counts the layers with
    adapters.  ``starts`` are the first outputs of the parts.
    """

    def __init__(self, a: Tensor, b: Tensor, number: int, starts: Sequence[int]) -> None:
        self.a = a
        self.b = b
        self.number = number
        _, self.parts, self.rank, self.inputs = a.shape
        self.width = triton.next_power_of_2(self.rank)
        self.starts = tuple(starts)
        self.joins = self.rank == self.width <= COLUMNS  # ``low_rank`` may be called
        self.adds = self.joins and fits_rows(self.starts)
        self.gates = self.joins and self.starts == (0, b.shape[1] // 2)  # ``gated`` may be called
        self.precision = "ieee" if a.dtype == torch.float32 else "tf32"
        bounds = [*starts, b.shape[1]]
        self.unit = 16 if all(bound % 16 == 0 for bound in bounds) else 1
        self.block = 256 if self.width <= 32 else 64
        self.large = 128 if self.width <= 32 else 64
        self.blocks = {size: self._blocks(size, bounds) for size in (self.block, self.large)}

    def _blocks(self, size: int, bounds: Sequence[int]) -> Tensor:
        """Return blocks of at most ``size`` outputs, i32 [blocks, 3].

        A row has the number of the part, the first output of the block, and the end of its part, in units.
        """
        blocks = []
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            first_outputs = range(start, stop, size)
            blocks += [(part, begin // self.unit, stop // self.unit) for begin in first_outputs]
        return torch.tensor(blocks, dtype=torch.int32, device=self.a.device)

    def low_rank(self, x: Tensor, groups: TokenGroups) -> LowRankRows:
        """Launch the products of x [T, in] and A, and return the low-rank products for the kernel that adds them.

        The width of the memory must be a power of two (``joins``)."""
        tiles, tile = groups.rows.shape
        few = groups.tokens <= FEW
        block_k, span, splits = self._spans(few, 1 if few else MANY_SPLITS)
        h = torch.empty(splits, self.parts, groups.tokens, self.rank, dtype=torch.float32, device=x.device)
        columns = self.rank if few else triton.next_power_of_2(self.parts * self.rank)
        stages = 1 if span == block_k else 2 if few else 3
        of_parts = self.parts if few else 1
        shape = {"PARTS": self.parts, "R": self.rank, "C": columns, "BT": tile}
        options = {"BK": block_k, "SPAN": span, "num_warps": 4, "num_stages": stages}
        _shrink_rows[(of_parts, tiles, splits)](
            x,
            self.a,
            groups.rows,
            groups.sizes,
            groups.adapters,
            h,
            groups.tokens,
            self.inputs,
            x.stride(0),
            self.a.stride(0),
            PRECISION=self.precision,
            **shape,
            **options,
            **pdl(x),
        )
        return LowRankRows(h, self.b, self.starts, groups.slots, groups.present, groups.count)

    def _spans(self, few: bool, splits: int = 1) -> tuple[int, int, int]:
        """Return the inputs that a program multiplies at a time, those of a split, and the number of splits.

        ``splits`` is the number for many tokens."""
        block_k = max(32, min(512 if few else 128, 16384 // self.width))
        span = -(-self.inputs // (SPLITS if few else splits))
        span = -(-span // block_k) * block_k
        return block_k, span, -(-self.inputs // span)

    def _of_tiles(self, groups: TokenGroups) -> tuple[Tensor, ...]:
        return groups.rows, groups.sizes, groups.adapters, groups.ranks[:, self.number :]

    def shrink(self, x: Tensor, groups: TokenGroups) -> Tensor:
        """Return h f32 [splits, parts, tiles, tile, rank], the products of x [T, in] and A."""
        tiles, tile = groups.rows.shape
        few = groups.few
        block_k, span, splits = self._spans(few)
        h = torch.empty(splits, self.parts, tiles, tile, self.width, dtype=torch.float32, device=x.device)
        shape = {"PARTS": self.parts, "RANK": self.rank, "R": self.width, "BT": tile}
        shape["PRECISION"] = self.precision
        stages = 1 if span == block_k else 2 if few else 3
        options = {"BK": block_k, "SPAN": span, "num_warps": 4, "num_stages": stages, **pdl(x)}
        strides = x.stride(0), self.a.stride(0), groups.ranks.stride(0)
        grid = self.parts, tiles, splits
        _shrink[grid](x, self.a, *self._of_tiles(groups), h, tiles, self.inputs, *strides, **shape, **options)
        return h

    def expand(self, h: Tensor, y: Tensor, groups: TokenGroups) -> Tensor:
        """Add the products of h and B to y [T, out] in place, and return y."""
        tiles, tile = groups.rows.shape
        shape = {"PARTS": self.parts, "RANK": self.rank, "R": self.width, "BT": tile}
        shape["PRECISION"] = self.precision
        size = self.block if groups.few else self.large
        blocks = self.blocks[size]
        options = {"BN": size, "UNIT": self.unit, "SPLITS": len(h), "num_warps": 4, **pdl(y)}
        strides = y.stride(0), self.b.stride(0), groups.ranks.stride(0)
        grid = len(blocks), tiles
        _expand[grid](h, self.b, *self._of_tiles(groups), blocks, y, tiles, *strides, **shape, **options)
        return y

    def gated(self, x: Tensor, y: Tensor, activation: str, groups: TokenGroups) -> Tensor:
        """Return activation(gate) * up [T, n] of y [T, 2 n] = gate | up plus the product for x [T, in]."""
        return gated_rows(y, self.low_rank(x, groups), activation)

    def __call__(self, x: Tensor, y: Tensor, groups: TokenGroups) -> Tensor:
        """Add the product for x [T, in] to y [T, out] in place, and return y."""
        return self.second(self.first(x, groups), y, groups)

    def first(self, x: Tensor, groups: TokenGroups) -> LowRankRows | Tensor:
        """Return the products of x [T, in] and A, for ``second``."""
        return self.low_rank(x, groups) if self.adds and not groups.invariant else self.shrink(x, groups)

    def second(self, inner: LowRankRows | Tensor, y: Tensor, groups: TokenGroups) -> Tensor:
        """Add the products of the result of ``first`` and B to y [T, out] in place, and return y."""
        return add_rows(y, inner) if isinstance(inner, LowRankRows) else self.expand(inner, y, groups)
