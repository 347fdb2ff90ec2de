"""What a process of a server holds right now: tables, blocks, memory, descriptors, threads, children.

``GET /debug/state`` shows it to find leaks, with ``--admin`` only: the walk over the KV cache stops the engine for some
milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.errors import EngineDeadError
from minivllm.runtime.processes.memory import find_trim, rss_bytes

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine


def freeze_loaded() -> None:
    """All is loaded, and stays: the garbage collector need not look at it again, which takes a tenth of a second each
    time in the process of an engine, and a quarter of what /health waits for while 1,000 connections are made."""
    gc.collect()
    gc.freeze()


def process(trim: bool) -> dict[str, Any]:
    """Return the figures of this process, None where the system has none; ``trim`` frees unused memory first."""
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


def engine(made: Engine, loop_tables: Mapping[str, int], accepted: int, trim: bool) -> dict[str, Any]:
    """Return the figures of an engine and its process.

    ``loop_tables`` has the sizes of the tables of the loop around the engine, and ``accepted`` is the number of
    requests that the engine took.  ``fault`` in the result is the error that the walk over every block and table
    found, or None; ``tap_points`` has the points of the model and their widths."""
    fault = None
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
        **loop_tables,
    }
    counts = {"accepted": accepted, "finished": made.finished}
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
