"""A process with which ``minivllm doctor`` tests messages, the meeting of ranks, and the time of their sums."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from minivllm.errors import describe_error
from minivllm.runtime.processes.channel import Channel, ChannelClosed
from minivllm.runtime.processes.child import attach

ECHO, MEET, FOUND = 1, 2, 3  # kinds of messages; MEET and FOUND contain JSON
SHAPES = ((1, 4096), (256, 4096))
REPEATS = 20


def main(sock: str, memory: str) -> None:
    """Run the probe; ``sock`` and ``memory`` are file descriptors of the channel."""
    channel = attach(sock, memory)
    try:
        with contextlib.suppress(ChannelClosed):
            _serve(channel)
    finally:
        channel.close()


def _serve(channel: Channel) -> None:
    while (message := channel.receive(wait=True)) is not None:
        if message.kind == ECHO:
            channel.send(ECHO, [message.data])
            continue
        try:
            found = _meet(**json.loads(message.data), store=channel.file())
        except Exception as e:  # any error of the library is reported as the result
            found = {"failed": describe_error(e)}
        channel.send(FOUND, [json.dumps(found).encode()])


def _meet(rank: int, size: int, device: str, seconds: float, store: int) -> dict[str, Any]:
    """Join the process group of the ranks, and return the time of sums of tensors in ms, by shape."""
    begun = time.monotonic()
    import torch

    from minivllm.device.layers.communicator import ProcessGroup

    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    ranks = ProcessGroup(rank, size, device)
    ranks.join(f"/proc/self/fd/{store}", seconds)
    found: dict[str, Any] = {"meet": time.monotonic() - begun}
    try:
        for shape in SHAPES:
            x = torch.full(shape, rank + 1.0, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device)
            ranks.all_reduce(x)
            if (wrong := (x != size * (size + 1) / 2).sum().item()) > 0:
                raise RuntimeError(f"the sum over {size} ranks is wrong in {wrong} of {x.numel()} elements")
            x.zero_()
            found["x".join(map(str, shape))] = _ms(lambda x=x: ranks.all_reduce(x), device)
        numbers = torch.zeros(3, 64, dtype=torch.int64, device=device)
        found["broadcast"] = _ms(lambda: ranks.broadcast(numbers), device)
    finally:
        ranks.leave()
    return found


def _ms(call: Any, device: str) -> float:
    """Return the mean time of a call in ms, after some calls that are not measured."""
    import torch

    begun = 0.0
    for i in range(REPEATS + 5):
        if i == 5:
            if device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / REPEATS * 1e3
