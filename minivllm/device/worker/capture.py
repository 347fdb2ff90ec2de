"""Recording CUDA graphs: one at a time in a process, and whatever happens the thread is back on its own stream.

    ALONE held:   own stream ──wait──► [ run once ] ──► [ begin ─ run ─ end ] ──wait──► own stream
                                       compiles, takes scratch      recorded, nothing runs

What goes wrong otherwise, each seen as wrong tokens or a device-side assert of some later step:

* torch lets one capture be under way in a process; a second one, begun by another engine's thread, breaks both.
* CUDA refuses to wait for a whole device while a stream of it is being captured, and ends the capture as well.
* ``torch.cuda.graph`` leaves its thread on the capture stream if the capture cannot be begun or ended.  All that the
  thread enqueues from then on runs beside what is on its way on the stream that it had before.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

ALONE = threading.RLock()  # held by who captures, and by who waits for the device as a whole


@lru_cache(maxsize=16)
def _stream(device: int) -> torch.cuda.Stream:
    """The stream that captures are recorded on: one for all, so that their memory can be shared."""
    return torch.cuda.Stream(device)


class GraphRecorder:
    """Records captures that share one memory, because they run one after another."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # torch still counts them as users of their pools
        self._broken: list[torch.cuda.CUDAGraph] = []

    def capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """(the graph of what ``run`` enqueues, what ``run`` returned while it was recorded).

        ``run`` is called once as it is, so that kernels are compiled and scratch is taken, and then to be recorded; it
        must neither wait for the device nor depend on what a call left behind.  What ``run`` raises, and a capture that
        CUDA refuses, come out as they are; nothing is recorded then.
        """
        before = torch.cuda.current_stream()
        stream = _stream(torch.cuda.current_device())
        with ALONE:
            stream.wait_stream(before)
            try:
                with torch.cuda.stream(stream):
                    run()
                    try:
                        return self._record(run)
                    except torch.OutOfMemoryError:
                        # graphs have memory of their own: what others keep goes back
                        torch.cuda.synchronize()
                        torch.cuda.empty_cache()
                        return self._record(run)
            finally:
                before.wait_stream(stream)

    def _record(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """On the current stream."""
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken by what was raised
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            # torch may count the pool as being recorded to for ever: those to come get another one
            self._broken.append(graph)
            self.pool = torch.cuda.graph_pool_handle()
            raise
        return graph, result


def synchronize() -> None:
    """Wait for the work queued on the device.  Captures of other threads stay intact."""
    with ALONE:
        torch.cuda.synchronize()


def release_unused() -> None:
    """Collect unreachable tensors, then return the allocator's unused memory to the device.

    A model and its attention back end refer to each other, so that only the garbage collector frees them.
    """
    gc.collect()
    with ALONE:
        torch.cuda.empty_cache()
