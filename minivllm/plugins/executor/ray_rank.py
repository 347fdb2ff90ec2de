"""A rank in an actor of Ray, with the interface that ``Child`` has for processes of this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from minivllm.runtime.processes.channel import Channel, ChannelClosed, ChannelStuck, Message, shared_file
from minivllm.runtime.processes.child import HUNG_UP, ChildEnded, Words
from minivllm.runtime.processes.gate import Guest
from minivllm.runtime.processes.rhythm import Rhythm
from minivllm.runtime.processes.status import LINE, WORD, StatusPage
from minivllm.runtime.processes.wire import Wire, cut_by, watch_peer

CHANNEL, WORDS, STATE = "channel", "words", "state"  # what each connection of a rank is for
RAY_SAYS = 0.4  # seconds to wait for Ray's report of the end of an actor
CREDENTIALS = struct.Struct("3i")  # process, user, group


class ActorKeeper(Protocol):
    """The methods of the cluster that a rank uses.  ``place`` is the number of the rank's actor."""

    def end_of(self, place: int, seconds: float) -> str:
        """Return Ray's description of the end of an actor, "" if there is none within ``seconds``."""
        ...

    def kill(self, place: int) -> None:
        """Kill an actor through Ray."""
        ...


class PlacedRank:
    """The rank of one actor.  A message to it waits up to ``patience`` seconds for room in its channel."""

    def __init__(self, cluster: ActorKeeper, came: Mapping[str, Guest], patience: float) -> None:
        hello, sock = came[CHANNEL]
        self.cluster = cluster
        self.place = hello["place"]
        self.pid = hello["pid"]
        self.node = hello["node"]
        self.host = hello["host"]
        self.gpus = hello["gpus"]
        self.here = sock.family == socket.AF_UNIX
        # descriptor by which the process can be ended, -1 on another machine
        self._handle = _handle(sock) if self.here else -1
        self._state = None if self.here else came[STATE].sock
        self._cut = ""
        words = -1
        if self.here:
            self._channel: Channel | None
            self._channel, words = _share(sock)
        else:
            for role in (WORDS, STATE):
                watch_peer(came[role].sock)
            self._channel, words = Wire(sock, self.alive), came[WORDS].sock.detach()
        self._channel.patience = patience
        self._words = Words(words)
        self._words.start()
        self._poll = select.poll()
        for one in (sock, self._state):
            if one is not None:
                self._poll.register(one, HUNG_UP)

    @property
    def gpu(self) -> str:
        return self.gpus[0] if self.gpus else "-"

    def show(self, page: StatusPage, rank: int) -> None:
        """Copy the states of a rank on another machine to the page of states.

        A rank on this machine writes them itself.
        """
        if self._state is not None:
            threading.Thread(target=self._show, args=(self._state, page, rank), daemon=True).start()

    def _show(self, sock: socket.socket, page: StatusPage, rank: int) -> None:
        """Copy states until the connection ends or the page is closed."""
        line = b""
        try:
            while found := sock.recv(LINE * WORD - len(line)):
                line += found
                if len(line) == LINE * WORD:
                    page.set_line(rank, line)
                    line = b""
        except ValueError:  # the page is closed
            pass
        except OSError as e:
            self._cut = cut_by(e)

    # ---- as ``Child`` --------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        return self._channel is not None and not self._poll.poll(0)

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
        return self._channel is not None and self._channel.ready()

    def receive(self, wait: bool, rhythm: Rhythm | None = None) -> Message | None:
        try:
            if self._channel is None:
                raise ChannelClosed
            return self._channel.receive(wait, rhythm)
        except ChannelClosed as e:
            raise self._ended() from e

    def rest(self, seconds: float, rhythm: Rhythm | None = None) -> bool:
        return self._channel is None or self._channel.ready() or self._channel.rest(seconds, rhythm)

    def ended(self) -> ChildEnded | None:
        return None if self.alive() else self._ended()

    def kill(self, seconds: float = 0.0) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            select.select([self._handle], (), (), seconds)
        else:
            self.cluster.kill(self.place)

    def _ended(self) -> ChildEnded:
        if isinstance(self._channel, Wire):
            self._cut = self._cut or self._channel.cut
        self.leave()
        if self._cut:
            return ChildEnded(f"the worker process {self.pid} on {self.host} is out of reach: {self._cut}")
        reason = self.cluster.end_of(self.place, RAY_SAYS)
        self._words.join(0.2)
        how = f"; {reason}" if reason else ""
        return ChildEnded(f"the worker process {self.pid} on {self.host} has ended{how}{self._words.summary()}")

    def leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def end(self, deadline: float) -> None:
        """Close the rank's channel, wait half of ``deadline`` seconds for its end, then kill it."""
        self.leave()
        if self._handle >= 0:
            if not select.select([self._handle], (), (), deadline / 2)[0]:
                self.kill(deadline / 2)
            os.close(self._handle)
            self._handle = -1
        if self._state is not None:
            with contextlib.suppress(OSError):
                self._state.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from the socket
        self._words.join(max(0.1, deadline / 2))


def _handle(sock: socket.socket) -> int:
    """Return a handle of the process at the other end of a socket, -1 if there is none.

    A handle is used because the system may reuse the id of an ended process.
    """
    pid, _, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except (OSError, AttributeError):
        return -1


def _share(sock: socket.socket) -> tuple[Channel, int]:
    """Return a channel through memory shared with the other side, and the read end of its standard error."""
    memory = shared_file(Channel.BYTES)
    (says, says_to) = os.pipe()
    try:
        socket.send_fds(sock, [b"\0"], [memory, says_to])
        return Channel(sock, memory, started=False), says
    finally:
        os.close(memory)
        os.close(says_to)
