"""A load generator with little CPU time: bare sockets, one poll loop per process, and parsing only of an answer's end.

It reads the number of an answer's tokens from the usage at its end, and stores the time of each piece of text.  Each
answer has its own connection, or (``keep``) the answers of a stream share one.  The result includes the generator's own
CPU time, because a generator at its limit would measure itself.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TEXT = b'"text"'  # occurs in every event of a completion with text
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
LAST = b"\r\n0\r\n\r\n"  # the end of an answer in chunks
TAIL = 2048  # bytes at the end of an answer that hold its usage
PROBE = 0.05  # seconds between requests of /health


@dataclass
class Answer:
    """Seconds to the first text and between first and last text, tokens, and events with text."""

    first: float
    span: float
    tokens: int
    events: int


@dataclass
class Found:
    """The results of a measurement.

    ``seconds`` are from the first request to the last answer, ``cpu`` the CPU seconds of all generators, and ``health``
    the seconds of each request of /health.  ``wrong`` has results that were no answers.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    health: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class _Stream:
    """A stream of answers over one connection after another, or over one (``keep``).  ``asks`` are whole requests."""

    def __init__(self, address: tuple[str, int], asks: Sequence[bytes], keep: bool) -> None:
        self.address, self.asks, self.keep = address, list(reversed(asks)), keep
        self.socket: socket.socket | None = None

    def begin(self) -> int:
        self.start = time.perf_counter()
        self.first = self.last = 0.0
        self.events, self.tail = 0, b""
        if self.socket is None:
            self.socket = socket.create_connection(self.address)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(True)
        self.socket.sendall(self.asks.pop())
        self.socket.setblocking(False)
        return self.socket.fileno()

    def read(self) -> bool:
        """Read some bytes, and return False at the end."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        if TEXT in data:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.events += data.count(TEXT)
        self.tail = self.tail[-TAIL:] + data if self.tail else data
        return bool(data) and not (self.keep and self.tail.endswith(LAST))

    def end(self) -> Answer | str:
        if not (self.keep and self.asks):
            self.socket.close()
            self.socket = None
        counts = USAGE.findall(self.tail)
        if not counts or not self.first:
            return self.tail[:200].decode(errors="replace")
        return Answer(self.first - self.start, self.last - self.first, int(counts[-1]), self.events)


def drive(
    address: tuple[str, int], asks: Sequence[Sequence[bytes]], keep: bool, at: float
) -> tuple[list, list[str], float, float]:
    """Run all streams of one process from ``at`` (time.monotonic) on, and return (answers, wrong, end, CPU seconds)."""
    time.sleep(max(at - time.monotonic(), 0.0))
    cpu = time.process_time()
    poll = select.epoll()
    live: dict[int, _Stream] = {}
    for mine in asks:
        stream = _Stream(address, mine, keep)
        live[fd := stream.begin()] = stream
        poll.register(fd, select.EPOLLIN)
    answers, wrong = [], []
    while live:
        for fd, _ in poll.poll():
            stream = live[fd]
            if stream.read():
                continue
            poll.unregister(fd)
            del live[fd]
            answer = stream.end()
            (wrong if isinstance(answer, str) else answers).append(answer)
            if stream.asks and not isinstance(answer, str):
                live[fd := stream.begin()] = stream
                poll.register(fd, select.EPOLLIN)
    return answers, wrong, time.monotonic(), time.process_time() - cpu


def _probe(address: tuple[str, int], stop, pipe) -> None:
    """Request /health until ``stop`` is set."""
    ask, took = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", []
    while not stop.wait(PROBE):
        start = time.perf_counter()
        with socket.create_connection(address, timeout=30) as link:
            link.sendall(ask)
            good = link.recv(4096).startswith(b"HTTP/1.1 200")
            while link.recv(4096):
                pass
        took.append(time.perf_counter() - start if good else float("inf"))
    pipe.send(took)


def _drive_to(pipe, *args) -> None:
    pipe.send(drive(*args))


def request(host: str, body: dict, keep: bool = False) -> bytes:
    """Return a streamed completion as bytes.  ``keep`` keeps the connection open afterwards."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    after = "keep-alive" if keep else "close"
    return f"{head}Content-Length: {len(data)}\r\nConnection: {after}\r\n\r\n".encode() + data


def measure(
    url: str, asks: Sequence[Sequence[dict]], processes: int = 1, health: bool = True, keep: bool = False
) -> Found:
    """Run the streams ``asks`` at once, each of which sends its bodies one after another.

    ``keep`` uses one connection for each stream.
    """
    where = urlsplit(url)
    address = (where.hostname or "127.0.0.1", where.port or 80)
    made = [[request(address[0], body, keep) for body in mine] for mine in asks]
    context = multiprocessing.get_context("fork")
    stop, begin = context.Event(), time.monotonic() + 0.3
    found, workers = Found(), []
    for k in range(processes):
        near, far = context.Pipe(False)
        workers.append((context.Process(target=_drive_to, args=(far, address, made[k::processes], keep, begin)), near))
    near, far = context.Pipe(False)
    prober = context.Process(target=_probe, args=(address, stop, far))
    for worker, _ in workers:
        worker.start()
    if health:
        prober.start()
    ends = []
    for worker, pipe in workers:
        answers, wrong, end, cpu = pipe.recv()
        found.answers += answers
        found.wrong += wrong
        found.cpu += cpu
        ends.append(end)
        worker.join()
    found.seconds = max(ends) - begin
    stop.set()
    if health:
        found.health = near.recv()
        prober.join()
    return found
