"""Messages to and from a process on another machine, over TCP: a ``Channel`` without shared memory and descriptors.

    size of the message u32, its kind u16, its bytes        and the next message

A message is plain bytes, which codecs and JSON decode, so nothing that arrives from a network is executed.

The kernel probes a silent peer, so a connection to an unreachable machine ends after ``GONE`` seconds, even if no
message is due.  ``TCP_USER_TIMEOUT`` would also end a connection whose peer reads nothing for that time, as a process
does in a long step.  The connection for messages therefore does not use it.  A second connection, whose ends always
read at once, detects an unreachable machine (``lives``).
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
READ = 1 << 20  # largest number of bytes of one read
GONE = 6  # seconds after which a silent machine counts as unreachable
# options of TCP in seconds, but TCP_USER_TIMEOUT (the longest time without an acknowledgement) in milliseconds
WATCH = {
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": GONE - 1,
    "TCP_USER_TIMEOUT": 1000 * GONE,
    "TCP_NODELAY": 1,
}


NO_WAY = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


def watch_peer(sock: socket.socket, reads: bool = True) -> None:
    """Make the operating system end a connection to a machine that does not answer.

    ``reads`` means that the peer always reads immediately.  Otherwise the system detects an unreachable machine only
    while no data is in transit.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in WATCH.items():
        if not reads and name == "TCP_USER_TIMEOUT":
            value = 0  # no limit
        number = getattr(socket, name, None)
        if number is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


def cut_by(e: OSError) -> str:
    """Return the system's message if the other machine is unreachable, or "" if only its process has ended."""
    return (e.strerror or str(e)) if e.errno in NO_WAY else ""


class Wire(Channel):
    """One end of a connection.  It belongs to one thread."""

    def __init__(self, sock: socket.socket, lives: Callable[[], bool] = lambda: True) -> None:
        """Use a connected socket.

        ``lives`` returns whether the other machine is reachable, and is called while that machine reads no data.
        """
        self._sock, self._lives = sock, lives
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            watch_peer(sock, reads=False)
        self._buffer = bytearray()  # the received part of a message
        self._came: deque[Message] = deque()
        self._ended = False
        self.cut = ""  # message of the operating system about an unreachable machine
        self.patience = math.inf
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], file: int = -1) -> None:
        """Send a message.  ValueError for a descriptor, ChannelClosed or ChannelStuck as ``Channel.send``."""
        if file >= 0:
            raise ValueError("a file descriptor cannot be sent to another machine")
        if self._ended:
            raise ChannelClosed("the other process has ended")
        body = b"".join(parts)
        left = memoryview(HEAD.pack(len(body), kind) + body)
        since = time.monotonic()
        while left:
            try:
                left = left[self._sock.send(left) :]
                since = time.monotonic()
            except BlockingIOError:
                self._wait_for_room(since)
            except OSError as e:
                self.cut = cut_by(e) or self.cut
                raise ChannelClosed("the other process has ended") from e

    def _wait_for_room(self, since: float) -> None:
        """Wait a moment for the reader.  Read its messages meanwhile, because it may wait for room as well.
        ChannelStuck if it has read nothing for ``patience`` seconds, ChannelClosed if its machine is out of reach."""
        if time.monotonic() - since > self.patience:
            raise ChannelStuck(f"has read nothing from the connection for {self.patience:.0f} s")
        if not self._lives():
            raise ChannelClosed("the machine of the other process is out of reach")
        self._read_socket()
        self._gather()
        select.select((), (self._sock,), (), 0.01)

    def ready(self) -> bool:
        """Return whether a whole message has arrived, after reading without waiting."""
        return bool(self._came) or (self._read_socket() and self._gather())

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

    def _read_socket(self, wait: bool = False) -> bool:
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
        raise ChannelClosed("a file descriptor cannot be received from another machine")

    def close(self) -> None:
        """Close the connection immediately, even if another process holds this end.  Further calls have no effect."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
