"""Messages to and from a process that this one has started: bytes in shared memory, announced through a socket.

    writer                                            reader
    bytes ──► room in the memory, where it is free
    note  ──► socket: where, how many, what kind  ──►  note
                                                       bytes ◄── memory
    room  ◄── a word of the memory                ◄──  how many pieces it has read

There is a memory for each direction.  A message that does not fit goes in pieces, as the reader makes room.  The socket
orders the memory (a note is sent behind the bytes that it announces), wakes who waits, and ends when the other process
does (``child`` looks besides: another process may hold that end).  Files are handed over beside a note
(``SCM_RIGHTS``).
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

OUT, BACK = 4 << 20, 16 << 20  # bytes of the memories to and from the started process
NOTE = struct.Struct("<IIHH")  # where a piece begins, its bytes, kind of the message, whether more of it follows
COUNT = struct.Struct("<Q")
WORD = 64  # bytes before a memory that hold the reader's count: a cache line of its own
PAUSE = 2e-4  # seconds between looks at a memory that is full
NOTES = 512 * NOTE.size  # bytes of notes that are read at once
BESIDE = socket.CMSG_SPACE(16 * array.array("i").itemsize)  # bytes of the descriptors that come with them


class ChannelClosed(ConnectionError):
    """The other process has closed its end, or has ended."""


class Message(NamedTuple):
    kind: int
    data: bytearray


def shared_file(size: int) -> int:
    """The descriptor of a file without a name, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minivllm", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        os.ftruncate(fd, size)  # pages are taken when they are first written
    except OSError:
        os.close(fd)
        raise
    return fd


class Outgoing:
    """The writer's end of ``size`` bytes behind a word at ``start`` of a memory: a ring that begins anew whenever all
    of it has been read, so that small messages stay in the same pages.  A piece lies in one stretch."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._bytes, self._word, self._start, self.size = memoryview(memory), start, start + WORD, size
        self._written = 0  # pieces, since the beginning
        self._unread: deque[tuple[int, int]] = deque()  # (begin, end) of those not read yet, in order

    def put(self, piece: memoryview) -> int:
        """Write a piece; where it begins, -1 if the reader has to make room first."""
        n = max(len(piece), 1)  # no two begin at the same place
        while len(self._unread) > self._written - COUNT.unpack_from(self._bytes, self._word)[0]:
            self._unread.popleft()
        at = 0
        if self._unread:
            first, at = self._unread[0][0], self._unread[-1][1]
            if at > first and at + n > self.size:
                at = 0
            if at <= first and at + n > first:
                return -1
        self._unread.append((at, at + n))
        self._written += 1
        self._bytes[self._start + at : self._start + at + len(piece)] = piece
        return at

    def close(self) -> None:
        self._bytes.release()


class Incoming:
    """The reader's end of the same."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._bytes, self._word, self._start = memoryview(memory), start, start + WORD
        self._read = 0

    def take(self, at: int, n: int) -> bytearray:
        """Read a piece, and make room."""
        found = bytearray(self._bytes[self._start + at : self._start + at + n])
        self._read += 1
        COUNT.pack_into(self._bytes, self._word, self._read)
        return found

    def close(self) -> None:
        self._bytes.release()


class Channel:
    """One end.  It belongs to one thread."""

    def __init__(self, sock: socket.socket, file: int, started: bool) -> None:
        """``file``: that of ``shared_file(Channel.BYTES)``; ``started``: this is the started process."""
        self._sock = sock
        self._memory = mmap.mmap(file, self.BYTES)
        to_it, from_it = 0, WORD + OUT
        if started:
            self._into, self._from = Outgoing(self._memory, from_it, BACK), Incoming(self._memory, to_it)
        else:
            self._into, self._from = Outgoing(self._memory, to_it, OUT), Incoming(self._memory, from_it)
        self._notes = bytearray()
        self._files: deque[int] = deque()
        self._pieces: list[bytearray] = []  # of a message of which more follows
        self._came: deque[Message] = deque()

    BYTES = 2 * WORD + OUT + BACK

    def send(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], file: int = -1) -> None:
        """``file``: a descriptor that goes with it and stays open here.  ChannelClosed if nobody is there."""
        data = memoryview(b"".join(parts))
        most = self._into.size // 4
        for begin in range(0, max(len(data), 1), most):
            piece = data[begin : begin + most]
            while (at := self._into.put(piece)) < 0:
                self._read(wait=False)  # it may wait for room itself
                time.sleep(PAUSE)
            self._note(NOTE.pack(at, len(piece), kind, begin + most < len(data)), file)
            file = -1

    def _note(self, note: bytes, file: int) -> None:
        files = [] if file < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        try:
            while True:
                try:
                    sent = self._sock.sendmsg([note], files, socket.MSG_DONTWAIT)
                except BlockingIOError:  # hundreds of notes wait to be read
                    self._read(wait=False)
                    time.sleep(PAUSE)
                    continue
                if sent == len(note):
                    return
                note, files = note[sent:], []
        except (BrokenPipeError, ConnectionResetError) as e:
            raise ChannelClosed("the other process has ended") from e

    def receive(self, wait: bool) -> Message | None:
        """The next message; None if there is none and it does not ``wait``.  ChannelClosed once the other end has
        closed and all that it sent has been read."""
        while not self._came:
            if not self._read(wait) and not wait:
                return None
        return self._came.popleft()

    def _read(self, wait: bool) -> bool:
        """Read the notes that there are, and what they announce; whether there were any."""
        try:
            found, beside, _, _ = self._sock.recvmsg(NOTES, BESIDE, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError as e:
            raise ChannelClosed("the other process has ended") from e
        if not found:
            raise ChannelClosed("the other process has ended")
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
                self._files.extend(files)
        self._notes += found
        whole = len(self._notes) // NOTE.size * NOTE.size
        for at, size, kind, more in NOTE.iter_unpack(bytes(self._notes[:whole])):
            self._pieces.append(self._from.take(at, size))
            if not more:
                message = self._pieces[0] if len(self._pieces) == 1 else bytearray().join(self._pieces)
                self._came.append(Message(kind, message))
                self._pieces = []
        del self._notes[:whole]
        return True

    def file(self) -> int:
        """The descriptor that came with a message: files come in the order of the messages that they were sent with."""
        return self._files.popleft()

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()
        while self._files:
            os.close(self._files.popleft())
        for end in (self._into, self._from):
            end.close()
        with contextlib.suppress(BufferError):
            self._memory.close()
