"""The engine in a process of its own: started by ``process_client`` with one end of a socket pair.

It listens on nothing.  It ends when it is told to, when the socket or the life pipe closes (its parent is gone), or
when the engine has died or hangs (status 7).  Ctrl-C and SIGTERM go to the parent, which decides what they mean.
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

from minivllm.errors import EngineDeadError, MinivllmError, describe_error

from .child_log import LineFormatter
from .frames import Frame, Splitter, encode

GRACE = 5.0  # seconds to give everything back once the parent is gone
BACKLOG = 32 * 2**20  # bytes of frames that wait for a parent that does not read, before the engine waits for it
CHUNK = 1 << 18
ENGINE = ("minivllm.core.", "minivllm.device.worker.", "minivllm.device.functions.")  # frames that are no plug-in's


class SocketLink:
    """``engine_loop.Link`` over a socket.  ``send`` waits for nobody as long as less than ``BACKLOG`` is unread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket, self._splitter = sock, Splitter()
        self._out = bytearray()

    def receive(self, seconds: float) -> list[Frame]:
        """EngineDeadError if the parent is gone, or what it says is no frame."""
        if self._out:
            self._push()
        found = self._read()
        until = time.monotonic() + seconds
        while not found and (left := until - time.monotonic()) > 0:
            self._wait(left)
            found = self._read()
        return found

    def send(self, header: dict[str, Any], columns: dict[str, np.ndarray], kind: str = "frame") -> None:
        self._out += encode(kind, header, columns)
        self._push()
        while len(self._out) > BACKLOG:
            self._wait(1.0)

    def finish(self, seconds: float) -> None:
        """Wait until all is sent, at most that long."""
        until = time.monotonic() + seconds
        while self._out and (left := until - time.monotonic()) > 0:
            self._wait(left, reads=False)

    def _wait(self, seconds: float, reads: bool = True) -> None:
        _, writable, _ = select.select(
            [self._socket] if reads else [], [self._socket] if self._out else [], [], seconds
        )
        if writable:
            self._push()

    def _push(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError as e:
            raise EngineDeadError(f"the client of the engine is gone: {e}") from e

    def _read(self) -> list[Frame]:
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
    """What the process runs; the arguments are numbers of inherited file descriptors."""
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
    os._exit(status)  # threads of libraries do not hold it up; all was given back


def _serve(link: SocketLink, running: threading.Event) -> int:
    from minivllm.device.hardware import prepare_environment

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.getLogger("minivllm").addHandler(handler)
    prepare_environment()  # before torch is imported
    from minivllm.frontend.building import build_engine

    from . import state
    from .description import describe
    from .engine_loop import EngineLoop

    opening = link.receive(60.0)
    if not opening or opening[0].kind != "open":
        raise EngineDeadError("the client of the engine did not say what to open")
    try:
        engine, resolved, _ = build_engine(loaded_from_json(opening[0].header), live=True)
    except BaseException as e:  # SystemExit too: a process that ends without a word tells nobody why
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


def _watch_parent(life_fd: int, running: threading.Event) -> None:
    """The other end of the pipe is open as long as the parent lives, however it ends."""
    os.read(life_fd, 1)
    if running.is_set():
        time.sleep(GRACE)
    os._exit(EngineDeadError.exit_code)


def _watch_loop(loop: Any, seconds: float, thread: int) -> None:
    """End the process if a turn takes longer than that, and say where it hangs."""
    while (silent := time.monotonic() - loop.turned) < seconds:
        time.sleep(min(max(seconds - silent, 0.05), 1.0))
    where = _plugin_in(sys._current_frames().get(thread))
    print(f"minivllm: error: the engine has hung for {silent:.0f} s in {where}", file=sys.stderr, flush=True)
    os._exit(EngineDeadError.exit_code)


def _plugin_in(frame: FrameType | None) -> str:
    """What the engine's core has called, and where that is now."""
    at, called = frame, frame
    while at is not None and not at.f_globals.get("__name__", "").startswith(ENGINE):
        called, at = at, at.f_back
    if frame is None or called is None:
        return "code that Python does not see"
    owner = type(called.f_locals["self"]).__name__ + "." if "self" in called.f_locals else ""
    module = called.f_globals.get("__name__", "?")
    return f"{module}:{owner}{called.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def loaded_to_json(loaded: Any) -> dict[str, Any]:
    """A configuration as JSON, for ``loaded_from_json``; ``[run]`` is not the engine's."""
    engine = loaded.engine.model_dump(mode="json", exclude_unset=True)
    return {
        "engine": engine,
        "sampling": dict(loaded.sampling),
        "origins": dict(loaded.origins),
        "requires": list(loaded.requires),
        "files": list(loaded.files),
    }


def loaded_from_json(fields: dict[str, Any]) -> Any:
    """ConfigError if it is not one that this version makes."""
    from minivllm.config import EngineConfig, Loaded

    return Loaded(
        EngineConfig(**fields["engine"]),
        fields["sampling"],
        origins=fields["origins"],
        requires=tuple(fields["requires"]),
        files=tuple(fields["files"]),
    )
