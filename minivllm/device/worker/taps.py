"""Taps on the device: vectors that are added at points of the model, and values that are read there.

    steering[point]  [S, width]    a row of each slot, zeros for those that add nothing there
    x [T, width] at a point ──► x + steering[point][slot of each token] ──┬──► goes on in the model
                                                                          └──► tokens that are read ──► host

A step in which nobody has taps hears of none of this (``StepTensors.taps`` is None).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.model import tap_points
from minivllm.core.interfaces.plan import StepError
from minivllm.core.interfaces.taps import LOGITS, by_point, read_only
from minivllm.device.layers.taps import TapsOfStep

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.core.interfaces.model import Model
    from minivllm.core.interfaces.plan import Delta, StepPlan

    from .state import DeviceState

NO_MEMORY = (
    "taps: the device has no memory left for what is added at {}; want fewer points, or a lower "
    "gpu_memory_utilization or max_num_seqs"
)


class TapState:
    """What the taps of one device's rows need: ``points`` of the model and their widths, "logits" last; empty: none.
    ``ranks``: the communicator of those that share the model, which add at the same points or capture other steps."""

    def __init__(
        self,
        model: Model,
        vocab: int,
        dtype: torch.dtype,
        state: DeviceState,
        ranks: Any = None,
    ) -> None:
        self.ranks, found = ranks, tap_points(model)
        self.points: dict[str, int] = {**found, LOGITS: vocab} if found else {}
        self.names, self.dtype, self.state = list(self.points), dtype, state
        self.slots = len(state.known)
        self.steering: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}  # [S, width] what rows of captured decode steps have

    def _rows(self, rows: dict[str, Tensor], point: str) -> Tensor:
        """[S, width], made when the point is first asked for."""
        if point not in rows:
            width = self.points[point]
            # float32 holds an expert's number
            dtype = torch.float32 if read_only(point) else self.dtype
            rows[point] = torch.zeros(self.slots, width, dtype=dtype, device=self.state.device)
        return rows[point]

    def apply(self, delta: Delta) -> dict[int, StepError]:
        """Rows that joined or forked: what is added to them.  Slots for whose vectors there is no memory."""
        join, to = delta.join, self.state.to
        failed: dict[int, StepError] = {}
        if join is not None and self.steering:
            slots = to(join.slot).long()
            for column in self.steering.values():
                column.index_fill_(0, slots, 0)
        at = 0
        for row, number in () if join is None else join.steer.tolist():
            point, slot = self.names[number], int(join.slot[row])
            vector = join.vectors[at : at + self.points[point]]
            at += len(vector)
            if not self._has_room(point):
                failed[slot] = StepError("rows", "", NO_MEMORY.format(point))
                continue
            self.steering[point][slot].copy_(to(vector), non_blocking=True)
        if len(delta.fork) and self.steering:
            source = to(delta.fork[:, 0]).long()
            child = to(delta.fork[:, 1]).long()
            for column in self.steering.values():
                column[child] = column[source]
        return failed

    def _has_room(self, point: str) -> bool:
        """Whether there are rows for what is added at a point: on all ranks, or on none."""
        if point in self.steering:
            return True
        with suppress(torch.OutOfMemoryError):
            self._rows(self.steering, point)
        if self.ranks is not None and not self.ranks.least([point in self.steering])[0]:
            self.steering.pop(point, None)
        return point in self.steering

    # ---- a step --------------------------------------------------------------------------------------------------

    def of_step(self, plan: StepPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the points at which rows of a step add something, and of those of the layers that they read."""
        if not len(plan.taps) and not len(plan.steered):
            return (), ()
        read = set(plan.taps[:, 0].tolist()) - {len(self.names) - 1}
        return self._steered(plan), tuple(sorted(read))

    def _steered(self, plan: StepPlan) -> tuple[int, ...]:
        """Numbers of the points at which something is added; rows without memory for it have failed."""
        return tuple(n for n in plan.steered.tolist() if self.names[n] in self.steering)

    def eager(
        self,
        plan: StepPlan,
        tokens: Mapping[str, np.ndarray],
        meta: AttnMeta,
        found: dict[str, Tensor],
    ) -> TapsOfStep | None:
        """Those of a step of separate launches; None if it has none.  What is read of a point is put into ``found``:
        [n, width], those of its ``tokens``."""
        if not len(plan.taps) and not len(plan.steered):
            return None
        indices = {point: self.state.to(at) for point, at in tokens.items() if point != LOGITS}

        def keep(point: str, x: Tensor) -> None:
            found[point] = x[indices[point]]

        return self._of_step(self._steered(plan), meta, frozenset(indices), keep)

    def captured(self, steered: tuple[int, ...], read: tuple[int, ...], meta: AttnMeta) -> TapsOfStep:
        """Those of a captured step: what all rows have goes to ``buffers``."""
        buffers = {p: self._rows(self.buffers, p) for p in (self.names[n] for n in read)}

        def keep(point: str, x: Tensor) -> None:
            buffers[point][: len(x)].copy_(x)

        return self._of_step(steered, meta, frozenset(buffers), keep)

    def replayed(self, tokens: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """What ``eager`` finds, of a decode step that was replayed: rows are tokens."""
        return {point: self._rows_at(self.buffers[point], at) for point, at in tokens.items() if point != LOGITS}

    def _rows_at(self, buffer: Tensor, at: np.ndarray) -> Tensor:
        """Rows ``at``, ascending: a view where they are the first ones."""
        n = len(at)
        return buffer[:n] if at[-1] == n - 1 else buffer[self.state.to(at)]

    def flat(self, found: Mapping[str, Tensor]) -> Tensor:
        """f32, the values that were found, one after another in the order of the points."""
        values = [found[point].float().ravel() for point in self.names if point in found]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _of_step(self, steered: Any, meta: AttnMeta, read: frozenset[str], keep: Any) -> TapsOfStep:
        steering = {self.names[n]: self.steering[self.names[n]] for n in steered}
        return TapsOfStep(steering, meta.slots[meta.row], read, keep)

    def tokens(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """point -> i64 [n] numbers of the tokens of the step that are read there, ascending."""
        ends, found = plan.q_len.cumsum(), {}
        for number, rows, first in by_point(plan.taps):
            n = plan.q_len[rows] - first
            before = n.cumsum() - n
            found[self.names[number]] = (ends[rows] - n - before).repeat(n) + np.arange(n.sum())
        return found
