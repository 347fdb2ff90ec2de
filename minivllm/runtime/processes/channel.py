"""Messages to and from a process that this one has started: bytes and notes in shared memory, and a bell.

    writer                                            reader
    bytes ──► room in the memory, where it is free
    note  ──► memory: where, how many, what kind  ──►  note
                                                       bytes ◄── memory
    room  ◄── a word of the memory                ◄──  how many pieces it has read
    bell  ──► socket, if the reader sleeps        ──►  wakes

There is a memory for each direction.  A message that does not fit goes in pieces, as the reader makes room.  The socket
wakes who sleeps, ends when the other process does (``child`` looks besides: another process may hold that end), and
hands files over (``SCM_RIGHTS``).

To ring and to wake take some 60 us, so a reader that expects something soon (``Rhythm``) looks at the memory for
a while instead.  It says when it sleeps: it writes the word *asleep*, looks once more, and sleeps.  The writer writes a
note, then looks at that word.  Between the two each has a barrier, so one of them sees what the other wrote.  That, and
that a note is seen after its bytes, takes a processor that keeps stores in their order, as x86 does.  On any other the
bell is rung for each note, and a reader knows of no more notes than it has heard bells: the system calls order them.
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

OUT, BACK = 4 << 20, 16 << 20  # bytes of the memories to and from the started process
NOTE = struct.Struct("<IIHH4x")  # where a piece begins, its bytes, kind of the message, whether more of it follows
NOTES = 512  # that are not read yet, at most; bells that are heard at once
WORD = 8
READ, ASLEEP, TOLD = 0, 8, 64  # where the words lie, two cache lines: the reader's, and how many notes there have been
HEAD = 128 + NOTES * NOTE.size  # bytes before a memory: words and notes
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")  # the processor keeps stores in order
PAUSE = 2e-4  # seconds between looks at a memory that is full
NAPS = (1e-3, 0.5)  # seconds of the first sleep and of the longest: a look between them costs next to nothing
BESIDE = socket.CMSG_SPACE(16 * array.array("i").itemsize)  # bytes of the descriptors that come with bells
FEW = 1024  # descriptors that ``select`` can wait for; ``poll`` waits for any, but in whole milliseconds
_fence = threading.Lock()


def barrier() -> None:
    """Stores before it are seen by other processors before anything behind it is loaded: to take a lock is an atomic
    instruction, which is a full barrier on x86."""
    if _fence.acquire(False):
        _fence.release()


class ChannelClosed(ConnectionError):
    """The other process has closed its end, or has ended."""


class ChannelStuck(ChannelClosed):
    """The other process is there, and has made no room for a message in time."""


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
    """The writer's end of ``size`` bytes behind a head at ``start`` of a memory: a ring that begins anew whenever all
    of it has been read, so that small messages stay in the same pages.  A piece lies in one stretch."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._bytes, self._start, self.size = memoryview(memory), start + HEAD, size
        self._words = self._bytes.cast("Q")  # one store each, and one load: a struct goes byte by byte
        self._read, self._asleep, self._told = ((start + at) // WORD for at in (READ, ASLEEP, TOLD))
        self._notes = start + HEAD - NOTES * NOTE.size
        self._written = 0  # pieces, since the beginning
        self._unread: deque[tuple[int, int]] = deque()  # (begin, end) of those not read yet, in order

    def put(self, piece: bytes | memoryview, kind: int = 0, more: bool = False) -> int:
        """Write a piece and its note; where it begins, -1 if the reader has to make room first."""
        n = len(piece) or 1  # no two begin at the same place
        unread, left = self._unread, self._written - self._words[self._read]
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
        self._words[self._told] = self._written
        return at

    def unheard(self) -> bool:
        """Whether the reader may sleep, so that what was put last needs a bell."""
        barrier()
        return bool(self._words[self._asleep])

    def close(self) -> None:
        self._words.release()
        self._bytes.release()


class Incoming:
    """The reader's end of the same."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._bytes, self._start = memoryview(memory), start + HEAD
        self._words = self._bytes.cast("Q")
        self._count, self._asleep, self._told = ((start + at) // WORD for at in (READ, ASLEEP, TOLD))
        self._notes = start + HEAD - NOTES * NOTE.size
        self._read = 0
        self.heard: int | None = None if ORDERED else 0  # bells, where a note is known by its bell

    def ready(self) -> bool:
        """Whether there is a piece."""
        return (self._words[self._told] if self.heard is None else self.heard) > self._read

    def take(self) -> tuple[int, bool, bytearray]:
        """Read the next piece, and make room: kind of its message, whether more follows, its bytes."""
        at, n, kind, more = NOTE.unpack_from(self._bytes, self._notes + self._read % NOTES * NOTE.size)
        begin = self._start + at
        found = bytearray(self._bytes[begin : begin + n])
        self._read += 1
        self._words[self._count] = self._read
        return kind, bool(more), found

    def asleep(self, sleeps: bool) -> None:
        self._words[self._asleep] = sleeps
        if sleeps:
            barrier()

    def close(self) -> None:
        self._words.release()
        self._bytes.release()


class Channel:
    """One end.  It belongs to one thread."""

    def __init__(self, sock: socket.socket, file: int, started: bool) -> None:
        """``file``: that of ``shared_file(Channel.BYTES)``; ``started``: this is the started process."""
        self._sock = sock
        self._memory = mmap.mmap(file, self.BYTES)
        to_it, from_it = 0, HEAD + OUT
        if started:
            self._into, self._from = Outgoing(self._memory, from_it, BACK), Incoming(self._memory, to_it)
        else:
            self._into, self._from = Outgoing(self._memory, to_it, OUT), Incoming(self._memory, from_it)
        self._files: deque[int] = deque()
        self._pieces: list[bytearray] = []  # of a message of which more follows
        self._came: deque[Message] = deque()
        self._ended = False  # nothing is written behind what is there
        self.patience = math.inf  # seconds to wait for room
        self._full = 0.0  # since when there is none
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    BYTES = 2 * HEAD + OUT + BACK

    @property
    def socket(self) -> socket.socket:
        """Its end tells of the other process's."""
        return self._sock

    # ---- to the other --------------------------------------------------------------------------------------------

    def send(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], file: int = -1) -> None:
        """``file``: a descriptor that goes with it and stays open here.  ChannelClosed if nobody is there, as far as
        is known: who reads will know.  ChannelStuck if there is no room for ``patience`` seconds."""
        if self._ended:
            raise ChannelClosed("the other process has ended")
        data: bytes | memoryview = b"".join(parts)
        size, most, begin = len(data), self._into.size // 4, 0
        if size > most:
            data = memoryview(data)
        while True:
            piece, end = data if size <= most else data[begin : begin + most], begin + most
            while self._into.put(piece, kind, end < size) < 0:
                self._make_room()
            self._full = 0.0
            if file >= 0 or not ORDERED or self._into.unheard():
                self._ring(file)
                file = -1
            if end >= size:
                return
            begin = end

    def _make_room(self) -> None:
        """The other one may wait for room itself."""
        self._gather()
        if self._ended:
            raise ChannelClosed("the other process has ended")
        self._hear()
        now = time.monotonic()
        self._full = self._full or now
        if now - self._full > self.patience:
            raise ChannelStuck(f"has read nothing for {self.patience:.0f} s")
        time.sleep(PAUSE)

    def _ring(self, file: int) -> None:
        files = [] if file < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        try:
            while True:
                try:
                    self._sock.sendmsg([b"\0"], files, socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:  # hundreds of bells have not been heard
                    if ORDERED and not files:
                        return
                    self._make_room()
        except (BrokenPipeError, ConnectionResetError) as e:
            raise ChannelClosed("the other process has ended") from e

    # ---- from the other ------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether there is something to read, as far as the memory tells: the cheapest look."""
        return bool(self._came) or self._from.ready()

    def receive(self, wait: bool, rhythm: Rhythm | None = None) -> Message | None:
        """The next message; None if there is none and it does not ``wait``, as ``rest`` does.  ChannelClosed once the
        other end has closed and all that it sent has been read."""
        while not self._came and not self._gather():
            if self._ended:
                raise ChannelClosed("the other process has ended")
            if wait and self.rest(NAPS[1], rhythm) and self.ready():
                continue
            if not self._hear() and not wait:
                return None
        return self._came.popleft()

    def rest(self, seconds: float, rhythm: Rhythm | None = None) -> bool:
        """Until there may be something to read, or the other one has ended: True; or so many seconds have passed.
        ``rhythm`` tells when it is worth while to look instead of sleeping."""
        end, nap = time.perf_counter() + seconds, NAPS[0]
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
        """Look without a rest."""
        while not self.ready():
            if time.perf_counter() >= until:
                return False
            if self._from.heard is not None and self._hear() and self._ended:
                return True
            let_others()
        return True

    def _sleep(self, seconds: float) -> bool:
        """Until a bell rings or the other one ends: True; or there was something before, or time has passed."""
        try:
            self._from.asleep(True)
            if self.ready():
                return True
            if (number := self._sock.fileno()) < FEW:
                return bool(select.select((number,), (), (), seconds)[0])
            return bool(self._poll.poll(1e3 * seconds))
        finally:
            self._from.asleep(False)

    def _gather(self) -> bool:
        """Read the pieces that there are; whether there is a message."""
        while self._from.ready():
            kind, more, piece = self._from.take()
            if more or self._pieces:
                self._pieces.append(piece)
                if more:
                    continue
                piece, self._pieces = bytearray().join(self._pieces), []
            self._came.append(Message(kind, piece))
        return bool(self._came)

    def _hear(self, wait: bool = False) -> bool:
        """Take the bells that have rung, and the files beside them; whether there were any, or the end."""
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
        """The descriptor that came with a message: files come in the order of the messages that they were sent with.
        ChannelClosed if the other one has ended before it handed it over."""
        while not self._files:
            if self._ended:
                raise ChannelClosed("the other process has ended")
            self._hear(wait=True)
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
