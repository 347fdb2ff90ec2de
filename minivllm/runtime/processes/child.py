"""A process that this one starts with a channel to it: how it is started, how its end is noticed, what it said last."""

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

LAST_WORDS = 16_000  # bytes of its standard error that its end is explained with
MOST = 400  # characters of a line of it
CRASH = "Fatal Python error"  # as faulthandler begins
LOOK = 0.5  # seconds between looks whether it lives: others may hold its end of the channel
PATIENCE = 5.0  # seconds for one whose channel has closed to end
HUNG_UP = getattr(
    select, "POLLRDHUP", 0
)  # that the other end of a socket has closed, also where bytes are left to read


class ChildEnded(Exception):
    """It has ended, or closed its channel: how, and with which last words."""


class Words(threading.Thread):
    """Passes on what a process writes to its standard error, and keeps the end of it.  It knows of nothing but the
    pipe, so that who started the process can be forgotten while it runs."""

    def __init__(self, pipe: int) -> None:
        """``pipe``: its own from now on."""
        super().__init__(name="minivllm: what a worker says", daemon=True)
        self._pipe, self.last = pipe, b""

    def run(self) -> None:
        """Until nobody holds the other end any more."""
        while said := os.read(self._pipe, 1 << 16):
            self.last = (self.last + said)[-LAST_WORDS:]
            with contextlib.suppress(Exception):  # there may be no standard error, or a closed one
                sys.stderr.write(said.decode(errors="replace"))
                sys.stderr.flush()
        os.close(self._pipe)

    def told(self) -> str:
        """The last lines, for the sentence that tells of an end; of a crash the first ones of what Python writes."""
        lines = [line for line in self.last.decode(errors="replace").splitlines() if line.strip()]
        crash = next((i for i, line in enumerate(lines) if line.startswith(CRASH)), None)
        some = lines[-3:] if crash is None else lines[crash : crash + 3]
        return f"; its last words: {' | '.join(line.strip()[:MOST] for line in some)}" if some else ""


class Child:
    """It runs the function ``target`` ("module:name") with two words, the descriptors for ``attach``.  It ends when
    this process does, or forgets it."""

    def __init__(self, target: str, patience: float = math.inf) -> None:
        """``patience``: seconds that a message to it may wait for room.  OSError if it cannot be started."""
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
        return self._process.pid

    def alive(self) -> bool:
        return self._channel is not None and self._process.poll() is None

    def send(self, kind: int, parts: Sequence[bytes], file: int = -1) -> None:
        try:
            if self._channel is None:
                raise ChannelClosed
            self._channel.send(kind, parts, file)
        except ChannelStuck as e:
            raise ChildEnded(f"the worker process {self.pid} {e}") from e
        except ChannelClosed as e:
            raise self._ended() from e

    def ready(self) -> bool:
        """Whether there is a message, by the cheapest look: its end is not seen."""
        return self._channel is not None and self._channel.ready()

    def receive(self, wait: bool, rhythm: Rhythm | None = None) -> Message | None:
        """The next message; None if there is none and it does not ``wait``: then ``rhythm`` tells when it may come.
        ChildEnded once all that it sent has been read."""
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
        """Until there may be a message, or it has ended: True; or so many seconds have passed."""
        return self._channel is None or self._channel.ready() or self._channel.rest(seconds, rhythm)

    def ended(self) -> ChildEnded | None:
        """How, if it has, whatever it has said before."""
        return None if self.alive() else self._ended()

    def kill(self, seconds: float = 0.0) -> None:
        """Without a word, and wait so long for its end; ``end`` comes behind."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _gone(self) -> Message | None:
        raise ChannelClosed("the process has ended; another one holds its end of the channel")

    def _ended(self) -> ChildEnded:
        self._close()  # whatever it still does, nobody hears of it
        pid = self._process.pid
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return ChildEnded(f"the worker process {pid} has closed its channel, and runs on")
        self._words.join(1.0)
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"
        return ChildEnded(f"the worker process {pid} has ended, {how}{self._words.told()}")

    def _close(self) -> None:
        if self._channel is not None:
            self._forgotten.detach()
            self._channel.close()
            self._channel = None

    def leave(self) -> None:
        """Close its channel, upon which it ends; ``end`` waits for that."""
        self._close()

    def end(self, deadline: float) -> None:
        """It ends by itself, as its channel is closed, or is killed after half of ``deadline`` seconds."""
        end = time.monotonic() + deadline
        self.leave()
        try:
            self._process.wait(deadline / 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.join(max(0.1, end - time.monotonic()))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def attach(sock: str, memory: str, last: Callable[[], None] | None = None) -> Channel:
    """In the started process: its end of the channel, upon whose end it ends (``follow``)."""
    ours = socket.socket(fileno=int(sock))
    ours.set_inheritable(False)
    channel = Channel(ours, int(memory), started=True)
    os.close(int(memory))
    follow(ours, last=last)
    return channel


def follow(*socks: socket.socket, last: Callable[[], None] | None = None, patience: float = PATIENCE) -> None:
    """From now on signals that a terminal or a supervisor sends to the whole group are left to the process at the other
    end of ``socks``, whose end ends this process too, be it in the middle of a step.  ``last`` is called before, where
    this process has not ended by itself within ``patience`` seconds."""
    ignore_signals()
    files = [os.dup(sock.fileno()) for sock in socks]
    threading.Thread(target=_end_with, args=(files, os.getppid(), last, patience), daemon=True).start()


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with(socks: Sequence[int], parent: int, last: Callable[[], None] | None, patience: float) -> None:
    """End this process when the other end of its channel has closed, if it has not done so by itself in time."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, HUNG_UP)
    while not poll.poll(1e3 * LOOK) and os.getppid() == parent:
        pass
    time.sleep(patience)
    if last is not None:
        last()
    os._exit(1)
