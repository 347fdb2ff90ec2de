"""The engine's process, which ``process_client`` starts with one end of a socket pair.

It listens on no address.  It ends on the command to stop, when the socket or the life pipe closes (its parent is gone),
and when the engine has died or hangs (status 7).  It ignores Ctrl-C and SIGTERM, which the parent handles.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import numpy as np

from minivllm.core import progress
from minivllm.errors import EngineDeadError, MinivllmError, describe_error

from .child_log import LineFormatter
from .frames import Frame, Splitter, encode

GRACE = 5.0  # time limit in seconds for the release of resources after the end of the parent
BACKLOG = 32 * 2**20  # number of unread bytes from which on the engine waits for its parent
CHUNK = 1 << 18  # largest number of bytes of a read
ENGINE = (
    "minivllm.core.",
    "minivllm.device.worker.",
    "minivllm.device.functions.",
)  # modules of stack frames that are not a plug-in's


class SocketLink:
    """An ``engine_loop.Link`` over a socket.  ``send`` waits only while more than ``BACKLOG`` bytes are unread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket, self._splitter = sock, Splitter()
        self._out = bytearray()

    def receive(self, seconds: float) -> list[Frame]:
        """Return received frames, waiting at most ``seconds`` for the first.

        Raise EngineDeadError if the parent is gone, or has sent bytes that are not a frame.
        """
        if self._out:
            self._push()
        found = self._read()
        until = time.monotonic() + seconds
        while not found and (remaining := until - time.monotonic()) > 0:
            self._wait(remaining)
            found = self._read()
        return found

    def send(self, header: dict[str, Any], columns: dict[str, np.ndarray], kind: str = "frame") -> None:
        """Send a frame, or as much of it as the socket accepts; the rest is sent later."""
        self._out += encode(kind, header, columns)
        self._push()
        while len(self._out) > BACKLOG:
            self._wait(1.0)

    def finish(self, seconds: float) -> None:
        """Wait until all bytes are sent, at most ``seconds``."""
        until = time.monotonic() + seconds
        while self._out and (remaining := until - time.monotonic()) > 0:
            self._wait(remaining, reads=False)

    def _wait(self, seconds: float, reads: bool = True) -> None:
        """Wait until the socket can be written if bytes wait, or (``reads``) be read, and write."""
        readers = [self._socket] if reads else []
        writers = [self._socket] if self._out else []
        _, writable, _ = select.select(readers, writers, [], seconds)
        if writable:
            self._push()

    def _push(self) -> None:
        """Send as many bytes as the socket accepts.  EngineDeadError if the client of the engine is gone."""
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError as e:
            raise EngineDeadError(f"the client of the engine is gone: {e}") from e

    def _read(self) -> list[Frame]:
        """Return the frames that can be read without waiting.  EngineDeadError if the client of the engine is gone."""
        found: list[Frame] = []
        try:
            while True:
                data = self._socket.recv(CHUNK)
                if not data:
                    raise EngineDeadError("the client of the engine is gone")
                found += self._splitter.feed(data)
                if len(data) < CHUNK:
                    return found
        except BlockingIOError:
            return found
        except OSError as e:
            raise EngineDeadError(f"the client of the engine is gone: {e}") from e


def main(socket_fd: str, life_fd: str) -> None:
    """Run the process.  The arguments are the numbers of inherited file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    running = threading.Event()
    threading.Thread(target=_watch_parent, args=(int(life_fd), running), daemon=True).start()
    link = SocketLink(socket.socket(fileno=int(socket_fd)))
    try:
        status = _serve(link, running)
        link.finish(GRACE)
    except EngineDeadError as e:
        print(f"minivllm: error: {e}", file=sys.stderr)
        status = EngineDeadError.exit_code
    sys.stderr.flush()
    os._exit(status)  # ends without waiting for threads of libraries, because all resources have been released


def _serve(link: SocketLink, running: threading.Event) -> int:
    """Start the engine that the parent describes, run its loop, and return the exit status.

    ``running`` is set once the engine has started.
    """
    from minivllm.device import early
    from minivllm.device.hardware import prepare_environment

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.getLogger("minivllm").addHandler(handler)
    prepare_environment()  # must run before the libraries of torch are loaded
    early.open_torch()
    from minivllm.frontend.building import build_engine

    from . import state
    from .description import describe
    from .engine_loop import EngineLoop

    opening = link.receive(60.0)
    if not opening or opening[0].kind != "open":
        raise EngineDeadError("the client of the engine did not send a configuration")
    try:
        loaded = loaded_from_json(opening[0].header)
        with progress.listening(progress_to(link)):
            engine, resolved, _ = build_engine(loaded, live=True)
    except BaseException as e:  # BaseException, so that the parent receives the reason also for SystemExit
        if not isinstance(e, MinivllmError):
            logging.getLogger("minivllm").exception("the engine could not be started")
        text = str(e) if isinstance(e, MinivllmError) else describe_error(e).partition(": ")[2]
        link.send({"error": [type(e).__name__, text, getattr(e, "param", None)]}, {}, "failed")
        return getattr(e, "exit_code", 1)
    state.freeze_loaded()
    link.send(describe(engine, resolved), {}, "ready")
    running.set()
    loop = EngineLoop(engine, link, ends=True)
    stuck = opening[0].header["stuck_after"], threading.get_ident()
    threading.Thread(target=_watch_loop, args=(loop, *stuck), daemon=True).start()
    loop.run()
    engine.stop()
    return 0 if loop.stopping else EngineDeadError.exit_code


def progress_to(link: SocketLink) -> progress.Listener:
    """Return the listener that sends the progress of the start to the parent: the first and the last report of each
    stage, and few between."""

    def send(stage: str, done: int, total: int) -> None:
        header = {"progress": [stage, done, total]}
        link.send(header, {}, "progress")

    return progress.thinned(send)


def _watch_parent(life_fd: int, running: threading.Event) -> None:
    """End the process after the end of the parent, which closes the other end of the pipe."""
    os.read(life_fd, 1)
    if running.is_set():
        time.sleep(GRACE)
    os._exit(EngineDeadError.exit_code)


def _watch_loop(loop: Any, seconds: float, thread: int) -> None:
    """End the process if a turn of the loop takes longer than ``seconds``, and print the place at which it hangs."""
    while (silent := time.monotonic() - loop.turned) < seconds:
        time.sleep(min(max(seconds - silent, 0.05), 1.0))
    where = _plugin_in(sys._current_frames().get(thread))
    print(f"minivllm: error: the engine has hung for {silent:.0f} s in {where}", file=sys.stderr, flush=True)
    os._exit(EngineDeadError.exit_code)


def _plugin_in(frame: FrameType | None) -> str:
    """Return the name of the function that the engine's core has called, and the line at which ``frame`` is."""
    at, called = frame, frame
    while at is not None and not at.f_globals.get("__name__", "").startswith(ENGINE):
        called, at = at, at.f_back
    if frame is None or called is None:
        return "code outside of Python"
    owner = type(called.f_locals["self"]).__name__ + "." if "self" in called.f_locals else ""
    module = called.f_globals.get("__name__", "?")
    return f"{module}:{owner}{called.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def loaded_to_json(loaded: Any) -> dict[str, Any]:
    """Return a configuration as JSON data for ``loaded_from_json``, without its ``[run]`` table."""
    engine = loaded.engine.model_dump(mode="json", exclude_unset=True)
    return {
        "engine": engine,
        "sampling": dict(loaded.sampling),
        "origins": dict(loaded.origins),
        "requires": list(loaded.requires),
        "files": list(loaded.files),
    }


def loaded_from_json(fields: dict[str, Any]) -> Any:
    """Return the configuration for the result of ``loaded_to_json``.  Raise ConfigError if its fields are not valid."""
    from minivllm.config import EngineConfig, Loaded

    return Loaded(
        EngineConfig(**fields["engine"]),
        fields["sampling"],
        origins=fields["origins"],
        requires=tuple(fields["requires"]),
        files=tuple(fields["files"]),
    )
