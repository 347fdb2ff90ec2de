"""Taps on the device: add vectors, and read values, at tap points (named places in the model).

    steering[point]  [S, width]    a vector for each slot; zeros if the slot adds nothing at this point
    x [T, width] at a point ──► x + steering[point][slot of each token] ──┬──► goes on in the model
                                                                          └──► tokens that are read ──► host

In a step without taps ``StepTensors.taps`` is None, and the model runs no extra operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.model import given_points, tap_points
from minivllm.core.interfaces.plan import StepError
from minivllm.core.interfaces.routes import OWN
from minivllm.core.interfaces.taps import LOGITS, by_point, read_only
from minivllm.device.layers.taps import TapsOfStep

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.core.interfaces.model import Model
    from minivllm.core.interfaces.plan import Delta, StepPlan

    from .state import DeviceState

NO_MEMORY = (
    "taps: the device has no memory left for what is added at {}; use fewer points, or a lower "
    "gpu_memory_utilization or max_num_seqs"
)


class TapState:
    """The tap points (named values) of a model, with memory for vectors that are added and values that are read.

    ``points`` maps the name of a tap point to its width, with "logits" last; it is empty if the model has none.
    ``ranks`` is the communicator of the processes that share the model, or None.  All of them must add vectors at the
    same points, because otherwise they would capture different steps."""

    def __init__(
        self,
        model: Model,
        vocab: int,
        dtype: torch.dtype,
        state: DeviceState,
        ranks: Any = None,
    ) -> None:
        self.ranks = ranks
        found = tap_points(model)
        self.points: dict[str, int] = {}
        if found:
            self.points = {**found, LOGITS: vocab}
        self.widths = tuple(self.points.values())
        self.names = list(self.points)
        self.dtype = dtype
        self.state = state
        self.slots = len(state.known)
        # tap point (named value of the model) at which a request may set a token's experts -> experts per token
        given = [point for point in given_points(model) if point in self.points]
        self.given = {point: self.points[point] for point in given}
        self.given_width = sum(self.given.values())
        self.given_rows: Tensor | None = None  # i32 [S, sum of widths] experts that requests set, for captured steps
        self.steering: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}  # tap point -> values [S, width] of the rows of a captured decode step

    def _rows(self, rows: dict[str, Tensor], point: str) -> Tensor:
        """Return the tensor [S, width] of the tap point ``point`` in ``rows``.  It is created with zeros at the first
        use."""
        if point not in rows:
            width = self.points[point]
            # values of a read-only tap point may be indices of experts, which float32 stores exactly
            dtype = torch.float32 if read_only(point) else self.dtype
            rows[point] = torch.zeros(self.slots, width, dtype=dtype, device=self.state.device)
        return rows[point]

    def apply(self, delta: Delta) -> dict[int, StepError]:
        """Store the vectors that new sequences add at tap points, and copy them to the forks of a sequence.

        Return slot -> error for the slots whose vectors do not fit in memory.
        """
        join = delta.join
        to = self.state.to
        failed: dict[int, StepError] = {}
        if join is not None:
            if self.steering:
                slots = to(join.slot).long()
                for column in self.steering.values():
                    column.index_fill_(0, slots, 0)
            at = 0
            for row, number in join.steer.tolist():
                point = self.names[number]
                slot = int(join.slot[row])
                end = at + self.points[point]
                vector = join.vectors[at:end]
                at = end
                if not self._has_room(point):
                    failed[slot] = StepError("rows", "", NO_MEMORY.format(point))
                    continue
                steered = self.steering[point][slot]
                steered.copy_(to(vector), non_blocking=True)
        if len(delta.fork) and self.steering:
            source = to(delta.fork[:, 0]).long()
            child = to(delta.fork[:, 1]).long()
            for column in self.steering.values():
                column[child] = column[source]
        return failed

    def _has_room(self, point: str) -> bool:
        """Allocate the vectors [S, width] of a tap point if necessary; return whether all ranks have memory for them.

        If one rank has no memory, the vectors of the point are freed on all."""
        if point in self.steering:
            return True
        with suppress(torch.OutOfMemoryError):
            self._rows(self.steering, point)
        if self.ranks is not None:
            (everywhere,) = self.ranks.least([point in self.steering])
            if not everywhere:
                self.steering.pop(point, None)
        return point in self.steering

    # ---- a step --------------------------------------------------------------------------------------------------

    def of_step(self, plan: StepPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of the tap points at which rows of a step add a vector, and of those that they read.

        The index of the point "logits" is left out of both.
        """
        if not len(plan.taps) and not len(plan.steered):
            return (), ()
        logits = len(self.names) - 1
        read = set(plan.taps[:, 0].tolist())
        read.discard(logits)
        return self._steered(plan), tuple(sorted(read))

    def _steered(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the indices of the tap points at which rows of a step add a vector.

        Points whose vectors did not fit in memory are left out, because their rows have failed already."""
        steered = plan.steered.tolist()
        return tuple(n for n in steered if self.names[n] in self.steering)

    def eager(
        self,
        plan: StepPlan,
        tokens: Mapping[str, np.ndarray],
        meta: AttnMeta,
        found: dict[str, Tensor],
    ) -> TapsOfStep | None:
        """Return the object that reads and changes the values at tap points in a step without a capture; None if no row
        needs it.

        ``tokens`` maps a tap point to the indices i64 [n] of the tokens to read.  While the model runs, their values
        [n, width] are stored in ``found``."""
        given = len(plan.given) > 0
        if not len(plan.taps) and not len(plan.steered) and not given:
            return None
        indices = {point: self.state.to(at) for point, at in tokens.items() if point != LOGITS}

        def keep(point: str, x: Tensor) -> None:
            found[point] = x[indices[point]]

        routes = {}
        if given:
            experts = self.state.to(self._given_tokens(plan))
            routes = self._by_point(experts)
        steered = self._steered(plan)
        return self._of_step(steered, meta, frozenset(indices), keep, routes)

    def _given_tokens(self, plan: StepPlan) -> np.ndarray:
        """Return the experts i32 [T, sum of widths] that requests set for the tokens of a step; -1 leaves the choice to
        the router."""
        total = int(plan.q_len.sum())
        found = np.full((total, self.given_width), OWN, np.int32)
        begins = plan.q_len.cumsum() - plan.q_len
        rows, counts = plan.given.T
        before = counts.cumsum() - counts
        shift = begins[rows] - before
        tokens = shift.repeat(counts)
        tokens += np.arange(len(tokens))
        found[tokens] = plan.routes.reshape(len(tokens), -1)
        return found

    def _by_point(self, rows: Tensor) -> dict[str, Tensor]:
        """Divide experts [T, sum of widths] by tap point, into contiguous tensors i32 [T, k]."""
        widths = list(self.given.values())
        parts = [part.contiguous() for part in rows.split(widths, dim=1)]
        return dict(zip(self.given, parts, strict=True))

    def give(self, plan: StepPlan, rows: int) -> None:
        """Copy the experts that requests set for a captured decode step to its memory; the step is padded to ``rows``
        rows."""
        buffer = self._given_buffer()
        count = len(plan.slots)
        experts = self.state.to(self._given_tokens(plan))
        buffer[:count].copy_(experts, non_blocking=True)
        buffer[count:rows].fill_(OWN)

    def _given_buffer(self) -> Tensor:
        """Return ``given_rows``, and allocate it at the first use."""
        if self.given_rows is None:
            size = self.slots, self.given_width
            self.given_rows = torch.full(size, OWN, dtype=torch.int32, device=self.state.device)
        return self.given_rows

    def captured(
        self, steered: tuple[int, ...], read: tuple[int, ...], meta: AttnMeta, given: bool = False
    ) -> TapsOfStep:
        """Return the object that reads and changes the values at tap points in a captured step.

        ``steered`` and ``read`` are indices of tap points.  The values of all rows are copied to ``buffers``.  With
        ``given``, a replay reads the experts that ``give`` has copied."""
        points = [self.names[number] for number in read]
        buffers = {point: self._rows(self.buffers, point) for point in points}

        def keep(point: str, x: Tensor) -> None:
            buffers[point][: len(x)].copy_(x)

        routes = {}
        if given:
            rows = self._given_buffer()[: len(meta.row)]
            routes = self._by_point(rows)
        return self._of_step(steered, meta, frozenset(buffers), keep, routes)

    def replayed(self, tokens: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Return the values [n, width] of each tap point after the replay of a decode step.

        ``tokens`` maps a tap point to the indices i64 [n] of its tokens.  Each row of a decode step has one token, so
        these are indices of rows too."""
        found = {}
        for point, at in tokens.items():
            if point != LOGITS:
                found[point] = self._rows_at(self.buffers[point], at)
        return found

    def _rows_at(self, buffer: Tensor, at: np.ndarray) -> Tensor:
        """Return the rows ``at`` (ascending) of a buffer: a view if they are the first rows, else a copy."""
        n = len(at)
        if at[-1] == n - 1:
            return buffer[:n]
        return buffer[self.state.to(at)]

    def flat(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return the values of all tap points as one f32 tensor, concatenated in the order of the points."""
        values = [found[point].float().ravel() for point in self.names if point in found]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _of_step(
        self, steered: Any, meta: AttnMeta, read: frozenset[str], keep: Any, routes: Mapping[str, Tensor]
    ) -> TapsOfStep:
        points = [self.names[number] for number in steered]
        steering = {point: self.steering[point] for point in points}
        slot_of = meta.slots[meta.row]
        return TapsOfStep(steering, slot_of, read, keep, routes)

    def tokens(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """Return tap point -> indices i64 [n] in the step of the tokens to read there, ascending."""
        ends = plan.q_len.cumsum()
        found = {}
        for number, rows, first in by_point(plan.taps):
            n = plan.q_len[rows] - first
            before = n.cumsum() - n
            shift = ends[rows] - n - before
            tokens = shift.repeat(n)
            tokens += np.arange(len(tokens))
            found[self.names[number]] = tokens
        return found
