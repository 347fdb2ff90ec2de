"""What a machine can do at most, and how long an operation takes on it: the two sides of "beside its floor".

An operation that moves b bytes and needs f operations of arithmetic takes no less than max(b / memory speed, f / peak):
the roofline of Williams et al. (CACM 52(4), 2009).  Both roofs are measured here, not taken from a data sheet.  Who is
faster than its floor has found data in a cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

ENOUGH = 0.01  # seconds that a run of an operation takes at least, by repeating it
TRIES = 5  # of each roof; the best counts
BUFFER = {"cpu": 128 << 20, "cuda": 512 << 20}  # bytes that are moved, more than caches hold
SIDE = {"cpu": 1024, "cuda": 8192}  # rows, columns and inner length of the product

Call = Callable[[], Any]


@dataclass(frozen=True)
class MachinePeaks:
    """Measured: bytes a second from and to memory, and operations of arithmetic a second of a product."""

    bytes_per_s: float
    flops_per_s: float

    def floor(self, size: float, flops: float) -> tuple[float, str]:
        """Seconds of what moves ``size`` bytes and needs ``flops``, and which of the two it is bound by."""
        moved, computed = size / self.bytes_per_s, flops / self.flops_per_s
        return max(moved, computed), "memory" if moved >= computed else "arithmetic"


def machine_peaks(device: str, dtype: torch.dtype) -> MachinePeaks:
    """Of one device ("cpu", "cuda"), with as many threads as torch has."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    clock = OperationClock(device)
    speed = _memory_speed(clock, device, dtype, BUFFER[kind])
    a, b = (torch.randn(SIDE[kind], SIDE[kind], device=device).to(dtype) for _ in range(2))
    return MachinePeaks(speed, 2 * SIDE[kind] ** 3 / clock.best(lambda: a @ b))


def _memory_speed(clock: OperationClock, device: str, dtype: torch.dtype, size: int) -> float:
    """Bytes a second of the fastest of copying, of summing, and of multiplying one row by a matrix."""
    wide = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    other, row = torch.empty_like(wide), torch.ones(1, 4096, dtype=dtype, device=device)
    matrix = wide.view(-1, 4096)
    return max(
        2 * size / clock.best(lambda: other.copy_(wide)),
        size / clock.best(wide.sum),
        size / clock.best(lambda: F.linear(row, matrix)),
    )


class OperationClock:
    """Times calls on one device.  On a GPU a round of them is captured, as a step is, and replayed; what cannot be
    captured is launched one by one."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self._recorder: Any = None
        if self.cuda:
            from minivllm.device.worker.capture import GraphRecorder

            self._recorder = GraphRecorder()

    def prepare(self, calls: Sequence[Call], captured: bool = True) -> RepeatedRound:
        """A round of ``calls``, one after another, warmed up.  ``captured`` False: they replay captures themselves, or
        shall be launched."""

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
        """Seconds of the fastest of some runs."""
        prepared = self.prepare([call], captured=False)
        return min(prepared.seconds() for _ in range(TRIES))


class RepeatedRound:
    """``run`` makes ``count`` calls; ``seconds`` of one of them, over so many rounds that the clock can tell."""

    def __init__(self, run: Call, count: int, cuda: bool, how: str) -> None:
        self.run, self.count, self.cuda, self.how, self.rounds = run, count, cuda, how, 1
        self.rounds = max(1, math.ceil(ENOUGH / max(self.seconds() * count, 1e-9)))

    def seconds(self) -> float:
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
