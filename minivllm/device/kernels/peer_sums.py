"""Sums over the GPUs of one host through memory that all of them can read and write, with residual and norm.

Each rank has a region of the same layout, and every kernel has the addresses of all regions (``peers``).  Program b of
a rank waits only for the programs b of the other ranks.  It counts its meetings in ``count[b]``, and the number of a
meeting is the value of its flags.  So nothing is ever reset, and a replayed captured kernel continues with the right
number.  The parity of the number selects one of two places, so one meeting per sum is enough: a program at number n + 1
has read all data of number n.

    words   a few rows.  A word of 64 bits has 32 bits of data and the number of the meeting, so the reader sees whether
            it has arrived.  Each rank writes its rows into the regions of the others and polls its own region:

              rank r:  x ──► {data, n} ──► words[parity][b][r] of each peer;   poll its own until all arrive ─► sum

    flags   more rows.  Each rank writes its rows into the regions of the others, and then a flag.  It reads its own
            region once all flags are set.  With ``SPLIT`` each rank sums a share of the columns, and a second meeting
            distributes the sums.  This sends fewer bytes between many GPUs, and needs one meeting more.

              rank r:  x ──► rows[parity][b][r], then flag n, of each peer;   all flags n?  ─► rows of all ─► sum

Sums are float32 in the order of the ranks, so they have the same bits on each rank and in each run.

A rank sends, for T rows of B bytes, T * B * 2 (size - 1) bytes by words, T * B * (size - 1) by flags, and T * B * 2
(size - 1) / size by split flags.  The references are a float64 sum and ``device.layers.norm.rms_norm``
(``tests/device/kernels/test_peer_kernels.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import kernel, wait

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # content of a 32-bit word: one float32, or a pair of 16-bit numbers
_BFLOAT16, _FLOAT16 = tl.constexpr(BFLOAT16), tl.constexpr(FLOAT16)


@triton.jit
def _numbers(words, KIND: tl.constexpr):
    """Unpack 32-bit words to float32: the elements at even and those at odd indices.  For FLOAT32 both results are the
    same."""
    if KIND == _BFLOAT16:
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    elif KIND == _FLOAT16:
        even = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = words.to(tl.float32, bitcast=True)
        odd = even
    return even, odd


@triton.jit
def _words(even, odd, KIND: tl.constexpr):
    """Round the elements at even and at odd indices to the dtype, and pack them into words i32."""
    if KIND == _BFLOAT16:
        low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif KIND == _FLOAT16:
        low = even.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (odd.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        words = even.to(tl.int32, bitcast=True)
    return words


@triton.jit
def _add_and_norm(
    even, odd, residual, weight, bias, y, at, on, eps, DIM: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Add bias and residual to the sum of a row, normalize it and store it.

    ``at`` are the words of the row in ``residual`` and ``y``, and ``on`` marks those that exist.  ``WIDE`` means that
    the norm's weight is float32, with two numbers for each word of a half dtype.
    """
    place = tl.arange(0, at.shape[0])
    if BIAS:
        b_even, b_odd = _numbers(tl.load(bias + place, mask=on, other=0), KIND)
        # rounded to the dtype first, as a product is rounded before its bias is added
        even, odd = _numbers(_words(even, odd, KIND), KIND)
        even += b_even
        odd += b_odd
    if ADD:
        r_even, r_odd = _numbers(tl.load(residual + at, mask=on, other=0), KIND)
        even, odd = _numbers(_words(even, odd, KIND), KIND)
        even += r_even
        odd += r_odd
    words = _words(even, odd, KIND)
    if ADD:
        tl.store(residual + at, words, mask=on)
    if NORM:
        even, odd = _numbers(words, KIND)
        squares = even * even
        if KIND != 0:
            squares += odd * odd
        inverse = tl.rsqrt(tl.sum(tl.where(on, squares, 0.0), 0) / DIM + eps)
        if WIDE and KIND != 0:
            w_even = tl.load(weight + 2 * place, mask=on, other=0).to(tl.float32, bitcast=True)
            w_odd = tl.load(weight + 2 * place + 1, mask=on, other=0).to(tl.float32, bitcast=True)
        else:
            w_even, w_odd = _numbers(tl.load(weight + place, mask=on, other=0), KIND)
        words = _words(even * inverse * w_even, odd * inverse * w_odd, KIND)
    tl.store(y + at, words, mask=on)


@triton.jit
def _at(peers, r, offset, element: tl.constexpr):
    """Return the address of ``offset`` bytes in the region of rank r.

    Offsets are multiples of 16 bytes, which the compiler cannot infer for an address from memory.
    """
    return tl.multiple_of((tl.load(peers + r) + offset).to(tl.pointer_type(element)), 16)


@kernel("rank")
def sum_by_words(
    x, residual, weight, bias, y, peers, count, progress, stride, rank, eps, DIM: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    SIZE: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum rows of all ranks through words that carry the number of the sum.

    The grid is (T,) with T <= ROWS, and a program handles a row of N words of 32 bits; P is a power of two of at least
    N. ``peers`` i64 [SIZE] are the regions.  At WORDS bytes each has i64 [2, ROWS, SIZE, MOST]. ``progress`` i32 [2],
    which the host reads, has the number of the sum that the first program began last, and of the sum that it ended
    last.
    """
    wait(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, P)
    on = at < N
    number = tl.load(count + row) + 1
    mine = tl.load(x + row.to(tl.int64) * stride + at, mask=on, other=0)
    tagged = (mine.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    if row == 0:
        tl.store(progress, number)
    place = ((number & 1) * ROWS + row).to(tl.int64) * (SIZE * MOST)
    for r in tl.static_range(SIZE):
        if r != rank:
            there = _at(peers, r, WORDS, tl.int64)
            tl.store(there + place + rank * MOST + at, tagged, mask=on)
    here = _at(peers, rank, WORDS, tl.int64)
    even = tl.zeros([P], tl.float32)
    odd = tl.zeros([P], tl.float32)
    for r in tl.static_range(SIZE):
        got = tagged
        if r != rank:
            got = tl.load(here + place + r * MOST + at, mask=on, other=0, volatile=True)
            while tl.max(tl.where(on & ((got >> 32).to(tl.int32) != number), 1, 0), 0) > 0:
                got = tl.load(here + place + r * MOST + at, mask=on, other=0, volatile=True)
        e, o = _numbers(got.to(tl.int32), KIND)
        even += e
        odd += o
    _add_and_norm(even, odd, residual, weight, bias, y, row.to(tl.int64) * N + at, on, eps, DIM, KIND, WIDE, BIAS, ADD,
                  NORM)  # fmt: skip
    tl.debug_barrier()  # all threads must have loaded the count before one of them changes it
    tl.store(count + row, number)
    if row == 0:
        tl.store(progress + 1, number)


@triton.jit
def _meet(peers, rank, block, number, flags, SIZE: tl.constexpr):
    """Send ``number``, the count of exchanges, to the same program of all other ranks, and wait until these have sent
    it too.

    ``flags`` is the offset of i32 [blocks, SIZE] in a region.  All earlier writes of these programs are visible
    afterwards.
    """
    tl.debug_barrier()  # all threads must have written their data before one thread sets the flag
    for r in tl.static_range(SIZE):
        if r != rank:
            there = (tl.load(peers + r) + flags).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(there + block * SIZE + rank, number, sem="release", scope="sys")
    here = (tl.load(peers + rank) + flags).to(tl.pointer_type(tl.int32))
    for r in tl.static_range(SIZE):
        if r != rank:
            seen = tl.atomic_add(here + block * SIZE + r, 0, sem="acquire", scope="sys")
            while seen - number < 0:  # the difference is compared, because the 32-bit count may wrap around
                seen = tl.atomic_add(here + block * SIZE + r, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@kernel("rank", "T")
def sum_by_flags(
    x, residual, weight, bias, y, peers, count, progress, stride, rank, eps, T, DIM: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    SIZE: tl.constexpr, FLAGS: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, EACH: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum rows of all ranks through flags.

    The grid is (G,) with G <= BLOCKS, and program b handles the rows b, b + G ..., EACH of them at a time.  A region
    has i32 [BLOCKS, SIZE] at FLAGS bytes, i32 [2, BLOCKS, SIZE, CHUNK] by sender at ROWS bytes, and i32 [2, BLOCKS,
    CHUNK] at SUMS bytes.
    """
    wait(PDL)
    block, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, P)
    on = at < N
    share: tl.constexpr = ((N + SIZE - 1) // SIZE + 3) // 4 * 4
    number = tl.load(count + block)
    if block == 0:
        tl.store(progress, number + 1)
    for first in tl.range(block, T, programs * EACH):
        number += 1
        half = ((number & 1) * BLOCKS + block).to(tl.int64) * (CHUNK * 4)
        for i in tl.static_range(EACH):
            row = first + i * programs
            mask = on & (row < T)
            mine = tl.load(x + row.to(tl.int64) * stride + at, mask=mask, other=0)
            for r in tl.static_range(SIZE):
                if r != rank:
                    theirs = mask
                    if SPLIT:
                        theirs = mask & (at >= r * share) & (at < (r + 1) * share)
                    there = _at(peers, r, ROWS + half * SIZE + rank * (CHUNK * 4), tl.int32)
                    tl.store(there + i * N + at, mine, mask=theirs)
        _meet(peers, rank, block, number, FLAGS, SIZE)
        if SPLIT:
            part = tl.arange(0, P // SIZE) + rank * share
            within = (part < N) & (part < (rank + 1) * share)
            for i in tl.static_range(EACH):
                row = first + i * programs
                mask = within & (row < T)
                even = tl.zeros([P // SIZE], tl.float32)
                odd = tl.zeros([P // SIZE], tl.float32)
                for r in tl.static_range(SIZE):
                    from_r = _at(peers, rank, ROWS + half * SIZE + r * (CHUNK * 4), tl.int32)
                    words = tl.load(x + row.to(tl.int64) * stride + part, mask=mask & (r == rank), other=0)
                    words |= tl.load(from_r + i * N + part, mask=mask & (r != rank), other=0, cache_modifier=".cg")
                    e, o = _numbers(words, KIND)
                    even += e
                    odd += o
                for r in tl.static_range(SIZE):
                    there = _at(peers, r, SUMS + half, tl.int32)
                    tl.store(there + i * N + part, _words(even, odd, KIND), mask=mask)
            number += 1
            _meet(peers, rank, block, number, FLAGS, SIZE)
        for i in tl.static_range(EACH):
            row = first + i * programs
            mask = on & (row < T)
            if SPLIT:
                here = _at(peers, rank, SUMS + half, tl.int32)
                even, odd = _numbers(tl.load(here + i * N + at, mask=mask, other=0, cache_modifier=".cg"), KIND)
            else:
                even = tl.zeros([P], tl.float32)
                odd = tl.zeros([P], tl.float32)
                for r in tl.static_range(SIZE):
                    from_r = _at(peers, rank, ROWS + half * SIZE + r * (CHUNK * 4), tl.int32)
                    words = tl.load(x + row.to(tl.int64) * stride + at, mask=mask & (r == rank), other=0)
                    words |= tl.load(from_r + i * N + at, mask=mask & (r != rank), other=0, cache_modifier=".cg")
                    e, o = _numbers(words, KIND)
                    even += e
                    odd += o
            _add_and_norm(even, odd, residual, weight, bias, y, row.to(tl.int64) * N + at, mask, eps, DIM, KIND, WIDE,
                          BIAS, ADD, NORM)  # fmt: skip
    tl.store(count + block, number)
    if block == 0:  # report the last exchange that this program has begun and ended
        tl.store(progress, number)
        tl.store(progress + 1, number)
