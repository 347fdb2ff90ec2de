"""Jobs whose input comes from clients, in processes with limits of time and memory.

``Confined`` sends jobs from the server, and ``main`` runs in the started process.

    this process ──start──► parent: loads the modules and data of the work ──fork──► worker 0, worker 1, ...
         ◄──────────────────────── frames, one socket for each worker ──────────────────►

A worker runs one job after another.  Before each job it sets limits: CPU seconds (ITIMER_PROF, whose signal ends the
process in any state), a multiple of them in real time, and memory beyond its present use (RLIMIT_AS).  A job that
exceeds a limit ends only its worker.  The parent reports it and forks the next worker within a millisecond, because
everything is loaded.  A frame has the number of its job, so an answer cannot be taken for another job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from minivllm.errors import ResourceError, describe_error
from minivllm.registration import fresh

Work = Callable[[dict[str, Any], list[bytes]], list[bytes]]
Buffer = bytes | bytearray | memoryview
JobPart = Buffer | Sequence[Buffer]  # a part of a job: bytes, or buffers that the work receives as one
PATIENCE = 120.0  # seconds without an answer, also during the start, after which all workers are replaced
BY_THE_CLOCK = 10  # wall-clock limit of a job as a multiple of its CPU seconds, for loaded machines
HEAD = struct.Struct("<QI")  # head of a frame: number of the job, and number of the parts that follow
PARTS = 16  # largest number of parts of a frame
# Number of bytes that the event loop copies in a turn.  Copies of 8 MiB touch thousands of new pages of memory, and the
# kernel needs 2 to 10 microseconds for each.
PIECE = 64 << 10
LEFT, MEMORY, GARBLED = 3, 4, 5  # exit statuses of a worker: closed socket, MemoryError, malformed frame
NOBODY = 0  # job number in a frame that is about the worker itself


class Exceeded(Exception):
    """Error of a job that exceeded its limit of ``resource``, "time" or "memory"."""

    def __init__(self, resource: str) -> None:
        super().__init__(resource)
        self.resource = resource


def frame(number: int, parts: Sequence[bytes]) -> bytes:
    """Return the bytes of a frame."""
    return b"".join([_head(number, list(map(len, parts))), *parts])


def size_of(part: JobPart) -> int:
    """Return the number of bytes of a part."""
    return len(part) if isinstance(part, Buffer) else sum(map(len, part))


def pieces(parts: Sequence[JobPart]) -> Iterator[bytearray]:
    """Yield the bytes of parts one after another, in pieces of at most ``PIECE`` bytes."""
    held = bytearray()
    for part in parts:
        for buffer in (part,) if isinstance(part, Buffer) else part:
            view = memoryview(buffer)
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                if len(held) + len(piece) > PIECE:
                    yield held
                    held = bytearray()
                held += piece
    if held:
        yield held


async def encode_text(*texts: str) -> list[bytes]:
    """Return the UTF-8 bytes of texts in pieces, of which each turn of the event loop encodes ``PIECE`` characters.
    Halves of surrogate pairs are encoded like other characters."""
    found = []
    left = PIECE
    for text in texts:
        for at in range(0, len(text), PIECE):
            piece = text[at : at + PIECE]
            if len(piece) > left:
                await asyncio.sleep(0)
                left = PIECE
            left -= len(piece)
            found.append(piece.encode("utf-8", "surrogatepass"))
    return found


async def decode_text(part: Buffer, sizes: Sequence[int]) -> str:
    """Return the text of UTF-8 bytes, of which a piece is decoded in each turn of the event loop.  ``sizes`` are the
    numbers of bytes of the pieces, each of whole characters."""
    view, found = memoryview(part), []
    for size in sizes:
        found.append(str(view[:size], "utf-8"))
        view = view[size:]
        await asyncio.sleep(0)
    return "".join(found)


def _head(number: int, sizes: Sequence[int]) -> bytes:
    """Return the bytes of a frame before its parts, which have the given sizes."""
    return HEAD.pack(number, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)


class Confined:
    """Workers for the jobs of one event loop, started when the first job arrives.

    ``target`` ("module:function") is called with ``hello()`` in the parent process and returns the ``Work``.  ``nices``
    has the niceness of each worker.  ``shared`` are descriptors that all workers have under the same numbers."""

    def __init__(
        self, target: str, hello: Callable[[], bytes], nices: Sequence[int], shared: Sequence[int] = ()
    ) -> None:
        self._target, self._hello, self._nices, self._shared = target, hello, tuple(nices), shared
        self._starting: asyncio.Task[list[_Seat]] | None = None
        self._numbers = NOBODY
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> asyncio.Task[list[_Seat]]:
        """Start the processes unless they are running or starting.  The task returns the workers' sockets."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def run_job(
        self, worker: int, job: dict[str, Any], parts: Sequence[JobPart] = (), *, seconds: float, megabytes: int
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """Run a job and return the parts of its answer, the first of them parsed as JSON.

        The caller must not use the worker for two jobs at once, nor change the buffers of ``parts`` meanwhile.  A part
        of the answer above ``PIECE`` bytes is a memoryview.  Exceeded if the job exceeds a limit, ResourceError if no
        process can run it, RuntimeError if the work fails."""
        request = json.dumps({**job, "seconds": seconds, "megabytes": megabytes}).encode()
        reason = ""
        for _ in range(2):  # a second try if the worker ends for another reason, such as a lack of memory
            starting = self.start()
            self._numbers += 1
            try:
                workers = await asyncio.shield(starting)
                answer, more = await asyncio.wait_for(
                    workers[worker].run_job(self._numbers, [request, *parts]), PATIENCE
                )
            except (OSError, EOFError, ValueError, asyncio.TimeoutError) as e:
                reason = describe_error(e)
                self._drop(starting)
                continue
            broken, ended = answer.get("broken"), answer.get("ended")
            if broken is not None:
                self._drop(starting)
                raise ResourceError(f"the process for {self._target} does not start: {broken}")
            if ended in ("time", "memory"):
                raise Exceeded(ended)
            if ended is None:
                if "failed" in answer:
                    raise RuntimeError(answer["failed"])
                return answer, more
            reason = f"it ended with {ended}"
        raise ResourceError(f"a process for {self._target} ended twice: {reason}")

    async def _start(self) -> list[_Seat]:
        """Start the parent process and return the workers' sockets.  If it cannot be started, all sockets are
        closed."""
        pairs = [socket.socketpair() for _ in self._nices]
        try:
            fds = ",".join(str(theirs.fileno()) for _, theirs in pairs)
            argv = fresh.command(
                "minivllm.runtime.processes.confined:main", self._target, fds, ",".join(map(str, self._nices))
            )
            passed = [*(theirs.fileno() for _, theirs in pairs), *self._shared]
            process = await asyncio.to_thread(self._spawn, argv, passed)
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._process = process
        weakref.finalize(self, _kill, process)
        return [_Seat(*await asyncio.open_unix_connection(sock=ours, limit=4 * PIECE)) for ours, _ in pairs]

    def _spawn(self, argv: list[str], passed: list[int]) -> subprocess.Popen[bytes]:
        """Return the parent process of the workers, started with the descriptors ``passed``, after it was sent
        ``hello()``."""
        # no threads of libraries, because a fork does not copy threads
        quiet = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        null = subprocess.DEVNULL
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=null, stderr=null, pass_fds=passed, env=quiet)
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:  # if the worker is dead, the first job reports it
            process.stdin.write(self._hello())
        return process

    def _drop(self, starting: asyncio.Task[list[_Seat]]) -> None:
        """End the workers of a start, so that the next job starts others."""
        if self._starting is not starting:
            return
        self._starting = None
        if self._process is not None:
            _kill(self._process)
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            for worker in starting.result():
                worker.writer.close()

    async def close(self) -> None:
        """End the processes.  Jobs that run fail."""
        starting = self._starting
        if starting is not None:
            await asyncio.gather(starting, return_exceptions=True)
            self._drop(starting)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for its end."""
    process.kill()
    process.wait()


class _Seat:
    """The server's end of a worker's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def run_job(self, number: int, parts: Sequence[JobPart]) -> tuple[dict[str, Any], list[Buffer]]:
        """Send a job and return the parts of its answer, or of a frame about the worker.

        EOFError, OSError or ValueError if the worker cannot be used any more."""
        await self._send([_head(number, list(map(size_of, parts))), *parts])
        while True:
            answered, count = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            if not 0 < count <= PARTS:
                raise ValueError("a malformed frame")
            sizes = struct.unpack(f"<{count}Q", await self.reader.readexactly(8 * count))
            found = [await self._receive(size) for size in sizes]
            if answered in (number, NOBODY):
                return json.loads(bytes(found[0])), found[1:]

    async def _send(self, parts: Sequence[JobPart]) -> None:
        """Send parts, a piece in each turn of the event loop.  A job that is cancelled meanwhile ends the worker."""
        try:
            for number, piece in enumerate(pieces(parts)):
                if number:
                    await asyncio.sleep(0)
                self.writer.write(piece)
                await self.writer.drain()
        except asyncio.CancelledError:
            self.writer.transport.abort()
            raise

    async def _receive(self, size: int) -> Buffer:
        """Return a part of an answer.  A large one is copied as its bytes arrive, not in one turn of the event loop."""
        if size <= PIECE:
            return await self.reader.readexactly(size)
        part = memoryview(mmap.mmap(-1, size))  # a page is zeroed when it is written; a bytearray is zeroed at once
        left = part
        while left:
            piece = await self.reader.readexactly(min(PIECE, len(left)))
            left[: len(piece)] = piece
            left = left[len(piece) :]
        return part.toreadonly()


# ---- the started process ---------------------------------------------------------------------------------------------


def main(target: str, fds: str, nices: str) -> None:
    """Make the work, and keep a worker process for each socket until the server closes the socket."""
    # signals are ignored, because this process ends when the server closes its sockets
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    links = [socket.socket(fileno=int(fd)) for fd in fds.split(",")]
    try:
        work: Work = fresh.import_target(target)(sys.stdin.buffer.read())
    except Exception as e:
        for link in links:
            _send_note(link, {"broken": describe_error(e)})
        sys.exit(1)
    gc.collect()
    gc.freeze()  # a garbage collection in a worker would write to shared pages, and so copy them
    niceness = list(map(int, nices.split(",")))
    workers = {_fork(at, links, work, niceness[at]): at for at in range(len(links))}
    while workers:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        at = workers.pop(pid, None)
        if at is None or code == LEFT:
            continue
        if code == GARBLED:
            _send_note(links[at], {"broken": "a malformed frame"})
            continue
        limits = {-signal.SIGPROF: "time", -signal.SIGALRM: "time", MEMORY: "memory"}
        _send_note(links[at], {"ended": limits.get(code, str(code))})
        workers[_fork(at, links, work, niceness[at])] = at


def _send_note(link: socket.socket, answer: dict[str, Any]) -> None:
    """Send a frame about a worker to the server."""
    with contextlib.suppress(OSError):
        link.sendall(frame(NOBODY, [json.dumps(answer).encode()]))


def _fork(at: int, links: list[socket.socket], work: Work, nice: int) -> int:
    """Start the worker of the socket ``at`` and return its process id.  The worker serves jobs and never returns."""
    child = os.fork()
    if child:
        return child
    try:
        for other, link in enumerate(links):
            if other != at:
                link.close()
        os.nice(nice)
        _serve(links[at], work)
    finally:
        os._exit(GARBLED)


def _serve(link: socket.socket, work: Work) -> NoReturn:
    """Run the jobs that arrive on a socket, within their limits of time and memory, until the server closes it."""
    while True:
        number, parts = _receive(link)
        job = json.loads(parts[0])
        limit_memory(job["megabytes"])
        allow(job["seconds"])
        try:
            answer = work(job, parts[1:])
        except MemoryError:
            os._exit(MEMORY)
        except Exception as e:
            answer = [json.dumps({"failed": describe_error(e)}).encode()]
        allow(0)
        link.sendall(frame(number, answer))
        del parts, answer


def _receive(link: socket.socket) -> tuple[int, list[bytes]]:
    """Return the number and the parts of the next frame.  End this process if there is none."""

    def exactly(size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = link.recv_into(view)
            if not count:
                os._exit(LEFT)
            view = view[count:]
        return bytes(data)

    limit_memory(None)
    number, count = HEAD.unpack(exactly(HEAD.size))
    if not 0 < count <= PARTS:
        os._exit(GARBLED)
    return number, [exactly(size) for size in struct.unpack(f"<{count}Q", exactly(8 * count))]


def allow(seconds: float) -> None:
    """Limit this process to ``seconds`` of further CPU time and ten times as much real time.  0 means no limit.

    The work may also call this function between parts of a job that have separate limits."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, BY_THE_CLOCK * seconds)


def prepare(action: Callable[[], None], seconds: float, megabytes: int) -> None:
    """Run an action once in the parent, so that all workers have its results.

    The action may run external code, so a child first runs it within the limits.  If the child fails, the parent does
    not run the action, and each worker runs it when it needs the results.
    """
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1] == 0:
            limit_memory(megabytes)
            action()
            limit_memory(None)
        return
    try:
        limit_memory(megabytes)
        allow(seconds)
        action()
        os._exit(0)
    finally:
        os._exit(1)


def limit_memory(megabytes: int | None) -> None:
    """Limit the memory of this process to ``megabytes`` more than it has now.  None removes the limit."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if megabytes is None:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return
    with open("/proc/self/statm") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    most = have + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
