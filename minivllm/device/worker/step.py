"""What a step does on the device, once: functions over tensors that are a step's own, or the static ones of a capture.

    FORWARD   rows from the host ─ read_rows ────┐
              columns ──────── read_columns ─────┴► StepTensors ─ forward ──► hidden states of the rows that draw
    SAMPLE    hidden ─ head ─ guides ─ stop ids, processors, masks ─ draw ─ accept ─ log-probabilities

``runner`` calls them step by step, ``graphs`` while it captures, ``own_model`` for a drafter's model.  Where separate
launches and a capture differ on purpose is ``StepCalls``: how plug-ins are called, and by what tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnMeta
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.plan import FAILED, NAN, OVERSHOOT
from minivllm.core.interfaces.sampling import Draw, Rows

from . import sampling

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttentionBackend, GraphKey
    from minivllm.core.interfaces.model import Model
    from minivllm.core.interfaces.plan import StepPlan
    from minivllm.core.interfaces.states import StepStates

    from .state import DeviceState

# ---- FORWARD -------------------------------------------------------------------------------------


class HostLengths(NamedTuple):
    """What the host knows of the rows of a step: bounds where they are padded, or ahead of it."""

    tokens: int  # T
    decode_rows: int
    q_len: np.ndarray  # i32 [R]
    kv_len: np.ndarray  # i32 [G, R]


def host_lengths(plan: StepPlan, groups: int) -> HostLengths:
    """Those of a plan, as they are."""
    q_len, shape = plan.q_len, (groups, len(plan.slots))
    kv_len = np.broadcast_to(plan.computed + q_len, shape)
    return HostLengths(int(q_len.sum()), int((q_len == 1).sum()), q_len, kv_len)


def table_size(rows: int, tokens: int) -> int:
    """Numbers in a row table (``pack_rows``)."""
    return 5 * rows + 1 + 2 * tokens


def pack_rows(plan: StepPlan, rows: int, tokens: int, spare: int) -> np.ndarray:
    """The row table of a step, i64: slots R | cu_q R + 1 | q_len R | kv_len R | last token R | row T | position T.

    ``rows`` R and ``tokens`` T may be more than the plan's: what pads the rows is the slot ``spare``, and tokens from
    cu_q[R] on are nobody's."""
    out = np.zeros(table_size(rows, tokens), np.int64)
    r, ends, kv_len = len(plan.slots), plan.q_len.cumsum(), plan.computed + plan.q_len
    t = int(ends[-1]) if r else 0
    out[:r] = plan.slots
    cu_q, q_len = rows + 1, 2 * rows + 1
    out[cu_q : cu_q + r] = ends
    if r < rows:
        out[r:rows] = spare
        out[cu_q + r : q_len] = t
    for i, column in enumerate((plan.q_len, kv_len, ends - 1)):
        out[q_len + i * rows : q_len + i * rows + r] = column
    row, position = 5 * rows + 1, 5 * rows + 1 + tokens
    out[row : row + t] = at = np.arange(r).repeat(plan.q_len)
    out[position : position + t] = np.arange(t) + (kv_len - ends)[at]
    return out


def read_rows(state: DeviceState, table: Tensor, host: HostLengths, padded: bool = False) -> tuple[StepTensors, Tensor]:
    """(what a model is called with, the last token of each row i64 [R]) of a row table on the device (``pack_rows``).

    Token ids and places come from the columns.  Nobody's tokens go to the null block: those of rows that met their end
    on the device while the step was on its way, and, where the table is ``padded``, those from cu_q[R] on."""
    r, t, block = len(host.q_len), host.tokens, state.block
    slots, cu_q, q_len, kv_len, last, row, position = table.split([r, r + 1, r, r, r, t, t])
    slot_of = slots[row]
    ids = state.tokens[slot_of, position].long()
    place = state.table[:, slot_of, position // block].long() * block + position % block
    nobody = state.stopped[slot_of]
    if padded:
        nobody = nobody | (torch.arange(t, device=table.device) >= cu_q[-1])
    meta = AttnMeta(
        slots=slots,
        cu_q=cu_q.int(),
        q_len=q_len.int(),
        kv_len=kv_len.int().expand(len(state.table), r),
        position=state.rope_position(slot_of, position),
        row=row,
        table=state.table,
        slot_map=place.masked_fill(nobody, 0),
        block=block,
        decode_rows=host.decode_rows,
        host_q_len=host.q_len,
        host_kv_len=host.kv_len,
    )
    return StepTensors(ids, position, meta, states=states_of(state, meta)), last


def states_of(state: DeviceState, meta: AttnMeta, drafts: Tensor | None = None) -> StepStates | None:
    """Return the recurrent states of the rows of a step, None for a model without any; ``drafts`` as in ``of_step``."""
    if state.recurrent is None:
        return None
    return state.recurrent.of_step(meta, state.stopped, drafts)


def forward(
    model: Model,
    backend: AttentionBackend,
    step: StepTensors,
    key: GraphKey,
    logits_indices: Tensor | None = None,
    selects: bool = False,
    out: Tensor | None = None,
    run: Callable[..., Any] = lambda seam, call, *args: call(*args),
) -> Tensor:
    """Hidden states [N, H] of the tokens ``logits_indices`` i64 [N], or of all; written to ``out`` if there is one.

    ``selects``: the model computes no others after its last attention.  ``run(seam, call, *args)`` makes the calls."""
    run("attention", backend.plan, step.meta, key)
    if selects:
        step.logits_indices = logits_indices
    hidden = run("model", model, step)
    if step.states is not None:
        step.states.advance()
    if logits_indices is not None and not selects:
        return torch.index_select(hidden, 0, logits_indices, out=out)
    return hidden if out is None else out.copy_(hidden)


# ---- SAMPLE --------------------------------------------------------------------------------------


def rows_of(state: DeviceState, slots: Tensor, position: Tensor, longest: int) -> Rows:
    """The rows of ``slots`` i64 [N] that draw for ``position`` i64 [N], none of them behind ``longest``."""
    at = state.prompt[slots], state.seed[slots], state.sample[slots]
    return Rows(slots, position, *at, 0, state.tokens, longest)


class DrawCalls(Protocol):
    """How a step calls its plug-ins (``calls``, ``captured``); N rows, V tokens of the vocabulary."""

    wants_min: bool  # stop ids are forbidden to some row, for now

    # the processors, in order and in place
    def apply(self, logits: Tensor, rows: Rows) -> None: ...
    def draw(self, logits: Tensor, rows: Rows) -> Draw: ...


class StepCalls(DrawCalls, Protocol):
    """Of a step whose tokens are kept: also what is accepted, and its log-probabilities."""

    float32: bool  # of the logits, whatever the dtype of the model
    changes: bool  # the logits may be written to
    topk: int  # log-probabilities that are asked for, as in ``StepPlan``
    processed: bool  # and they are those of what the sampler draws from

    # those of rows that have a guide, and no others, become what these are drawn from
    def guide(self, logits: Tensor) -> Tensor: ...
    def rows(self) -> Rows: ...  # those that draw, once the head has been enqueued
    # masks of late rows, in place; logits that the host wants
    def meet_host(self, logits: Tensor) -> None: ...
    # what shows ``accept`` rows without a finite largest logit
    def peaks(self, logits: Tensor) -> Any: ...
    def drawn_from(self, logits: Tensor, rows: Rows) -> Tensor: ...
    # columns, processors and result get the tokens, which come back i64 [N], each within the vocabulary
    def accept(self, logits: Tensor, rows: Rows, drawn: Draw, peaks: Any) -> Tensor: ...
    # as ``sampling.logprobs_of``
    def score(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]: ...


def restrict(calls: DrawCalls, state: DeviceState, logits: Tensor, rows: Rows) -> None:
    """What the rows' own settings make of ``logits`` [N, V], in place: no stop id before ``min_tokens``, processors."""
    if calls.wants_min:
        at = state.min_end[rows.slots], state.stop_ids[rows.slots]
        sampling.suppress_stops(logits, rows.position, *at)
    calls.apply(logits, rows)


def sample(calls: StepCalls, state: DeviceState, model: Model, hidden: Tensor) -> tuple[Tensor, ...] | None:
    """SAMPLE: tokens from ``hidden`` [N, H] into the columns; their log-probabilities if ``topk`` >= 0, which are those
    of the model's own logits unless ``processed``."""
    raw = calls.guide(model.logits(hidden))
    logits = raw.float() if calls.float32 else raw
    if calls.topk >= 0 and logits is raw and calls.changes and not calls.processed:
        logits = raw.clone()
    rows = calls.rows()
    restrict(calls, state, logits, rows)
    calls.meet_host(logits)
    peaks = calls.peaks(logits)
    scored = calls.drawn_from(logits, rows) if calls.topk >= 0 and calls.processed else raw
    drawn = calls.draw(logits, rows)
    tokens = calls.accept(logits, rows, drawn, peaks)
    return calls.score(scored, tokens) if calls.topk >= 0 else None


# ---- what is accepted ----------------------------------------------------------------------------


def accept(
    state: DeviceState,
    rows: Rows,
    drawn: Tensor,
    bad: Tensor,
    width: int,
    failed: Tensor | None = None,
    waits: Tensor | None = None,
    draft: np.ndarray | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens i64 [N] within the vocabulary; count i32 [N], 1 where they were accepted; flags i32 [N]).

    Write what was ``drawn`` i64 [N] to the columns: not of rows that had ended, that failed, or that wait for the
    host.  The captured form, for rows without these exceptions, is the kernel ``commit``.

    ``bad`` bool [N]: nothing can be drawn from the row; ``width`` is V; ``failed`` bool [N] rows that a plug-in failed;
    ``waits`` i64 [n] rows that wait; ``draft`` [N] as in ``StepPlan``: rows of a slot hold as far as drafts were right.
    """
    slots, position = rows.slots, rows.position
    tokens = drawn.clamp(0, width - 1)
    ends = state.stop_ids[slots], state.n_eos[slots], state.min_end[slots], state.end[slots]
    flags = sampling.stop_flags(tokens, position, *ends, bad)
    flags = torch.where((tokens != drawn) & ~bad, FAILED, flags.int())  # no token of the vocabulary
    stopped = state.stopped[slots]
    taken = ~stopped
    if failed is not None:
        flags = flags.masked_fill(failed, FAILED)
    if waits is not None:  # only a fault ends a row that waits for the host
        host = torch.zeros_like(stopped)
        host[waits] = True
        flags = torch.where(host, flags & (FAILED | NAN), flags)
        taken &= ~host
    if draft is not None:  # what stands behind a draft that was rejected has no say
        right = _holds(state, rows, draft, tokens, (flags != 0) | stopped)
        taken, flags = taken & right, torch.where(right, flags, 0)
    taken &= (flags & (FAILED | NAN)) == 0
    flags = torch.where(stopped, OVERSHOOT, flags)
    count = taken.int()
    old = state.tokens[slots, position]
    state.tokens[slots, position] = torch.where(taken, tokens.int(), old)
    ended = stopped | (flags != 0)
    if draft is not None:  # lengths and ends of slots that stand in several rows
        length = torch.where(taken, position + 1, 0)
        state.known.scatter_reduce_(0, slots, length, "amax")
        state.stopped.view(torch.uint8).scatter_reduce_(0, slots, ended.to(torch.uint8), "amax")
    else:
        state.known[slots] = torch.where(taken, position + 1, state.known[slots])
        state.stopped[slots] = ended
    return tokens, count, flags


def _holds(state: DeviceState, rows: Rows, draft: np.ndarray, tokens: Tensor, ended: Tensor) -> Tensor:
    """bool [N]: all drafts up to this row's token are what was drawn, and nothing before it has ended its row.

    ``tokens`` i64 [N] were drawn; ``ended`` bool [N]: they end their row, or are none."""
    back = state.to(np.arange(len(draft)) - (draft > 0))
    fits = (tokens[back] == state.tokens[rows.slots, rows.position - 1]) & ~ended[back]
    breaks = (~fits & state.to(draft > 0)).int().cumsum(0)
    return breaks == breaks[state.to(np.arange(len(draft)) - draft)]


def by_slot(state: DeviceState, draft: np.ndarray, tokens: Tensor, count: Tensor) -> tuple[np.ndarray, Tensor, Tensor]:
    """(which rows of N are the first of their slot; tokens i64 [n, W] and count i32 [n] of each)."""
    heads = np.flatnonzero(draft == 0)
    size = np.diff(np.append(heads, len(draft)))
    at = state.to(heads[:, None] + np.minimum(np.arange(size.max()), size[:, None] - 1))
    group = state.to(np.repeat(np.arange(len(heads)), size))
    total = torch.zeros(len(heads), dtype=count.dtype, device=count.device)
    return heads, tokens[at], total.index_add_(0, group, count)
