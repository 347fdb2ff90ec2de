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
    """The points of a model, and the memory for vectors that are added and values that are read.

    ``points`` maps the name of a point to its width, with "logits" last; it is empty if the model has no points.
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
        # point at which a step may give experts -> its width
        self.given = {point: self.points[point] for point in given_points(model) if point in self.points}
        self.given_rows: Tensor | None = None  # i32 [S, sum of widths] given experts of captured decode steps
        self.steering: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}  # [S, width] values of the rows of captured decode steps

    def _rows(self, rows: dict[str, Tensor], point: str) -> Tensor:
        """Return the tensor [S, width] of a point in ``rows``, and create it with zeros at the first use."""
        if point not in rows:
            width = self.points[point]
            # values of a read-only point may be expert numbers, which float32 stores exactly
            dtype = torch.float32 if read_only(point) else self.dtype
            rows[point] = torch.zeros(self.slots, width, dtype=dtype, device=self.state.device)
        return rows[point]

    def apply(self, delta: Delta) -> dict[int, StepError]:
        """Store the vectors of sequences that join, and copy the vectors of sequences that fork.

        Return an error for each slot whose vectors do not fit in memory.
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
                self.steering[point][slot].copy_(to(vector), non_blocking=True)
        if len(delta.fork) and self.steering:
            source = to(delta.fork[:, 0]).long()
            child = to(delta.fork[:, 1]).long()
            for column in self.steering.values():
                column[child] = column[source]
        return failed

    def _has_room(self, point: str) -> bool:
        """Allocate the vectors of a point if necessary; return whether there is memory on all ranks.

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
        """Return the numbers of the points at which rows of a step add a vector, and of the points that they read.

        The point "logits" is left out of both.
        """
        if not len(plan.taps) and not len(plan.steered):
            return (), ()
        logits = len(self.names) - 1
        read = set(plan.taps[:, 0].tolist()) - {logits}
        return self._steered(plan), tuple(sorted(read))

    def _steered(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the numbers of the points at which a vector is added, without points that have no memory.

        The rows that add a vector at a point without memory have failed already."""
        return tuple(n for n in plan.steered.tolist() if self.names[n] in self.steering)

    def eager(
        self,
        plan: StepPlan,
        tokens: Mapping[str, np.ndarray],
        meta: AttnMeta,
        found: dict[str, Tensor],
    ) -> TapsOfStep | None:
        """Return the taps of a step of separate launches, or None if it has none.

        While the model runs, the values [n, width] of each point at its ``tokens`` i64 [n] are stored in ``found``."""
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
        return self._of_step(self._steered(plan), meta, frozenset(indices), keep, routes)

    def _given_tokens(self, plan: StepPlan) -> np.ndarray:
        """Return the given experts i32 [T, sum of widths] of all tokens of a step, -1 for the router's own choice."""
        size = int(plan.q_len.sum()), sum(self.given.values())
        found = np.full(size, OWN, np.int32)
        begins = plan.q_len.cumsum() - plan.q_len
        rows, counts = plan.given.T
        before = counts.cumsum() - counts
        shift = begins[rows] - before
        tokens = shift.repeat(counts) + np.arange(counts.sum())
        found[tokens] = plan.routes.reshape(len(tokens), -1)
        return found

    def _by_point(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the columns i32 [T, k] of each point, contiguous, of given experts [T, sum of widths]."""
        parts = rows.split(list(self.given.values()), dim=1)
        return {point: part.contiguous() for point, part in zip(self.given, parts, strict=True)}

    def give(self, plan: StepPlan, rows: int) -> None:
        """Set the given experts of a captured decode step that is padded to ``rows`` rows."""
        buffer = self._given_buffer()
        count = len(plan.slots)
        experts = self.state.to(self._given_tokens(plan))
        buffer[:count].copy_(experts, non_blocking=True)
        buffer[count:rows].fill_(OWN)

    def _given_buffer(self) -> Tensor:
        """Return ``given_rows``, and allocate it at the first use."""
        if self.given_rows is None:
            size = self.slots, sum(self.given.values())
            self.given_rows = torch.full(size, OWN, dtype=torch.int32, device=self.state.device)
        return self.given_rows

    def captured(
        self, steered: tuple[int, ...], read: tuple[int, ...], meta: AttnMeta, given: bool = False
    ) -> TapsOfStep:
        """Return the taps of a captured step.  The values of all rows are copied to ``buffers``.

        With ``given``, a replay reads the given experts that ``give`` has set."""
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
        """Return the values of each point after the replay of a decode step, as ``eager`` stores them in ``found``.

        Each row of a decode step has one token, so numbers of tokens are numbers of rows."""
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
        """Return all values as one f32 tensor, concatenated in the order of the points."""
        values = [found[point].float().ravel() for point in self.names if point in found]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _of_step(
        self, steered: Any, meta: AttnMeta, read: frozenset[str], keep: Any, routes: Mapping[str, Tensor]
    ) -> TapsOfStep:
        points = [self.names[number] for number in steered]
        steering = {point: self.steering[point] for point in points}
        return TapsOfStep(steering, meta.slots[meta.row], read, keep, routes)

    def tokens(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """Return a dict from each point that is read to the numbers i64 [n] of the tokens to read, ascending."""
        ends = plan.q_len.cumsum()
        found = {}
        for number, rows, first in by_point(plan.taps):
            n = plan.q_len[rows] - first
            before = n.cumsum() - n
            shift = ends[rows] - n - before
            found[self.names[number]] = shift.repeat(n) + np.arange(n.sum())
        return found
