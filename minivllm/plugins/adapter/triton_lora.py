"""Adapters (LoRA) of a linear layer: y [T, out] += (x A^T) B^T, where each token uses the matrices A and B of its
adapter.

    places    2 0 2 -1 0 2          adapter of each token of the step
    groups    [0: 1 4] [2: 0 2 5] [none: 3]   tiles of tokens with one adapter or none, made once for all layers
    shrink    x, A ──► h f32 [splits, parts, T, rank]
    expand    h, summed over the splits, B ──► added to y

A program has one tile and one part of the layer, so it reads the A or B of one adapter.  The number of tiles is the
largest that a step of T tokens can have, so the launches have the same shape for every mixture of adapters, and can be
captured.  Programs of tiles without tokens end at once.  Rows of A beyond an adapter's rank are not read, and columns
of B only up to the next multiple of 8.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, wait

# (most tokens of a step, tokens of a tile); batch-invariant steps always use the first tile
TILES = ((256, 16), (1024, 32), (1 << 62, 64))
SPLITS = 16  # largest number of programs that share the inputs of a tile
SPLIT_TO = 1024  # tokens of a step up to which the inputs are split
SCANNED = 8192  # comparisons of a token with an adapter that a program of ``group`` makes at a time


class TokenGroups(NamedTuple):
    """The tokens of a step by adapter, in tiles.

    ``rows`` i32 [tiles, tile] are the tokens of each tile, of which the first ``sizes`` i32 [tiles] are set.
    ``adapters`` i32 [tiles] are the places (slots) of the adapters, and ``ranks`` i32 [tiles, layers] their ranks in
    each layer.  Tiles without tokens have the size 0 and ranks of 0.  ``used`` i32 [1] is the last of the adapters'
    places, plus 1."""

    rows: Tensor
    sizes: Tensor
    adapters: Tensor
    ranks: Tensor
    used: Tensor
    tokens: int

    @property
    def few(self) -> bool:
        """Return whether the inputs of a tile are split over programs.  Batch-invariant steps always split them."""
        _, least = TILES[0]
        _, tile = self.rows.shape
        return self.tokens <= SPLIT_TO or tile == least


@triton.jit
def _places(of_token, t, T, places):
    """Return the places of the adapters of tokens t, ``places`` for tokens without one, -1 behind the last token."""
    place = tl.load(of_token + t, mask=t < T, other=0)
    return tl.where(t < T, tl.where(place < 0, places, place), -1)


@kernel("T", "places", "layers", "sizes", "adapters", "ranks", "used")
def _group(
    of_token, of_place, rows, sizes, adapters, ranks, used, T, places, layers,
    P: tl.constexpr, BT: tl.constexpr, SCAN: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    p = tl.arange(0, P)
    counts = tl.zeros((P,), tl.int32)
    for t0 in range(0, T, SCAN):
        t = t0 + tl.arange(0, SCAN)
        place = _places(of_token, t, T, places)
        counts += tl.sum((place[None, :] == p[:, None]).to(tl.int32), 1)
    tiles = (counts + BT - 1) // BT
    ends = tl.cumsum(tiles, 0)
    adapter = tl.sum((ends <= tile).to(tl.int32), 0)
    here = p == adapter
    first = (tile - tl.sum(tl.where(here, ends - tiles, 0), 0)) * BT
    size = tl.sum(tl.where(here, counts, 0), 0) - first
    size = tl.where(adapter <= places, tl.minimum(size, BT), 0)
    tl.store(sizes + tile, size)
    tl.store(adapters + tile, tl.where(adapter < places, adapter, 0))
    if tile == 0:
        of_step = (counts > 0) & (p < places)
        ends_at = tl.where(of_step, p + 1, 0)
        tl.store(used, tl.max(ends_at, 0))
    for l0 in range(0, layers, BL):
        layer = l0 + tl.arange(0, BL)
        rank = tl.load(of_place + adapter * layers + layer, mask=(layer < layers) & (adapter < places), other=0)
        tl.store(ranks + tile * layers + layer, rank, mask=layer < layers)
    if size > 0:
        before = 0
        for t0 in range(0, T, SCAN):
            t = t0 + tl.arange(0, SCAN)
            chosen = _places(of_token, t, T, places) == adapter
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
    unfilled = min(places + 1, count)  # most tiles with fewer than ``tile`` tokens: one for each adapter and for none
    tiles = min(count, count // tile + unfilled)
    parts = [tiles * tile, tiles, tiles, tiles * layers, 1]
    ints = torch.empty(sum(parts), dtype=torch.int32, device=tokens.device)
    rows, sizes, adapters, of_tiles, used = ints.split(parts)
    width = power(places + 1)
    most = 64 if count <= SPLIT_TO else 1024
    scan = max(16, min(most, SCANNED // width))
    shape = {"P": width, "BT": tile, "SCAN": scan, "BL": 128, "num_warps": 4}
    launch = _group[(tiles,)]
    launch(tokens, ranks, rows, sizes, adapters, of_tiles, used, count, places, layers, **shape)
    rows = rows.view(tiles, tile)
    of_tiles = of_tiles.view(tiles, layers)
    return TokenGroups(rows, sizes, adapters, of_tiles, used, count)


@triton.jit
def of_tile(rows, sizes, places, ranks, tile, layers, j, BT: tl.constexpr):
    """Return the rank and the place of a tile's adapter, for each j whether the tile has a j-th token, and the indices
    of these tokens in the step (0 if there is none).
    """
    rank = tl.load(ranks + tile * layers)
    used = j < tl.load(sizes + tile)
    place = tl.load(places + tile)
    t = tl.load(rows + tile * BT + j)
    return rank, place, used, tl.where(used, t, 0)


@triton.jit
def of_outputs(b, b_place, place, n, inside, rank, RANK: tl.constexpr, R: tl.constexpr):
    """Return the rows of B [outputs, R] of the adapter in a place for the outputs n, 0 behind the rank and where
    ``inside`` is false.

    Eight columns, 16 bytes of a row, share the condition of their load, because otherwise each would be read apart.
    """
    r = tl.arange(0, R)
    at = b + tl.cast(place, tl.int64) * b_place + n[:, None] * RANK + r[None, :]
    columns = r // 8 < (rank + 7) // 8
    rows = tl.load(at, mask=inside[:, None] & columns[None, :], other=0.0)
    return tl.where((r < rank)[None, :], rows, 0.0)


@kernel("T", "sizes", "places", "ranks", "layers")
def _shrink(
    x, a, rows, sizes, places, ranks, h, T, K, x_row, a_place, layers,
    PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    j = tl.arange(0, BT)
    r = tl.arange(0, R)
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, j, BT)
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
    out = h + ((split * PARTS + part) * tl.cast(T, tl.int64) + t)[:, None] * R + r[None, :]
    tl.store(out, acc, mask=used[:, None])


@kernel("T", "sizes", "places", "ranks", "layers")
def _expand(
    h, b, rows, sizes, places, ranks, blocks, y, T, y_row, b_place, layers,
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
    rank, place, used, t = of_tile(rows, sizes, places, ranks, tile, layers, j, BT)
    if rank == 0:
        return
    n = begin + tl.arange(0, BN)
    there = used[:, None] & (n < stop)[None, :]
    out = y + tl.cast(t, tl.int64)[:, None] * y_row + n[None, :]
    ws = of_outputs(b, b_place, place, n, n < stop, rank, RANK, R)
    old = tl.load(out, mask=there, other=0.0)
    inner = tl.zeros((BT, R), tl.float32)
    for split in tl.static_range(SPLITS):
        at = h + ((split * PARTS + part) * tl.cast(T, tl.int64) + t)[:, None] * R + r[None, :]
        inner += tl.load(at, mask=used[:, None], other=0.0)
    added = tl.dot(inner.to(b.dtype.element_ty), tl.trans(ws), input_precision=PRECISION)
    tl.store(out, (old.to(tl.float32) + added).to(y.dtype.element_ty), mask=there)


class LoraProduct:
    """The product of the adapters of one layer.

    a [places, parts, rank, in] and b [places, out, rank] are views of the arena.  ``number`` is the index of the
    layer among the layers with adapters.  ``starts`` are the first outputs of the parts.
    """

    def __init__(self, a: Tensor, b: Tensor, number: int, starts: Sequence[int]) -> None:
        self.a = a
        self.b = b
        self.number = number
        _, self.parts, self.rank, self.inputs = a.shape
        outputs = b.shape[1]
        self.width = power(self.rank)
        self.starts = tuple(starts)
        self.gates = self.starts == (0, outputs // 2)  # whether it has two parts of equal size (gate, up)
        self.precision = "ieee" if a.dtype == torch.float32 else "tf32"
        # arguments of both kernels
        self.shape = {"PARTS": self.parts, "RANK": self.rank, "R": self.width, "PRECISION": self.precision}
        bounds = [*starts, outputs]
        aligned = all(bound % 16 == 0 for bound in bounds)
        self.unit = 16 if aligned else 1
        self.block = self.large = 64
        if self.width <= 32:
            self.block = 256
            self.large = 128
        sizes = {self.block, self.large}
        self.blocks = {size: self._blocks(size, bounds) for size in sizes}

    def _blocks(self, size: int, bounds: Sequence[int]) -> Tensor:
        """Return blocks of at most ``size`` outputs, i32 [blocks, 3].

        A row has the index of the part, the first output of the block, and the end of the part, in units of outputs.
        """
        blocks = []
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            end = stop // self.unit
            for begin in range(start, stop, size):
                blocks.append((part, begin // self.unit, end))
        return torch.tensor(blocks, dtype=torch.int32, device=self.a.device)

    def of_tiles(self, groups: TokenGroups) -> tuple[Tensor, ...]:
        return groups.rows, groups.sizes, groups.adapters, groups.ranks[:, self.number :]

    def shrink(self, x: Tensor, groups: TokenGroups) -> Tensor:
        """Return h f32 [splits, parts, T, rank], the products of x [T, in] and A for the tokens with an adapter."""
        tiles, tile = groups.rows.shape
        span = self.inputs
        block_k = 128
        stages = 3
        if groups.few:
            span = cdiv(span, SPLITS)
            block_k = 512
            stages = 2
        block_k = max(32, min(block_k, 16384 // self.width))
        blocks = cdiv(span, block_k)
        if blocks == 1:
            stages = 1
        span = blocks * block_k
        splits = cdiv(self.inputs, span)
        shape = splits, self.parts, groups.tokens, self.width
        h = torch.empty(shape, dtype=torch.float32, device=x.device)
        options = {"BT": tile, "BK": block_k, "SPAN": span, "num_warps": 4, "num_stages": stages}
        strides = x.stride(0), self.a.stride(0), groups.ranks.stride(0)
        of_tiles = self.of_tiles(groups)
        launch = _shrink[(self.parts, tiles, splits)]
        launch(x, self.a, *of_tiles, h, len(x), self.inputs, *strides, **self.shape, **options, **pdl(x))
        return h

    def expand(self, h: Tensor, y: Tensor, groups: TokenGroups) -> Tensor:
        """Add the products of h and B to y [T, out] in place, and return y."""
        tiles, tile = groups.rows.shape
        size = self.block if groups.few else self.large
        blocks = self.blocks[size]
        options = {"BT": tile, "BN": size, "UNIT": self.unit, "SPLITS": len(h), "num_warps": 4}
        strides = y.stride(0), self.b.stride(0), groups.ranks.stride(0)
        of_tiles = self.of_tiles(groups)
        launch = _expand[(len(blocks), tiles)]
        launch(h, self.b, *of_tiles, blocks, y, len(y), *strides, **self.shape, **options, **pdl(y))
        return y

    def __call__(self, x: Tensor, y: Tensor, groups: TokenGroups) -> Tensor:
        """Add the product for x [T, in] to y [T, out] in place, and return y."""
        inner = self.shrink(x, groups)
        return self.expand(inner, y, groups)
