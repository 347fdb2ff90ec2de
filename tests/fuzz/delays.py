"""Delays at meetings of host and device, which give races time to occur.

    results   a step that has run counts as unfinished, so that steps also run ahead on a CPU
    device    (CUDA) kernels of FORWARD and SAMPLE begin up to a millisecond after the host enqueued them

The delays are a function of the case's seed and of the order of calls.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

LONGEST = 2_000_000  # cycles of the device's clock, about a millisecond


@contextlib.contextmanager
def planted(share: float, seed: int, device: str) -> Iterator[None]:
    """Delay a ``share`` of the calls inside the context."""
    from minivllm.device.worker.runner import Runner
    from minivllm.device.worker.running import Running

    if not share:
        yield
        return
    rng = random.Random(f"delays {seed}")
    finished, forward, sample = Running.finished, Runner.forward, Runner.sample

    def late(running: Any) -> bool:
        return rng.random() >= share and finished(running)

    def sleepy(call: Any) -> Any:
        import torch

        def delayed(*args: Any) -> Any:
            if rng.random() < share:
                torch.cuda._sleep(rng.randrange(LONGEST))
            return call(*args)

        return delayed

    Running.finished = late  # type: ignore[method-assign]
    if device == "cuda":
        Runner.forward, Runner.sample = sleepy(forward), sleepy(sample)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Running.finished, Runner.forward, Runner.sample = finished, forward, sample  # type: ignore[method-assign]
