"""Record CUDA graphs: one at a time in a process.  Afterwards, also after an error, the thread is on its own stream.

    ALONE held:   own stream ──wait──► [ run once ] ──► [ begin ─ run ─ end ] ──wait──► own stream
                                       compiles, takes scratch      recorded, nothing runs

This avoids three failures.  Each caused wrong tokens or a device-side assert in a later step:

* torch allows one capture at a time in a process.  A second capture, from the thread of another engine, breaks both.
* If a thread waits for the whole device while a stream is captured, CUDA raises an error and ends the capture.
* If a capture cannot begin or end, ``torch.cuda.graph`` leaves its thread on the capture stream.  Later work of the
  thread then runs concurrently with the work that is still queued on its previous stream.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

ALONE = threading.RLock()  # held while a graph is captured, and while a thread waits for the whole device


@lru_cache(maxsize=16)
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which captures of a device are recorded.

    All captures use the same stream, so that they can share memory."""
    return torch.cuda.Stream(device)


class GraphRecorder:
    """Records CUDA graphs that share one memory pool, because they run one after another."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.launch_ms = 0.0  # milliseconds in which the host launched the kernels of the last capture without a graph
        # graphs whose capture failed; they are kept, because torch still counts them as users of their memory pools
        self._broken: list[torch.cuda.CUDAGraph] = []

    def capture(
        self, run: Callable[[], Any], before: Callable[[], Any] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Record the kernels that ``run`` launches; return (the graph, the result of ``run`` in the recorded call).

        ``before`` is called first without recording, so that kernels are compiled and scratch memory is allocated; None
        means ``run``.  It must launch every kernel that ``run`` launches.  ``run`` is then called while it is recorded.
        It must not wait for the device, and must not depend on the effects of an earlier call.  Exceptions of both and
        errors of CUDA are raised unchanged; nothing is recorded then.
        """
        with ALONE, self._on_stream():
            (before or run)()
            try:
                return self._record(run)
            except torch.OutOfMemoryError:
                # a graph can only use memory of its pool, so memory that torch caches elsewhere is returned to the
                # device
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                return self._record(run)

    def rehearse(self, run: Callable[[], Any]) -> None:
        """Call ``run`` as ``capture`` does, on the stream of captures and with the lock, without recording a graph."""
        with self._on_stream():
            run()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Make the stream of captures the current stream; its work waits for the work queued on the thread's own
        stream."""
        before = torch.cuda.current_stream()
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            before.wait_stream(stream)

    def _record(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Record one call of ``run`` on the current stream; return the graph and the result of the call."""
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                begun = time.perf_counter()
                result = run()
                self.launch_ms = 1e3 * (time.perf_counter() - begun)
            except BaseException:
                # an exception of the captured function may have ended the capture already
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            # torch may regard the memory pool as in use for recording from then on, so later captures use a new pool
            self._broken.append(graph)
            self.pool = torch.cuda.graph_pool_handle()
            raise
        return graph, result


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of a replay in milliseconds, the shortest of three."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(3):
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        found.append(begun.elapsed_time(ended))
    return min(found)


def synchronize() -> None:
    """Wait for all work that is queued on the device, without breaking a capture in another thread."""
    with ALONE:
        torch.cuda.synchronize()


def release_unused() -> None:
    """Collect unreachable tensors, then return the allocator's unused memory to the device.

    A model and its attention back end refer to each other, so that only the garbage collector frees them.
    """
    gc.collect()
    with ALONE:
        torch.cuda.empty_cache()
