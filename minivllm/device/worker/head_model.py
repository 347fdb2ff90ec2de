"""The layers of a drafter that read hidden states of the served model (``drafter.Head``).

    tokens of a row        t0  t1  t2  t3  (newest)  d0  d1             known = 4
    hidden states          h0  h1  h2                g   g'
    pairs                 (h0, t1) (h1, t2) (h2, t3) (g, d0) ...        pair i has position i in the KV cache
    logits of the pair                      for d0   for d1

``h`` are the states of the served model, and ``g`` the states of the head at the draft before.  Pairs with drafts are
computed again with ``h`` in the next step, because ``g`` only approximates it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from minivllm.core.interfaces.attention import GraphKey

from . import step
from .own_model import OwnModel, rows_plan

if TYPE_CHECKING:
    from minivllm.core.interfaces.drafter import Ask
    from minivllm.core.interfaces.model import StepTensors
    from minivllm.device.layers.native_steps import NativeHead

    from .target_states import TargetStates


class HeadModel(OwnModel):
    """A drafter's layers that read hidden states of the served model (a head), on the block tables of the served model.

    Invariant: the KV cache of the head holds the first ``read[s]`` pairs of the sequence in slot s.  A pair at the end
    of a block depends on the first token of the next block.  If a block is shared by rows that continue differently,
    this pair is that of the last row that computed it, which may change drafts of other rows, and no token."""

    ahead = 1

    def __init__(self, *args: Any, states: TargetStates) -> None:
        super().__init__(*args)
        self.states = states
        self.native: NativeHead | None = None  # native CPU code that runs the head's layers, or None
        self.last: Tensor | None = None  # [N, W] hidden states of the head at the newest draft of each row

    def logits(self, ask: Ask, j: int) -> Tensor:
        if self.passes is not None:
            return self.passes.logits(j)
        if not j:
            return self.logits_behind(ask.slots, ask.known, ask.k - 1)
            # every row draws as many drafts as the row that wants the most; surplus drafts are dropped
        last = self.wiring.max_model_len - 2
        pairs = np.maximum(ask.known, 2) + j - 2
        pairs = np.minimum(pairs, last)
        ones = np.ones(len(pairs), np.int32)
        return self._run(ask.slots, ones, pairs, copied=True)

    def logits_behind(self, slots: np.ndarray, known: np.ndarray, extra: int = 0) -> Tensor:
        """Return the logits [N, V] after the first ``known`` i32 [N] tokens of the sequences in ``slots`` i32 [N].

        Each slot occurs once, and the served model has computed all known tokens except the last one.  The head first
        computes the pairs that are missing in its KV cache, and the last pair in any case.  A row with one known token
        has no pair, so its logits are undefined.
        """
        pairs = self.total(known)
        done = self._done(slots, known)
        most = max(1, self.wiring.max_num_batched_tokens // len(slots))
        while (far := np.flatnonzero(pairs - done > most)).size:
            q_len = np.full(len(far), most, np.int32)
            self._run(slots[far], q_len, done[far])
            done[far] += most
        self.keep(slots, known, extra)
        missing = (pairs - done).astype(np.int32)
        return self._run(slots, missing, done)

    def propose(self, slots: np.ndarray, known: np.ndarray, k: int) -> np.ndarray | None:
        """Draw k drafts of each row in one call of native CPU code, and write them to the columns of tokens.  Return
        the drafts i32 [k, N].

        ``slots`` and ``known`` i32 [N] are the rows and their numbers of known tokens.  Return None if the native
        program cannot compute or draw these rows."""
        native = self.native
        done = self._done(slots, known)
        q_len = self.total(known) - done
        if native is None or not native.takes(q_len):
            return None
        if not native.steps.draws_rows(slots):
            return None
        self.keep(slots, known, k - 1)
        return native.propose(slots, q_len, done, known, k, self.states.memory)

    def draw(self, ask: Ask, logits: Tensor, j: int) -> Tensor:
        native = None if self.passes is not None else self.native
        if native is not None and native.draws(ask.slots, logits):
            return native.draw(ask.slots, ask.known + j)
        return super().draw(ask, logits, j)

    def _states(self, slots: np.ndarray, q_len: np.ndarray, computed: np.ndarray) -> Tensor:
        """Return the hidden states [T, W] of the served model for ``q_len`` pairs of each row, behind its first
        ``computed`` pairs."""
        row = np.repeat(np.arange(len(slots)), q_len)
        first = q_len.cumsum() - q_len
        shift = computed - first
        position = shift[row] + np.arange(len(row))
        places = np.stack([slots[row], position])
        slot_of, at = self.state.to(places.astype(np.int64))
        return self.states.at(self.state, slot_of, at)

    def total(self, known: np.ndarray) -> np.ndarray:
        return np.maximum(known - 1, 1)

    def _done(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        newest = self.total(known) - 1
        return np.minimum(self.read[slots], newest)

    def keep(self, slots: np.ndarray, known: np.ndarray, extra: int) -> None:
        self.read[slots] = np.maximum(known - 1, 0)
        self.drafted[slots] = extra + 1

    def most_pending(self, k: int) -> int:
        """Return the number of (hidden state, token) pairs of a row that a captured call computes in its first pass.

        Pairs of drafts are computed again with the hidden states of the served model, so all tokens of the last step
        are computed."""
        return 1 + k

    def covers(self, slots: np.ndarray, k: int) -> bool:
        if not super().covers(slots, k):
            return False
        # a row whose last step had more than k drafts may lack more (hidden state, token) pairs than one pass computes
        return bool((self.drafted[slots] <= k).all())

    def enter(self, read: StepTensors, last: Tensor | None) -> None:
        read.drafted = last is not None
        if last is None:
            last = self.states.at(self.state, read.meta.slots, read.position)
        read.hidden = last

    def _run(self, slots: np.ndarray, q_len: np.ndarray, computed: np.ndarray, copied: bool = False) -> Tensor:
        """Run the head on the ``q_len`` (hidden state, token) pairs of each row behind its first ``computed`` pairs.

        Return the logits f32 [N, V] of the last pair of each row.  ``copied`` means that each row has one pair, whose
        hidden state is the head's own for the previous draft.
        """
        if self.native is not None and self.native.takes(q_len):
            states = self.last if copied else self._states(slots, q_len, computed)
            assert states is not None
            self.last, logits = self.native.forward(slots, q_len, computed, states)
            return logits
        plan, last = rows_plan(slots, q_len, computed)
        read = self.read_plan(plan)
        read.states = None  # the states that ``read_plan`` returns belong to the served model, not to this head
        if self.second.one_rope:
            read.meta.position = read.position
        slot_of = read.meta.slots[read.meta.row]
        following = self.state.tokens[slot_of, read.position + 1]
        read.ids = following.long()
        read.drafted = copied
        read.hidden = self.last
        if not copied:
            read.hidden = self.states.at(self.state, slot_of, read.position)
        indices = None
        if len(read.ids) > len(slots):
            indices = self.state.to(last)
        model = self.second.model
        backend = self.second.backend
        self.last = step.forward(model, backend, read, GraphKey(), indices)
        return model.logits(self.last).float()
