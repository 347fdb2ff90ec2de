"""Copies of blocks between the tensors of the KV cache and pages, in which a block is contiguous.

    tensors   K of layer 0 [blocks, row 0]    V of layer 0 [blocks, row 1]    K of layer 1 ...
                       │                               │
    page      [ row 0  ·  row 1  ·  row 2 ... ]        at any address, also in pinned host memory

One launch moves any number of blocks of all tensors, so its time on the host does not grow with the layers.

Pages are fetched from pinned host memory by a few programs, whose loads in flight suffice for the speed of the bus.
More programs would only take places on the multiprocessors from the kernels of a step that runs at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from .launch import kernel

CHUNK = 1024  # number of elements of a block that each program copies
PINNED_FROM = 4096  # arrays of at least this many bytes are pinned, because the host would wait for their copies
FETCHERS = 16  # number of programs that fetch pages from host memory
FETCHED = 2048  # number of 8-byte elements that each of them has in flight
ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes


@kernel("where", "tensors", "pages", "count")
def _move(
    where, tensors, pages, count, ELEMENT: tl.constexpr, BYTES: tl.constexpr, PACK: tl.constexpr, CHUNK: tl.constexpr
):
    """Move the blocks ``where`` i64 [0, pages] to the addresses ``where`` i64 [1, pages], or back without ``PACK``.

    ``tensors`` i64 [3, count] are the addresses of the tensors, the elements of a block in each, and the bytes before
    it in a page.  An ELEMENT has BYTES bytes.  The grid is (pages, count, chunks of the largest tensor).
    """
    element: tl.constexpr = tl.pointer_type(ELEMENT)
    page, tensor, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    elements = tl.load(tensors + count + tensor)
    at = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    on = at < elements
    block = tl.load(where + page)
    row = (tl.load(tensors + tensor) + block * elements * BYTES).to(element) + at
    there = (tl.load(where + pages + page) + tl.load(tensors + 2 * count + tensor)).to(element) + at
    if PACK:
        tl.store(there, tl.load(row, mask=on), mask=on)
    else:
        tl.store(row, tl.load(there, mask=on), mask=on)


def _addresses(first: Sequence[int], second: Sequence[int], device: torch.device) -> Tensor:
    """Return two lists of numbers as a tensor i64 [2, n] on the device, without waiting for its copy."""
    both = torch.tensor([first, second], dtype=torch.int64)
    if device.type == "cuda" and both.nbytes >= PINNED_FROM:
        both = both.pin_memory()
    return both.to(device, non_blocking=True)


def _launch(table: Tensor, blocks: Sequence[int], addresses: Sequence[int], chunks: int, unit: int, pack: bool) -> None:
    """Copy blocks between the tensors in ``table`` i64 [3, count] and pages at ``addresses``, on the current stream.

    With ``pack`` the blocks are copied to the pages, otherwise the pages to the blocks.  ``chunks`` is the number of
    programs for each block of the largest tensor, and ``unit`` the bytes of an element.
    """
    where = _addresses(blocks, addresses, table.device)
    pages = len(blocks)
    count = table.shape[1]
    element = ELEMENTS[unit]
    _move[pages, count, chunks](where, table, pages, count, element, unit, pack, CHUNK)


class PageTable:
    """The tensors of a KV group, whose first dimension are blocks, and the layout of a page."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Lay out a page with the rows of contiguous ``tensors`` one after the other.

        ValueError if a tensor is not contiguous.
        """
        if not all(t.is_contiguous() for t in tensors):
            raise ValueError("pages need contiguous tensors")
        self._tensors = list(tensors)
        self.device = tensors[0].device
        self._sizes = [t[0].numel() * t.element_size() for t in tensors]
        self.page_bytes = sum(self._sizes)
        self._addresses: list[int] = []
        self._look()

    def _look(self) -> None:
        """Build the table of the tensors' addresses again if they have changed, as after a sleep of the engine."""
        addresses = [t.data_ptr() for t in self._tensors]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self.unit = math.gcd(8, self.page_bytes, *self._sizes, *addresses)
        largest = max(self._sizes)
        self._chunks = -(-largest // (self.unit * CHUNK))
        elements = [size // self.unit for size in self._sizes]
        begins = [0, *accumulate(self._sizes[:-1])]
        facts = torch.tensor([addresses, elements, begins], dtype=torch.int64)
        self._table = facts.to(self.device)

    def move(self, blocks: Sequence[int], addresses: Sequence[int], pack: bool) -> None:
        """Copy each block to the page at its address, or with ``pack`` False each page to its block, on the current
        stream.  Addresses are multiples of 8 bytes that the device can access."""
        self._look()
        _launch(self._table, blocks, addresses, self._chunks, self.unit, pack)


@kernel("where", "pages", "elements", "chunks")
def _fetch(where, pages, elements, chunks, CHUNK: tl.constexpr):
    """Copy pages of ``elements`` 8-byte elements from the addresses ``where`` i64 [0, pages] to those in [1, pages].

    Each program copies every n-th of the ``chunks`` of all pages, with n programs."""
    for piece in range(tl.program_id(0), pages * chunks, tl.num_programs(0)):
        page = piece // chunks
        at = (piece % chunks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        on = at < elements
        source = tl.load(where + page).to(tl.pointer_type(tl.int64))
        target = tl.load(where + pages + page).to(tl.pointer_type(tl.int64))
        tl.store(target + at, tl.load(source + at, mask=on), mask=on)


def copy_pages(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy pinned host pages u8 [n] to pages on the device, by one kernel on the current stream.

    The pages have the same size, a multiple of 8 bytes.
    """
    elements = targets[0].nbytes // 8
    chunks = -(-elements // FETCHED)
    where = _addresses([page.data_ptr() for page in sources], [page.data_ptr() for page in targets], targets[0].device)
    _fetch[FETCHERS,](where, len(sources), elements, chunks, FETCHED, num_warps=8)
