"""The first and the last part of a captured decode step, one kernel each, which need nothing from the host.

    begin:  slot ──► token id, position, KV length, cache slot of each row       grid (rows,)
    commit: token ──► history, length, stop flags, result of each row            grid (rows,)

The references are ``read_rows`` and ``accept`` of ``device.worker.step``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.plan import EOS, FAILED, LENGTH, NAN, OVERSHOOT, STOP_ID, STOP_IDS

from .launch import kernel, pdl, power, wait

_EOS, _STOP, _LENGTH, _NAN = (tl.constexpr(x) for x in (EOS, STOP_ID, LENGTH, NAN))
_OVERSHOOT, _FAILED = tl.constexpr(OVERSHOOT), tl.constexpr(FAILED)


def history_of(state) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens i32 of each slot, the number of known tokens, and u8 1 for slots that have ended."""
    stopped = state.stopped.view(torch.uint8)
    return state.tokens, state.known, stopped


def ends_of(state) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the columns of ``state`` by which a token ends its sequence."""
    return state.end, state.min_end, state.stop_ids, state.n_eos


def dropped_of(state) -> Tensor:
    """Return the numbers of tokens that compression removed, or a tensor that the kernels do not read."""
    return state.known if state.dropped is None else state.dropped


def place_constants(state, like: Tensor) -> dict[str, Any]:
    """Return the constants of kernels that compute the cache slots of rows, and their launch options."""
    constants = pdl(like)
    constants["BLOCK"] = state.block
    constants["GROUPS"] = state.table.shape[0]
    constants["SLOTS"] = state.table.shape[1]
    constants["DROPS"] = state.dropped is not None
    constants["num_warps"] = 1
    return constants


def draw_constants(tiles: int, like: Tensor) -> dict[str, Any]:
    """Return the constants of kernels that accept drawn tokens, and their launch options.

    ``tiles`` is the number of tiles of the vocabulary with a largest logit each.
    """
    constants = pdl(like)
    constants["TILES"] = tiles
    constants["P"] = power(tiles)
    constants["IDS"] = STOP_IDS
    constants["num_warps"] = 1
    return constants


@kernel("slots", "ids", "position", "kv_len", "slot_map", "rows")
def _begin(
    slots, tokens, known, stopped, table, ids, position, kv_len, slot_map, dropped, tokens_stride, table_stride, rows,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, DROPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    length = tl.load(known + slot)
    at = tl.maximum(length - 1, 0)
    tl.store(ids + row, tl.load(tokens + slot * tokens_stride + at).to(tl.int64))
    tl.store(position + row, at)
    ended = tl.load(stopped + slot) != 0
    for g in tl.static_range(GROUPS):
        # number of tokens that compression removed
        gone = tl.load(dropped + g * SLOTS + slot) if DROPS else 0
        place = at - gone
        block = tl.load(table + (g * SLOTS + slot) * table_stride + place // BLOCK).to(tl.int64)
        tl.store(kv_len + g * rows + row, (length - gone).to(tl.int32))
        tl.store(slot_map + g * rows + row, tl.where(ended, 0, block * BLOCK + place % BLOCK))


def begin(slots: Tensor, state, ids: Tensor, position: Tensor, kv_len: Tensor, slot_map: Tensor) -> None:
    """Read the columns of ``slots`` i64 [R] from ``state``, and write the inputs of the step.

    The inputs are ids and position i64 [R], kv_len i32 [G, R] and slot_map i64 [G, R].  Ended rows write to the null
    block.
    """
    rows = len(slots)
    constants = place_constants(state, ids)
    inputs = (ids, position, kv_len, slot_map)
    strides = (state.tokens.stride(0), state.table.stride(1))
    _begin[(rows,)](slots, *history_of(state), state.table, *inputs, dropped_of(state), *strides, rows, **constants)


@kernel("slots", "out", "rows")
def _gather(slots, a, b, c, d, out, rows, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    tl.store(out + row, tl.load(a + slot))
    tl.store(out + rows + row, tl.load(b + slot))
    tl.store(out + 2 * rows + row, tl.load(c + slot))
    tl.store(out + 3 * rows + row, tl.load(d + slot))


def gather(slots: Tensor, columns: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four columns i64 [S] at ``slots`` i64 [R], each i64 [R]."""
    rows = len(slots)
    out = torch.empty(4, rows, dtype=torch.int64, device=slots.device)
    _gather[(rows,)](slots, *columns, out, rows, num_warps=1, **pdl(out))
    return tuple(out)


@kernel("slots", "drawn", "out", "rows")
def _commit(
    slots, drawn, best, tokens, known, stopped, end, min_end, stop_ids, n_eos, out, tokens_stride, width, rows,
    TILES: tl.constexpr, P: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(known + slot)
    raw = tl.load(drawn + row)
    token = tl.minimum(tl.maximum(raw, 0), width - 1)
    tl.store(drawn + row, token)  # clamped to the vocabulary, because later kernels use the id as an index
    ot = tl.arange(0, P)
    tile = tl.load(best + row * TILES + ot, mask=ot < TILES, other=float("-inf"))
    peak = tl.max(tl.where(tile != tile, float("inf"), tile), 0)
    bad = (peak == float("inf")) | (peak == float("-inf"))
    oi = tl.arange(0, IDS)
    hit = tl.load(stop_ids + slot * IDS + oi) == token.to(tl.int32)
    hit &= position >= tl.load(min_end + slot)
    eos = tl.max((hit & (oi < tl.load(n_eos + slot))).to(tl.int32), 0)
    stop = tl.max((hit & (oi >= tl.load(n_eos + slot))).to(tl.int32), 0)
    flags = eos * _EOS + stop * _STOP + (position + 1 >= tl.load(end + slot)).to(tl.int32) * _LENGTH
    flags = tl.where(raw != token, _FAILED, flags)
    flags = tl.where(bad, _NAN, flags)
    ended = tl.load(stopped + slot) != 0
    accept = (ended == 0) & (bad == 0) & (raw == token)
    tl.store(tokens + slot * tokens_stride + position, token.to(tl.int32), mask=accept)
    tl.store(known + slot, position + 1, mask=accept)
    tl.store(stopped + slot, 1, mask=flags != 0)
    tl.store(out + row, token.to(tl.int32))
    tl.store(out + rows + row, accept.to(tl.int32))
    tl.store(out + 2 * rows + row, tl.where(ended, _OVERSHOOT, flags))


def commit(slots: Tensor, drawn: Tensor, best: Tensor, state, out: Tensor, width: int) -> None:
    """Accept ``drawn`` i64 [R] in the columns, and write tokens, counts and flags to ``out`` i32 [3, R].

    A token outside of the ``width`` tokens of the vocabulary ends its row with FAILED, and is clamped in ``drawn`` for
    later readers.  ``best`` is the result of ``best_of_tiles`` or of a sampler.  Rows whose largest logit is not finite
    end with NAN.
    """
    best = best.float().contiguous()
    constants = draw_constants(best.shape[1], out)
    rows = len(slots)
    columns = (*history_of(state), *ends_of(state))
    stride = state.tokens.stride(0)
    _commit[(rows,)](slots, drawn, best, *columns, out, stride, width, rows, **constants)
