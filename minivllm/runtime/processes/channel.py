"""Messages between this process and a process that it has started: data in shared memory, and a socket that wakes.

    writer                                            reader
    bytes ──► free part of the shared memory
    note  ──► memory: position, size, kind        ──►  note
                                                       bytes ◄── memory
    room  ◄── a word of the memory                ◄──  number of pieces read
    bell  ──► socket, if the reader sleeps        ──►  wakes

Each direction has its own memory.  A message that does not fit is sent in pieces while the reader makes room.  The
socket wakes a sleeping reader, closes when the other process ends, and transfers file descriptors (``SCM_RIGHTS``).
``child`` also checks whether the process lives, because a third process may hold the other end of the socket.

A bell, one byte on the socket, takes about 60 us to send and to wake the reader.  A reader that expects a message soon
(``Rhythm``) therefore polls the memory for a while.  Before it sleeps, the reader writes the word *asleep* and looks
for notes once more.  The writer writes a note and then looks at the word.  Both have a memory barrier between the two
actions, so at least one of them sees the store of the other process.  This protocol, and reading a note only after its
bytes, need a processor that keeps stores in order, such as x86.  On other processors the writer rings for each note,
and the reader takes no more notes than it has received bells, because system calls keep the order.
"""

from __future__ import annotations

import array
import contextlib
import math
import mmap
import os
import platform
import select
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .rhythm import Rhythm, let_others

OUT, BACK = 4 << 20, 16 << 20  # sizes in bytes of the memories to and from the started process
# position of a piece, number of its bytes, kind of the message, whether more pieces follow
NOTE = struct.Struct("<IIHH4x")
NOTES = 512  # largest number of unread notes, and of bells that are received in one call
WORD = 8
# offsets in bytes of the words: pieces read, reader asleep (one cache line), notes written
READ, ASLEEP, RECEIVED = 0, 8, 64
HEAD = 128 + NOTES * NOTE.size  # size in bytes of the words and notes before the data of a memory
# whether the processor keeps stores in order
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
PAUSE = 2e-4  # seconds between looks at a full memory
NAPS = (1e-3, 0.5)  # seconds of the first and the longest sleep between looks
# size in bytes of the buffer for the descriptors that arrive with bells
BESIDE = socket.CMSG_SPACE(16 * array.array("i").itemsize)
FEW = 1024  # file descriptors from this number on need ``poll``, whose timeout is a whole number of milliseconds
_fence = threading.Lock()


def barrier() -> None:
    """Make earlier stores visible to other processors before any later load.

    Acquiring a lock is an atomic instruction, which is a full barrier on x86."""
    if _fence.acquire(False):
        _fence.release()


class ChannelClosed(ConnectionError):
    """Error of a channel whose other process has ended or closed its end."""


class ChannelStuck(ChannelClosed):
    """Error of a channel whose other process runs, but has not made room for a message within the time limit."""


class Message(NamedTuple):
    """A message: its kind, a number that the user of the channel chooses, and its bytes."""

    kind: int
    data: bytearray


def shared_file(size: int) -> int:
    """Return the descriptor of a new file without a name, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minivllm", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        os.ftruncate(fd, size)  # the operating system allocates a page of the file at its first write
    except OSError:
        os.close(fd)
        raise
    return fd


class Outgoing:
    """The writer's end of one direction: a ring of ``size`` bytes after the head at ``start`` of the memory.

    The ring restarts whenever the reader has read all of it, so small messages stay in the same pages.  Each piece is
    contiguous."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._bytes = memoryview(memory)
        self._start = start + HEAD
        self.size = size
        # assignments to this view are single loads and stores; ``struct`` copies byte by byte
        self._words = self._bytes.cast("Q")
        self._read, self._asleep, self._announced = ((start + at) // WORD for at in (READ, ASLEEP, RECEIVED))
        self._notes = start + HEAD - NOTES * NOTE.size
        self._written = 0  # pieces so far
        self._unread: deque[tuple[int, int]] = deque()  # (begin, end) of each unread piece, in order

    def put(self, piece: bytes | memoryview, kind: int = 0, more: bool = False) -> int:
        """Write a piece of a message and the note that announces it, and return its position, or -1 if the reader must
        make room first."""
        n = len(piece) or 1  # an empty piece has a byte, so that no two pieces have the same position
        unread = self._unread
        left = self._written - self._words[self._read]
        while len(unread) > left:
            unread.popleft()
        at = 0
        if unread:
            first, at = unread[0][0], unread[-1][1]
            if at > first and at + n > self.size:
                at = 0
            if (at <= first and at + n > first) or len(unread) == NOTES:
                return -1
        unread.append((at, at + n))
        begin = self._start + at
        self._bytes[begin : begin + len(piece)] = piece
        note = self._notes + self._written % NOTES * NOTE.size
        NOTE.pack_into(self._bytes, note, at, len(piece), kind, more)
        self._written += 1
        self._words[self._announced] = self._written
        return at

    def reader_may_sleep(self) -> bool:
        """Return whether the reader may be asleep, so that a bell (a byte on the socket) must wake it for the last
        piece."""
        barrier()
        return bool(self._words[self._asleep])

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._bytes.release()


class Incoming:
    """The reader's end of one direction, whose head is at ``start`` of the memory."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._bytes = memoryview(memory)
        self._start = start + HEAD
        self._words = self._bytes.cast("Q")
        self._count, self._asleep, self._announced = ((start + at) // WORD for at in (READ, ASLEEP, RECEIVED))
        self._notes = start + HEAD - NOTES * NOTE.size
        self._read = 0
        # number of received bells on processors on which the bells order the notes, else None
        self.heard: int | None = None if ORDERED else 0

    def ready(self) -> bool:
        """Return whether there is an unread piece."""
        return (self._words[self._announced] if self.heard is None else self.heard) > self._read

    def take(self) -> tuple[int, bool, bytearray]:
        """Return the kind of the next piece's message, whether more pieces follow, and its bytes, and free its room."""
        at, n, kind, more = NOTE.unpack_from(self._bytes, self._notes + self._read % NOTES * NOTE.size)
        begin = self._start + at
        found = bytearray(self._bytes[begin : begin + n])
        self._read += 1
        self._words[self._count] = self._read
        return kind, bool(more), found

    def asleep(self, sleeps: bool) -> None:
        """Store for the writer, in shared memory, whether the reader sleeps."""
        self._words[self._asleep] = sleeps
        if sleeps:
            barrier()

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._bytes.release()


class Channel:
    """One end of a connection between two processes.  Only one thread may use it."""

    def __init__(self, sock: socket.socket, file: int, started: bool) -> None:
        """Map ``file``, a descriptor of ``shared_file(Channel.BYTES)``.

        ``started`` means that this is the end of the started process."""
        self._sock = sock
        self._memory = mmap.mmap(file, self.BYTES)
        to_it, from_it = 0, HEAD + OUT
        if started:
            self._into, self._from = Outgoing(self._memory, from_it, BACK), Incoming(self._memory, to_it)
        else:
            self._into, self._from = Outgoing(self._memory, to_it, OUT), Incoming(self._memory, from_it)
        self._files: deque[int] = deque()
        self._pieces: list[bytearray] = []  # pieces of an incomplete message
        self._came: deque[Message] = deque()
        self._ended = False  # whether the other process will not write any more
        self.patience = math.inf  # longest time in seconds to wait for room in the memory
        self._full = 0.0  # time since which the memory is full
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    BYTES = 2 * HEAD + OUT + BACK

    @property
    def socket(self) -> socket.socket:
        """Return the socket, which closes when the other process ends."""
        return self._sock

    # ---- sending -------------------------------------------------------------------------------------------------

    def send(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], file: int = -1) -> None:
        """Send a message, and a descriptor ``file`` with it, which stays open here.

        ChannelClosed if the other process is known to have ended; a later read detects any end.  ChannelStuck if there
        is no room for ``patience`` seconds."""
        if self._ended:
            raise ChannelClosed("the other process has ended")
        data: bytes | memoryview = b"".join(parts)
        size, most = len(data), self._into.size // 4
        begin = 0
        if size > most:
            data = memoryview(data)
        while True:
            piece = data if size <= most else data[begin : begin + most]
            end = begin + most
            while self._into.put(piece, kind, end < size) < 0:
                self._make_room()
            self._full = 0.0
            if file >= 0 or not ORDERED or self._into.reader_may_sleep():
                self._ring(file)
                file = -1
            if end >= size:
                return
            begin = end

    def _make_room(self) -> None:
        """Wait a moment for the reader.  Read its messages meanwhile, because it may wait for room as well.
        ChannelClosed if the other process has ended, ChannelStuck if it has read nothing for ``patience`` seconds."""
        self._gather()
        if self._ended:
            raise ChannelClosed("the other process has ended")
        self._read_socket()
        now = time.monotonic()
        self._full = self._full or now
        if now - self._full > self.patience:
            raise ChannelStuck(f"has read nothing from the channel for {self.patience:.0f} s")
        time.sleep(PAUSE)

    def _ring(self, file: int) -> None:
        """Send a bell (a byte on the socket that wakes the reader), with a descriptor if ``file`` is not negative.
        ChannelClosed if the other process has ended."""
        files = [] if file < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        try:
            while True:
                try:
                    self._sock.sendmsg([b"\0"], files, socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:  # hundreds of bells are unread, so the reader will wake in any case
                    if ORDERED and not files:
                        return
                    self._make_room()
        except (BrokenPipeError, ConnectionResetError) as e:
            raise ChannelClosed("the other process has ended") from e

    # ---- receiving -----------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether there is something to read, by a look at the memory without a system call."""
        return bool(self._came) or self._from.ready()

    def receive(self, wait: bool, rhythm: Rhythm | None = None) -> Message | None:
        """Return the next message, or None if there is none and ``wait`` is false.

        ``rhythm`` is passed to ``rest``.  ChannelClosed once the other end is closed and all its messages are read."""
        while not self._came and not self._gather():
            if self._ended:
                raise ChannelClosed("the other process has ended")
            if wait and self.rest(NAPS[1], rhythm) and self.ready():
                continue
            if not self._read_socket() and not wait:
                return None
        return self._came.popleft()

    def rest(self, seconds: float, rhythm: Rhythm | None = None) -> bool:
        """Wait until there may be data to read or the other process has ended, at most ``seconds``.

        Return False after the time limit.  ``rhythm`` predicts the time in which to poll instead of sleeping.
        """
        end = time.perf_counter() + seconds
        nap = NAPS[0]
        while (now := time.perf_counter()) < end:
            begin, until = (0.0, 0.0) if rhythm is None else rhythm.window()
            if begin <= now < until:
                if self._watch(until):
                    return True
                continue
            if self._sleep(min(nap, end - now, begin - now if now < begin else nap)):
                return True
            nap = min(2 * nap, NAPS[1])
        return False

    def _watch(self, until: float) -> bool:
        """Poll until there may be something to read, or return False at the time ``until``."""
        while not self.ready():
            if time.perf_counter() >= until:
                return False
            if self._from.heard is not None and self._read_socket() and self._ended:
                return True
            let_others()
        return True

    def _sleep(self, seconds: float) -> bool:
        """Sleep until a bell arrives or the other process ends, at most ``seconds``.

        Return False after the time limit, and True without sleeping if there is data to read.
        """
        try:
            self._from.asleep(True)
            if self.ready():
                return True
            number = self._sock.fileno()
            if number < FEW:
                return bool(select.select((number,), (), (), seconds)[0])
            return bool(self._poll.poll(1e3 * seconds))
        finally:
            self._from.asleep(False)

    def _gather(self) -> bool:
        """Read all pieces that have arrived, and return whether there is a complete message."""
        while self._from.ready():
            kind, more, piece = self._from.take()
            if more or self._pieces:
                self._pieces.append(piece)
                if more:
                    continue
                piece = bytearray().join(self._pieces)
                self._pieces = []
            self._came.append(Message(kind, piece))
        return bool(self._came)

    def _read_socket(self, wait: bool = False) -> bool:
        """Receive bells (bytes on the socket that wake the reader), and store the descriptors that came with them.

        Return True if there were bells or the other end has closed the socket, which is stored too."""
        try:
            found, beside, _, _ = self._sock.recvmsg(NOTES, BESIDE, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            found, beside = b"", []
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
                self._files.extend(files)
        self._ended = self._ended or not found
        if self._from.heard is not None:
            self._from.heard += len(found)
        return True

    def file(self) -> int:
        """Return the descriptor that was sent with a message, in the order of the messages.

        ChannelClosed if the other process has ended before it sent the descriptor."""
        while not self._files:
            if self._ended:
                raise ChannelClosed("the other process has ended")
            self._read_socket(wait=True)
        return self._files.popleft()

    def close(self) -> None:
        """Close this end, with its socket, memory and received file descriptors.  Further calls do nothing."""
        self._sock.close()
        while self._files:
            os.close(self._files.popleft())
        for end in (self._into, self._from):
            end.close()
        with contextlib.suppress(BufferError):
            self._memory.close()
