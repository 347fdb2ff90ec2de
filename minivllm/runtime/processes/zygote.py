"""A process that has imported torch and minivllm, and forks a process for each command (``minivllm zygote``).

    client    ``run``   words, folder, environment, descriptors  ──►  zygote ──fork──► session ──fork──► command
              signals   ──────────────────────────────────────────►  session ──► process group of the command
              exit status  ◄──────────────────────────────────────  session

The zygote has no threads of Python and no context of a device, so a fork of it can start both.  A session is a process
that waits for one command.  When the client's end of the socket closes, the session ends the command.

Linux only, because the zygote checks the user of a client and waits for processes by descriptors (pidfd).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import io
import json
import locale
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, ResourceError
from minivllm.registration import fresh

PRELOADED = (
    "minivllm.cli.commands",
    "minivllm.frontend.llm",
    "minivllm.frontend.building",
    "minivllm.frontend.record.recorder",
    "minivllm.config.resolve",
    "minivllm.core.engine.engine",
    "minivllm.device.worker.runner",
    "minivllm.runtime.text.tokenizer",
    "minivllm.runtime.text.pool",
    "minivllm.runtime.structured.service",
    "minivllm.runtime.hooks.bridge",
    "minivllm.frontend.requests",
    "minivllm.plugins.executor.local",
    "minivllm.plugins.attention.sdpa",
    "minivllm.plugins.model.qwen3",
    "minivllm.plugins.tokenizer.hf",
    "minivllm.plugins.processor.thinking_budget",
)
# prefixes of environment variables that Python and libraries read at their start or import
EARLY = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "LRU_CACHE_", "LD_", "MALLOC_",
         "TORCH_", "PYTORCH_", "ATEN_", "LC_ALL", "LC_CTYPE", "LANG")  # fmt: skip
EARLY_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
GRACE = 5.0  # seconds between SIGHUP and SIGKILL for a command
LONGEST_PATH = 107  # largest size in bytes of the path of a socket
LONGEST = 1 << 22  # largest size in bytes of a message
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of a peer


def check_system() -> None:
    """Check that the system has the calls that a zygote needs.  ResourceError if it has not."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        raise ResourceError("a zygote needs Linux 5.3 or later; run the command without it")


def socket_path() -> Path:
    """Return the path of the zygote's socket of this user, interpreter and installation, in a folder of the user only.

    ResourceError if the folder belongs to another user or is open to others."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    folder = Path(base, f"minivllm-{os.getuid()}")
    name = _digest("\n".join((sys.executable, str(Path(__file__).resolve()))))
    path = folder / f"zygote-{name}"
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ResourceError(f"{path}: a socket's path has at most {LONGEST_PATH} bytes; set XDG_RUNTIME_DIR")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ResourceError(f"{folder}: expected a folder of this user with the mode 0700; remove it")
    return path


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def early_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that count when Python starts or when libraries are imported."""
    return {name: value for name, value in environ.items() if name.startswith(EARLY)}


def sources() -> dict[str, tuple[int, int]]:
    """Return the time of change and the size of the file of each imported module, by path; (0, 0) if it is gone."""
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            found[path] = _state(path)
    return found


def _state(path: str) -> tuple[int, int]:
    try:
        state = os.stat(path)
    except OSError:
        return 0, 0
    return state.st_mtime_ns, state.st_size


def connect() -> socket.socket | None:
    """Return a connection to the running zygote, None if there is none."""
    check_system()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(str(socket_path()))
    except (FileNotFoundError, ConnectionRefusedError):
        made.close()
        return None
    return made


def send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with open descriptors, as its length and JSON.  ConfigError if it is too long."""
    data = json.dumps(message).encode()
    if len(data) > LONGEST:
        raise ConfigError(f"the command and its environment have {len(data)} bytes; a zygote takes at most {LONGEST}")
    socket.send_fds(end, [struct.pack("I", len(data))], list(descriptors))
    end.sendall(data)


def receive(end: socket.socket, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Return a message and the descriptors that came with it.  EOFError if the other end has closed."""
    head, found, _, _ = socket.recv_fds(end, 4, descriptors)
    if len(head) < 4:
        raise EOFError
    (size,) = struct.unpack("I", head)
    data = b""
    while len(data) < min(size, LONGEST):
        piece = end.recv(min(size, LONGEST) - len(data))
        if not piece:
            raise EOFError
        data += piece
    return json.loads(data), found


def main(ready: str, idle: str) -> None:
    """Serve commands until a stop, a changed source file, or ``idle`` seconds without a command.

    ``ready`` is the number of a descriptor that gets one line when the zygote serves or cannot start."""
    early = early_variables(os.environ)
    with os.fdopen(int(ready), "w") as report:
        path = socket_path()
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.write("another zygote is starting or running")
            return
        fresh.import_target("minivllm.device.hardware:prepare_environment")()
        for name in PRELOADED:
            importlib.import_module(name)
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            report.write(f"imports have started threads, which end in a fork: {names}")
            return
        path.unlink(missing_ok=True)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listening:
            mask = os.umask(0o177)
            listening.bind(str(path))
            os.umask(mask)
            listening.listen()
            report.write("ready")
            report.close()
            zygote = Zygote(listening, path, float(idle), early, lock)
            zygote.serve()
    if zygote.words is not None:  # this is the process of a command
        sys.exit(_run(zygote.words))


def _run(words: list[str]) -> int:
    """Run a command in this process, and return its exit code."""
    sys.argv[:] = ["minivllm", *words]
    return fresh.import_target("minivllm.cli:main")(None)


class Zygote:
    """The loop of the zygote.  ``words`` is the command line in the process of a command, None in the zygote."""

    def __init__(self, listening: socket.socket, path: Path, idle: float, early: dict[str, str], lock: int) -> None:
        self.listening, self.path, self.idle, self.early, self.lock = listening, path, idle, early, lock
        self.words: list[str] | None = None
        self.sources = sources()
        self.begun, self.served = time.monotonic(), 0
        self.sessions: set[int] = set()
        self.running = True
        gc.collect()
        gc.freeze()  # so that a collection in a fork does not copy the pages of these objects

    def serve(self) -> None:
        """Answer clients until ``running`` is False.  In the process of a command, return with ``words`` set."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._stop)
        owner, last = os.getpid(), time.monotonic()
        try:
            while self.running:
                ready, _, _ = select.select([self.listening], [], [], 1.0)
                self._reap()
                if ready:
                    end, _ = self.listening.accept()
                    with end:
                        end.settimeout(GRACE)
                        with contextlib.suppress(EOFError, OSError, ValueError, KeyError, TypeError):
                            self._answer(end)
                    if os.getpid() != owner:
                        return
                if ready or self.sessions:
                    last = time.monotonic()
                elif time.monotonic() - last > self.idle:
                    return
        finally:
            if os.getpid() == owner:
                self.path.unlink(missing_ok=True)

    def _stop(self, *_: Any) -> None:
        self.running = False

    def _reap(self) -> None:
        """Remove the sessions that have ended."""
        for pid in list(self.sessions):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.sessions.discard(pid)

    def _answer(self, end: socket.socket) -> None:
        """Answer one client: start a command, stop, or send the status.  A client of another user gets no answer."""
        _, user, _ = CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        message, descriptors = receive(end, 3)
        try:
            if user != os.getuid():
                return
            if message["do"] == "run":
                self._start(end, message, descriptors)
            elif message["do"] == "stop":
                self.running = False
                send(end, {"pid": os.getpid()})
            else:
                seconds = time.monotonic() - self.begun
                running = len(self.sessions)
                send(end, {"pid": os.getpid(), "seconds": seconds, "served": self.served, "running": running})
        finally:
            if self.words is None:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _refusal(self, message: Mapping[str, Any]) -> str:
        """Return why a command cannot run in a fork of this process, "" if it can."""
        changed = [path for path, state in self.sources.items() if _state(path) != state]
        if changed:
            self.running = False
            return f"{changed[0]} has changed since the zygote started, which has ended now"
        theirs = early_variables(message["environ"])
        for name in sorted(theirs.keys() | self.early.keys()):
            if theirs.get(name) != self.early.get(name):
                return f"{name} is {theirs.get(name)!r} here, and was {self.early.get(name)!r} when the zygote started"
        return ""

    def _start(self, end: socket.socket, message: Mapping[str, Any], descriptors: list[int]) -> None:
        """Fork the session of a command; there, fork the command and wait for it."""
        problem = self._refusal(message)
        if problem or len(descriptors) != 3:
            send(end, {"error": problem or "expected three descriptors"})
            return
        pid = os.fork()
        if pid:
            self.served += 1
            self.sessions.add(pid)
            return
        self.listening.close()
        os.close(self.lock)
        # signals are blocked, so that they arrive after the command has installed its handlers
        signal.pthread_sigmask(signal.SIG_BLOCK, EARLY_SIGNALS)
        command = os.fork()
        if command == 0:
            end.close()
            become(message, descriptors)
            self.words = list(message["words"])
            return
        try:
            for descriptor in descriptors:
                os.close(descriptor)
            attend(end, command)
        finally:
            os._exit(0)


def become(message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Set the streams, folder, mask and environment of this process to those of the client, in a new process group."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(message["environ"])
    fresh.import_target("minivllm.device.hardware:prepare_environment")()
    os.umask(message["umask"])
    os.chdir(message["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), _encoding())
    for name, number in (("stdout", 1), ("stderr", 2)):
        writer = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        lines = number == 2 or os.isatty(number)
        errors = "backslashreplace" if number == 2 else "strict"
        text = io.TextIOWrapper(writer, _encoding(), errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EARLY_SIGNALS)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise all forks would draw the same random numbers


def _encoding() -> str:
    return locale.getpreferredencoding(False)


def attend(end: socket.socket, command: int) -> None:
    """Pass signals of the client to the command, and send its exit status.  End it if the client has gone."""
    end.settimeout(None)
    done = os.pidfd_open(command)
    ends: list[Any] = [end, done]
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(ends, [], [], left)[0]
        if done in ready:
            break
        if not ready:
            _kill(command, signal.SIGKILL)
            deadline = time.monotonic() + GRACE
        elif number := end.recv(1):
            _kill(command, number[0])
        else:
            ends.remove(end)
            _kill(command, signal.SIGHUP)
            deadline = time.monotonic() + GRACE
    status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(OSError):
        send(end, {"status": status})


def _kill(command: int, number: int) -> None:
    """Send a signal to the process group of a command, or only to the command while it has none."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(command, number)
        except ProcessLookupError:
            os.kill(command, number)
