"""More connections than descriptors: which of them wait, which are closed, and that /health answers meanwhile."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("fastapi")

import httpx
from http_helpers import Running

from minivllm.errors import ResourceError
from minivllm.server import logs
from minivllm.server.http import accepting

ASK = {"prompt": "a", "max_tokens": 1}
BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)
SOCKET = b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
SOCKET += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
ROOM = 24


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.rows = []

    def emit(self, record):
        self.rows.append((time.monotonic(), record.getMessage()))


@pytest.fixture
def lines():
    handler = Lines()
    logs.log.addHandler(handler)
    yield handler
    logs.log.removeHandler(handler)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("minivllm.server.serve.room_for", lambda files: ROOM)
    running = Running(body_timeout=60, header_timeout=60)
    running.client.close()
    yield running
    running.close()


def status(server, path="/health", body=None):
    """Of one request on a connection of its own."""
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        return (client.get(path) if body is None else client.post(path, json=body)).status_code


def connect(server, count, say=b""):
    links = []
    for _ in range(count):
        links.append(socket.create_connection((server.host, server.port), timeout=30))
        links[-1].sendall(say)
    return links


def until(found, seconds=30.0):
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def warnings(lines):
    return [at for at, text in lines.rows if "no room for more connections" in text]


@pytest.mark.parametrize("say", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", BODY])
def test_connections_that_ask_for_nothing_make_room_for_those_that_do(server, lines, say):
    """The waiting connections are silent, have sent a part of the headers or no body, or are kept alive after an
    answer.
    """
    start = time.monotonic()
    links = connect(server, 4 * ROOM, say)
    try:
        for _ in range(5):
            assert status(server) == 200
            assert status(server, "/v1/completions", ASK) == 200
        assert len(server.http.server_state.connections) <= ROOM + accepting.SPARE
        assert 1 <= len(warnings(lines)) <= time.monotonic() - start + 2, "at most one line a second"
    finally:
        for link in links:
            link.close()
    until(lambda: not server.http.server_state.connections)
    assert status(server, "/v1/completions", ASK) == 200


def test_where_every_connection_works_health_answers_others_get_503_and_all_is_well_once_they_have_closed(
    server, lines
):
    until(lambda: not server.http.server_state.connections)  # the connection of the fixture may still be closing
    links = connect(server, ROOM, SOCKET)
    try:
        for link in links:
            assert link.recv(4096).startswith(b"HTTP/1.1 101")
        for _ in range(3):
            for path in ("/health", "/ready", "/metrics"):
                assert status(server, path) == 200
            assert status(server, "/v1/completions", ASK) == status(server, "/v1/models") == 503
        (refused,) = connect(server, 1, SOCKET)
        got = refused.recv(4096)
        assert got.startswith(b"HTTP/1.1 503") and json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == 503
        refused.close()
        # more connections than spare descriptors; silent connections are closed even then
        idle = connect(server, 2 * accepting.SPARE)
        assert status(server) == 200
        assert len(server.http.server_state.connections) <= ROOM + accepting.SPARE
    finally:
        for link in links:
            link.close()
    until(lambda: status(server, "/v1/completions", ASK) == 200)
    for link in idle:
        link.close()


def test_of_more_requests_than_connections_each_is_answered(server):
    """Many are accepted before the first is read, and none of these is closed as idle."""
    until(lambda: not server.http.server_state.connections)

    async def ask():
        reader, writer = await asyncio.open_connection(server.host, server.port)
        try:
            body = json.dumps({"prompt": "a", "max_tokens": 60, "ignore_eos": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            return int(lines[0].split()[1]), any(line.startswith(b"retry-after:") for line in lines)
        finally:
            writer.close()

    async def main():
        return await asyncio.gather(*(ask() for _ in range(6 * ROOM)))

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert set(found) == {(200, False), (503, True)} and found.count((200, False)) >= ROOM


class Socket:
    """A listening socket, whose ``accept`` fails for lack of descriptors while ``error`` is set."""

    def __init__(self, error):
        self.error, self.tries = error, 0
        self.real = socket.create_server(("127.0.0.1", 0))

    def accept(self):
        self.tries += 1
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self.real.accept()

    def __getattr__(self, name):
        return getattr(self.real, name)


class Idle(asyncio.Protocol):
    idle, since, spare = 0, 0.0, False

    def __init__(self, known):
        self.known = known

    def connection_made(self, transport):
        self.transport = transport
        self.known.add(self)

    def connection_lost(self, exc):
        self.known.discard(self)


@pytest.mark.parametrize("error", sorted(accepting.FULL))
def test_without_descriptors_nothing_is_tried_for_a_moment_and_connections_are_taken_again(error, lines):
    async def main():
        bound, known = Socket(error), set()
        acceptor = accepting.Acceptor(bound, lambda: Idle(known), known, 100)
        links = [socket.create_connection(bound.real.getsockname()) for _ in range(20)]
        start, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(1.1)
        passed = time.monotonic() - start
        assert 1 <= bound.tries <= passed / accepting.AGAIN + 2 and time.thread_time() - cpu < 0.5
        assert 1 <= len(warnings(lines)) <= passed + 1
        bound.error = 0
        while len(known) < 20:
            await asyncio.sleep(0.02)
        bound.error = error  # now there are some that may go
        late = socket.create_connection(bound.real.getsockname())
        while len(known) == 20:
            await asyncio.sleep(0.02)
        for link in (*links, late):
            link.close()
        acceptor.close()
        acceptor.close()
        await acceptor.wait_closed()
        bound.real.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_idle_connection_is_closed_only_for_one_that_waits(lines):
    async def main():
        bound, known = socket.create_server(("127.0.0.1", 0)), set()
        acceptor = accepting.Acceptor(bound, lambda: Idle(known), known, 4)
        links = []
        for count in range(1, 5):
            links.append(socket.create_connection(bound.getsockname()))
            while len(known) < count:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(known) == 4 and not warnings(lines)
        first = set(known)
        links.append(socket.create_connection(bound.getsockname()))
        while not known - first:
            await asyncio.sleep(0.01)
        assert len(known) == 4 and len(warnings(lines)) == 1
        for link in links:
            link.close()
        acceptor.close()
        await acceptor.wait_closed()
        bound.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_error_that_is_not_about_descriptors_is_not_hidden(lines):
    async def main():
        bound = Socket(errno.EBADF)
        acceptor = accepting.Acceptor(bound, lambda: None, set(), 100)
        with pytest.raises(OSError, match="descriptor"):
            acceptor._take()
        acceptor.close()
        bound.real.close()

    asyncio.run(main())


def test_the_limit_of_files_is_read_and_one_that_is_too_low_is_refused_in_words_that_help(monkeypatch):
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: set_to.append(pair))
    for have, most in (((100, 4096), 4096), ((100, resource.RLIM_INFINITY), accepting.FILES), ((512, 512), 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, have=have: have)
        assert accepting.open_files() == most
    assert set_to == [(4096, 4096), (accepting.FILES, resource.RLIM_INFINITY)]
    used = len(os.listdir("/proc/self/fd"))
    assert abs(accepting.room_for(5000) - (5000 - used - accepting.OWN - accepting.SPARE)) <= 2
    with pytest.raises(ResourceError, match=r"limit of open files is 64; expected at least \d+ \(ulimit -n \d+\)"):
        accepting.room_for(64)


def test_a_server_with_few_descriptors_stands_a_flood_and_its_log_stays_short():
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))

    argv = [sys.executable, "-m", "minivllm", "serve", "pocket", "--max-model-len", "512", "--port", "0"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=limited)
    reported, links = [], []
    try:
        for line in process.stderr:
            reported.append(line)
            if '"url"' in line:
                break
        received = json.loads(reported[-1])
        assert 100 < received["connections"] < 256, "soft was raised to hard"
        where = httpx.URL(received["url"])
        for number in range(600):
            links.append(socket.socket())
            links[-1].setblocking(False)
            with contextlib.suppress(BlockingIOError):
                links[-1].connect((where.host, where.port))
            if number % 100 == 99:
                assert httpx.get(where.join("/health"), timeout=30, trust_env=False).status_code == 200
        answer = httpx.post(where.join("/v1/completions"), json=ASK, timeout=30, trust_env=False)
        assert answer.status_code == 200
        for link in links:
            link.close()
        assert httpx.get(where.join("/health"), timeout=30, trust_env=False).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0
    assert "Traceback" not in rest and len(rest.splitlines()) < 40
