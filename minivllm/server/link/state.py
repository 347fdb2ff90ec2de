"""What a server holds right now, for who looks for a leak: tables, blocks, memory, descriptors, threads, children.

``GET /debug/state`` shows it, with ``--admin`` only: the walk over the KV cache stops the engine for some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING, Any

from minivllm.errors import EngineDeadError
from minivllm.runtime.processes.memory import find_trim, rss_bytes

if TYPE_CHECKING:
    from minivllm.server.openai.generate import Service

    from .engine_loop import EngineLoop


def freeze_loaded() -> None:
    """All is loaded, and stays: the garbage collector need not look at it again, which takes a tenth of a second each
    time in the process of an engine, and a quarter of what /health waits for while 1,000 connections are made."""
    gc.collect()
    gc.freeze()


def process(trim: bool) -> dict[str, Any]:
    """Of this process; None for what the system does not tell.  ``trim``: unused memory is given back first."""
    if trim:
        gc.collect()
        if (give_back := find_trim()) is not None:
            give_back()
    fds = children = None
    with contextlib.suppress(OSError):
        fds = len(os.listdir("/proc/self/fd")) - 1  # the one that reads the list
        children = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children", "rb") as file:
                children += [int(pid) for pid in file.read().split()]
    return {
        "pid": os.getpid(),
        "rss_bytes": rss_bytes(),
        "fds": fds,
        "threads": threading.active_count(),
        "children": None if children is None else sorted(children),
    }


def engine(loop: EngineLoop, trim: bool) -> dict[str, Any]:
    """Of the engine and its process.  ``fault``: what the walk over every block and table found, or None;
    ``tap_points``: those of the model, and how wide each is."""
    made, fault = loop.engine, None
    try:
        made.check()
    except AssertionError as e:
        fault = str(e) or "a check without a message failed"
    pools = [
        {"total": pool.total - 1, "free": pool.free, "cached": pool.idle, "held": pool.held}
        for pool in made.cache.pools
    ]
    tables = {
        "requests": len(made.requests),
        "in_flight": len(made.in_flight),
        "rows": len(made.slots.running),
        "waiting": made.planner.n_waiting,
        "reserved": int(made.planner.reserved),
        "live": len(loop.live),
        "compiling": len(loop.compiling),
        "arriving": len(loop.arriving),
    }
    counts = {"accepted": loop.accepted, "finished": made.finished}
    taken = None  # an executor may not know
    with contextlib.suppress(NotImplementedError, EngineDeadError):
        taken = made.call("kv_resident")
    memory = {"kv_resident_bytes": taken, "grammar_bytes": getattr(made.grammars, "bytes", 0)}
    return {
        "fault": fault,
        "pools": pools,
        "tables": tables,
        "counts": counts,
        "memory": memory,
        "process": process(trim),
        "tap_points": dict(made.capacity.taps or {}),
    }


async def of(service: Service, trim: bool) -> dict[str, Any]:
    """Of the whole server.  The question itself is not counted."""
    told = await service.client.state(trim)
    tables = {**service.client.tables(), "inside": service.door.inside, "tasks": len(asyncio.all_tasks())}
    tables["body_bytes"] = sum(service.bodies.held.values())
    memory = {"token_cache_bytes": service.tokens.cached_bytes}
    return {"engine": told, "server": {"tables": tables, "memory": memory, "process": process(trim)}}
