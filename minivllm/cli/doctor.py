"""``minivllm doctor``: what an engine over several processes needs of the machine, tried out and measured.

device     what there is, and which devices reach each other's memory
memory     shared memory, which plans and results go through
messages   to another process and back, as a step's plan and result go
ranks      so many processes meet, and sum: the sums are checked
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
from minivllm.runtime.processes.channel import shared_file
from minivllm.runtime.processes.child import Child, ChildEnded

PROBE = "minivllm.plugins.executor.probe:main"
ECHO, MEET = 1, 2  # kinds of the probe's messages
SIZE = 64 << 20  # bytes of shared memory that are written
ECHOES = 200
STARTING = 60.0  # seconds for a process to answer its first message
MOST = 8  # ranks
Found = Iterator[tuple[str, str]]  # what it is of, and what was found; more lines of one thing have no name


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    text = "Try out and measure what an engine over several processes needs of this machine."
    sub = command("doctor", "cli.doctor:doctor", text)
    sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    sub.add_argument("--ranks", type=int, help=f"processes that meet, up to {MOST} (default: the devices; 2 on a CPU)")
    sub.add_argument("--seconds", type=float, default=30.0, help="that they may take to meet (default 30)")


def doctor(args: argparse.Namespace) -> int:
    """Prints what it finds; the exit code of what is wrong first, 0 if nothing is."""
    code = 0
    device = find_device(args.device)
    ranks = args.ranks if args.ranks is not None else 2 if device.kind == "cpu" else min(MOST, device.devices)
    if not 1 <= ranks <= MOST:
        raise ResourceError(f"--ranks {ranks}: want 1 to {MOST}")
    if device.kind != "cpu" and ranks > device.devices:
        raise ResourceError(f"--ranks {ranks}: each has a device, and torch sees {device.devices}")
    for check in (_versions, _device, _memory, _processes):
        try:
            for name, words in check(device, ranks, args.seconds):
                print(f"{name:10} {words}", flush=True)
        except (MinivllmError, ChildEnded, OSError) as e:
            code = code or getattr(e, "exit_code", ResourceError.exit_code)
            print(f"{check.__name__[1:]:10} FAILED: {e}", flush=True)
    return code


def _versions(device: Device, ranks: int, seconds: float) -> Found:
    import torch
    import torch.distributed as dist

    yield "versions", f"minivllm {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    if not dist.is_available():
        raise ResourceError("this build of torch has no torch.distributed: want one that has")
    there = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    yield "", f"processes may sum by {' and '.join(there) or 'nothing'}"
    if (want := "gloo" if device.kind == "cpu" else "nccl") not in there:
        raise ResourceError(f"on {device.kind} processes sum by {want}, which this build of torch lacks")


def _device(device: Device, ranks: int, seconds: float) -> Found:
    several = f", {device.devices} of it" if device.devices > 1 else ""
    yield "device", f"{device.kind}: {device.name}, {device.memory / 2**30:.1f} GiB{several}"
    if device.kind == "cpu":
        yield "", f"{os.cpu_count()} cores, {free_ram() / 2**30:.1f} GiB of memory free"
        return
    import torch

    for i in range(device.devices):
        free, total = torch.cuda.mem_get_info(i)
        others = [j for j in range(device.devices) if j != i and torch.cuda.can_device_access_peer(i, j)]
        reach = f"reaches the memory of {', '.join(map(str, others))}" if others else "reaches no other's memory"
        name = torch.cuda.get_device_name(i)
        yield "", f"{i}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {reach}"


def _memory(device: Device, ranks: int, seconds: float) -> Found:
    file = shared_file(SIZE)
    try:
        memory, some = mmap.mmap(file, SIZE), bytes(1 << 20)
        begun = time.perf_counter()
        for at in range(0, SIZE, len(some)):
            memory[at : at + len(some)] = some
        took = time.perf_counter() - begun
        memory.close()
    finally:
        os.close(file)
    where = "without a name (memfd)" if hasattr(os, "memfd_create") else "a file in the folder for temporary ones"
    yield "memory", f"shared, {where}: {SIZE >> 20} MiB written in {took * 1e3:.0f} ms, {SIZE / took / 1e9:.1f} GB/s"
    if not os.path.exists("/proc/self/fd"):
        raise ResourceError(f"processes meet by /proc/self/fd, which {sys.platform} lacks: want tensor_parallel_size=1")


def _processes(device: Device, ranks: int, seconds: float) -> Found:
    children: list[Child] = []
    try:
        begun = time.monotonic()
        children += [Child(PROBE) for _ in range(ranks)]
        for rank, child in enumerate(children):
            _ask(child, ECHO, b"", rank, STARTING)
        started = time.monotonic() - begun
        took = []
        for _ in range(ECHOES):
            begun = time.perf_counter()
            _ask(children[0], ECHO, bytes(4096), 0, seconds)
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


def _sums(children: list[Child], device: Device, seconds: float) -> Found:
    file, size = shared_file(0), len(children)
    try:
        for rank, child in enumerate(children):
            told = {"rank": rank, "size": size, "device": device.kind, "seconds": seconds}
            child.send(MEET, [json.dumps(told).encode()], file)
    finally:
        os.close(file)
    found = [json.loads(_answer(child, rank, 3 * seconds)) for rank, child in enumerate(children)]
    for rank, one in enumerate(found):
        if "failed" in one:
            raise ResourceError(f"rank {rank} of {size}: {one['failed']}")
    slowest: dict[str, Any] = {name: max(one[name] for one in found) for name in found[0]}
    backend = "gloo" if device.kind == "cpu" else "NCCL"
    yield "ranks", f"{size} met by {backend} in {slowest.pop('meet'):.1f} s (torch's import among them); sums are right"
    for name, ms in slowest.items():
        yield "", f"{'all_reduce of ' + name if name[0].isdigit() else name}: {ms:.3f} ms"


def _ask(child: Child, kind: int, data: bytes, rank: int, seconds: float) -> bytearray:
    child.send(kind, [data])
    return _answer(child, rank, seconds)


def _answer(child: Child, rank: int, seconds: float) -> bytearray:
    end = time.monotonic() + seconds
    while (message := child.receive(wait=False)) is None:
        if (ended := child.ended()) is not None:
            raise ended
        if time.monotonic() > end:
            raise ResourceError(f"process {rank} (pid {child.pid}) has not answered for {seconds:.0f} s")
        child.rest(0.1)
    return message.data
