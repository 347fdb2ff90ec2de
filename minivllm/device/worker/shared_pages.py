"""The blocks that decoding rows share, estimated on the host from the block tables.

An attention back end with ``shares_from`` reads a prefix that several rows share once.  Its kernels cost time in every
layer, so only steps run them in which they save enough (``GraphKey.shared``).  The host decides this from a copy of the
block tables; the rows and blocks are found on the device.

    plan.delta ──► pages [S, M] ──► rows with the same block at the ends of a few depths ──► bytes saved
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.plan import NO_CHANGE, Delta, StepPlan

if TYPE_CHECKING:
    from .build import Worker
    from .state import DeviceState

LEAST_TOKENS = 256  # of a prefix
FEWEST_ROWS = 4  # that share it


class SharedPages:
    """A copy of the block tables of one KV group, from which the host estimates the bytes that rows with common blocks
    save.

    ``least`` is the smallest saving of a step in bytes for each layer, from which common blocks are read once.
    ``token_bytes`` is the size of a token's keys and values in a layer.
    """

    def __init__(self, group: int, slots: int, columns: int, block: int, token_bytes: float, least: int) -> None:
        self.group = group
        self.block = block
        self.pages = np.zeros((slots, columns), np.int32)
        self.least_tokens = max(1, int(least / token_bytes))
        first = max(1, -(-LEAST_TOKENS // block))
        self.depths = [first << i for i in range(columns.bit_length()) if first << i <= columns]
        # slots of the last estimate, those of decoding rows first; None after a change of the tables
        self.slots: np.ndarray | None = None
        self.decoding = 0
        self.rows = 0  # the last estimate

    def apply(self, delta: Delta) -> None:
        """Apply the changes of a step to the copy of the block tables."""
        if delta is NO_CHANGE:
            return
        if delta.join is not None:
            self.pages[delta.join.slot] = 0
            self.slots = None
        if len(delta.fork):
            self.pages[delta.fork[:, 1]] = 0
            self.slots = None
        if not len(delta.table):
            return
        changed = delta.table[delta.table[:, 0] == self.group]
        slots = changed[:, 1]
        index = changed[:, 2]
        # a block of a row was replaced, for instance by an equal cached block, so the last estimate is not valid
        if np.count_nonzero(self.pages[slots, index]):
            self.slots = None
        self.pages[slots, index] = changed[:, 3]

    def sharing(self, plan: StepPlan) -> int:
        """Return the number of decoding rows of a step that share cached blocks; 0 if reading those once saves too
        little."""
        decoding = int(np.count_nonzero(plan.q_len == 1))
        if self.slots is None or decoding != self.decoding or not np.array_equal(self.slots, plan.slots):
            # a copy, because the memory of the plan may be reused
            self.slots = plan.slots.copy()
            self.decoding = decoding
            self.rows = self._estimate(plan)
        return self.rows

    def can_save(self, rows: int, tokens: int) -> bool:
        """Return whether a step of ``rows`` rows with contexts of at most ``tokens`` tokens can save ``least``
        bytes."""
        lengths = [depth * self.block for depth in self.depths]
        deepest = max((length for length in lengths if length <= tokens), default=0)
        return rows >= FEWEST_ROWS and (rows - 1) * deepest >= self.least_tokens

    def _estimate(self, plan: StepPlan) -> int:
        decode = plan.q_len == 1
        slots = plan.slots[decode]
        whole = plan.computed[decode] // self.block
        most = shared = 0
        for depth in self.depths:
            deep = slots[whole >= depth]
            if len(deep) < FEWEST_ROWS:
                break
            page = self.pages[deep, depth - 1]
            counts = np.unique(page[page > 0], return_counts=True)[1]
            counts = counts[counts >= FEWEST_ROWS]
            saved = int((counts - 1).sum()) * depth * self.block
            if saved > most:
                most = saved
                shared = int(counts.sum())
        return shared if most >= self.least_tokens else 0


def shared_pages(worker: Worker, state: DeviceState) -> SharedPages | None:
    """Return the copy of the block tables from which common blocks of rows are estimated.

    Return None if the attention back end reads each row separately, or if all layers have sliding windows."""
    least = worker.backend.shares_from
    group = _group_without_window(worker)
    if least is None or group is None:
        return None
    cache = worker.caches[group][0]
    blocks = worker.num_blocks[group]
    token_bytes = sum(t.nbytes for t in cache.values()) / (blocks * state.block)
    _, slots, columns = state.table.shape
    return SharedPages(group, slots, columns, state.block, token_bytes, least)


def _group_without_window(worker: Worker) -> int | None:
    """Return the first KV group whose layers have no sliding window, or None."""
    layers = worker.parts.layers
    for number, group in enumerate(worker.groups):
        if layers[group[0]].spec.window is None:
            return number
    return None
