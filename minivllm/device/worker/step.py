"""The operations of a step on the device.  The tensors of a step are new ones, or the static ones of a CUDA graph.

    FORWARD   rows from the host ─ read_rows ────┐
              columns ──────── read_columns ─────┴► StepTensors ─ forward ──► hidden states of the rows that draw
    SAMPLE    hidden ─ head ─ guides ─ stop ids, processors, masks ─ draw ─ accept ─ log-probabilities

``runner`` calls these functions for each step that runs as separate launches.  ``graphs`` calls them while it captures
a CUDA graph, and ``own_model`` for the model of a drafter or processor.  Separate launches and captures differ only in
their ``StepCalls``: how plug-ins are called, and which function accepts the drawn tokens.
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
from minivllm.device.layers.attention import FACTORS

from . import sampling

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttentionBackend, GraphKey
    from minivllm.core.interfaces.model import Model
    from minivllm.core.interfaces.plan import StepPlan
    from minivllm.core.interfaces.states import StepStates

    from .state import DeviceState

# ---- FORWARD -------------------------------------------------------------------------------------


class HostLengths(NamedTuple):
    """The numbers of tokens of a step's rows, as far as the host has them.  In a capture they are upper bounds."""

    tokens: int  # number T of the tokens of all rows
    decode_rows: int  # number of rows with one token
    q_len: np.ndarray  # i32 [R] tokens of each row in this step
    kv_len: np.ndarray  # i32 [G, R] tokens in the KV cache after the step, in each group of layers


def host_lengths(plan: StepPlan, dropped: np.ndarray) -> HostLengths:
    """Return the exact lengths of the rows of a plan.  ``dropped`` is ``DeviceState.dropped_host``."""
    q_len = plan.q_len
    kv_len = plan.computed + q_len - dropped[:, plan.slots]
    tokens = int(q_len.sum())
    one_token = q_len == 1
    return HostLengths(tokens, int(one_token.sum()), q_len, kv_len)


def table_size(rows: int, tokens: int) -> int:
    """Return the length of a row table (see ``pack_rows``), in i64 numbers."""
    return 5 * rows + 1 + 2 * tokens


def pack_rows(plan: StepPlan, rows: int, tokens: int, spare: int) -> np.ndarray:
    """Return the row table of a step, an i64 array that the device splits into the tensors of the step.

    It holds slots R | cu_q R + 1 | q_len R | kv_len R | last token R | row T | position T.  ``rows`` R and ``tokens`` T
    may be larger than in the plan.  Rows of padding have the slot ``spare``; tokens from cu_q[R] on are padding."""
    out = np.zeros(table_size(rows, tokens), np.int64)
    r = len(plan.slots)
    ends = plan.q_len.cumsum()
    kv_len = plan.computed + plan.q_len
    t = int(ends[-1]) if r else 0
    out[:r] = plan.slots
    cu_q = rows + 1
    q_len = 2 * rows + 1
    out[cu_q : cu_q + r] = ends
    if r < rows:
        out[r:rows] = spare
        out[cu_q + r : q_len] = t
    begin = q_len
    for column in (plan.q_len, kv_len, ends - 1):
        out[begin : begin + r] = column
        begin += rows
    row_of = np.arange(r).repeat(plan.q_len)
    out[begin : begin + t] = row_of
    begin += tokens
    shift = kv_len - ends
    position = np.arange(t) + shift[row_of]
    out[begin : begin + t] = position
    return out


def read_rows(state: DeviceState, table: Tensor, host: HostLengths, padded: bool = False) -> tuple[StepTensors, Tensor]:
    """Return (the inputs of the model, the index of each row's last token i64 [R]) for a row table on the device.

    ``table`` is described at ``pack_rows``.  Token ids and places in the KV cache are read from the columns of the
    slots.  Two kinds of tokens write their keys and values to the null block, where they are never read: tokens of
    rows that ended on the device before this step, and with ``padded`` the tokens from cu_q[R] on."""
    r = len(host.q_len)
    t = host.tokens
    block = state.block
    sizes = [r, r + 1, r, r, r, t, t]
    slots, cu_q, q_len, kv_len, last, row, position = table.split(sizes)
    slot_of = slots[row]
    ids = state.tokens[slot_of, position].long()
    if state.dropped is None:
        blocks = state.table[:, slot_of, position // block]
        place = blocks.long() * block + position % block
        stored = kv_len.int().expand(len(state.table), r)
    else:
        at = state.stored(slot_of, position).clamp_min(0)
        groups = torch.arange(len(at), device=at.device)
        blocks = state.table[groups[:, None], slot_of, at // block]
        place = blocks.long() * block + at % block
        stored = state.stored(slots, kv_len).int()
    nobody = state.stopped[slot_of]
    rotary = state.rope_position(slot_of, position)
    if padded:
        index = torch.arange(t, device=table.device)
        padding = index >= cu_q[-1]
        nobody = nobody | padding
        if state.rope_first is not None:
            # padding counts as tokens of the first row, whose images may give a negative index of the rotary tables
            rotary = rotary.masked_fill(padding, 0)
    slot_map = place.masked_fill(nobody, 0)
    meta = AttnMeta(
        slots=slots,
        cu_q=cu_q.int(),
        q_len=q_len.int(),
        kv_len=stored,
        position=rotary,
        row=row,
        table=state.table,
        slot_map=slot_map,
        block=block,
        decode_rows=host.decode_rows,
        host_q_len=host.q_len,
        host_kv_len=host.kv_len,
    )
    states = states_of(state, meta, exact=not padded)
    return StepTensors(ids, position, meta, states=states), last


def states_of(
    state: DeviceState, meta: AttnMeta, drafts: Tensor | None = None, exact: bool = False
) -> StepStates | None:
    """Return the recurrent states of the rows of a step, as ``StateMemory.of_meta``; None for a model without such
    states.

    ``drafts`` bool [R] marks rows with drafts.  ``exact`` means that the lengths on the host are exact.
    """
    if state.recurrent is None:
        return None
    return state.recurrent.of_meta(meta, state.stopped, drafts, exact=exact)


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
    """Run the layers of a model; return the hidden states [N, H] of the tokens with the indices ``logits_indices`` i64
    [N].

    ``logits_indices`` None means all tokens.  With ``selects`` the model itself drops the other tokens after its last
    attention.  The result is written to ``out`` unless that is None.  ``run(seam, call, *args)`` calls the attention
    back end and the model; ``seam`` is "attention" or "model"."""
    # remove the factors of the last run: all runs of a capture share these tensors, and a back end need not clear
    # ``work``
    step.meta.work.pop(FACTORS, None)
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
    """Return the ``Rows`` that processors and the sampler get: slot, position, length of the prompt and seed of each
    row.

    ``slots`` i64 [N] are the slots, and ``position`` i64 [N] the index in the sequence of the token to draw.  No
    position is greater than ``longest``."""
    prompt = state.prompt[slots]
    seed = state.seed[slots]
    sample = state.sample[slots]
    return Rows(slots, position, prompt, seed, sample, 0, state.tokens, longest)


class DrawCalls(Protocol):
    """Calls of processors and the sampler for logits [N, V] with N rows and V tokens of the vocabulary.

    ``calls`` and ``captured`` implement them.
    """

    wants_min: bool  # whether at least one row has ``min_tokens``

    # calls the processors in order, which change ``logits`` in place
    def apply(self, logits: Tensor, rows: Rows) -> None: ...
    # call the sampler, and return its tokens
    def draw(self, logits: Tensor, rows: Rows) -> Draw: ...


class StepCalls(DrawCalls, Protocol):
    """Calls of the SAMPLE part of a step, which also accept the drawn tokens and compute log-probabilities."""

    float32: bool  # whether the logits are converted to float32 before the processors run
    changes: bool  # whether processors, masks or the sampler may overwrite the logits
    topk: int  # log-probabilities of the k likeliest tokens are returned; -1 means no log-probabilities
    processed: bool  # whether log-probabilities are those of the processed logits instead of the model's logits

    # combine the logits of each row that has a guide with the logits of its guide
    def guide(self, logits: Tensor) -> Tensor: ...
    # return the rows that draw; called after the output layer was enqueued
    def rows(self) -> Rows: ...
    # apply the token masks of rows in place, and start the copy of logits to the host
    def meet_host(self, logits: Tensor) -> None: ...
    # return the data from which ``accept`` finds rows whose largest logit is not finite
    def peaks(self, logits: Tensor) -> Any: ...
    # return the logits whose softmax is the distribution from which the sampler draws
    def drawn_from(self, logits: Tensor, rows: Rows) -> Tensor: ...
    # write the drawn tokens to the columns and the result, report them to the processors, and return them, i64 [N]
    # within the vocabulary
    def accept(self, logits: Tensor, rows: Rows, drawn: Draw, peaks: Any) -> Tensor: ...
    # return log-probabilities as ``sampling.logprobs_of`` does
    def score(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]: ...


def restrict(calls: DrawCalls, state: DeviceState, logits: Tensor, rows: Rows) -> None:
    """Set stop ids to -inf in rows below ``min_tokens``, then call processors.  ``logits`` [N, V] change in place."""
    if calls.wants_min:
        min_end = state.min_end[rows.slots]
        stop_ids = state.stop_ids[rows.slots]
        sampling.suppress_stops(logits, rows.position, min_end, stop_ids)
    calls.apply(logits, rows)


def sample(calls: StepCalls, state: DeviceState, model: Model, hidden: Tensor) -> tuple[Tensor, ...] | None:
    """Draw a token for each row of ``hidden`` [N, H], write the tokens to the columns and return log-probabilities.

    The log-probabilities are those of the model's logits, or of the processed logits with ``calls.processed`` (see
    ``sampling.logprobs_of``).  Return None if ``calls.topk`` is negative."""
    raw = calls.guide(model.logits(hidden))
    logits = raw.float() if calls.float32 else raw
    scores = calls.topk >= 0
    if scores and logits is raw and calls.changes and not calls.processed:
        logits = raw.clone()
    rows = calls.rows()
    restrict(calls, state, logits, rows)
    calls.meet_host(logits)
    peaks = calls.peaks(logits)
    scored = raw
    if scores and calls.processed:
        scored = calls.drawn_from(logits, rows)
    drawn = calls.draw(logits, rows)
    tokens = calls.accept(logits, rows, drawn, peaks)
    return calls.score(scored, tokens) if scores else None


# ---- accept drawn tokens -------------------------------------------------------------------------


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
    """Write the tokens ``drawn`` i64 [N] to the columns, and set the new lengths and ends of the sequences.

    Return (tokens i64 [N] within the vocabulary; count i32 [N], 1 for an accepted token, else 0; flags i32 [N] as in
    ``StepResult``).  Tokens are not accepted in rows that had ended before, that failed, or that wait for the host.
    A captured step has no such rows and uses the kernel ``commit`` instead.

    ``bad`` bool [N] marks rows whose logits allow no draw.  ``width`` is the size V of the vocabulary.  ``failed``
    bool [N] marks rows in which a plug-in raised.  ``waits`` i64 [n] are the rows that wait for a token of the host.
    ``draft`` [N] is ``StepPlan.draft`` of the rows: of the rows of a sequence, tokens are accepted up to the first
    draft that was not drawn.  None means none, for each of these three.
    """
    slots = rows.slots
    position = rows.position
    tokens = drawn.clamp(0, width - 1)
    flags = _stop_flags(state, rows, tokens, bad)
    outside = (tokens != drawn) & ~bad  # rows whose drawn id is not in the vocabulary
    flags = torch.where(outside, FAILED, flags.int())
    stopped = state.stopped[slots]
    taken = ~stopped
    if failed is not None:
        flags = flags.masked_fill(failed, FAILED)
    if waits is not None:  # a row whose token the host will choose ends only by a fault
        host = torch.zeros_like(stopped)
        host[waits] = True
        flags = torch.where(host, flags & (FAILED | NAN), flags)
        taken &= ~host
    if draft is not None:  # tokens after a rejected draft are not accepted, and their flags are ignored
        ends = (flags != 0) | stopped
        right = _holds(state, rows, draft, tokens, ends)
        taken = taken & right
        flags = torch.where(right, flags, 0)
    taken &= (flags & (FAILED | NAN)) == 0
    flags = torch.where(stopped, OVERSHOOT, flags)
    count = taken.int()
    old = state.tokens[slots, position]
    new = torch.where(taken, tokens.int(), old)
    state.tokens[slots, position] = new
    ended = stopped | (flags != 0)
    if draft is not None:  # a sequence with drafts has several rows with the same slot
        length = torch.where(taken, position + 1, 0)
        state.known.scatter_reduce_(0, slots, length, "amax")
        stops = state.stopped.view(torch.uint8)
        stops.scatter_reduce_(0, slots, ended.to(torch.uint8), "amax")
    else:
        known = state.known[slots]
        state.known[slots] = torch.where(taken, position + 1, known)
        state.stopped[slots] = ended
    return tokens, count, flags


def _stop_flags(state: DeviceState, rows: Rows, tokens: Tensor, bad: Tensor) -> Tensor:
    """Return the flags u8 [N] of ``tokens`` i64 [N] that were drawn for ``rows``, as ``sampling.stop_flags`` does."""
    slots = rows.slots
    stop_ids = state.stop_ids[slots]
    n_eos = state.n_eos[slots]
    min_end = state.min_end[slots]
    end = state.end[slots]
    return sampling.stop_flags(tokens, rows.position, stop_ids, n_eos, min_end, end, bad)


def _holds(state: DeviceState, rows: Rows, draft: np.ndarray, tokens: Tensor, ended: Tensor) -> Tensor:
    """Return bool [N], True for rows of sequences whose drafts up to this row were all drawn and did not end the
    sequence.

    ``tokens`` i64 [N] were drawn.  ``ended`` bool [N] marks rows whose token ends the sequence, and rows of sequences
    that had ended before."""
    row = np.arange(len(draft))
    is_draft = draft > 0
    before = state.to(row - is_draft)
    given = state.tokens[rows.slots, rows.position - 1]
    fits = (tokens[before] == given) & ~ended[before]
    wrong = ~fits & state.to(is_draft)
    breaks = wrong.int().cumsum(0)
    heads = state.to(row - draft)
    return breaks == breaks[heads]


def by_slot(state: DeviceState, draft: np.ndarray, tokens: Tensor, count: Tensor) -> tuple[np.ndarray, Tensor, Tensor]:
    """Group the rows of a step with drafts by slot.

    Return (index [n] of the first row of each slot; its tokens i64 [n, W], padded by repeating the last; the sum of
    ``count`` over its rows, i32 [n], which is its number of accepted tokens).  W is the largest number of rows of a
    slot."""
    heads = np.flatnonzero(draft == 0)
    ends = np.append(heads, len(draft))
    size = np.diff(ends)
    column = np.arange(size.max())
    inside = np.minimum(column, size[:, None] - 1)
    at = state.to(heads[:, None] + inside)
    slot_of = np.repeat(np.arange(len(heads)), size)
    group = state.to(slot_of)
    total = torch.zeros(len(heads), dtype=count.dtype, device=count.device)
    total.index_add_(0, group, count)
    return heads, tokens[at], total
