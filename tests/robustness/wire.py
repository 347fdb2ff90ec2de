"""A45, A46, F14, F23 and other wrong behaviour of a connection, with plain sockets."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

from .ground import Ground, at_once, receive, rest_within, status_of
from .lines import line

COMPLETIONS = "/v1/completions"
SUM = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
TEXT, BINARY, CLOSE, PING, MORE = 1, 2, 8, 9, 0  # opcodes (RFC 6455)


@line("A45", "a body that never comes, or drips")
def a45(ground: Ground, rng: random.Random) -> Any:
    body = json.dumps({"prompt": "a" * rng.randrange(10, 99)}).encode()

    def silence(given: int, more: int) -> None:
        start = time.monotonic()
        got = ground.raw(ground.head(COMPLETIONS, f"Content-Length: {len(body) + more}") + b"\r\n" + body[:given])
        assert status_of(got) == 408 and time.monotonic() - start < 5, got[:200]

    def drip() -> None:
        """Send a byte now and then, which must not prolong the limit."""
        with ground.connect() as link:
            link.sendall(ground.head(COMPLETIONS, "Content-Length: 1000") + b"\r\n")
            link.settimeout(0.2)
            end, got = time.monotonic() + 6, b""
            while time.monotonic() < end and b"\r\n\r\n" not in got:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    link.sendall(b" ")
                    got += link.recv(4096)
            assert status_of(got) == 408, got[:200]

    def chunked() -> None:
        got = ground.raw(ground.head(COMPLETIONS, "Transfer-Encoding: chunked") + b"\r\n" + b'5\r\n{"a":\r\n')
        assert status_of(got) == 408, got[:200]

    yield "silence after the headers", lambda: silence(0, 0)
    yield "half of it", lambda: silence(rng.randrange(1, len(body)), 0)
    yield "all, and more was said", lambda: silence(len(body), rng.randrange(1, 1000))
    yield "a byte now and then", drip
    yield "half of the chunks", chunked


@line("A46", "two lengths, a length beside chunks, and lengths that are none")
def a46(ground: Ground, rng: random.Random) -> Any:
    body = b'{"prompt": "a", "max_tokens": 1}'
    n = len(body)
    for lines in (
        (f"Content-Length: {n}", f"Content-Length: {n + rng.randrange(1, 9)}"),
        (f"Content-Length: {n}", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", f"Content-Length: {n}"),
        (f"Content-Length: {n}, {n + 1}",),
        ("Content-Length: -1",),
        ("Content-Length: 0x10",),
        (f"Content-Length: +{n}",),
        ("Content-Length: 1e1",),
        (f"Content-Length: {10**30}",),
        ("Transfer-Encoding: chunked, gzip",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("Content-Length: ",),
        (f"Content-Length: {n}\x00",),
    ):

        def check(lines: tuple[str, ...] = lines) -> None:
            got = ground.raw(ground.head(COMPLETIONS, *lines, "Connection: close") + b"\r\n" + body, 3)
            assert status_of(got) in (400, 408, 411, 413, 501), got[:200]
            assert got.count(b"HTTP/1.1 200") == 0, "something behind the request was taken for one"

        yield " + ".join(lines)[:50], check

    def smuggled() -> None:
        inner = ground.head("/v1/models", method="GET") + b"\r\n"
        head = ground.head(COMPLETIONS, "Content-Length: 4", "Transfer-Encoding: chunked")
        got = ground.raw(head + b"\r\n0\r\n\r\n" + inner, 3)
        assert b"HTTP/1.1 200" not in got, got[:300]

    yield "a request behind it", smuggled


@line("framing", "fuzz: bytes that are no HTTP, or nearly")
def framing(ground: Ground, rng: random.Random) -> Any:
    good = ground.request({"prompt": "a", "max_tokens": 2}, COMPLETIONS, "Connection: close")

    def check() -> None:
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            how = rng.randrange(4)
            if how == 0:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at : at + rng.randrange(1, 40)]
            elif how == 2:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
            else:
                data[at:at] = rng.choice([b"\r\n", b"\x00", b"\r", b"\n\n", b": ", b" HTTP/1.1", b"\xff" * 9])
        got = ground.raw(bytes(data), 6)
        assert status_of(got) < 500, got[:300]

    yield "32 at once", lambda: at_once([check] * 32, 16)


@line("pipeline", "requests sent before the answers are read")
def pipeline(ground: Ground, rng: random.Random) -> Any:
    def check() -> None:
        one = ground.request({"prompt": "a", "max_tokens": 1})
        bad = ground.request(b"{")
        count = rng.randrange(5, 20)
        got = ground.raw((one + bad) * count + ground.head("/version", "Connection: close", method="GET") + b"\r\n", 20)
        assert got.count(b"HTTP/1.1 200") == count + 1 and got.count(b"HTTP/1.1 400") == count, got[-300:]

    yield "some", check

    def left(stream: bool) -> None:
        with ground.connect() as link:
            link.sendall(ground.request({**LONG, "stream": stream}) * rng.randrange(2, 9))
            if stream:
                link.recv(4096)
            else:
                time.sleep(0.2)
        rest_within(ground, 2)

    yield "streams, and gone", lambda: left(True)
    yield "whole answers, and gone", lambda: left(False)

    def endless() -> None:
        with ground.connect() as link, contextlib.suppress(OSError):
            for _ in range(200):
                link.sendall(ground.request({**LONG, "stream": False}) * 50)
        rest_within(ground, 2)

    yield "10,000", endless


@line("F14", "more requests than run and wait")
def f14(ground: Ground, rng: random.Random) -> Any:
    def check() -> None:
        room, surplus = 8 + 16, rng.randrange(5, 25)
        inside = [ground.connect(30) for _ in range(room)]
        for link in inside:
            link.sendall(ground.request({**LONG, "max_tokens": 120, "stream": True}))
        end = time.monotonic() + 5
        while ground.state()["server"]["tables"]["inside"] < room:
            assert time.monotonic() < end
            time.sleep(0.02)
        late = at_once([lambda: ground.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})] * surplus)
        codes = [answer.status_code for answer in late]
        assert codes == [429] * surplus, codes
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in late)
        assert ground.client.get("/health").status_code == 200
        for link in inside[6:]:
            link.close()
        for link in inside[:6]:
            got = receive(link, b"[DONE]")
            assert status_of(got) == 200 and b"data: [DONE]" in got, got[-200:]
            link.close()

    yield "24 inside", check


@line("F23", "200 connections with half a header, or half a body")
def f23(ground: Ground, rng: random.Random) -> Any:
    def check() -> None:
        links = [ground.connect(10) for _ in range(200)]
        whole = ground.request({"prompt": "a", "max_tokens": 4})
        head = whole.index(b"\r\n\r\n")
        starts = [rng.randrange(1, head) if i % 2 else rng.randrange(head + 4, len(whole) - 1) for i in range(200)]
        for link, cut in zip(links, starts, strict=True):
            link.sendall(whole[:cut])
        start = time.monotonic()
        answer = ground.post(COMPLETIONS, {"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 200 and time.monotonic() - start < 3
        for i, link in enumerate(links):
            got = receive(link)
            assert status_of(got) == (0 if i % 2 else 408), got[:200]
            link.close()
        assert time.monotonic() - start < 8

    yield "half of each", check

    def idle() -> None:
        """Open connections that send nothing, and upgrades that stop half way."""
        links = [ground.connect(10) for _ in range(50)]
        for link in links[::2]:
            link.sendall(
                b"GET /v1/ws HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-K"
            )
        start = time.monotonic()
        for link in links:
            assert receive(link) == b""
            link.close()
        assert time.monotonic() - start < 5

    yield "nothing at all", idle
