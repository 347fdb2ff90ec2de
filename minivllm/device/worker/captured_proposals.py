"""Captured calls of ``Drafter.propose``: all passes of a drafter's model, and the draws of its drafts, are one replay.

    known tokens     t0 ... t5 t6 t7          the last W tokens (or pairs of a head) of each row are computed in the
    first pass             t5 t6 t7 ─► d0     first pass, because a step accepts at most W tokens; tokens that the
    later passes                 d0 ─► d1     model has computed before get the same keys and values again

Lengths are read on the device, so nothing depends on the number of tokens that the last step accepted.  Rows whose
drafter's model lacks more than W tokens are computed first, as separate launches (``OwnModel.catch_up``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.drafter import Ask
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.plan import no_rows
from minivllm.core.interfaces.sampling import Rows
from minivllm.device.kernels import drafts

from . import step
from .captured import Buffers, CapturedCalls, SampleOperations, bounds, column_tensors
from .drafting import check_drafts
from .first_captures import SHORT
from .graphs import CAPTURES, Captured
from .state import staged

if TYPE_CHECKING:
    from .drafted_steps import DraftedSteps
    from .drafting import Drafting
    from .own_model import OwnModel
    from .runner import Runner


class ProposalKey(NamedTuple):
    """The shape of a captured call of the drafter: B rows, k drafts, contexts below ``span`` tokens, and options of the
    draw."""

    rows: int
    k: int
    span: int
    operations: SampleOperations


class CapturedPasses:
    """Run the drafter's model over B rows, once for each draft, while a call is captured.

    ``slots`` i64 [B] are the slots of the rows, and ``key`` is the shape of the call."""

    def __init__(self, runner: Runner, own: OwnModel, slots: Tensor, key: ProposalKey) -> None:
        self.runner = runner
        self.own = own
        self.slots = slots
        self.state = runner.state
        size = len(slots)
        self.width = own.most_pending(key.k)
        self.first = self._static(size * self.width, key.span)
        self.later = self._static(size, key.span)
        device = slots.device
        back = torch.arange(1 - self.width, 1, device=device) - own.ahead
        self.first_shift = back.expand(size, self.width).reshape(-1).contiguous()
        self.shifts = [torch.full((size,), j - own.ahead, device=device) for j in range(key.k)]
        none = torch.empty(0, device=device)
        buffers = Buffers(slots, none, none, no_rows())
        self.calls = CapturedCalls(runner, buffers, key.operations, None)
        self.last: Tensor | None = None  # [B, W] hidden states of the newest pass

    def _static(self, size: int, span: int) -> tuple[StepTensors, GraphKey]:
        key = GraphKey("decode", size, size, span)
        slots = torch.zeros(size, dtype=torch.int64, device=self.slots.device)
        lengths = bounds(key, len(self.state.table))
        return column_tensors(self.state, slots, lengths), key

    def logits(self, j: int) -> Tensor:
        """Return the logits [B, V] for draft ``j`` of each row (``DraftModel.logits``)."""
        second = self.own.second
        state = self.state
        slots = self.slots
        if j:
            static, key = self.later
            shift = self.shifts[j]
        else:
            static, key = self.first
            shift = self.first_shift
            slots = slots[:, None].expand(-1, self.width).reshape(-1)
        meta = static.meta
        meta.slots.copy_(slots)
        ahead = self.own.ahead
        drafts.begin_at(meta.slots, shift, state, static.ids, static.position, meta.kv_len, meta.slot_map, ahead)
        if state.rope_first is not None:
            behind = 0 if second.one_rope else state.rope_first[meta.slots]
            torch.add(static.position, behind, out=meta.position)
        read = StepTensors(static.ids, static.position, meta)
        self.own.enter(read, self.last if j else None)
        hidden = step.forward(second.model, second.backend, read, key)
        if not j:
            hidden = hidden[self.width - 1 :: self.width].contiguous()
        self.last = hidden
        return second.model.logits(hidden)

    def draw(self, rows: Rows, logits: Tensor, j: int) -> Tensor:
        """Draw draft ``j`` of each row and append it to the history (``DraftModel.draw``)."""
        logits = logits.float() if self.calls.float32 else logits
        at = replace(rows, position=rows.position + j)
        step.restrict(self.calls, self.state, logits, at)
        tokens = self.calls.draw(logits, at).tokens.clamp_(0, logits.shape[1] - 1)
        drafts.put(self.slots, tokens[:, None], self.state, logits.shape[1], j)
        return tokens


@dataclass
class CapturedProposals:
    """The captures of calls of one runner's drafter, by their shapes, in ``made``; None for a capture that failed.

    ``steps`` has the captures of the steps that verify drafts.  ``own`` is the drafter's model, or None if the drafter
    has no model."""

    runner: Runner
    drafting: Drafting
    steps: DraftedSteps
    own: OwnModel | None
    made: dict[ProposalKey, Captured | None] = field(default_factory=dict)
    # number of rows B -> slots [B] of the last call, on the host and on the device
    slots: dict[int, tuple[np.ndarray, Tensor]] = field(default_factory=dict)

    def propose(self, slots: np.ndarray, known: np.ndarray, k: int, slack: np.ndarray) -> Tensor | None:
        """Write ``k`` drafts of each of N rows to the columns of tokens by the replay of a capture, and return the
        number of usable drafts of each row, i32 [N] on the device.

        ``slots`` i32 [N] are the rows' slots.  ``known`` i32 [N] are their numbers of known tokens.  A number may be
        too large by up to ``slack`` i32 [N], because the host cannot count the accepted drafts of steps in flight yet
        (``StepPlan.slack``).  Return None, without drafts, if the call cannot be captured, or if the drafter's model
        may lack more tokens of a row with slack than the first pass computes.  An exception of the drafter's model is
        raised if it occurs before the replay.
        """
        key = self._key(slots, known, k)
        if key is None or self.made.get(key, key) is None:
            return None
        exact = slack == 0
        if self.own is not None:
            if not self.own.covers(slots[~exact], k):
                return None
            if exact.any():
                self.own.catch_up(slots[exact], known[exact], k)
        if key not in self.made:
            self.made[key] = self._capture(key)
        captured = self.made[key]
        if captured is None:
            return None
        self._fill(key.rows, slots)
        captured.graph.replay()
        if self.own is not None:
            self.own.keep(slots, known - slack, k - 1)
        return captured.result[: len(slots)]

    def _key(self, slots: np.ndarray, known: np.ndarray, k: int) -> ProposalKey | None:
        graphs = self.runner.graphs
        operations = graphs.slot_operations(slots, -1, False)
        if operations is None or len(slots) > graphs.sizes[-1]:
            return None
        at = int(np.searchsorted(graphs.sizes, len(slots)))
        size = graphs.sizes[at]
        longest = int(known.max()) + k
        span = SHORT if longest <= SHORT else self.runner.wiring.max_model_len
        key = ProposalKey(size, k, span, operations)
        return key if key in self.made or len(self.made) < CAPTURES else None

    def _fill(self, size: int, slots: np.ndarray) -> Tensor:
        """Return the slots i64 [size] of a call on the device, padded with the spare slot.

        They are copied only if they differ from those of the previous call."""
        spare = self.runner.wiring.max_num_seqs
        device = self.runner.device
        padded = np.full(size, spare, np.int64)
        padded[: len(slots)] = slots
        if size not in self.slots:
            self.slots[size] = padded, torch.from_numpy(padded).to(device)
        host, there = self.slots[size]
        if not np.array_equal(host, padded):
            there.copy_(staged(padded, device), non_blocking=True)
            self.slots[size] = padded, there
        return there

    def _capture(self, key: ProposalKey) -> Captured | None:
        """Capture a call of the drafter for rows of the spare slot.  If that fails, write a note and return None."""
        r = self.runner
        vocab = self.drafting.vocab_size
        slots = self._fill(key.rows, np.zeros(0, np.int64))
        given = torch.zeros(key.rows, dtype=torch.int32, device=r.device)
        passes = None if self.own is None else CapturedPasses(r, self.own, slots, key)

        def run() -> Tensor:
            longest = min(key.span, r.state.tokens.shape[1] - 1)
            rows = step.rows_of(r.state, slots, r.state.known[slots], longest)
            ask = Ask(rows, key.k, no_rows(), no_rows())
            tokens, count = self.drafting.drafter.propose(ask)
            check_drafts(tokens, count, key.rows, key.k)
            drafts.put(slots, tokens, r.state, vocab, 0, count, given)
            return given

        try:
            if self.own is not None:
                self.own.passes = passes
            graph, result = r.graphs.recorder.capture(run)
            return Captured(graph, result, keep=passes)
        except BaseException as e:  # the drafter cannot be captured, or memory is exhausted
            self.steps.note("the drafter", as_exception(e))
            return None
        finally:
            if self.own is not None:
                self.own.passes = None
