"""Penalties where the history says so: every distinct token once, exactly counted, without a count over the vocabulary.

    _penalise   grid (N,)   one program a row

Tokens of the history meet in a table of ``cells``, round by round, until none is left:

    1  each occurrence writes its index into the cell of its token; of those that share a cell one stays
    2  whose token is that of the one that stayed is counted there and done; another token waits for the next round,
       where the cells are others
    3  the one that stayed changes its token's logit

Which one stays is chance, what is counted is not.  Half as many tokens as cells: four fifths are done in the first
round, all in about five.  Bytes: a round reads the history three times and a cell or two an occurrence, in L2; a row of
4,096 tokens touches about 100 KB, of which the logits are 32 bytes a distinct token.  Reference: ``Penalties.apply``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.sampling import Rows
from minivllm.device.kernels.launch import kernel, pdl, wait

CELLS = 8192  # of a row, at most: longer histories take more rounds
CHUNK = 2048  # tokens that are looked at together, at most


@triton.jit
def _cell(token, turn, CELLS: tl.constexpr):
    """Return the hash table cell of a token in a round.  Tokens that collide in one round rarely collide in the
    next."""
    h = token.to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32)
    h = h + turn.to(tl.uint32) * tl.full((), 0x85EBCA6B, tl.uint32)
    h = (h ^ (h >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return ((h ^ (h >> 16)) & (CELLS - 1)).to(tl.int32)


@kernel("slots", "position", "prompt", "room")
def _penalise(
    logits, history, slots, position, prompt, repetition, presence, frequency, stayed, count, done,
    stride, span, V, room, CELLS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    factor, once, each = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (factor != 1) | (once != 0) | (each != 0):
        lane = tl.arange(0, CHUNK)
        base, past = logits + row.to(tl.int64) * stride, history + slot * span
        stayed += row * CELLS
        count += row * CELLS
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
                cell = _cell(tl.load(past + at, mask=waits, other=0), turn, CELLS)
                tl.store(stayed + cell, at, mask=waits)
                tl.store(count + cell, 0, mask=waits)
            tl.debug_barrier()
            others = tl.zeros((CHUNK,), tl.int32)
            for start in range(begin, end, CHUNK):
                at = start + lane
                waits = (at < end) & ((turn == 1) | (tl.load(done + at, mask=at < end, other=1) == 0))
                token = tl.load(past + at, mask=waits, other=0)
                cell = _cell(token, turn, CELLS)
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
                cell = _cell(token, turn, CELLS)
                now = now & (tl.load(stayed + cell, mask=now, other=-1) == at) & (token >= 0) & (token < V)
                x = tl.load(base + token, mask=now, other=0.0)
                n = tl.load(count + cell, mask=now, other=0).to(tl.float32)
                x = tl.where(x > 0, tl.div_rn(x, factor + tl.zeros((CHUNK,), tl.float32)), x * factor)
                x = x - n * each - tl.where(n > 0, once, 0.0)
                tl.store(base + token, x, mask=now)
            tl.debug_barrier()
            left = tl.sum(others, 0)


def penalise(logits: Tensor, rows: Rows, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
    """Change ``logits`` f32 [N, V] in place; the columns are f32 [S]."""
    n, room = len(rows.slots), max(rows.max_position, 1)
    wide = triton.next_power_of_2(min(max(rows.max_position, 256), rows.tokens.shape[1]))
    cells = min(CELLS, max(64, 2 * wide))
    make = lambda width, dtype: torch.empty(n, width, dtype=dtype, device=logits.device)  # noqa: E731
    _penalise[(n,)](
        logits,
        rows.tokens,
        rows.slots,
        rows.position,
        rows.prompt,
        repetition,
        presence,
        frequency,
        make(cells, torch.int32),
        make(cells, torch.int32),
        make(room, torch.int8),
        logits.stride(0),
        rows.tokens.stride(0),
        logits.shape[1],
        room,
        CELLS=cells,
        CHUNK=min(CHUNK, max(512, wide)),
        num_warps=16,
        maxnreg=64,
        **pdl(logits),
    )
