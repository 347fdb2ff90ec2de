"""Steps with drafts of a head whose three parts are calls of the native CPU library.

    rows of the plan ─► draft ─► numbers of drafts ─► forward ─► sample ─► packed result of all rows
                        head                          rows of these drafts only

The library groups the rows into sequences, so that the host runs no array operations for them.  A step that it cannot
run is run by ``Drafting.prepare``, ``NativeSteps.forward`` and ``NativeSteps.sample``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.device.native.program import FORMATS, HeadStates, address

from .native_steps import MOST_TOKENS

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import StepPlan

    from .native_steps import NativeHead, NativeSteps


class NativeDrafts:
    """Runs steps with drafts in native calls.

    ``steps`` are the native steps of the served model, and ``head`` is the native program of the drafter's head.
    ``read`` and ``drafted`` i64 [S] are columns of the head's model (``head_model.HeadModel``): the pairs in its KV
    cache, and the number of drafts of its last call.  ``memory`` [places, H] has the hidden states of the served model.
    """

    # The drafts of a row end before the first one for which the product of the head's largest probabilities is smaller.
    # A row of a step costs about a third of the time of a token without drafts.
    least = 0.25

    def __init__(
        self, steps: NativeSteps, head: NativeHead, read: np.ndarray, drafted: np.ndarray, memory: torch.Tensor
    ) -> None:
        self.steps = steps
        self.head = head
        state = steps.state
        self._held = memory, state.stopped, read, drafted  # kept alive, because the library uses their addresses
        self._states = HeadStates(
            memory.data_ptr(),
            FORMATS[memory.dtype],
            memory.shape[1],
            head.states.data_ptr(),
            head.hidden.data_ptr(),
            state.tokens.shape[1] - 2,
            state.stopped.data_ptr(),
            address(read),
            address(drafted),
        )
        self._states_at = ctypes.addressof(self._states)
        self._box = np.zeros(1 + 3 * MOST_TOKENS, np.int64)
        self._at = address(self._box)
        self._slots: np.ndarray | None = None  # ``slots`` of the last plan, if the library runs steps of its rows
        self._computed = self._box[:0]  # view of ``_box``: number of computed tokens of each row
        self._sequences = 0  # number of sequences with drafts

    def takes(self, plan: StepPlan) -> bool:
        """Return whether the library can run the parts of a step, and prepare its arguments.

        All rows need one token each, from which a token is drawn.  The conditions of ``NativeSteps.takes`` and
        ``NativeSteps.draws`` hold too.  Consecutive steps with the same array ``plan.slots`` have the same requests
        (see ``StepPlan.further``), so they are checked once."""
        if len(plan.slack):
            return False
        if plan.slots is not self._slots:
            self._slots = None
            if not self._fits(plan):
                return False
            self._fill(plan)
        self._computed[:] = plan.computed
        return True

    def _fits(self, plan: StepPlan) -> bool:
        """Return whether the library can run a step of the rows of a plan."""
        rows = len(plan.slots)
        drawing = rows == len(plan.samples) == int(plan.q_len.sum())
        if not len(plan.draft) or not drawing or rows > MOST_TOKENS:
            return False
        if len(plan.pooled) or not self.steps.takes(plan) or not self.steps.draws(plan):
            return False
        return int(np.count_nonzero(plan.draft == 1)) <= len(self.head.logits)

    def _fill(self, plan: StepPlan) -> None:
        """Write the rows of a plan to the arguments of the calls."""
        rows = len(plan.slots)
        self._box[0] = rows
        slots, self._computed, draft = self._box[1 : 1 + 3 * rows].reshape(3, rows)
        slots[:] = plan.slots
        draft[:] = plan.draft
        self._sequences = int(np.count_nonzero(plan.draft == 1))
        self._slots = plan.slots

    def draft(self) -> np.ndarray | None:
        """Draw the drafts of the step that ``takes`` accepted, and write them to the columns of tokens.

        Return their numbers i32 [n], one for each sequence that has rows for drafts.  None means that nothing was
        drawn, because the first pass has too many (hidden state, token) pairs."""
        found = np.empty(self._sequences, np.int32)
        self.head.program.draft(self._at, self._states_at, self.least, address(found))
        return found if found[0] >= 0 else None

    def forward(self, drafted: np.ndarray) -> None:
        """Run the layers of the step (FORWARD), of which each sequence has ``drafted`` i32 [n] drafts."""
        self.steps.program.forward_drafted(self._at, address(drafted))

    def sample(self) -> torch.Tensor:
        """Draw the tokens of the step, write them to the columns, and return i32 [3, R]: tokens, counts and flags.

        They are 0 for rows of drafts that were not drawn."""
        packed = np.empty((3, int(self._box[0])), np.int32)
        self.steps.program.sample_drafted(self._at, address(packed))
        return torch.from_numpy(packed)
