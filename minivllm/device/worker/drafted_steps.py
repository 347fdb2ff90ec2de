"""Captured steps of rows with drafts, whose FORWARD and SAMPLE are replays of two CUDA graphs, as in ``graphs``.

    row of a slot     newest     draft 1    draft 2      rows of one token; padding rows have the spare slot
    draft             0          1          2
    position          known - 1  known      known + 1    of the input token; ``known`` is read on the device

A recurrent layer reads a row and its drafts as one row of several tokens.  The host copies slots and numbers of drafts
only if they differ from the preceding step.  Steps are not captured here if they also compute prompts, read or change
hidden states, use adapters, or have masks from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.sampling import Draw, Rows
from minivllm.device.kernels import drafts
from minivllm.device.kernels.peaks import best_of_tiles
from minivllm.device.layers.captured_sizes import row_sizes
from minivllm.errors import describe_error

from . import step
from .captured import Buffers, Captured, CapturedCalls, SampleOperations, bounds, column_tensors
from .first_captures import SHORT
from .graphs import CAPTURES
from .state import staged

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import LateInputs, StepPlan
    from minivllm.core.interfaces.states import StepStates

    from .runner import Runner

log = logging.getLogger(__name__)
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DraftedKey(GraphKey):
    """The shape of a captured step with drafts.  Attention back ends treat it as a decode step."""


@dataclass
class DraftBuffers(Buffers):
    """The fixed tensors that all captures of B rows with drafts use.

    ``table`` i64 [6 B + 1] on the device holds: slot of each row | index of its draft, 0 for the newest token | slot of
    each sequence | 1 for sequences with drafts | index of each row's sequence | first row of each sequence, and B.  A
    step has at most B sequences; entries behind them have the spare slot and no rows."""

    table: Tensor
    draft: Tensor
    heads: Tensor
    many: Tensor
    row: Tensor
    cu_q: Tensor
    total: Tensor  # i32 [B] number of accepted tokens of each sequence, at the index of its first row
    host: np.ndarray  # copy of ``table`` on the host


# fields of ``StepPlan`` that must be empty in captured steps with drafts
APART = (
    "host", "held", "late", "guided", "prompt", "pooled", "observe", "sums", "taps", "steered", "given",
)  # fmt: skip


def draft_table(slots: np.ndarray, draft: np.ndarray, size: int, spare: int) -> np.ndarray:
    """Return ``DraftBuffers.table`` for rows in ``slots`` [R] with ``StepPlan.draft`` [R], padded to ``size`` rows."""
    n = len(slots)
    slot_of = np.full(size, spare)
    slot_of[:n] = slots
    number = np.zeros(size, np.int64)
    number[:n] = draft
    is_head = number == 0
    first = np.flatnonzero(is_head)
    sequences = len(first)
    heads = np.full(size, spare)
    heads[:sequences] = slot_of[first]
    begins = np.full(size + 1, size)
    begins[:sequences] = first
    many = np.zeros(size, np.int64)
    many[:sequences] = np.diff(np.append(first, size)) > 1
    row = np.cumsum(is_head) - 1
    return np.concatenate([slot_of, number, heads, many, row, begins])


class DraftedCalls(CapturedCalls):
    """The calls of processors and the sampler while the draw of a step with drafts is captured."""

    b: DraftBuffers

    def rows(self) -> Rows:
        """Return the rows of the draw.  Each row draws the token behind its input token (the newest token, or a
        draft)."""
        rows = super().rows()
        return replace(rows, position=rows.position + self.b.draft)

    def accept(self, logits: Tensor, rows: Rows, drawn: Draw, peaks: Tensor | None) -> Tensor:
        state = self.state
        b = self.b
        if peaks is None:
            peaks = drawn.peaks
        if peaks is None:
            peaks = best_of_tiles(logits)
        most = self.runner.wiring.speculation.num_speculative_tokens
        drafts.commit(b.slots, b.draft, drawn.tokens, peaks, state, b.out, b.total, logits.shape[1], most)
        if any(self.chain.commits):
            self._commit_sequences(drawn.tokens, rows, most)
        return drawn.tokens

    def _commit_sequences(self, tokens: Tensor, rows: Rows, most: int) -> None:
        """Report the accepted tokens to the processors, with all tokens of a sequence in its first row.

        Rows of drafts get the spare slot and no tokens."""
        b = self.b
        size = len(tokens)
        first = torch.arange(size, device=tokens.device)
        at = first[:, None] + torch.arange(1 + most, device=tokens.device)
        spare = self.runner.wiring.max_num_seqs
        its = replace(rows, slots=rows.slots.masked_fill(b.draft > 0, spare))
        self.commit(tokens[at.clamp_(max=size - 1)], b.total, its)


@dataclass
class DraftedSteps:
    """The CUDA graphs of one runner's steps with drafts.  They share the memory pool of its other captures."""

    runner: Runner
    buffers: dict[int, DraftBuffers] = field(default_factory=dict)
    forwards: dict[GraphKey, Captured] = field(default_factory=dict)
    samples: dict[tuple[int, SampleOperations], Captured | None] = field(default_factory=dict)
    refused: set[GraphKey] = field(default_factory=set)  # shapes whose capture failed; their steps are not captured

    def __post_init__(self) -> None:
        wiring = self.runner.wiring
        self.spare = wiring.max_num_seqs
        self.most = wiring.speculation.num_speculative_tokens
        self.sizes = row_sizes(self.spare * (1 + self.most))

    def key(self, plan: StepPlan) -> DraftedKey | None:
        """Return the shape of the capture in which a step with drafts runs; None if the step cannot be captured
        here."""
        rows = len(plan.slots)
        if not len(plan.draft) or rows > self.sizes[-1] or len(plan.samples) < rows:
            return None
        if any(len(getattr(plan, name)) for name in APART):
            return None
        if (plan.q_len != 1).any() or self.runner.adapts(plan)[0]:
            return None
        if self.runner.images is not None and self.runner.images.reached(plan):
            return None  # the last token of a prompt may be one of an image
        size = self.sizes[int(np.searchsorted(self.sizes, rows))]
        span = SHORT if int(plan.computed.max()) < SHORT else self.runner.wiring.max_model_len
        key = DraftedKey("decode", size, size, span)
        known = key in self.forwards or len(self.forwards) < CAPTURES
        return key if known and key not in self.refused else None

    def forward(self, key: GraphKey, plan: StepPlan) -> Tensor | None:
        """Replay the layers of a step, and return the hidden states [R, H] of its rows.

        A missing capture of shape ``key`` is made first.  Return None if it cannot be made.
        """
        b = self._buffers(key.rows)
        if key not in self.forwards:
            self._fill(b, NONE, NONE)
            try:
                self.forwards[key] = self._capture_forward(key, b)
            except BaseException as e:  # the model or back end cannot be captured, or memory is exhausted
                self.refused.add(key)
                self.note("a step with drafts", as_exception(e))
                return None
        self._fill(b, plan.slots, plan.draft)
        self.forwards[key].graph.replay()
        return b.hidden[: len(plan.slots)]

    def sample_operations(self, plan: StepPlan) -> SampleOperations | None:
        """Return the operations that the SAMPLE part of a step needs, or None if they cannot be captured."""
        return self.runner.graphs.slot_operations(plan.slots, plan.topk, False)

    def sample(
        self, key: GraphKey, operations: SampleOperations, plan: StepPlan, late: LateInputs | None
    ) -> tuple[Tensor, Any] | None:
        """Replay the draw of a step with drafts, and return the same as ``Graphs.sample``.

        ``late`` is None, because no row of such a step has a token mask."""
        at = key.rows, operations
        if at not in self.samples:
            if len(self.samples) >= CAPTURES:
                return None
            self.samples[at] = self._capture_sample(self._buffers(key.rows), operations)
        captured = self.samples[at]
        if captured is None:
            return None
        captured.graph.replay()
        return self.buffers[key.rows].out, captured.result

    def note(self, what: str, e: Exception) -> None:
        """Add a note that the capture of ``what`` failed to the notes of the runner's captures, and log it once."""
        text = f"{what} is not captured, it runs as separate launches: {describe_error(e)}"
        if text not in self.runner.graphs.notes:
            self.runner.graphs.notes.append(text)
            log.warning(text)

    # ---- capture -------------------------------------------------------------------------------------------------

    def _buffers(self, size: int) -> DraftBuffers:
        if size not in self.buffers:
            r = self.runner
            host = draft_table(NONE, NONE, size, self.spare)
            table = torch.from_numpy(host).to(r.device)
            slots, draft, heads, many, row, cu_q = table.split([size] * 5 + [size + 1])
            dtype = getattr(torch, r.wiring.dtype)
            hidden = torch.zeros(size, r.worker.hidden_size, dtype=dtype, device=r.device)
            out = torch.zeros(3, size, dtype=torch.int32, device=r.device)
            total = torch.zeros_like(out[0])
            views = (table, draft, heads, many, row, cu_q, total)
            self.buffers[size] = DraftBuffers(slots, hidden, out, host[:size], *views, host)
        return self.buffers[size]

    def _fill(self, b: DraftBuffers, slots: np.ndarray, draft: np.ndarray) -> None:
        """Copy the rows of a step to the device unless they equal the rows of the previous step."""
        n = len(slots)
        size = len(b.slots)
        numbers = b.host[size : size + n]
        same = (b.host[:n] == slots).all() and (numbers == draft).all()
        padding = b.host[n:size]
        if not same or (padding != self.spare).any():
            b.host = draft_table(slots, draft, size, self.spare)
            b.table.copy_(staged(b.host, self.runner.device), non_blocking=True)

    def _capture_forward(self, key: GraphKey, b: DraftBuffers) -> Captured:
        r = self.runner
        static = column_tensors(r.state, b.slots, bounds(key, len(r.worker.groups)))
        meta = static.meta

        def run() -> None:
            drafts.begin_at(b.slots, b.draft, r.state, static.ids, static.position, meta.kv_len, meta.slot_map)
            if r.state.rope_first is not None:
                torch.add(static.position, r.state.rope_first[b.slots], out=meta.position)
            states = self._states(b)
            read = StepTensors(static.ids, static.position, meta, states=states)
            read.watch = r.watch(read)
            step.forward(r.model, r.backend, read, key, out=b.hidden)

        return self._capture(run, static)

    def _states(self, b: DraftBuffers) -> StepStates | None:
        """Return the recurrent states of a step's sequences; None for a model without recurrent layers."""
        state = self.runner.state
        if state.recurrent is None:
            return None
        start = (state.known[b.heads] - 1).int()
        cu_q = b.cu_q.int()
        found = state.recurrent.of_step(b.heads, start, cu_q, state.stopped, b.many.bool())
        found.row = b.row
        found.longest = 1 + self.most
        return found

    def _capture_sample(self, b: DraftBuffers, operations: SampleOperations) -> Captured | None:
        r = self.runner
        before = b.table.clone()
        spare_rows = draft_table(NONE, NONE, len(b.slots), self.spare)
        b.table.copy_(torch.from_numpy(spare_rows))

        def run() -> Any:
            calls = DraftedCalls(r, b, operations, None)
            return step.sample(calls, r.state, r.model, b.hidden)

        try:
            return self._capture(run, None)
        except BaseException as e:  # a plug-in that cannot be captured runs as separate launches
            self.note("sampling of steps with drafts", as_exception(e))
            return None
        finally:
            b.table.copy_(before)

    def _capture(self, run: Callable[[], Any], keep: Any) -> Captured:
        """Capture the operations of ``run``.  All rows must have the spare slot, because ``run`` is executed."""
        graph, result = self.runner.graphs.recorder.capture(run)
        return Captured(graph, result, keep=keep)
