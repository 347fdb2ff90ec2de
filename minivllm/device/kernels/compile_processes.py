"""Compile kernels in other processes, because threads of one process wait for Python's lock in a part of it.

    engine        CompileProcesses ──► one process that imports torch and Triton; it sees no device
    that process  forks the workers and waits for their end
    worker        socket ──► source, target, options ──► Triton's folder of compiled kernels ──► answer

The engine's process then finds the kernel in the folder.  A kernel that no worker has compiled, for any reason, is
compiled by the thread that asked for it.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minivllm.device import early
from minivllm.errors import describe_error
from minivllm.registration import fresh

log = logging.getLogger(__name__)
PATIENCE = 120.0  # seconds after which a process that has not answered is no longer used
GRACE = 2.0  # seconds after which processes that have not ended are killed
FEW = 2  # number of cores up to which the start of the processes costs more time than they save


class CompileProcesses:
    """Processes that compile kernels, each for one caller at a time.

    They end when this process ends or drops the object."""

    def __init__(self, count: int) -> None:
        """Start the processes.  OSError if they cannot be started."""
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [other.fileno() for _, other in pairs]
        numbers = ",".join(str(file) for file in theirs)
        argv = fresh.command(f"{__name__}:main", numbers)
        # no threads of libraries, because a fork does not copy threads
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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


def start_processes(count: int) -> CompileProcesses | None:
    """Start ``count`` processes that compile kernels; return None if they would not save time or cannot be started."""
    frozen = getattr(sys, "frozen", False)  # then ``sys.executable`` is an application, which would start again
    if count <= FEW or not hasattr(os, "fork") or not sys.executable or frozen:
        return None
    try:
        return CompileProcesses(count)
    except OSError as e:
        log.info("threads compile kernels, because no process can be started: %s", describe_error(e))
        return None


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


# ---- requests --------------------------------------------------------------------------------------------------------


def make_request(compile_it: Callable[..., Any], target: Any, launcher: Any) -> bytes:
    """Return the request to compile a kernel for ``target``, with the class ``launcher`` of its launcher.

    ``compile_it`` is a ``functools.partial`` of ``JITFunction._do_compile``.  An error of any type is raised if a value
    cannot be sent to another process."""
    given: Any = compile_it
    source, options = _source(*given.args, **given.keywords)
    stream = io.BytesIO()
    _Pickler(stream).dump((source, target, options, launcher))
    return stream.getvalue()


def _source(
    function: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the source of a kernel's variant and its options, from the arguments of ``JITFunction._do_compile``."""
    source = function.ASTSource(function, signature, constexprs, attrs)
    return source, options.__dict__


class _Pickler(pickle.Pickler):
    """Pickler that writes functions of kernels by their names."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITFunction):
            return NotImplemented
        run = value.fn
        target = f"{run.__module__}:{run.__qualname__}"
        if fresh.import_target(target) is not value:
            raise pickle.PicklingError(f"{target} is another object")
        return fresh.import_target, (target,)


# ---- the processes ---------------------------------------------------------------------------------------------------


def main(numbers: str) -> None:
    """Import torch, fork a worker for each socket, and wait for their end.

    ``numbers`` are the descriptors of the sockets with commas between them."""
    hashing = early.begin(early.hash_compiler)
    import_module("minivllm.device.kernels.launch")  # modules of kernels import it, and it imports torch
    hashing.join()
    links = [Connection(int(number)) for number in numbers.split(",")]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it ends the workers only
    gc.freeze()  # the workers share the memory of these objects
    for link in links:
        if os.fork() == 0:
            _serve(link, links)
    for link in links:
        link.close()
    for _ in links:
        os.wait()


def _serve(link: Connection, links: Sequence[Connection]) -> None:
    """Compile kernels in this process, a worker, until the other end of ``link`` is closed; then end the process."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for other in links:  # the engine notices the end of a worker only if no other process has its socket
            if other is not link:
                other.close()
        threading.Thread(target=_end_with, args=(link,), daemon=True).start()
        while True:
            request = link.recv_bytes()
            link.send_bytes(_answer(request))
    finally:
        os._exit(0)


def _end_with(link: Connection) -> None:
    """End this process when the other end of ``link`` is closed, also during a compilation."""
    closed = select.poll()
    closed.register(link.fileno(), select.POLLRDHUP)
    closed.poll()
    os._exit(0)


class _Target:
    """The part of Triton's driver that a compilation reads: some functions of kernels depend on the GPU."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target


def _answer(request: bytes) -> bytes:
    """Compile the kernel of a request; return the error, or nothing."""
    try:
        source, target, options, launcher = pickle.loads(request)
        driver.set_active(_Target(target))
        kernel = triton.compile(source, target=target, options=options)
    except BaseException as e:  # an assertion or a SystemExit of Triton must not end the process
        return f"{type(e).__name__}: {e}".encode()
    if launcher is not None:
        with suppress(Exception):  # the first launch compiles it otherwise
            launcher(kernel.src, kernel.metadata)
    return b""
