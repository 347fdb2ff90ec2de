"""Transfers between the GPUs of a host in a step: logits to rank 0, and drawn tokens from rank 0.

Regions, meetings and their numbers are those of ``peer_sums``.  Here the sender does not wait for the receiver, up to
two meetings ahead.  It alternates between two places, and the receiver acknowledges a place (``acks``) before it is
written again::

    gather   rank r: tile ──► place[number % 2] of rank 0, flag number      rank 0: flag? ─► columns of out, ack number
    drawn    rank 0: {token, n}, {length and end, n} ──► places of each     rank r: poll until they arrive ─► columns

So rank 0 may be late, as when a grammar is compiled before the draw.  The other ranks continue until they need the
drawn tokens, or until more tiles wait than there are places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import kernel, wait
from .peer_sums import _at


@triton.jit
def _await(at, number):
    """Wait until an i32 that another GPU writes is at least ``number``.

    Earlier writes of that GPU are then visible.
    """
    seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
    while seen - number < 0:  # the difference is compared, because the 32-bit count may wrap around
        seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")


@kernel("rows", "rank")
def gather(
    x, out, peers, count, progress, rows, rank, vocab, COLUMNS: tl.constexpr, SIZE: tl.constexpr, FLAGS: tl.constexpr,
    ACKS: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, PLACE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gather x [rows, COLUMNS] of all ranks side by side to out [rows, vocab] on rank 0; columns from ``vocab`` on are
    cut.

    The grid is (G,) with G <= BLOCKS, and program b moves the tiles b, b + G ... A region has flags and acks i32
    [BLOCKS, SIZE] and places [2, BLOCKS, SIZE, PLACE] bytes, of which a tile uses the first.  ``progress`` is that of
    sums.
    """
    wait(PDL)
    block, programs = tl.program_id(0), tl.num_programs(0)
    element = x.dtype.element_ty
    tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    within = tl.arange(0, TILE)
    number = tl.load(count + block)
    if block == 0:
        tl.store(progress, number + 1)
    for tile in tl.range(block, rows * tiles, programs):
        number += 1
        row, at = tl.cast(tile // tiles, tl.int64), (tile % tiles) * TILE + within
        on = at < COLUMNS
        # equal for every TILE and dtype, so that the places of different programs never overlap
        place = PLACES + ((number & 1) * BLOCKS + block).to(tl.int64) * (SIZE * PLACE)
        mine = tl.load(x + row * COLUMNS + at, mask=on, other=0.0)
        if rank == 0:
            tl.store(out + row * vocab + at, mine, mask=on & (at < vocab))
            for r in tl.static_range(1, SIZE):
                _await((tl.load(peers) + FLAGS).to(tl.pointer_type(tl.int32)) + block * SIZE + r, number)
                tl.debug_barrier()
                here = _at(peers, 0, place + r * PLACE, element)
                theirs = tl.load(here + within, mask=on, other=0.0, cache_modifier=".cg")
                column = r * COLUMNS + at
                tl.store(out + row * vocab + column, theirs, mask=on & (column < vocab))
            tl.debug_barrier()  # all have read
            for r in tl.static_range(1, SIZE):
                ack = (tl.load(peers + r) + ACKS).to(tl.pointer_type(tl.int32)) + block * SIZE
                tl.atomic_xchg(ack, number, sem="release", scope="sys")
        else:
            _await((tl.load(peers + rank) + ACKS).to(tl.pointer_type(tl.int32)) + block * SIZE, number - 2)
            tl.debug_barrier()
            there = _at(peers, 0, place + rank * PLACE, element)
            tl.store(there + within, mine, mask=on)
            tl.debug_barrier()  # all threads must have written their data before one thread sets the flag
            flag = (tl.load(peers) + FLAGS).to(tl.pointer_type(tl.int32)) + block * SIZE + rank
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
    tl.store(count + block, number)
    if block == 0:  # report the last exchange that this program has begun and ended
        tl.store(progress, number)
        tl.store(progress + 1, number)


@kernel("rows", "rank", "position")
def drawn(
    slots, position, tokens, known, stopped, peers, count, progress, rows, tokens_stride, rank, SIZE: tl.constexpr,
    ACKS: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Send the columns of rows for which rank 0 has drawn a token to all ranks.

    For ``slots`` i64 [rows] these are the token at ``position`` i64 [rows], the length, and whether the row has ended.
    The grid is (cdiv(rows, TILE),), and a program handles TILE rows.  A region has acks i32 [BLOCKS, SIZE] and places
    i64 [2, BLOCKS, 2, TILE].  A place has a word for the token and a word for length and end, with the number of the
    call in their upper halves.
    """
    wait(PDL)
    block = tl.program_id(0)
    number = tl.load(count + block) + 1
    if block == 0:
        tl.store(progress, number)
    within = tl.arange(0, TILE)
    row = block * TILE + within
    on = row < rows
    slot = tl.load(slots + row, mask=on, other=0)
    at = slot * tokens_stride + tl.load(position + row, mask=on, other=0)
    place = ((number & 1) * BLOCKS + block).to(tl.int64) * (2 * TILE)
    tag = number.to(tl.int64) << 32
    if rank == 0:
        for r in tl.static_range(1, SIZE):
            _await((tl.load(peers) + ACKS).to(tl.pointer_type(tl.int32)) + block * SIZE + r, number - 2)
        tl.debug_barrier()
        token = tl.load(tokens + at, mask=on, other=0).to(tl.int64) & 0xFFFFFFFF
        length = tl.load(known + slot, mask=on, other=0).to(tl.int64)
        ended = tl.load(stopped + slot, mask=on, other=0).to(tl.int64)
        for r in tl.static_range(1, SIZE):
            there = (tl.load(peers + r) + PLACES).to(tl.pointer_type(tl.int64)) + place + within
            tl.store(there, token | tag, mask=on)
            tl.store(there + TILE, length | (ended << 31) | tag, mask=on)
    else:
        here = (tl.load(peers + rank) + PLACES).to(tl.pointer_type(tl.int64)) + place + within
        token = tl.load(here, mask=on, other=0, volatile=True)
        while tl.max(tl.where(on & ((token >> 32).to(tl.int32) != number), 1, 0), 0) > 0:
            token = tl.load(here, mask=on, other=0, volatile=True)
        length = tl.load(here + TILE, mask=on, other=0, volatile=True)
        while tl.max(tl.where(on & ((length >> 32).to(tl.int32) != number), 1, 0), 0) > 0:
            length = tl.load(here + TILE, mask=on, other=0, volatile=True)
        tl.store(tokens + at, token.to(tl.int32), mask=on)
        tl.store(known + slot, length & 0x7FFFFFFF, mask=on)
        tl.store(stopped + slot, ((length >> 31) & 1).to(tl.uint8), mask=on)
        tl.debug_barrier()
        ack = (tl.load(peers) + ACKS).to(tl.pointer_type(tl.int32)) + block * SIZE + rank
        tl.atomic_xchg(ack, number, sem="release", scope="sys")
    tl.store(count + block, number)
    if block == 0:
        tl.store(progress + 1, number)
