"""Requests to compile kernels, and the processes that answer them (see ``compile_processes``)."""

from __future__ import annotations

import gc
import io
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minivllm.device import early
from minivllm.registration import fresh

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
