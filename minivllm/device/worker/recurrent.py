"""The memory of recurrent states: one state for each slot, and copies at positions of prompts (checkpoints).

    index      0 ... S-2    S-1         S ... S+C-1
    state      slots        null state  checkpoints          S = max_num_seqs + 1
    valid      17 ...       .           496 ...              tokens that the state covers

``valid`` is on the device.  A step compares it with the position at which a row begins.  A state that does not fit the
row (one of an earlier sequence, say) makes the row's results NaN, which ends its request with an error; it never gives
tokens computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.states import COPIES, UNUSABLE, StepStates
from minivllm.device.layers.kv_memory import zeros

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.device.layers.state_layer import StateLayer


def state_bytes(layers: Sequence[StateLayer], dtype: torch.dtype, drafts: int) -> int:
    """Return the number of bytes of a sequence's recurrent states in all layers."""
    total = 0
    for layer in layers:
        for _, shape, kind in _tensors(layer, dtype, drafts):
            total += int(np.prod(shape)) * kind.itemsize
    return total


def _tensors(layer: StateLayer, dtype: torch.dtype, drafts: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return (name, shape for one sequence, dtype) of each tensor in the recurrent state of a layer."""
    found = []
    for tensor in layer.state.tensors:
        shape = tensor.shape
        if tensor.ring:
            shape = (layer.state.places(drafts), *shape)
        own = getattr(torch, tensor.dtype) if tensor.dtype else dtype
        found.append((tensor.name, shape, own))
    return found


class StateMemory:
    """The states of all recurrent layers of a model for ``slots`` slots, the last of which is the null state."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        slots: int,
        checkpoints: int,
        drafts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.checkpoints = checkpoints
        self.drafts = drafts
        self.device = device
        total = slots + checkpoints
        self.bytes = state_bytes(layers, dtype, drafts)
        self.memory: list[Mapping[str, Tensor]] = []
        for layer in layers:
            memory = {}
            for name, shape, kind in _tensors(layer, dtype, drafts):
                memory[name] = zeros((total, *shape), kind, device)
            layer.memory = memory
            self.memory.append(memory)
        self.valid = torch.zeros(total, dtype=torch.int32, device=device)
        self.save_at = torch.full((total, COPIES), -1, dtype=torch.int32, device=device)
        self.save_to = torch.full((total, COPIES), slots - 1, dtype=torch.int64, device=device)

    # ---- between steps ---------------------------------------------------------------------------

    def begin(self, slots: Tensor, empty: Tensor) -> None:
        """Prepare ``slots`` i64 [n] for new sequences: cancel requested copies, and empty the states of ``empty`` i64
        [m]."""
        self.valid.index_fill_(0, empty, 0)
        self.save_at.index_fill_(0, slots, -1)

    def copy(self, source: Tensor, to: Tensor) -> None:
        """Copy the recurrent states with the indices ``source`` i64 [n] to ``to`` i64 [n].  All are read before any is
        written."""
        for memory in self.memory:
            for tensor in memory.values():
                tensor[to] = tensor[source]
        self.valid[to] = self.valid[source]
        self.save_at.index_fill_(0, to, -1)

    def save(self, slots: Tensor, which: Tensor, position: Tensor, to: Tensor) -> None:
        """Request copies of states: slot ``slots[i]`` to index ``to[i]`` when it covers ``position[i]`` tokens.

        A slot may have COPIES requests at a time, and ``which[i]`` is the index of the request.  All arguments are i64
        [n]."""
        self.save_at[slots, which] = position.int()
        self.save_to[slots, which] = to

    # ---- in a step -------------------------------------------------------------------------------

    def of_step(
        self,
        slots: Tensor,
        start: Tensor,
        cu_q: Tensor,
        stopped: Tensor,
        drafts: Tensor | None = None,
        first: int = 0,
    ) -> StepStates:
        """Return the recurrent states of the R rows of a step.

        The rows have the slots ``slots`` i64 [R] and begin at the positions ``start`` i32 [R]; row r has the tokens
        cu_q[r] to cu_q[r + 1] - 1.  ``stopped`` bool [S] marks slots whose sequence has ended.  ``drafts`` bool [R]
        marks rows with drafts; None means no drafts.  The state of slot s has the index ``first + s``.
        """
        null = self.slots - 1
        dead = stopped[slots]
        rows = (slots + first).masked_fill(dead, null)
        start = start.masked_fill(dead, 0)
        behind = start - self.valid[rows]
        if self.drafts:
            fits = (behind >= 0) & (behind <= self.drafts + 1)
        else:
            fits = behind == 0
        behind = torch.where(fits, behind, UNUSABLE).masked_fill(start == 0, 0)
        if drafts is None:
            drafts = torch.zeros_like(dead)
        save_at = self.save_at[slots].masked_fill(dead[:, None], -1)
        save_to = self.save_to[slots]
        step = StepStates(rows, start, behind, cu_q, drafts, save_at, save_to, lambda: None)
        step.advance = partial(self._advance, step)
        return step

    def of_meta(
        self, meta: AttnMeta, stopped: Tensor, drafts: Tensor | None = None, first: int = 0, exact: bool = False
    ) -> StepStates:
        """Return the recurrent states of the rows of a step with the attention metadata ``meta``, as ``of_step``.

        ``stopped``, ``drafts`` and ``first`` are its arguments.  ``exact`` means that the lengths on the host are exact
        instead of upper bounds.
        """
        start = meta.kv_len[0] - meta.q_len
        step = self.of_step(meta.slots, start, meta.cu_q, stopped, drafts, first)
        step.row = meta.row
        step.longest = int(meta.host_q_len.max(initial=0))
        if exact:
            step.shortest = int(meta.host_q_len.min(initial=step.longest))
        return step

    def _advance(self, step: StepStates) -> None:
        """Update the numbers of tokens that the states cover, after a step."""
        n = step.cu_q[1:] - step.cu_q[:-1]
        certain = torch.where(step.drafts, n.clamp(max=1), n)
        begin = step.start - step.behind.clamp(min=0)
        end = step.start + certain
        after = step.save_at > begin[:, None]
        saved = after & (step.save_at <= end[:, None])
        null = self.slots - 1
        to = step.save_to.masked_fill(~saved, null)
        self.valid[to] = step.save_at
        self.valid[step.rows] = step.start + n.masked_fill(step.drafts, 0)
