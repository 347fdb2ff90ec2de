"""Apply penalties to the distinct tokens of a history, without counts of the whole vocabulary.

    _penalize   grid (N,)   one program per row

The tokens of the history are hashed to a table of ``cells``, in rounds, until all tokens are counted:

    1  each occurrence writes its index to the cell of its token; one index per cell remains
    2  occurrences with the token of the remaining index are counted in the cell; other tokens wait for the next round,
       which has another hash function
    3  the remaining occurrence changes the logit of its token

The remaining index is random, the counts are not.  With half as many tokens as cells, four fifths of the tokens are
counted in the first round and all in about five rounds.  A round reads the history three times, and one or two cells
per occurrence, from L2.  A row of 4,096 tokens reads and writes about 100 KB, with 32 bytes of logits per distinct
token.  The reference is ``Penalties.apply``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.sampling import Rows
from minivllm.device.kernels.launch import kernel, pdl, power, wait

CELLS = 8192  # largest number of cells of the hash table of a row; histories with more tokens need more rounds
CHUNK = 2048  # tokens that are read together; the same for all histories, so that one compilation serves them


@triton.jit
def _cell(token, turn, cells):
    """Return the cell of a token in a round.  Tokens that collide in a round rarely collide in the next."""
    h = token.to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32)
    h = h + turn.to(tl.uint32) * tl.full((), 0x85EBCA6B, tl.uint32)
    h = (h ^ (h >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return ((h ^ (h >> 16)) & (cells - 1).to(tl.uint32)).to(tl.int32)


@kernel("slots", "position", "prompt", "room", "cells")
def _penalize(
    logits, history, slots, position, prompt, repetition, presence, frequency, stayed, count, done,
    stride, span, V, room, cells, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    factor, once, each = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (factor != 1) | (once != 0) | (each != 0):
        lane = tl.arange(0, CHUNK)
        base, past = logits + row.to(tl.int64) * stride, history + slot * span
        stayed += row * cells
        count += row * cells
        done += row.to(tl.int64) * room
        output = tl.load(prompt + row).to(tl.int32)
        end = tl.minimum(tl.load(position + row), room).to(tl.int32)
        begin = tl.where(factor != 1, 0, output)
        left = tl.maximum(end - begin, 0)
        turn = tl.full((), 0, tl.int32)
        while left > 0:
            turn += 1
            for start in range(begin, end, CHUNK):
                at = start + lane
                waits = (at < end) & ((turn == 1) | (tl.load(done + at, mask=at < end, other=1) == 0))
                cell = _cell(tl.load(past + at, mask=waits, other=0), turn, cells)
                tl.store(stayed + cell, at, mask=waits)
                tl.store(count + cell, 0, mask=waits)
            tl.debug_barrier()
            others = tl.zeros((CHUNK,), tl.int32)
            for start in range(begin, end, CHUNK):
                at = start + lane
                waits = (at < end) & ((turn == 1) | (tl.load(done + at, mask=at < end, other=1) == 0))
                token = tl.load(past + at, mask=waits, other=0)
                cell = _cell(token, turn, cells)
                one = tl.load(stayed + cell, mask=waits, other=0)
                same = waits & (tl.load(past + one, mask=waits, other=-1) == token)
                tl.atomic_add(count + cell, 1, mask=same & (at >= output))
                tl.store(done + at, tl.where(same, turn, 0).to(tl.int8), mask=waits)
                others += (waits & ~same).to(tl.int32)
            tl.debug_barrier()
            for start in range(begin, end, CHUNK):
                at = start + lane
                now = (at < end) & (tl.load(done + at, mask=at < end, other=0) == turn)
                token = tl.load(past + at, mask=now, other=0)
                cell = _cell(token, turn, cells)
                now = now & (tl.load(stayed + cell, mask=now, other=-1) == at) & (token >= 0) & (token < V)
                x = tl.load(base + token, mask=now, other=0.0)
                n = tl.load(count + cell, mask=now, other=0).to(tl.float32)
                x = tl.where(x > 0, tl.div_rn(x, factor + tl.zeros((CHUNK,), tl.float32)), x * factor)
                x = x - n * each - tl.where(n > 0, once, 0.0)
                tl.store(base + token, x, mask=now)
            tl.debug_barrier()
            left = tl.sum(others, 0)


def penalize(logits: Tensor, rows: Rows, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
    """Apply the penalties of each row to its logits f32 [N, V], in place.

    ``repetition``, ``presence`` and ``frequency`` are columns f32 [S] with a penalty for each slot.
    """
    n = len(rows.slots)
    room = max(rows.max_position, 1)
    width = min(max(rows.max_position, 256), rows.tokens.shape[1])
    cells = min(CELLS, 2 * power(width))
    kept = torch.empty(n, cells, dtype=torch.int32, device=logits.device)
    counts = torch.empty_like(kept)
    done = torch.empty(n, room, dtype=torch.int8, device=logits.device)
    _penalize[(n,)](
        logits,
        rows.tokens,
        rows.slots,
        rows.position,
        rows.prompt,
        repetition,
        presence,
        frequency,
        kept,
        counts,
        done,
        logits.stride(0),
        rows.tokens.stride(0),
        logits.shape[1],
        room,
        cells,
        CHUNK=CHUNK,
        num_warps=16,
        maxnreg=64,
        **pdl(logits),
    )
