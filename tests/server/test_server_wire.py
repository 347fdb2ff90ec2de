"""Bounds of the bytes that a client sends beside a request (headers, trailers, chunks, frames) or leaves unread."""

import base64
import contextlib
import os
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httptools")

from http_helpers import Running, make_certificate, served

from minivllm.server.http import body, connection, socket_connection
from minivllm.server.http.socket_connection import _HELD
from minivllm.server.http.sweep import SMALL, Sweep

MOST = 64 << 10  # bytes of a body here
server = served(max_header_bytes=4096, max_body_bytes=MOST, body_timeout=3, keys=["k"])

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: k\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
REQUESTED = b'{"prompt":"a","max_tokens":1}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(REQUESTED)


def talk(server, first, rest, most=64 << 20):
    """Send ``rest`` repeatedly behind ``first``.  Return the number of accepted bytes, and the answer."""
    with socket.create_connection((server.host, server.port), timeout=5) as link:
        link.sendall(first)
        time.sleep(0.2)  # the route reads the body by now
        sent, got = 0, b""
        with contextlib.suppress(OSError):
            while sent < most:
                link.sendall(rest)
                sent += len(rest)
        with contextlib.suppress(OSError):
            while part := link.recv(65536):
                got += part
        return sent, got


BESIDE = {
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"x-a: " + b"b" * 1000 + b"\r\n"),
    "small trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"a:b\r\n" * 1000),
    "one trailer": (CHUNKED + b"1\r\n{\r\n0\r\nx: ", b"b" * 8192),
    "an extension": (CHUNKED + b"1;", b"b" * 8192),
    "extensions": (CHUNKED, (b"1;" + b"b" * 1000 + b"\r\n \r\n") * 8),
    "chunks of one byte": (CHUNKED, b"1\r\n \r\n" * 1000),
    "the next request's headers": (HEAD + b"Content-Length: 9\r\n\r\nGET / HTTP/1.1\r\nx: ", b"b" * 8192),
    "a header behind an answer": (HEAD + LENGTH + REQUESTED + b"GET / HTTP/1.1\r\nx: ", b"b" * 8192),
    "a line": (b"GET /", b"b" * 8192),
    "empty lines": (b"", b"\r\n" * 4096),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_request_has_beside_its_body_ends_its_connection_once_it_is_too_much(server, name):
    sent, _ = talk(server, *BESIDE[name])
    assert sent < 16 << 20, f"{sent >> 20} MiB were taken"


def test_a_body_in_chunks_with_extensions_and_trailers_is_read_and_its_trailers_are_no_headers(server):
    pieces = [REQUESTED[at : at + 3] for at in range(0, len(REQUESTED), 3)]
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(one), one) for one in pieces)
    trailers = b"0\r\nHost: evil.example\r\nx-api-key: other\r\nContent-Type: text/plain\r\n\r\n"
    end = b"GET /version HTTP/1.1\r\nHost: localhost\r\nx-api-key: k\r\nConnection: close\r\n\r\n"
    got = server.raw(CHUNKED + chunks + trailers + end)
    assert got.count(b"HTTP/1.1 200 OK") == 2, got


@pytest.mark.parametrize("tls", [False, True])
def test_no_turn_of_the_loop_reads_more_than_a_little(tls, tmp_path, monkeypatch):
    """So that no client's bytes take long at once: of one-byte chunks 256 KiB take 0.1 s."""
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), make_certificate(tmp_path), strict=True)) if tls else {}
    running = Running(**files)
    sizes = []
    took = connection.WatchedConnection.data_received

    def data_received(self, data):
        sizes.append(len(data))
        took(self, data)

    monkeypatch.setattr(connection.WatchedConnection, "data_received", data_received)
    try:
        assert running.post("/tokenize", {"prompt": "a" * 1_000_000}).status_code == 400
    finally:
        running.close()
    assert sum(sizes) > 1_000_000
    # for TLS, the bytes of one read and the rest of the record (16 KiB) before it
    assert max(sizes) <= connection.READ * (2 if tls else 1)


def frame(data, opcode=1, fin=True, size=None):
    size = len(data) if size is None else size
    return bytes([0x80 * fin | opcode, 0x80 | 127]) + size.to_bytes(8, "big") + bytes(4) + data


@contextlib.contextmanager
def shaken(server):
    """A connection that is a WebSocket."""
    nonce = base64.b64encode(os.urandom(16))
    head = b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nx-api-key: k\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as link:
        link.sendall(head + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + nonce + b"\r\n\r\n")
        got = b""
        while b"\r\n\r\n" not in got:
            got += link.recv(4096)
        yield link


def held(server):
    return sum(_HELD[server.http.server_state].values())


def closing(link):
    """The code of the close frame that comes, or None."""
    got = b""
    with contextlib.suppress(OSError):
        while part := link.recv(4096):
            got += part
    at = got.find(b"\x88")
    return int.from_bytes(got[at + 2 : at + 4], "big") if at >= 0 else None


HALVES = {
    "half a frame": lambda size: frame(b"a" * (size - 100), size=size - 50),
    "a fragment": lambda size: frame(b"a" * (size - 100), fin=False),
    "fragments": lambda size: frame(b"a" * (size // 2), fin=False) + frame(b"a" * (size // 2 - 200), 0, fin=False),
}


@pytest.mark.parametrize("half", HALVES)
def test_messages_on_their_way_are_bounded_on_all_sockets_of_an_address(server, half):
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(shaken(server)) for _ in range(body.HELD + 3)]
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(HALVES[half](MOST))
        end = time.monotonic() + 2
        while (now := held(server)) < (body.HELD - 1) * MOST and time.monotonic() < end:
            time.sleep(0.02)
        assert (body.HELD - 2) * MOST < now <= body.HELD * MOST + socket_connection.READ
    end = time.monotonic() + 5
    while held(server) and time.monotonic() < end:
        time.sleep(0.02)
    assert held(server) == 0


def test_a_message_that_does_not_come_ends_its_socket_and_one_in_pieces_between_pings_is_read(server):
    with shaken(server) as slow, shaken(server) as quick:
        slow.sendall(frame(b'{"type":', fin=False))
        ping = bytes([0x89, 0x80, 0, 0, 0, 0])
        quick.sendall(frame(b'{"type":"cancel",', fin=False) + ping + frame(b'"id":"a"}', 0))
        answer = b""
        while b"expected the id of a request" not in answer:
            answer += quick.recv(4096)
        begun = time.monotonic()
        assert closing(slow) == socket_connection.LATE
        assert time.monotonic() - begun < 8
        quick.sendall(frame(b'{"type":"cancel","id":"b"}'))
        assert b"expected the id" in quick.recv(4096)


class Transport:
    def __init__(self, size):
        self.size, self.aborted = size, False

    def get_write_buffer_size(self):
        return self.size

    def abort(self):
        self.aborted = True


class Reader:
    def __init__(self, size, address):
        self.transport, self.client = Transport(size), (address, 1)


def test_who_leaves_more_unread_than_an_address_may_loses_the_largest_first_and_others_lose_nothing():
    sweep = Sweep(30, unread=40 * SMALL)
    mine = [Reader(n * SMALL, "10.0.0.1") for n in (2, 30, 5, 20, 1)]
    other = Reader(39 * SMALL, "10.0.0.2")
    for _ in range(3):
        for one in mine:
            one.transport.size -= 1 if one.transport.size > SMALL else 0  # each reads a little: none is stuck
        sweep.look([*mine, other])
    assert [one.transport.aborted for one in mine] == [False, True, False, False, False]
    assert not other.transport.aborted


def test_a_flood_of_small_frames_leaves_health_answering(server):
    stop = threading.Event()

    def flood():
        with shaken(server) as link, contextlib.suppress(OSError):
            while not stop.is_set():
                link.sendall(bytes([0x8A, 0x80, 0, 0, 0, 0]) * 20_000)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        times = []
        for _ in range(20):
            begun = time.monotonic()
            assert server.client.get("/health").status_code == 200
            times.append(time.monotonic() - begun)
    finally:
        stop.set()
        thread.join(20)
    assert sorted(times)[10] < 1.0  # at 256 KiB a turn each takes two seconds
