"""A process that this one starts, with a channel to it: its start, the detection of its end, and its last output."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from minivllm.registration import fresh

from .channel import Channel, ChannelClosed, ChannelStuck, Message, shared_file
from .rhythm import Rhythm

LAST_WORDS = 16_000  # number of last bytes of standard error that are kept to explain the end of the process
MOST = 400  # largest number of characters of a line in the explanation
CRASH = "Fatal Python error"  # first words of the report that faulthandler writes after a crash
LOOK = 0.5  # seconds between checks that the process is alive, because another process may hold its end of the channel
PATIENCE = 5.0  # time limit in seconds for the end of a process after its channel has closed
# event: the other end of a socket has closed, even if bytes can still be read
HUNG_UP = getattr(select, "POLLRDHUP", 0)


class ChildEnded(Exception):
    """Error about a process that has ended or closed its channel, with its exit code and its last output."""


class Words(threading.Thread):
    """A thread that copies the standard error of a process to that of this process, and stores its last bytes.

    It refers to the pipe only, so ``Child`` can be garbage-collected while the thread runs.
    """

    def __init__(self, pipe: int) -> None:
        """Take over the reading end of a pipe."""
        super().__init__(name="minivllm: output of a worker", daemon=True)
        self._pipe = pipe
        self.last = b""

    def run(self) -> None:
        """Copy the output of the pipe until no process has its writing end open."""
        while output := os.read(self._pipe, 1 << 16):
            self.last = (self.last + output)[-LAST_WORDS:]
            with contextlib.suppress(Exception):  # standard error may be absent or closed
                sys.stderr.write(output.decode(errors="replace"))
                sys.stderr.flush()
        os.close(self._pipe)

    def summary(self) -> str:
        """Return the last three lines of the output as the end of an error message, or "" without output.

        After a crash, they are the first three lines of faulthandler's report.
        """
        lines = [line for line in self.last.decode(errors="replace").splitlines() if line.strip()]
        crash = next((i for i, line in enumerate(lines) if line.startswith(CRASH)), None)
        some = lines[-3:] if crash is None else lines[crash : crash + 3]
        return f"; its last words: {' | '.join(line.strip()[:MOST] for line in some)}" if some else ""


class Child:
    """A started process, which runs the function ``target`` ("module:name").

    The function gets two words, the descriptors for ``attach``.  The process ends when this process ends or drops the
    object."""

    def __init__(self, target: str, patience: float = math.inf) -> None:
        """Start the process.  OSError if it cannot be started.

        ``patience`` is the time in seconds that a message may wait for room."""
        ours, theirs = socket.socketpair()
        memory = says = says_to = -1
        try:
            memory = shared_file(Channel.BYTES)
            says, says_to = os.pipe()
            self._process = subprocess.Popen(
                fresh.command(target, str(theirs.fileno()), str(memory)),
                stdin=subprocess.DEVNULL,
                stderr=says_to,
                pass_fds=(theirs.fileno(), memory),
            )
            self._channel: Channel | None = Channel(ours, memory, started=False)
            self._channel.patience = patience
            self._words = Words(says)
            self._words.start()
            says = -1
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for file in (memory, says, says_to):
                if file >= 0:
                    os.close(file)
        self._forgotten = weakref.finalize(self, ours.close)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the process runs and its channel is open."""
        return self._channel is not None and self._process.poll() is None

    def send(self, kind: int, parts: Sequence[bytes], file: int = -1) -> None:
        """Send a message, and a descriptor ``file`` with it.  ChildEnded if the process does not receive it."""
        try:
            if self._channel is None:
                raise ChannelClosed
            self._channel.send(kind, parts, file)
        except ChannelStuck as e:
            raise ChildEnded(f"the worker process {self.pid} {e}") from e
        except ChannelClosed as e:
            raise self._ended() from e

    def ready(self) -> bool:
        """Return whether there is a message, without a system call.  This does not detect the end of the process."""
        return self._channel is not None and self._channel.ready()

    def receive(self, wait: bool, rhythm: Rhythm | None = None) -> Message | None:
        """Return the next message, or None if there is none and ``wait`` is false.

        ``rhythm`` predicts the arrival of a message.  ChildEnded once the process has ended and all its messages are
        read."""
        try:
            while self._channel is not None:
                rested = not wait or self._channel.ready() or self._channel.rest(LOOK, rhythm)
                if not rested and self._process.poll() is not None:
                    return self._channel.receive(wait=False) or self._gone()
                message = self._channel.receive(wait=False)
                if message is not None or not wait:
                    return message
            raise ChannelClosed
        except ChannelClosed as e:
            raise self._ended() from e

    def rest(self, seconds: float, rhythm: Rhythm | None = None) -> bool:
        """Wait until there may be a message or the process has ended, at most ``seconds``; return False after them."""
        return self._channel is None or self._channel.ready() or self._channel.rest(seconds, rhythm)

    def ended(self) -> ChildEnded | None:
        """Return the error about the end of the process, even if there are unread messages, or None if it runs."""
        return None if self.alive() else self._ended()

    def kill(self, seconds: float = 0.0) -> None:
        """Kill the process and wait ``seconds`` for its end.  Call ``end`` afterwards."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _gone(self) -> Message | None:
        """Raise ChannelClosed because the process has ended while another one holds its end of the channel."""
        raise ChannelClosed("the process has ended; another one holds its end of the channel")

    def _ended(self) -> ChildEnded:
        """Close the channel and return the error about the end of the process: its exit code or signal, and its last
        output."""
        self._close()
        pid = self._process.pid
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return ChildEnded(f"the worker process {pid} has closed its channel, and runs on")
        self._words.join(1.0)
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"
        return ChildEnded(f"the worker process {pid} has ended, {how}{self._words.summary()}")

    def _close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._forgotten.detach()
            self._channel.close()
            self._channel = None

    def leave(self) -> None:
        """Close the channel, so that the process ends.  ``end`` waits for it."""
        self._close()

    def end(self, deadline: float) -> None:
        """Close the channel and wait for the end of the process.  Kill it after half of ``deadline`` seconds."""
        end = time.monotonic() + deadline
        self.leave()
        try:
            self._process.wait(deadline / 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.join(max(0.1, end - time.monotonic()))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def attach(sock: str, memory: str, last: Callable[[], None] | None = None) -> Channel:
    """Return the channel to the parent process, in a process that it has started.

    ``sock`` and ``memory`` are the numbers of inherited file descriptors.  When the parent closes the channel, this
    process ends; ``follow`` describes how, and when it calls ``last``."""
    ours = socket.socket(fileno=int(sock))
    ours.set_inheritable(False)
    channel = Channel(ours, int(memory), started=True)
    os.close(int(memory))
    follow(ours, last=last)
    return channel


def follow(*socks: socket.socket, last: Callable[[], None] | None = None, patience: float = PATIENCE) -> None:
    """End this process when the process at the other end of ``socks`` ends, even in the middle of a step.

    Signals that a terminal or a supervisor sends to the whole process group are ignored, because the other process
    handles them.  If this process has not ended after ``patience`` seconds, ``last`` is called and the process exits.
    """
    ignore_signals()
    files = [os.dup(sock.fileno()) for sock in socks]
    threading.Thread(target=_end_with, args=(files, os.getppid(), last, patience), daemon=True).start()


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with(socks: Sequence[int], parent: int, last: Callable[[], None] | None, patience: float) -> None:
    """Wait until the other end of a socket closes or the parent changes, then end this process as described in
    ``follow``.
    """
    poll = select.poll()
    for sock in socks:
        poll.register(sock, HUNG_UP)
    while not poll.poll(1e3 * LOOK) and os.getppid() == parent:
        pass
    time.sleep(patience)
    if last is not None:
        last()
    os._exit(1)
