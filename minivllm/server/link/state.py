"""Report the state of the server's processes: tables, blocks, memory, file descriptors, threads and children.

``GET /debug/state`` shows it, to find leaks.  It requires ``--admin``, because checking the KV cache stops the engine
for some milliseconds.
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
    """Exclude all present objects from garbage collection, after everything is loaded.

    Otherwise each full collection takes a tenth of a second in the engine's process.  In the server's process, full
    collections cause a quarter of the latency of /health while 1,000 connections are made.
    """
    gc.collect()
    gc.freeze()


def process(trim: bool) -> dict[str, Any]:
    """Return figures of this process, None for those that the operating system does not report.

    ``trim`` first returns free memory of the heap to the operating system.
    """
    if trim:
        gc.collect()
        if (give_back := find_trim()) is not None:
            give_back()
    fds = children = None
    with contextlib.suppress(OSError):
        fds = len(os.listdir("/proc/self/fd")) - 1  # the descriptor that reads the list is not counted
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

    ``loop_tables`` has the numbers of entries in the dicts of the loop around the engine.  ``accepted`` is the number
    of requests that the engine accepted.  In the result, ``fault`` is the error that a check of every block and table
    found, or None.  ``tap_points`` has the points of the model and their widths.
    """
    fault = None
    try:
        made.check()
    except AssertionError as e:
        fault = str(e) or "a check without a message failed"
    pools = []
    for pool in made.cache.pools:
        pools.append({"total": pool.total - 1, "free": pool.free, "cached": pool.idle, "held": pool.held})
    tables = {
        "requests": len(made.requests),
        "in_flight": len(made.in_flight),
        "rows": len(made.slots.running),
        "waiting": made.planner.n_waiting,
        "reserved": int(made.planner.reserved),
        **loop_tables,
    }
    counts = {"accepted": accepted, "finished": made.finished}
    resident = None
    with contextlib.suppress(NotImplementedError, EngineDeadError):  # some executors do not implement this call
        resident = made.call("kv_resident")
    memory = {"kv_resident_bytes": resident, "grammar_bytes": getattr(made.grammars, "bytes", 0)}
    return {
        "fault": fault,
        "pools": pools,
        "tables": tables,
        "counts": counts,
        "memory": memory,
        "process": process(trim),
        "tap_points": dict(made.capacity.taps or {}),
    }
