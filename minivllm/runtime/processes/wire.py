"""Messages to and from a process on another machine, over TCP: a ``Channel`` without memory to share or files to hand.

    bytes of the message u32, its kind u16, its bytes        and the next

Bytes only, as there: what they mean is left to codecs and JSON, so nothing that comes from a network is run.

The kernel asks after a peer that is silent: a machine that is gone ends a connection after ``GONE`` seconds, however
long no message is due.  It takes one for gone, too, that is there and has read nothing for so long
(``TCP_USER_TIMEOUT``), as a process does in a long step.  So messages go without that, and a second connection, whose
ends always read at once, tells whether the machine is there (``lives``).
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from .channel import Channel, ChannelClosed, ChannelStuck, Message
from .rhythm import let_others

HEAD = struct.Struct("<IH2x")
READ = 1 << 20  # bytes at once
GONE = 6  # seconds
# of the last: milliseconds that bytes may be on their way
WATCH = {
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": GONE - 1,
    "TCP_USER_TIMEOUT": 1000 * GONE,
    "TCP_NODELAY": 1,
}


NO_WAY = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


def watch_peer(sock: socket.socket, reads: bool = True) -> None:
    """A connection whose other machine does not answer ends by itself, as far as the system can do that.  ``reads``:
    who is there reads at once; else that is found out only while nothing is on its way."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in WATCH.items():
        if not reads and name == "TCP_USER_TIMEOUT":
            value = 0  # whatever it was
        if (number := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


def cut_by(e: OSError) -> str:
    """What the system says, where the other machine is out of reach; "" where its process has ended."""
    return (e.strerror or str(e)) if e.errno in NO_WAY else ""


class Wire(Channel):
    """One end.  It belongs to one thread."""

    def __init__(self, sock: socket.socket, lives: Callable[[], bool] = lambda: True) -> None:
        """``lives``: whether the other machine is there, as is asked where it reads nothing."""
        self._sock, self._lives = sock, lives
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            watch_peer(sock, reads=False)
        self._buffer = bytearray()  # of a message that has not come as a whole
        self._came: deque[Message] = deque()
        self._ended = False
        self.cut = ""  # what the system says, where the other machine is out of reach
        self.patience = math.inf
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], file: int = -1) -> None:
        if file >= 0:
            raise ValueError("a file cannot go to another machine")
        if self._ended:
            raise ChannelClosed("the other process has ended")
        body = b"".join(parts)
        left, since = memoryview(HEAD.pack(len(body), kind) + body), time.monotonic()
        while left:
            try:
                left, since = left[self._sock.send(left) :], time.monotonic()
            except BlockingIOError:
                self._wait_for_room(since)
            except OSError as e:
                self.cut = cut_by(e) or self.cut
                raise ChannelClosed("the other process has ended") from e

    def _wait_for_room(self, since: float) -> None:
        """The other one may wait for room itself, so what it has sent is read."""
        if time.monotonic() - since > self.patience:
            raise ChannelStuck(f"has read nothing for {self.patience:.0f} s")
        if not self._lives():
            raise ChannelClosed("the other process is out of reach")
        self._hear()
        self._gather()
        select.select((), (self._sock,), (), 0.01)

    def ready(self) -> bool:
        """One system call: there is no memory to look at."""
        return bool(self._came) or (self._hear() and self._gather())

    def _watch(self, until: float) -> bool:
        while not self.ready():
            if self._ended:
                return True
            if time.perf_counter() >= until:
                return False
            let_others()
        return True

    def _sleep(self, seconds: float) -> bool:
        return self._ended or bool(self._came) or bool(self._poll.poll(1e3 * seconds))

    def _gather(self) -> bool:
        while len(self._buffer) >= HEAD.size:
            size, kind = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                break
            self._came.append(Message(kind, self._buffer[HEAD.size : HEAD.size + size]))
            del self._buffer[: HEAD.size + size]
        return bool(self._came)

    def _hear(self, wait: bool = False) -> bool:
        try:
            found = self._sock.recv(READ)
        except BlockingIOError:
            return False
        except OSError as e:  # reset, or the machine is gone
            self.cut = cut_by(e) or self.cut
            found = b""
        self._buffer += found
        self._ended = self._ended or not found
        return True

    def file(self) -> int:
        raise ChannelClosed("a file cannot come from another machine")

    def close(self) -> None:
        """Idempotent.  The other end is told at once, whoever else holds this one."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
