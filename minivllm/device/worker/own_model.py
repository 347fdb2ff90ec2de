"""The second model that a drafter or processor runs.  It uses the block tables of the served model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.drafter import Ask, DraftModel
from minivllm.core.interfaces.plan import StepPlan

from . import step
from .calls import BoundCalls, ProcessorChain

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.model import StepTensors

    from .build import SecondModel
    from .state import DeviceState


class OwnModel(DraftModel):
    """A second model that uses the block tables of the served model.  ``read_plan`` returns the model inputs of a plan.

    Invariant: the KV cache of this model holds the first ``read[s]`` tokens of the sequence in slot s.  It also holds
    the next ``extra[s]`` tokens, which are drafts of the last step; they are valid as far as they were accepted.

    A model with recurrent states has two states for each slot.  The first state covers exactly ``read[s]`` tokens.
    The second is a copy for the newest token and the drafts, so rejected drafts leave no trace; ``extra`` is 0 then."""

    ahead = 0  # 1 if the input of a position is the token behind it, as in a drafter's head, else 0

    def __init__(
        self,
        wiring: Wiring,
        state: DeviceState,
        chain: ProcessorChain,
        read_plan: Callable[[StepPlan], StepTensors],
        second: SecondModel,
    ) -> None:
        self.wiring = wiring
        self.state = state
        self.chain = chain
        self.read_plan = read_plan
        self.second = second
        size = wiring.max_num_seqs + 1
        self.read = np.zeros(size, np.int64)
        self.extra = np.zeros(size, np.int64)
        # number of drafts of each row that the last call computed, 0 if the last step had no call for the row
        self.drafted = np.zeros(size, np.int64)
        # the passes of the call that is being captured (``captured_proposals.CapturedPasses``); None outside a capture
        self.passes: Any = None
        # ``StepPlan.draft`` of the last step with drafts, and the slots of its sequences without drafts
        self._draft: np.ndarray | None = None
        self._without_drafts = np.zeros(0, np.int32)

    def note(self, plan: StepPlan) -> None:
        """Update the numbers of tokens in this model's KV cache for a step's plan: for sequences that join or fork, for
        rows without drafts, and for blocks that changed."""
        delta = plan.delta
        states = self.second.states
        if delta.join is not None:
            slots = delta.join.slot
            self.read[slots] = 0
            self.extra[slots] = 0
            self.drafted[slots] = 0
        for source, to, _ in delta.fork.tolist():
            self.read[to] = self.read[source]
            self.extra[to] = 0
        if states is not None and len(delta.fork):
            forks = delta.fork[:, :2].T.astype(np.int64)
            states.copy(*self.state.to(forks))
        lone = self._lone(plan)
        if len(lone):
            self.extra[lone] = 0
            self.drafted[lone] = 0
        if not len(delta.table):
            return
        table = delta.table[delta.table[:, 0] == 0]
        # an equal cached block may replace a row's block, and it may lack keys and values of this second model
        if len(table):
            slots = table[:, 1]
            index = table[:, 2].astype(np.int64)
            before = self.read.copy()
            np.minimum.at(self.read, slots, index * self.wiring.block)
            shorter = self.read < before
            self.extra[shorter] = 0
            self.drafted[shorter] = 0
            if states is not None:
                self.read[shorter] = 0  # a recurrent state of fewer tokens cannot be restored

    def _lone(self, plan: StepPlan) -> np.ndarray:
        """Return the slots of the sequences without drafts in a step.  Steps that repeat the last one have its array
        ``plan.draft``, so their slots are looked up once."""
        if not len(plan.draft):
            return plan.slots
        if plan.draft is not self._draft:
            self._draft = plan.draft
            self._without_drafts = _lone(plan)
        return self._without_drafts

    def logits(self, ask: Ask, j: int) -> Tensor:
        if self.passes is not None:
            return self.passes.logits(j)
        if j:
            # every row draws as many drafts as the row that wants the most; surplus drafts are dropped
            last = self.wiring.max_model_len - 1
            behind = np.minimum(ask.known + j - 1, last)
            ones = np.ones(len(ask.slots), np.int32)
            return self._run(ask.slots, ones, behind, copied=True)
        following = max(ask.k - 1, 0)
        return self.logits_behind(ask.slots, ask.known, following)

    def logits_behind(self, slots: np.ndarray, known: np.ndarray, extra: int = 0) -> Tensor:
        """Return the logits [N, V] after the first ``known`` i32 [N] tokens of the sequences in ``slots`` i32 [N].

        Each slot occurs once.  The model first computes the tokens that are missing in its KV cache.  ``extra`` is the
        number of tokens that later calls of ``logits`` will add to the KV cache of each row.
        """
        done = self._done(slots, known)
        most = max(1, self.wiring.max_num_batched_tokens // len(slots))
        while (far := np.flatnonzero(known - done > most)).size:
            q_len = np.full(len(far), most, np.int32)
            self._run(slots[far], q_len, done[far])
            done[far] += most
        if self.second.states is not None:
            return self._run_newest(slots, known, done)
        self.keep(slots, known, extra)
        missing = (known - done).astype(np.int32)
        return self._run(slots, missing, done)

    def _done(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return the number of ``known`` tokens in the KV cache of this model, less than ``known``."""
        read = self.read[slots]
        newest = known - 1
        accepted = np.clip(newest - read, 0, self.extra[slots])
        # a row whose last draw was rejected has the same ``known`` again, and its last token is computed once more
        return np.minimum(read + accepted, newest)

    def keep(self, slots: np.ndarray, known: np.ndarray, extra: int) -> None:
        """Note that the KV cache of this model holds the ``known`` tokens of each row, and then ``extra`` drafts."""
        self.read[slots] = known
        self.extra[slots] = extra
        self.drafted[slots] = extra + 1

    # ---- captured calls ------------------------------------------------------------------------------------------

    def most_pending(self, k: int) -> int:
        """Return the number of tokens of a row that a captured call for ``k`` drafts computes in its first pass.

        If all drafts are accepted, the last draft and the newest token are missing in the KV cache."""
        return 2

    def covers(self, slots: np.ndarray, k: int) -> bool:
        """Return whether the first pass of a captured call for ``k`` drafts computes all tokens that the KV cache
        lacks.

        Only the device has the lengths of these rows.  A row whose last step had drafts lacks at most two tokens.
        """
        return bool((self.drafted[slots] > 0).all())

    def total(self, known: np.ndarray) -> np.ndarray:
        """Return the number of positions i32 [N] that this model computes for ``known`` i32 [N] tokens."""
        return known

    def catch_up(self, slots: np.ndarray, known: np.ndarray, k: int) -> None:
        """Compute tokens that are missing in this model's KV cache, until each row lacks at most ``most_pending`` of
        its ``known`` i32 [N] tokens."""
        done = self._done(slots, known)
        total = self.total(known)
        most = max(1, self.wiring.max_num_batched_tokens // len(slots))
        pending = self.most_pending(k)
        while (far := np.flatnonzero(total - done > pending)).size:
            before = done[far]
            q_len = np.minimum(total[far] - before - 1, most)
            self._run(slots[far], q_len.astype(np.int32), before)
            done[far] += q_len
        self.read[slots] = done
        self.extra[slots] = 0

    def enter(self, read: StepTensors, last: Tensor | None) -> None:
        """Add to ``read`` the inputs of a captured pass that only models of this class need.

        ``last`` are the results [N, W] of the pass before, None in the first pass."""

    def _run_newest(self, slots: np.ndarray, known: np.ndarray, done: np.ndarray) -> Tensor:
        """Compute the tokens behind ``done`` with a model that has recurrent states; the newest token uses copies of
        these.

        Return the logits f32 [N, V] of the newest token of each row."""
        states = self.second.states
        assert states is not None
        newest = known - 1
        older = np.flatnonzero(done < newest)
        if len(older):
            q_len = (newest - done)[older].astype(np.int32)
            self._run(slots[older], q_len, done[older])
        self.read[slots] = newest
        at = self.state.to(slots.astype(np.int64))
        states.copy(at, at + states.slots)
        ones = np.ones(len(slots), np.int32)
        return self._run(slots, ones, newest, copied=True)

    def _run(self, slots: np.ndarray, q_len: np.ndarray, computed: np.ndarray, copied: bool = False) -> Tensor:
        """Compute the ``q_len`` tokens of each row that follow its first ``computed`` tokens.

        ``copied`` means that a model with recurrent states uses the copies.  Return the logits f32 [N, V] of the last
        token of each row."""
        model = self.second.model
        backend = self.second.backend
        plan, last = rows_plan(slots, q_len, computed)
        read = self.read_plan(plan)
        states = self.second.states
        read.states = None  # the states that ``read_plan`` returns belong to the served model, not to this head
        if states is not None:
            first = states.slots if copied else 0
            read.states = states.of_meta(read.meta, self.state.stopped, first=first)
        indices = None
        if len(read.ids) > len(slots):
            indices = self.state.to(last)
        hidden = step.forward(model, backend, read, GraphKey(), indices)
        return model.logits(hidden).float()

    def draw(self, ask: Ask, logits: Tensor, j: int) -> Tensor:
        """Draw draft number ``j`` of each row from ``logits`` as a step does, and write it to the columns.

        Return the tokens i64 [N].  The logits may be overwritten.  Exceptions of processors are not caught."""
        if self.passes is not None:
            return self.passes.draw(ask.rows, logits, j)
        state = self.state
        slots = ask.rows.slots
        position = ask.rows.position + j
        longest = int(ask.known.max()) + j
        rows = step.rows_of(state, slots, position, longest)
        calls = BoundCalls(self.chain, ask.slots.astype(np.int64))
        step.restrict(calls, state, logits, rows)
        drawn = calls.draw(logits, rows)
        tokens = drawn.tokens.clamp_(0, logits.shape[1] - 1)
        last = state.tokens.shape[1] - 1
        at = position.clamp(max=last)
        state.tokens[slots, at] = tokens.int()
        return tokens


def rows_plan(slots: np.ndarray, q_len: np.ndarray, computed: np.ndarray) -> tuple[StepPlan, np.ndarray]:
    """Return the plan of a step of a second model: rows of ``q_len`` i32 [N] tokens behind ``computed`` i32 [N] tokens.

    Also return the index i64 [N] of the last token of each row among the tokens of the plan."""
    order = np.argsort(q_len > 1, kind="stable")
    lengths = q_len[order]
    before = computed[order].astype(np.int32)
    samples = np.arange(len(slots), dtype=np.int32)
    plan = StepPlan(0, slots[order], lengths, computed=before, samples=samples)
    last = np.cumsum(lengths) - 1
    return plan, last[np.argsort(order)]


def _lone(plan: StepPlan) -> np.ndarray:
    """Return the slots of sequences without drafts in a step."""
    following = np.append(plan.draft[1:], 0)
    lone = (plan.draft == 0) & (following == 0)
    return plan.slots[lone]
