"""The ends of a captured step with drafts, one kernel each, which need no lengths from the host.

    begin_at   slot, shift ──► token id, position, KV length, cache slot of each row     grid (rows,)
    commit     drawn tokens of a row and its drafts ──► history, length, end, result     grid (rows,)
    put        proposed tokens ──► history behind the known tokens                       grid (rows,)

The references are ``read_rows`` and ``accept`` of ``device.worker.step``, and ``device.worker.drafting``.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.plan import EOS, FAILED, LENGTH, NAN, OVERSHOOT, STOP_ID

from .launch import kernel, pdl, power, wait
from .step import draw_constants, dropped_of, ends_of, history_of, place_constants

_EOS, _STOP, _LENGTH, _NAN = (tl.constexpr(x) for x in (EOS, STOP_ID, LENGTH, NAN))
_OVERSHOOT, _FAILED = tl.constexpr(OVERSHOOT), tl.constexpr(FAILED)


@kernel("slots", "shift", "ids", "position", "kv_len", "slot_map", "rows", "last")
def _begin_at(
    slots, shift, tokens, known, stopped, table, ids, position, kv_len, slot_map, dropped, tokens_stride, table_stride,
    rows, last,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, DROPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    wanted = tl.load(known + slot) - 1 + tl.load(shift + row)
    at = tl.minimum(tl.maximum(wanted, 0), last)
    tl.store(ids + row, tl.load(tokens + slot * tokens_stride + at + AHEAD).to(tl.int64))
    tl.store(position + row, at)
    nowhere = (tl.load(stopped + slot) != 0) | (wanted < 0)
    length = tl.where(wanted < 0, 0, at + 1)
    for g in tl.static_range(GROUPS):
        gone = tl.load(dropped + g * SLOTS + slot) if DROPS else 0  # tokens that compression has removed from the cache
        place = tl.maximum(at - gone, 0)
        block = tl.load(table + (g * SLOTS + slot) * table_stride + place // BLOCK).to(tl.int64)
        tl.store(kv_len + g * rows + row, tl.maximum(length - gone, 0).to(tl.int32))
        tl.store(slot_map + g * rows + row, tl.where(nowhere, 0, block * BLOCK + place % BLOCK))


def begin_at(
    slots: Tensor,
    shift: Tensor,
    state,
    ids: Tensor,
    position: Tensor,
    kv_len: Tensor,
    slot_map: Tensor,
    ahead: int = 0,
) -> None:
    """Write the inputs of a step whose row r has the token ``shift[r]`` positions behind the newest token of its slot.

    ``slots`` and ``shift`` are i64 [R].  A shift of 0 is the newest known token, and a negative shift an earlier token.
    The results are ids and position i64 [R], kv_len i32 [G, R] and slot_map i64 [G, R].  ``ids`` are the tokens
    ``ahead`` positions later; 1 is for a head that reads pairs of a state and the next token.  Rows that have ended,
    and rows before the first token, whose length is 0, write to the null block.
    """
    rows = len(slots)
    constants = place_constants(state, ids)
    constants["AHEAD"] = ahead
    last = state.tokens.shape[1] - 2 - ahead
    columns = (*history_of(state), state.table)
    inputs = (ids, position, kv_len, slot_map)
    numbers = (state.tokens.stride(0), state.table.stride(1), rows, last)
    _begin_at[(rows,)](slots, shift, *columns, *inputs, dropped_of(state), *numbers, **constants)


@kernel("slots", "draft", "drawn", "out", "total", "rows")
def _commit(
    slots, draft, drawn, best, tokens, known, stopped, end, min_end, stop_ids, n_eos, out, total, tokens_stride, width,
    rows, MOST: tl.constexpr, TILES: tl.constexpr, P: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    head = tl.program_id(0)
    slot = tl.load(slots + head)
    first = tl.load(known + slot)
    ended = tl.load(stopped + slot) != 0
    begins = tl.load(draft + head) == 0
    on = begins  # whether the next row belongs to this sequence
    alive = ended == 0  # whether all drafts so far were drawn, and no token ended the sequence
    finished = ended & (ended == 0)
    got = first * 0
    ot, oi = tl.arange(0, P), tl.arange(0, IDS)
    for j in range(MOST):
        row = head + j
        on = on & (row < rows)
        on = on & (tl.load(draft + row, mask=on, other=-1) == j)
        position = first + j
        raw = tl.load(drawn + row, mask=on, other=0)
        token = tl.minimum(tl.maximum(raw, 0), width - 1)
        # clamped to the vocabulary, because later kernels use the id as an index
        tl.store(drawn + row, token, mask=on)
        tile = tl.load(best + row * TILES + ot, mask=(ot < TILES) & on, other=float("-inf"))
        peak = tl.max(tl.where(tile != tile, float("inf"), tile), 0)
        bad = (peak == float("inf")) | (peak == float("-inf"))
        hit = tl.load(stop_ids + slot * IDS + oi) == token.to(tl.int32)
        hit &= position >= tl.load(min_end + slot)
        eos = tl.max((hit & (oi < tl.load(n_eos + slot))).to(tl.int32), 0)
        stop = tl.max((hit & (oi >= tl.load(n_eos + slot))).to(tl.int32), 0)
        flags = eos * _EOS + stop * _STOP + (position + 1 >= tl.load(end + slot)).to(tl.int32) * _LENGTH
        flags = tl.where(raw != token, _FAILED, flags)
        flags = tl.where(bad, _NAN, flags)
        at = tokens + slot * tokens_stride + position
        # draft of the next row, loaded before the drawn token is stored in its place
        guess = tl.load(at, mask=on, other=-1)
        accept = on & alive & (bad == 0) & (raw == token)
        tl.store(at, token.to(tl.int32), mask=accept)
        tl.store(out + row, token.to(tl.int32), mask=on)
        tl.store(out + rows + row, accept.to(tl.int32), mask=on)
        shown = tl.where(ended, _OVERSHOOT, tl.where(alive, flags, 0))
        tl.store(out + 2 * rows + row, shown, mask=on)
        got += accept.to(tl.int64)
        finished = finished | (on & alive & (flags != 0))
        alive = alive & on & (flags == 0) & (guess == token.to(tl.int32))
    tl.store(known + slot, first + got, mask=got > 0)
    tl.store(stopped + slot, 1, mask=finished)
    tl.store(total + head, got.to(tl.int32))


def commit(
    slots: Tensor, draft: Tensor, drawn: Tensor, best: Tensor, state, out: Tensor, total: Tensor, width: int, most: int
) -> None:
    """Accept the drawn tokens of rows and their drafts in the columns, up to the first draft that was not drawn.

    Row r of ``slots``, ``draft`` (``StepPlan.draft``) and ``drawn``, each i64 [R], is followed by the rows of its
    drafts, at most ``most``.  The history of a slot holds its drafts behind the known tokens.  ``out`` i32 [3, R] gets
    tokens, counts and flags, and ``total`` i32 [R] the accepted tokens of each sequence at its first row, 0 at other
    rows.  A token outside of the ``width`` tokens of the vocabulary ends its row with FAILED, and is clamped in
    ``drawn``.  ``best`` f32 [R, tiles] are the largest logits of each row; a row whose largest logit is not finite
    ends with NAN.
    """
    best = best.float().contiguous()
    constants = draw_constants(best.shape[1], out)
    constants["MOST"] = 1 + most
    rows = len(slots)
    columns = (*history_of(state), *ends_of(state))
    stride = state.tokens.stride(0)
    _commit[(rows,)](slots, draft, drawn, best, *columns, out, total, stride, width, rows, **constants)


@kernel("slots", "drafts", "count", "given", "first", "width", "last")
def _put(
    slots, drafts, count, given, tokens, known, stopped, first, width, last, tokens_stride,
    K: tl.constexpr, P: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    o = tl.arange(0, P)
    on = o < K
    token = tl.load(drafts + row * K + o, mask=on, other=0)
    there = (token >= 0) & (token < width)
    at = tl.load(known + slot) + first + o
    live = tl.load(stopped + slot) == 0
    tl.store(tokens + slot * tokens_stride + at, tl.where(there, token, 0).to(tl.int32), mask=on & live & (at <= last))
    if COUNTS:
        usable = tl.min(tl.where(on & (there == 0), o, K), 0)
        n = tl.minimum(tl.load(count + row).to(tl.int32), usable)
        tl.store(given + row, tl.maximum(n, 0))


def put(
    slots: Tensor,
    drafts: Tensor,
    state,
    width: int,
    first: int = 0,
    count: Tensor | None = None,
    given: Tensor | None = None,
) -> None:
    """Write ``drafts`` [N, K] (i32 or i64) to the history, from position ``known + first`` of ``slots`` i64 [N] on.

    With ``count`` [N], ``given`` i32 [N] receives the number of usable drafts of each row.  It is at most ``count``,
    and ends before the first draft that is not one of the ``width`` tokens of the vocabulary.
    """
    k = drafts.shape[1]
    drafts = drafts.contiguous()
    counts = slots if count is None else count.contiguous()
    usable = slots if given is None else given
    constants = pdl(drafts)
    constants["K"] = k
    constants["P"] = power(k)
    constants["COUNTS"] = count is not None
    constants["num_warps"] = 1
    last = state.tokens.shape[1] - 1
    numbers = (first, width, last, state.tokens.stride(0))
    _put[(len(slots),)](slots, drafts, counts, usable, *history_of(state), *numbers, **constants)
