"""Calls of a reader of foreign files in a child process with limits of time and memory."""

from __future__ import annotations

import json
import os
import signal

from minivllm.errors import MinivllmError
from minivllm.runtime.processes.confined import allow, limit_memory

SECONDS, MEGABYTES = 5.0, 256  # CPU seconds, and memory beyond the present use


def limited(call, seconds=SECONDS, megabytes=MEGABYTES):
    """Return ("done", text of the result) or (name of the error, message) of ``call()``.

    The name is "time" or "memory" if a limit was exceeded, and "bug" for an error that is no MinivllmError.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(read)
            limit_memory(megabytes)
            allow(seconds)
            try:
                found = ("done", str(call())[:2000])
            except MinivllmError as e:
                found = (type(e).__name__, str(e))
            except MemoryError:
                found = ("memory", "")
            except BaseException as e:
                found = ("bug", repr(e))
            os.write(write, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        reported = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ended = os.WTERMSIG(status)
        return ("time" if ended in (signal.SIGPROF, signal.SIGALRM) else "bug", f"signal {ended}")
    return tuple(json.loads(reported))
