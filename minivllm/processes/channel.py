"""Messages to and from a process that this one has started: bytes in shared memory, announced through a socket.

    writer                                         reader
    bytes ──► ring, at the writer's count
    note  ──► socket: how many, of what kind  ──►  note
                                                   bytes ◄── ring, at the reader's count
    room  ◄── the ring's first word           ◄──  how far it has read

There is a ring for each direction.  A message that does not fit goes in pieces, as the reader makes room.  The socket
orders the memory (a note is sent behind the bytes that it announces), wakes who waits, and ends when the other process
does, however that ends; so nobody waits for the dead.  Files are handed over beside a note (``SCM_RIGHTS``).
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

OUT, BACK = 4 << 20, 16 << 20  # bytes of the rings to and from the started process
NOTE = struct.Struct("<IHH")  # bytes in the ring, kind of the message, whether more of it follows
COUNT = struct.Struct("<Q")
WORD = 64  # bytes before a ring that hold the reader's count: a cache line of its own
PAUSE = 2e-4  # seconds between looks at a ring that is full
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
    os.ftruncate(fd, size)  # pages are taken when they are first written
    return fd


class Ring:
    """``size`` bytes behind a word at ``start`` of the memory.  Counts are of bytes since the beginning.  A piece lies
    in one stretch, so the end of the ring is skipped where it would not fit, by writer and reader alike.  An empty ring
    has room for any piece of up to half its size."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._bytes, self._word, self._start, self.size = memoryview(memory), start, start + WORD, size
        self._count = 0  # of this process, be it the writer or the reader

    def _place(self, n: int) -> int:
        """The count at which a piece of n bytes begins."""
        left = self.size - self._count % self.size
        return self._count if n <= left else self._count + left

    def put(self, piece: memoryview) -> bool:
        """Write a piece; False if the reader has to make room first."""
        n = len(piece)
        at = self._place(n)
        if at + n - COUNT.unpack_from(self._bytes, self._word)[0] > self.size:
            return False
        begin = self._start + at % self.size
        self._bytes[begin : begin + n] = piece
        self._count = at + n
        return True

    def take(self, n: int) -> bytearray:
        """Read a piece, and make room."""
        at = self._place(n)
        begin = self._start + at % self.size
        found = bytearray(self._bytes[begin : begin + n])
        self._count = at + n
        COUNT.pack_into(self._bytes, self._word, self._count)
        return found

    def close(self) -> None:
        self._bytes.release()


class Channel:
    """One end.  It belongs to one thread."""

    def __init__(self, sock: socket.socket, file: int, started: bool) -> None:
        """``file``: that of ``shared_file(Channel.BYTES)``; ``started``: this is the started process."""
        self._sock = sock
        self._memory = mmap.mmap(file, self.BYTES)
        rings = Ring(self._memory, 0, OUT), Ring(self._memory, WORD + OUT, BACK)
        self._into, self._from = rings[::-1] if started else rings
        self._notes = bytearray()
        self._files: deque[int] = deque()
        self._pieces: list[bytearray] = []  # of a message of which more follows
        self._came: deque[Message] = deque()

    BYTES = 2 * WORD + OUT + BACK

    def send(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], file: int = -1) -> None:
        """``file``: a descriptor that goes with it and stays open here.  ChannelClosed if nobody is there."""
        data = memoryview(b"".join(parts))
        most = self._into.size // 4
        if len(data) <= most and self._into.put(data):
            self._note(NOTE.pack(len(data), kind, 0), file)
            return
        for at in range(0, max(len(data), 1), most):
            piece = data[at : at + most]
            while not self._into.put(piece):
                self._read(wait=False)  # it may wait for room itself
                time.sleep(PAUSE)
            self._note(NOTE.pack(len(piece), kind, at + most < len(data)), file)
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
        for size, kind, more in NOTE.iter_unpack(bytes(self._notes[:whole])):
            self._pieces.append(self._from.take(size))
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
        for ring in (self._into, self._from):
            ring.close()
        with contextlib.suppress(BufferError):
            self._memory.close()
