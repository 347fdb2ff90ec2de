"""Work that strangers choose, in processes with limits of time and memory: ``Confined`` asks, ``main`` answers.

    this process ──start──► parent: loads what the work needs, then waits ──fork──► worker 0, worker 1, ...
         ◄──────────────────────── frames on a socket a worker ─────────────────────────►

A worker does one job after another.  Before each it gets limits: CPU seconds (ITIMER_PROF, whose signal ends a process
whatever it is busy with), a multiple of them by the clock, and memory beyond what it has (RLIMIT_AS).  A job that
exceeds them costs the worker its life and nobody else anything: the parent says so and forks the next, which takes a
millisecond, as everything is loaded.  A frame has the number of its job, so an answer never reaches another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from minivllm.errors import ResourceError, describe_error
from minivllm.registration import fresh

Work = Callable[[dict[str, Any], list[bytes]], list[bytes]]
PATIENCE = 120.0  # seconds without an answer after which all workers are taken for stuck; a start may take a while
BY_THE_CLOCK = 10  # times the CPU seconds that a job may take by the clock: a loaded machine is slow
HEAD = struct.Struct("<QI")  # number of the job, how many parts follow
PARTS = 16  # of a frame, at most
LEFT, MEMORY, GARBLED = 3, 4, 5  # exit statuses of a worker: nobody asks any more, MemoryError, a frame that is none
NOBODY = 0  # the number of a frame about the worker itself


class Exceeded(Exception):
    """A job took more than it may: ``what`` is "time" or "memory"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def frame(number: int, parts: Sequence[bytes]) -> bytes:
    sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return b"".join([HEAD.pack(number, len(parts)), sizes, *parts])


class Confined:
    """Seats that are asked from one event loop.  ``target`` ("module:function") gets ``hello()`` and returns the
    ``Work``; ``nices``: a worker each, and how far it stands back from other processes.  Starts by need."""

    def __init__(self, target: str, hello: Callable[[], bytes], nices: Sequence[int]) -> None:
        self._target, self._hello, self._nices = target, hello, tuple(nices)
        self._starting: asyncio.Task[list[_Seat]] | None = None
        self._numbers = NOBODY
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> asyncio.Task[list[_Seat]]:
        """Begin to start, if nothing has; the workers can be asked at once."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def ask(
        self, worker: int, job: dict[str, Any], parts: Sequence[bytes] = (), *, seconds: float, megabytes: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The answer of a worker that nobody else asks meanwhile: what the work returned, its first part as JSON.
        Exceeded; ResourceError if there is no process that could do it; RuntimeError if the work fails."""
        asked = json.dumps({**job, "seconds": seconds, "megabytes": megabytes}).encode()
        why = ""
        for _ in range(2):  # a worker that died of something else, the kernel's want of memory, say, is asked again
            starting = self.start()
            self._numbers += 1
            try:
                workers = await asyncio.shield(starting)
                told_, more = await asyncio.wait_for(workers[worker].ask(self._numbers, [asked, *parts]), PATIENCE)
            except (OSError, EOFError, ValueError, asyncio.TimeoutError) as e:
                why = describe_error(e)
                self._drop(starting)
                continue
            if (broken := told_.get("broken")) is not None:
                self._drop(starting)
                raise ResourceError(f"the process for {self._target} does not start: {broken}")
            if (ended := told_.get("ended")) in ("time", "memory"):
                raise Exceeded(ended)
            if ended is None:
                if "failed" in told_:
                    raise RuntimeError(told_["failed"])
                return told_, more
            why = f"it ended with {ended}"
        raise ResourceError(f"a process for {self._target} cannot be kept: {why}")

    async def _start(self) -> list[_Seat]:
        pairs = [socket.socketpair() for _ in self._nices]
        try:
            fds = ",".join(str(theirs.fileno()) for _, theirs in pairs)
            argv = fresh.command(
                "minivllm.runtime.processes.confined:main", self._target, fds, ",".join(map(str, self._nices))
            )
            passed = [theirs.fileno() for _, theirs in pairs]
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
        return [_Seat(*await asyncio.open_unix_connection(sock=ours, limit=1 << 20)) for ours, _ in pairs]

    def _spawn(self, argv: list[str], passed: list[int]) -> subprocess.Popen[bytes]:
        quiet = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # threads cannot be forked
        null = subprocess.DEVNULL
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=null, stderr=null, pass_fds=passed, env=quiet)
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:  # if it has died, who asks will hear of it
            process.stdin.write(self._hello())
        return process

    def _drop(self, starting: asyncio.Task[list[_Seat]]) -> None:
        """Nothing more is heard of these workers; the next job starts others."""
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
        if (starting := self._starting) is not None:
            await asyncio.gather(starting, return_exceptions=True)
            self._drop(starting)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class _Seat:
    """Our end of a worker's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, number: int, parts: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """EOFError, OSError or ValueError if nothing that comes can be trusted any more."""
        self.writer.write(frame(number, parts))
        await self.writer.drain()
        while True:
            got, count = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            if not 0 < count <= PARTS:
                raise ValueError("a frame that is none")
            sizes = struct.unpack(f"<{count}Q", await self.reader.readexactly(8 * count))
            found = [await self.reader.readexactly(size) for size in sizes]
            if got in (number, NOBODY):
                return json.loads(found[0]), found[1:]


# ---- the other side --------------------------------------------------------------------------------------------------


def main(target: str, fds: str, nices: str) -> None:
    """Make the work, then keep a child in every worker until nobody asks any more."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the asking process decides; the end of its sockets ends this one
        signal.signal(number, signal.SIG_IGN)
    links = [socket.socket(fileno=int(fd)) for fd in fds.split(",")]
    try:
        work: Work = fresh.import_target(target)(sys.stdin.buffer.read())
    except Exception as e:
        for link in links:
            _tell(link, {"broken": describe_error(e)})
        sys.exit(1)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages that it looks at
    back = list(map(int, nices.split(",")))
    workers = {_fork(at, links, work, back[at]): at for at in range(len(links))}
    while workers:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if (at := workers.pop(pid, None)) is None or code == LEFT:
            continue
        if code == GARBLED:
            _tell(links[at], {"broken": "a frame that is none"})
            continue
        limits = {-signal.SIGPROF: "time", -signal.SIGALRM: "time", MEMORY: "memory"}
        _tell(links[at], {"ended": limits.get(code, str(code))})
        workers[_fork(at, links, work, back[at])] = at


def _tell(link: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        link.sendall(frame(NOBODY, [json.dumps(what).encode()]))


def _fork(at: int, links: list[socket.socket], work: Work, nice: int) -> int:
    if child := os.fork():
        return child
    try:
        for other, link in enumerate(links):
            if other != at:
                link.close()
        os.nice(nice)
        _sit(links[at], work)
    finally:
        os._exit(GARBLED)


def _sit(link: socket.socket, work: Work) -> NoReturn:
    """Answer jobs until there are no more."""
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
    def exactly(size: int) -> bytes:
        got = bytearray(size)
        view = memoryview(got)
        while view:
            come = link.recv_into(view)
            if not come:
                os._exit(LEFT)
            view = view[come:]
        return bytes(got)

    limit_memory(None)
    number, count = HEAD.unpack(exactly(HEAD.size))
    if not 0 < count <= PARTS:
        os._exit(GARBLED)
    return number, [exactly(size) for size in struct.unpack(f"<{count}Q", exactly(8 * count))]


def allow(seconds: float) -> None:
    """So much more CPU time from now on, and ten times as much by the clock; 0: no limit.  For the work to call, too,
    between parts that have limits of their own."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, BY_THE_CLOCK * seconds)


def prepare(what: Callable[[], None], seconds: float, megabytes: int) -> None:
    """Do ``what`` within limits, for every worker, if a child that tries it out survives: it may be a stranger's
    program. Else each worker does it itself by need."""
    if child := os.fork():
        if os.waitpid(child, 0)[1] == 0:
            limit_memory(megabytes)
            what()
            limit_memory(None)
        return
    try:
        limit_memory(megabytes)
        allow(seconds)
        what()
        os._exit(0)
    finally:
        os._exit(1)


def limit_memory(megabytes: int | None) -> None:
    """What the process may take beyond what it has; None: anything."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if megabytes is None:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return
    with open("/proc/self/statm") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    most = have + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
