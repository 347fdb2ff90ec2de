"""Measure the peak speeds of a machine and the time of operations, to compare an operation with its lower bound.

An operation that moves b bytes and needs f arithmetic operations takes at least max(b / memory speed, f / peak), its
floor.  This is the roofline model of Williams et al. (CACM 52(4), 2009).  Both peaks are measured, not taken from a
data sheet.  An operation that is faster than its floor has found data in a cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

ENOUGH = 0.01  # least duration of a measurement in seconds; short operations are repeated
TRIES = 5  # number of measurements of each peak; the best one is used
BUFFER = {"cpu": 128 << 20, "cuda": 512 << 20}  # bytes that are moved, more than caches hold
SIDE = {"cpu": 1024, "cuda": 8192}  # rows, columns and inner length of the matrix product

Call = Callable[[], Any]


@dataclass(frozen=True)
class MachinePeaks:
    """Measured peaks: bytes per second from and to memory, and arithmetic operations per second of a matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def floor(self, size: float, flops: float) -> tuple[float, str]:
        """Return the least seconds to move ``size`` bytes and compute ``flops``, and which of the two takes longer."""
        moving = size / self.bytes_per_s
        computing = flops / self.flops_per_s
        return max(moving, computing), "memory" if moving >= computing else "arithmetic"


def machine_peaks(device: str, dtype: torch.dtype) -> MachinePeaks:
    """Measure the peaks of a device ("cpu", "cuda"), with torch's number of threads."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    clock = OperationClock(device)
    speed = _memory_speed(clock, device, dtype, BUFFER[kind])
    a, b = (torch.randn(SIDE[kind], SIDE[kind], device=device).to(dtype) for _ in range(2))
    product_seconds = clock.best(lambda: a @ b)
    return MachinePeaks(speed, 2 * SIDE[kind] ** 3 / product_seconds)


def _memory_speed(clock: OperationClock, device: str, dtype: torch.dtype, size: int) -> float:
    """Return the bytes per second of the fastest of three operations: copy, sum, and a row times a matrix."""
    wide = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    other = torch.empty_like(wide)
    row = torch.ones(1, 4096, dtype=dtype, device=device)
    matrix = wide.view(-1, 4096)
    copy = 2 * size / clock.best(lambda: other.copy_(wide))
    add = size / clock.best(wide.sum)
    multiply = size / clock.best(lambda: F.linear(row, matrix))
    return max(copy, add, multiply)


class OperationClock:
    """Measures calls on a device.

    On a GPU a round of calls is captured as a graph and replayed, as the engine does with a step.  Calls that cannot be
    captured are launched one by one.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self._recorder: Any = None
        if self.cuda:
            from minivllm.device.worker.capture import GraphRecorder

            self._recorder = GraphRecorder()

    def prepare(self, calls: Sequence[Call], captured: bool = True) -> RepeatedRound:
        """Run a round of calls once as a warm-up, and return it for measurements.

        ``captured`` False means that the round is not captured, because its calls replay graphs themselves or are
        measured as separate launches.
        """

        def run() -> None:
            for call in calls:
                call()

        run()
        if self.cuda and captured:
            try:
                graph, _ = self._recorder.capture(run)
            except RuntimeError:
                graph = None
            if graph is not None:
                return RepeatedRound(graph.replay, len(calls), True, "captured")
        how = "launched" if captured or not self.cuda else "captured"
        return RepeatedRound(run, len(calls), self.cuda, how)

    def best(self, call: Call) -> float:
        """Return the seconds of a call in the fastest of some measurements."""
        prepared = self.prepare([call], captured=False)
        return min(prepared.seconds() for _ in range(TRIES))


@dataclass
class RepeatedRound:
    """A round ``run`` of ``count`` calls, repeated until the time is long enough for the clock.

    ``how`` is "captured" or "launched".
    """

    run: Call
    count: int
    cuda: bool
    how: str
    rounds: int = 1

    def __post_init__(self) -> None:
        round_seconds = max(self.seconds() * self.count, 1e-9)
        self.rounds = max(1, math.ceil(ENOUGH / round_seconds))

    def seconds(self) -> float:
        """Measure the rounds and return the seconds of a call."""
        if not self.cuda:
            begun = time.perf_counter()
            for _ in range(self.rounds):
                self.run()
            return (time.perf_counter() - begun) / (self.rounds * self.count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.rounds):
            self.run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / (self.rounds * self.count)
