"""``minivllm doctor``: test and measure the parts of the machine that an engine of several processes uses.

device     the devices, and which of them can read each other's memory
memory     shared memory, which carries plans and results between processes
processes  messages to another process and back, like a step's plan and result
ranks      several processes connect and sum tensors; the sums are checked
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from minivllm import __version__
from minivllm.device.hardware import Device, find_device, free_ram
from minivllm.errors import MinivllmError, ResourceError
from minivllm.limits import usable_cores
from minivllm.runtime.processes.channel import shared_file
from minivllm.runtime.processes.child import Child, ChildEnded

PROBE = "minivllm.plugins.executor.probe:main"
ECHO, MEET = 1, 2  # kinds of messages to a probe process: send the message back, and connect with the other processes
SIZE = 64 << 20  # bytes of shared memory that are written
ECHOES = 200
STARTING = 60.0  # time limit in seconds for the first message of a process
MOST = 8  # ranks
# (name of the check, line of its report); a further line of the same check has the name ""
Lines = Iterator[tuple[str, str]]


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command ``doctor``; ``command(name, ...)`` makes its parser."""
    text = "Test and measure the parts of this machine that an engine of several processes uses."
    sub = command("doctor", "cli.doctor:doctor", text)
    sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    text = f"processes that meet, up to {MOST} (default: one for each device; 2 on a CPU)"
    sub.add_argument("--ranks", type=int, help=text)
    sub.add_argument("--seconds", type=float, default=30.0, help="time limit for the processes to meet (default 30)")


def doctor(args: argparse.Namespace) -> int:
    """Run all checks, print their results, and return the exit code of the first that failed, 0 if none did."""
    code = 0
    device = find_device(args.device)
    ranks = args.ranks
    if ranks is None:
        ranks = 2 if device.kind == "cpu" else min(MOST, device.devices)
    if not 1 <= ranks <= MOST:
        raise ResourceError(f"--ranks {ranks}: expected 1 to {MOST}")
    if device.kind != "cpu" and ranks > device.devices:
        raise ResourceError(f"--ranks {ranks}: each needs a device, and torch sees {device.devices}")
    for check in (_versions, _device, _memory, _processes):
        try:
            for name, text in check(device, ranks, args.seconds):
                print(f"{name:10} {text}", flush=True)
        except (MinivllmError, ChildEnded, OSError) as exc:
            code = code or getattr(exc, "exit_code", ResourceError.exit_code)
            print(f"{check.__name__[1:]:10} FAILED: {exc}", flush=True)
    return code


def _versions(device: Device, ranks: int, seconds: float) -> Lines:
    """Yield the lines that report the versions.  ResourceError unless torch has the library by which processes sum
    tensors."""
    import torch
    import torch.distributed as dist

    yield "versions", f"minivllm {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    if not dist.is_available():
        raise ResourceError("this build of torch has no torch.distributed: install one that has")
    libraries = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    yield "", f"processes may sum by {' and '.join(libraries) or 'nothing'}"
    needed = "gloo" if device.kind == "cpu" else "nccl"
    if needed not in libraries:
        raise ResourceError(f"on {device.kind} processes sum by {needed}, which this build of torch lacks")


def _device(device: Device, ranks: int, seconds: float) -> Lines:
    """Yield lines that describe the devices, their free memory, and the pairs of devices that can read each other's
    memory."""
    several = f", {device.devices} of it" if device.devices > 1 else ""
    yield "device", f"{device.kind}: {device.name}, {device.memory / 2**30:.1f} GiB{several}"
    if device.kind == "cpu":
        yield "", f"{usable_cores()} cores, {free_ram() / 2**30:.1f} GiB of memory free"
        return
    import torch

    for i in range(device.devices):
        free, total = torch.cuda.mem_get_info(i)
        others = [j for j in range(device.devices) if j != i and torch.cuda.can_device_access_peer(i, j)]
        reach = f"reaches the memory of {', '.join(map(str, others))}" if others else "reaches no other's memory"
        name = torch.cuda.get_device_name(i)
        yield "", f"{i}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {reach}"


def _memory(device: Device, ranks: int, seconds: float) -> Lines:
    """Yield a line with the speed at which shared memory is written.  ResourceError if the system has no
    /proc/self/fd."""
    file = shared_file(SIZE)
    try:
        memory = mmap.mmap(file, SIZE)
        chunk = bytes(1 << 20)
        begun = time.perf_counter()
        for at in range(0, SIZE, len(chunk)):
            memory[at : at + len(chunk)] = chunk
        took = time.perf_counter() - begun
        memory.close()
    finally:
        os.close(file)
    where = "without a name (memfd)" if hasattr(os, "memfd_create") else "a file in the folder for temporary ones"
    yield "memory", f"shared, {where}: {SIZE >> 20} MiB written in {took * 1e3:.0f} ms, {SIZE / took / 1e9:.1f} GB/s"
    if not os.path.exists("/proc/self/fd"):
        raise ResourceError(f"processes meet by /proc/self/fd, which {sys.platform} lacks: use tensor_parallel_size=1")


def _processes(device: Device, ranks: int, seconds: float) -> Lines:
    """Start a process per rank, and yield lines with the time of messages to the first one; with several ranks check
    their sums."""
    children: list[Child] = []
    try:
        begun = time.monotonic()
        children += [Child(PROBE) for _ in range(ranks)]
        for rank, child in enumerate(children):
            _request(child, ECHO, b"", rank, STARTING)
        started = time.monotonic() - begun
        took = []
        for _ in range(ECHOES):
            begun = time.perf_counter()
            _request(children[0], ECHO, bytes(4096), 0, seconds)
            took.append(time.perf_counter() - begun)
        yield "processes", f"{ranks} started in {started:.1f} s"
        yield "", f"4 KiB to one and back: {statistics.median(took) * 1e6:.0f} us (median of {ECHOES})"
        if ranks > 1:
            yield from _sums(children, device, seconds)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.end(2.0)


def _sums(children: list[Child], device: Device, seconds: float) -> Lines:
    """Make the processes connect and sum tensors, and yield lines with the times of the slowest one.

    ResourceError if a process failed."""
    size = len(children)
    file = shared_file(0)
    try:
        for rank, child in enumerate(children):
            message = {"rank": rank, "size": size, "device": device.kind, "seconds": seconds}
            child.send(MEET, [json.dumps(message).encode()], file)
    finally:
        os.close(file)
    results = [json.loads(_answer(child, rank, 3 * seconds)) for rank, child in enumerate(children)]
    for rank, result in enumerate(results):
        if "failed" in result:
            raise ResourceError(f"rank {rank} of {size}: {result['failed']}")
    slowest: dict[str, Any] = {name: max(result[name] for result in results) for name in results[0]}
    backend = "gloo" if device.kind == "cpu" else "NCCL"
    yield "ranks", f"{size} met by {backend} in {slowest.pop('meet'):.1f} s (torch's import among them); sums are right"
    for name, ms in slowest.items():
        text = f"all_reduce of {name}" if name[0].isdigit() else name
        yield "", f"{text}: {ms:.3f} ms"


def _request(child: Child, kind: int, data: bytes, rank: int, seconds: float) -> bytearray:
    """Send a message of a kind to a process, and return its answer."""
    child.send(kind, [data])
    return _answer(child, rank, seconds)


def _answer(child: Child, rank: int, seconds: float) -> bytearray:
    """Wait for the next message of a process, and return it.

    ResourceError after ``seconds``; ChildEnded if the process died.
    """
    end = time.monotonic() + seconds
    while (message := child.receive(wait=False)) is None:
        if (ended := child.ended()) is not None:
            raise ended
        if time.monotonic() > end:
            raise ResourceError(f"process {rank} (pid {child.pid}) has not answered for {seconds:.0f} s")
        child.rest(0.1)
    return message.data
