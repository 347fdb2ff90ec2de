"""Choices and moves of the tokens that stay in the KV cache, for all layers and heads of a KV group in one launch.

    gather    tokens of a row in some layers ─────────► [lines, stored, dim], a line for each layer and head
    choose    scores f32 [lines, stored] ─────────────► kept tokens i32 [lines, kept], ascending
    move      kept tokens of all compressed rows ─────► the first places of each row, in place

A program of ``move`` moves the kept tokens of one head in one tensor, one chunk after the other.  Kept tokens are
ascending, so a token never moves to a later place.  A chunk is loaded before it is stored, so no token is overwritten
before it has been read.

Reference: ``device.worker.compaction``, which has the same operations in torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, kernel, power
from .pages import ELEMENTS, PINNED_FROM

SCORES = 1024  # number of scores that a program reads at a time
GATHERED = 64  # number of tokens that each program of the kernel ``gather`` copies
# bytes of a chunk of a move, and rows of a launch: on an H200 a row of 4,000 tokens in 32 layers takes 0.28 ms,
# 0.32 ms with chunks of 16 KiB, and 0.61 ms as one of eight rows of a launch
MOVED, ROWS = 32 << 10, 2
WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes


class Move(NamedTuple):
    """The kept tokens of a row in the layers of a KV group, and their blocks before and after the move."""

    tokens: Tensor  # i32 [layers, kv_heads, kept] indices of the kept tokens in the row, ascending
    sources: Tensor  # i32 [blocks]
    targets: Tensor  # i32 [blocks]


@kernel("table", "rows", "moves", "count")
def _move(
    table, rows, moves, count, HEADS: tl.constexpr, BLOCK: tl.constexpr, ELEMENT: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Move kept tokens to the first places of their rows.

    ``table`` i64 [3, count] are the addresses of the tensors, the elements of a token and head in each, and the number
    of their layer.  ``rows`` i64 [4, moves] are the numbers of kept tokens, and the addresses of the kept tokens, of
    the old blocks and of the new blocks, all i32.  The grid is (heads, count, moves).
    """
    head, tensor, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ints: tl.constexpr = tl.pointer_type(tl.int32)
    base = tl.load(table + tensor).to(tl.pointer_type(ELEMENT))
    elements = tl.load(table + count + tensor).to(tl.int32)
    line = tl.load(table + 2 * count + tensor) * HEADS + head
    kept = tl.load(rows + row).to(tl.int32)
    tokens = tl.load(rows + moves + row).to(ints) + line * kept
    old = tl.load(rows + 2 * moves + row).to(ints)
    new = tl.load(rows + 3 * moves + row).to(ints)
    column = tl.arange(0, WIDTH)
    for first in range(0, kept, N):
        at = first + tl.arange(0, N)
        on = at < kept
        token = tl.load(tokens + at, mask=on, other=0)
        source = tl.load(old + token // BLOCK, mask=on, other=0).to(tl.int64) * BLOCK + token % BLOCK
        target = tl.load(new + at // BLOCK, mask=on, other=0).to(tl.int64) * BLOCK + at % BLOCK
        moved = (on & (source != target))[:, None] & (column < elements)[None, :]
        read = base + ((source * HEADS + head) * elements)[:, None] + column[None, :]
        written = base + ((target * HEADS + head) * elements)[:, None] + column[None, :]
        x = tl.load(read, mask=moved)
        tl.debug_barrier()  # all threads must have loaded the chunk before one of them overwrites a part of it
        tl.store(written, x, mask=moved)


@kernel("addresses", "blocks", "stored")
def _gather(
    addresses, blocks, out, stored, HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Copy the tokens of a row to ``out`` [layers * HEADS, stored, D] from the tensors at ``addresses`` i64 [layers].

    ``out`` has whole numbers of up to 8 bytes in place of the elements.

    The grid is (chunks of N tokens, layers * HEADS)."""
    chunk, line = tl.program_id(0), tl.program_id(1)
    cache = tl.load(addresses + line // HEADS).to(tl.pointer_type(out.dtype.element_ty))
    at, column = chunk * N + tl.arange(0, N), tl.arange(0, DP)
    on = at < stored
    place = tl.load(blocks + at // BLOCK, mask=on, other=0).to(tl.int64) * BLOCK + at % BLOCK
    inside = on[:, None] & (column < D)[None, :]
    x = tl.load(cache + ((place * HEADS + line % HEADS) * D)[:, None] + column[None, :], mask=inside)
    tl.store(out + (line.to(tl.int64) * stored + at)[:, None] * D + column[None, :], x, mask=inside)


@triton.jit
def _ranks(scores, at, stored):
    """Load scores as u32 numbers (ranks) that have the same order.  Ranks behind the last score are 0."""
    on = at < stored
    x = tl.load(scores + at, mask=on, other=0.0)
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)  # -0 becomes 0, so that both have the same rank
    ranks = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(on, ranks, 0)


@kernel("stored", "kept")
def _choose(scores, chosen, stored, kept, N: tl.constexpr):
    """Write the ``kept`` tokens with the highest scores of a line, ascending; of equal scores the first.

    The lowest kept rank is found bit by bit, which reads the scores 32 times from the first-level cache.  The lowest
    score is -inf, whose rank is not 0."""
    line = tl.program_id(0).to(tl.int64)
    scores += line * stored
    chosen += line * kept
    lowest = tl.full((), 0, tl.uint32)
    for i in range(32):
        trial = lowest | (tl.full((), 0x80000000, tl.uint32) >> i)
        found = tl.zeros([N], tl.int32)
        for first in range(0, stored, N):
            found += (_ranks(scores, first + tl.arange(0, N), stored) >= trial).to(tl.int32)
        lowest = tl.where(tl.sum(found, 0) >= kept, trial, lowest)
    found = tl.zeros([N], tl.int32)
    for first in range(0, stored, N):
        found += (_ranks(scores, first + tl.arange(0, N), stored) > lowest).to(tl.int32)
    equal = kept - tl.sum(found, 0)  # number of tokens with the lowest kept score that are kept
    seen = tl.zeros((), tl.int32)
    placed = tl.zeros((), tl.int32)
    for first in range(0, stored, N):
        at = first + tl.arange(0, N)
        ranks = _ranks(scores, at, stored)
        same = ((ranks == lowest) & (at < stored)).to(tl.int32)
        stays = (ranks > lowest) | ((same > 0) & (seen + tl.cumsum(same, 0) <= equal))
        count = stays.to(tl.int32)
        tl.store(chosen + placed + tl.cumsum(count, 0) - 1, at, mask=stays)
        seen += tl.sum(same, 0)
        placed += tl.sum(count, 0)


def choose(scores: Tensor, kept: int) -> Tensor:
    """Return the ``kept`` tokens with the highest scores, i32 [..., kept], ascending, for scores f32 [..., stored]
    without NaN.

    Of equal scores the first tokens stay."""
    stored = scores.shape[-1]
    scores = scores.contiguous()
    chosen = torch.empty(*scores.shape[:-1], kept, dtype=torch.int32, device=scores.device)
    lines = scores.numel() // stored
    at_once = min(SCORES, power(stored))
    _choose[(lines,)](scores, chosen, stored, kept, N=at_once)
    return chosen


def copied(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of a host array on a device, for which the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and tensor.nbytes >= PINNED_FROM:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class GroupTensors:
    """The tensors of the layers of a KV group, whose blocks have the shape [block, kv_heads, ...].

    ``caches`` are the named tensors of each layer."""

    def __init__(self, caches: Sequence[Mapping[str, Tensor]]) -> None:
        self.caches = caches
        first = next(iter(caches[0].values()))
        self.block, self.heads = first.shape[1:3]
        self._addresses: list[int] = []

    @staticmethod
    def fit(caches: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return whether the kernels can move the tokens of some layers: their tensors are contiguous."""
        return all(tensor.is_contiguous() for cache in caches for tensor in cache.values())

    def _look(self) -> None:
        """Build the table of the tensors' addresses again if they have changed, as after a sleep of the engine."""
        tensors: list[Tensor] = []
        layers: list[int] = []
        for layer, cache in enumerate(self.caches):
            tensors += cache.values()
            layers += [layer] * len(cache)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        sizes = [math.prod(tensor.shape[3:]) * tensor.element_size() for tensor in tensors]
        self.unit = math.gcd(8, *sizes, *addresses)
        self.widest = max(sizes) // self.unit
        elements = [size // self.unit for size in sizes]
        facts = np.array([addresses, elements, layers], np.int64)
        self._device = tensors[0].device
        self._table = copied(facts, self._device)

    def move(self, moves: Sequence[Move]) -> None:
        """Move the kept tokens of some rows to the first places of their new blocks, with a launch for ROWS rows."""
        self._look()
        for first in range(0, len(moves), ROWS):
            self._launch(moves[first : first + ROWS])

    def compile(self) -> None:
        """Compile the kernels of a compression, so that no request waits for the compiler.

        To compile them, run them on the first token of the null block, which they keep in its place."""
        self._look()
        block = torch.zeros(1, dtype=torch.int32, device=self._device)
        for name in self.caches[0]:
            tensors = [cache[name] for cache in self.caches]
            if tensors[0].dim() == 4:
                gather(tensors, block, 1)
        scores = torch.zeros(len(self.caches), self.heads, SCORES, device=self._device)
        chosen = choose(scores, 1)
        self.move([Move(chosen, block, block)])

    def _launch(self, moves: Sequence[Move]) -> None:
        """Move the kept tokens of some rows in one launch."""
        count = len(moves)
        table = np.empty((4, count), np.int64)
        for row, (tokens, sources, targets) in enumerate(moves):
            table[0, row] = tokens.shape[-1]
            table[1, row] = tokens.data_ptr()
            table[2, row] = sources.data_ptr()
            table[3, row] = targets.data_ptr()
        rows = copied(table, self._device)
        width = power(self.widest)
        token_bytes = width * self.unit
        constants = {"HEADS": self.heads, "BLOCK": self.block, "WIDTH": width}
        constants["ELEMENT"] = ELEMENTS[self.unit]
        constants["N"] = max(1, min(128, MOVED // token_bytes))
        tensors = len(self._addresses)
        _move[self.heads, tensors, count](self._table, rows, count, tensors, **constants)


def gather(tensors: Sequence[Tensor], blocks: Tensor, stored: int) -> Tensor:
    """Return the first ``stored`` tokens in the blocks i32 [n] of contiguous tensors [blocks, block, kv_heads, dim] of
    the same shape, as [len(tensors) * kv_heads, stored, dim]."""
    block, heads, dim = tensors[0].shape[1:]
    lines = len(tensors) * heads
    out = tensors[0].new_empty(lines, stored, dim)
    found = [tensor.data_ptr() for tensor in tensors]
    row_bytes = dim * out.element_size()
    unit = math.gcd(8, row_bytes, *found)
    numbers = row_bytes // unit
    addresses = copied(np.array(found, np.int64), out.device)
    numbers_p = power(numbers)
    constants = {"HEADS": heads, "BLOCK": block, "D": numbers, "DP": numbers_p, "N": GATHERED}
    programs = cdiv(stored, GATHERED)
    _gather[programs, lines](addresses, blocks, out.view(WHOLE[unit]), stored, **constants)
    return out
