"""Ranks that capture their steps and share memory, without GPUs, as the worker of ``multiprocess`` in a test.

Captures are those of ``cpu_captures``, regions are files that all ranks map, and kernels run under Triton's
interpreter.  As on a GPU, a kernel that waits for another rank does not run while it is recorded, because the other
rank would not come.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from cpu_captures import CpuRecorder, Recording, cpu_captures
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from minivllm.device.layers import peer_memory
from minivllm.device.layers.communicator import ProcessGroup
from minivllm.device.worker import build, graphs
from minivllm.plugins.executor import multiprocess_worker

# Programs that wait for each other take turns on few cores, so there are only as many as the checks need.
peer_memory.BLOCKS, peer_memory.MOVERS, peer_memory.TILES, peer_memory.DRAWN = 2, 2, ((1, 32),), 4
recording = False


class RankRecorder(CpuRecorder):
    """A recorder whose recordings run the same calls on all ranks, except the gathering of logits, which only rank 0
    records.
    """

    def capture(self, run: Any, before: Any = None) -> tuple[Recording, Any]:
        global recording
        made, launch = super(), InterpretedFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if recording and kernel.__name__ == "gather":
                return None
            return launch(kernel, *args, **kwargs)

        turns = iter((False, True))

        def turn() -> Any:
            global recording
            recording = next(turns)
            return run()

        InterpretedFunction.run = launched
        try:
            return made.capture(turn)
        finally:
            InterpretedFunction.run, recording = launch, False


def share_memory(group: ProcessGroup) -> None:
    folder, size = os.environ["RANK_CAPTURES"], peer_memory.RegionLayout(group.size).bytes
    regions = [
        torch.from_file(f"{folder}/{rank}", shared=True, size=size, dtype=torch.uint8) for rank in range(group.size)
    ]
    torch.distributed.barrier()
    group.peers = peer_memory.PeerMemory(group.rank, torch.tensor([region.data_ptr() for region in regions]), regions)


def main(*given: str) -> None:
    torch.set_num_threads(1)
    with cpu_captures(), _disable_current_modes():
        graphs.GraphRecorder = RankRecorder
        build.has_kernels = lambda wiring: True
        peer_memory.PeerMemory.capturing = staticmethod(lambda: recording)
        ProcessGroup.share_memory = share_memory
        multiprocess_worker.main(*given)
