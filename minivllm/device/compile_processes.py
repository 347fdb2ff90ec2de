"""Compile kernels in other processes, because threads of one process wait for Python's lock in a part of it.

    engine        CompileProcesses ──► one process that imports torch and Triton; it sees no device
    that process  forks the workers and waits for their end
    worker        socket ──► source, target, options ──► Triton's folder of compiled kernels ──► answer

The engine's process then finds the kernel in the folder.  A kernel that no worker has compiled, for any reason, is
compiled by the thread that asked for it.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from minivllm.errors import describe_error
from minivllm.limits import usable_cores
from minivllm.registration import fresh

log = logging.getLogger(__name__)
PATIENCE = 120.0  # seconds after which a process that has not answered is no longer used
MARK = ".compiled"  # end of the names of files that mark kernels as compiled
GRACE = 2.0  # seconds after which processes that have not ended are killed
THREADS = 16  # largest number of threads that compile kernels, each of which may have a process
FEW = 2  # number of cores up to which the start of the processes costs more time than they save


class CompileProcesses:
    """Processes that compile kernels, each for one caller at a time.

    They end when this process ends or drops the object."""

    def __init__(self, count: int) -> None:
        """Start the processes.  OSError if they cannot be started."""
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [other.fileno() for _, other in pairs]
        numbers = ",".join(str(file) for file in theirs)
        argv = fresh.command("minivllm.device.kernels.compile_requests:main", numbers)
        # no threads of libraries, because a fork does not copy threads
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if "triton" in sys.modules:  # a program may have set another folder
            from triton import knobs

            environ["TRITON_CACHE_DIR"] = knobs.cache.dir
        null = subprocess.DEVNULL
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._closed = False
        try:
            # a session of its own, so that Ctrl-C reaches the engine only
            process = subprocess.Popen(
                argv, stdin=null, stdout=null, stderr=null, pass_fds=theirs, env=environ, start_new_session=True
            )
            for ours, _ in pairs:
                self._free.put(Connection(ours.detach()))
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()
        self.pid = process.pid
        self._end = weakref.finalize(self, _end_all, process, self._free, os.getpid())

    def compile(self, request: bytes) -> None:
        """Compile the kernel of a request in a process that is free, and wait for it.

        Return without a compiled kernel if no process can compile it.  CancelledError after ``close``."""
        if self._closed:
            raise CancelledError
        try:
            link = self._free.get_nowait()
        except queue.Empty:  # all processes have ended
            return
        try:
            link.send_bytes(request)
            if not link.poll(PATIENCE):
                raise TimeoutError(f"no answer after {PATIENCE:g} s")
            answer = link.recv_bytes()
        except (OSError, EOFError) as e:
            link.close()
            if self._closed:
                raise CancelledError from e
            log.info("a thread compiles a kernel in place of a process: %s", describe_error(e))
            return
        self._free.put(link)
        if answer:
            log.info("a thread compiles a kernel in place of a process: %s", answer.decode())

    def close(self) -> None:
        """End the processes at once.  Calls of ``compile`` that wait raise CancelledError."""
        self._closed = True
        self._end()


def usable_threads() -> int:
    """Return the number of threads that compile kernels: one for each core that this process may use, at most
    ``THREADS``."""
    return min(THREADS, usable_cores())


def start_processes(count: int) -> CompileProcesses | None:
    """Return ``count`` new processes that compile kernels, or those of ``spare``.  Return None if they would not save
    time or cannot be started."""
    with _LOCK:
        _open.clear()  # no others are needed
        return _spare.pop() if _spare else _start(count)


def _start(count: int) -> CompileProcesses | None:
    """Start ``count`` processes; return None if they would not save time or cannot be started."""
    frozen = getattr(sys, "frozen", False)  # then ``sys.executable`` is an application, which would start again
    if count <= FEW or not hasattr(os, "fork") or not sys.executable or frozen:
        return None
    try:
        return CompileProcesses(count)
    except OSError as e:
        log.info("threads compile kernels, because no process can be started: %s", describe_error(e))
        return None


_LOCK = threading.Lock()  # held while processes are taken from ``_spare``, or are started for it
_spare: list[CompileProcesses] = []  # processes that no start has taken yet
_open: set[object] = set()  # calls of ``spare`` whose processes a start may still take


@contextmanager
def spare() -> Iterator[Callable[[], None]]:
    """Return a function that starts processes before it is known whether a start, the body of the ``with`` statement,
    needs them.

    A thread may call it while torch is imported.  At the end of the body, processes that were not taken end.  Nothing
    is started if an earlier start has compiled kernels into Triton's folder, or if kernels are interpreted."""
    call, made = object(), list[CompileProcesses]()

    def start() -> None:
        with _LOCK:
            if call in _open and _are_new():
                found = _start(usable_threads())
                if found is not None:
                    made.append(found)
                    _spare.append(found)

    _open.add(call)
    try:
        yield start
    finally:
        with _LOCK:
            _open.discard(call)
            left = [one for one in made if one in _spare]
            for one in left:
                _spare.remove(one)
        for one in left:
            one.close()


def _are_new() -> bool:
    """Return whether kernels are compiled on this machine for the first time, as far as Triton's folder shows."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return False
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    return next(folder.glob(f"*{MARK}"), None) is None


def _end_all(process: subprocess.Popen[bytes], free: queue.SimpleQueue[Connection], starter: int) -> None:
    """End the workers, which are members of the session of ``process``, and wait until it has waited for them.

    Workers that outlive the process would remain as zombies where process 1 does not wait for others.  ``starter`` is
    the number of the process that started them.  Its forks, which call this at their end, only close their copies of
    the sockets."""
    with suppress(queue.Empty):
        while True:
            free.get_nowait().close()
    if os.getpid() != starter:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
