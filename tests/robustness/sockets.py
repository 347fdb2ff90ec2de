"""WebSockets, by hand and with a client library: A47 to A50, F3, F22."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import socket
import struct
import time
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from .ground import KEY, Ground, at_once, memory_of, narrow, receive, rest_within, slim, status_of
from .lines import line

COMPLETIONS = "/v1/completions"
SUM = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
TEXT, BINARY, CLOSE, PING, MORE = 1, 2, 8, 9, 0  # opcodes (RFC 6455)


def frame(opcode: int, data: bytes, final: bool = True, masked: bool = True) -> bytes:
    """Return a frame as a client sends it."""
    head = bytes([(0x80 if final else 0) | opcode])
    bit = 0x80 if masked else 0
    n = len(data)
    head += (
        bytes([bit | n])
        if n < 126
        else (bytes([bit | 126]) + struct.pack(">H", n) if n < 65536 else bytes([bit | 127]) + struct.pack(">Q", n))
    )
    if not masked:
        return head + data
    mask = os.urandom(4)
    return head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)) if n < 4096 else head + bytes(4) + data


def handshake(ground: Ground, link: socket.socket, *more: str) -> bytes:
    word = base64.b64encode(os.urandom(16)).decode()
    lines = [
        "GET /v1/ws HTTP/1.1",
        "Host: localhost",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {word}",
        *(more or [f"Authorization: Bearer {ground.key}"]),
    ]
    link.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    return receive(link, b"\r\n\r\n")


def code_of(got: bytes) -> int:
    """Return the close code at the end of received bytes, or 0."""
    at = 0
    while at + 2 <= len(got):
        opcode, n = got[at] & 15, got[at + 1] & 127
        at += 2
        if n == 126:
            n, at = struct.unpack(">H", got[at : at + 2])[0], at + 2
        elif n == 127:
            n, at = struct.unpack(">Q", got[at : at + 8])[0], at + 8
        if opcode == CLOSE:
            return struct.unpack(">H", got[at : at + 2])[0] if n >= 2 else 1005
        at += n
    return 0


def closes(ground: Ground, data: bytes, *codes: int, busy: bool = False) -> None:
    """Check that the data end the connection with one of these codes; with ``busy`` while a request runs on it."""
    with ground.connect(6) as link:
        assert b" 101 " in handshake(ground, link)
        if busy:
            link.sendall(frame(TEXT, json.dumps({"type": "completions", "id": "a", "body": LONG}).encode()))
            receive(link, b"chunk")
        with contextlib.suppress(ConnectionError):
            link.sendall(data)
        got = receive(link, done=lambda got: code_of(got) != 0)
        if busy:  # the received bytes may begin in the middle of a frame
            got = got[max(got.rfind(b"\x88\x02"), got.rfind(b"\x88\x1a"), 0) :] if b"\x88" in got else got
        assert code_of(got) in codes or (busy and not got), (code_of(got), got[-60:])


def talk(ground: Ground, **more: Any) -> Any:
    return connect(
        ground.url.replace("http", "ws") + "/v1/ws",
        proxy=None,
        **{"subprotocols": ["minivllm", f"key.{ground.key}"], **more},
    )


def answers(ground: Ground, socket_: Any) -> None:
    """Check that a request on the connection gets the expected text."""
    socket_.send(json.dumps({"type": "chat.completions", "id": "golden", "body": SUM}))
    text = ""
    while (message := json.loads(socket_.recv(timeout=20)))["type"] != "done" or message["id"] != "golden":
        if message["id"] == "golden":
            assert message["type"] == "chunk", message
            text += message["data"]["choices"][0]["delta"].get("content") or ""
    assert text == "2 + 3 = 5", text


@line("A47", "a binary message")
def a47(ground: Ground, rng: random.Random) -> Any:
    data = os.urandom(rng.randrange(1, 3000))
    yield "alone", lambda: closes(ground, frame(BINARY, data), 1003)
    yield "empty", lambda: closes(ground, frame(BINARY, b""), 1003)
    yield "in pieces", lambda: closes(ground, frame(BINARY, data, final=False) + frame(MORE, data), 1003)
    yield "JSON as bytes", lambda: closes(ground, frame(BINARY, b'{"type": "cancel", "id": "a"}'), 1003)
    yield "while a request runs", lambda: closes(ground, frame(BINARY, data), 1003, busy=True)


@line("A48", "messages that are no request: the socket lives")
def a48(ground: Ground, rng: random.Random) -> Any:
    messages = [
        "",
        "{",
        "null",
        "[]",
        '"a"',
        "5",
        "{}",
        '{"type": 5}',
        '{"id": "a"}',
        '{"type": "cancel"}',
        '{"type": "cancel", "id": 5}',
        '{"type": "completions", "id": "a", "body": null}',
        '{"type": "completions", "id": "a", "body": {"prompt": NaN}}',
        '{"type": "completions", "id": "a", "body": {"prompt": "a", "temperature": 1e999}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"type": "completions", "id": "\\ud800", "body": {}}',
        '{"type": "chat.completions", "id": "a", "body": {"messages": "a"}}',
        json.dumps({"type": "completions", "id": "a" * 129, "body": {}}),
        json.dumps({"type": "x" * 9999, "id": "a"}),
        json.dumps({"type": "completions", "id": "a", "body": {"prompt": "a", "n": 10**6}}),
        '{"type": "auth", "id": "a"} {}',
        json.dumps({"type": ["completions"], "id": {"a": 1}, "body": [1]}),
    ]
    rng.shuffle(messages)

    def check(part: list[str]) -> None:
        with talk(ground) as socket_:
            for message in part:
                socket_.send(message)
                got = json.loads(socket_.recv(timeout=10))
                assert got["type"] == "error" and got["error"]["code"] in (400, 404), (message[:80], got)
            answers(ground, socket_)

    for at in range(0, len(messages), 6):
        yield f"{at} on", lambda part=messages[at : at + 6]: check(part)
    yield "no UTF-8", lambda: closes(ground, frame(TEXT, b'{"a": "\xff"}'), 1007)
    yield "no UTF-8 in pieces", lambda: closes(ground, frame(TEXT, b"\xc3", final=False) + frame(MORE, b"("), 1007)


@line("A49", "messages and frames that are too large, or no frames")
def a49(ground: Ground, rng: random.Random) -> Any:
    size = (17 << 20) + rng.randrange(1 << 20)
    before = memory_of(ground)

    def large() -> None:
        closes(ground, frame(TEXT, b"a" * size), 1009)

    def pieces() -> None:
        part = b"a" * (1 << 20)
        closes(ground, frame(TEXT, part, final=False) + frame(MORE, part, final=False) * 16, 1009)

    def reported() -> None:
        head = bytes([0x81, 0xFF]) + struct.pack(">Q", rng.choice([2**40, 2**62, 2**63])) + bytes(4)
        closes(ground, head + b"aaaa", 1009, 1002)

    def crumbs() -> None:
        closes(ground, frame(TEXT, b"", final=False) + frame(MORE, b"", final=False) * 50_000, 1009)

    yield "17 MiB", large
    yield "in pieces", pieces
    yield "said only", reported
    yield "50,000 empty pieces", crumbs
    for name, data in (
        ("not masked", frame(TEXT, b"{}", masked=False)),
        ("reserved bits", b"\xf1\x80" + bytes(4)),
        ("opcode 3", b"\x83\x80" + bytes(4)),
        ("a long ping", frame(PING, b"a" * 126)),
        ("a ping in pieces", frame(PING, b"a", final=False)),
        ("more of nothing", frame(MORE, b"a")),
        ("a close of one byte", frame(CLOSE, b"\x03")),
        ("a close code that is none", frame(CLOSE, struct.pack(">H", rng.choice([0, 999, 1005, 1006, 1015, 65535])))),
    ):
        yield name, lambda data=data: closes(ground, data, 1002)
    yield "memory", lambda: slim(ground, before)


@line("A50", "a WebSocket with a wrong key, or none")
def a50(ground: Ground, rng: random.Random) -> Any:
    def wrong(**more: Any) -> None:
        try:
            with talk(ground, **more):
                raise AssertionError("it was let in")
        except InvalidStatus as e:
            assert e.response.status_code == 401, e.response.status_code

    def none(first: str | None) -> None:
        start = time.monotonic()
        with talk(ground, subprotocols=None) as socket_:
            try:
                if first is not None:
                    socket_.send(first)
                while True:
                    assert json.loads(socket_.recv(timeout=6))["type"] == "error"
            except ConnectionClosed as e:
                assert e.rcvd is not None and e.rcvd.code == 1008, e
        assert time.monotonic() - start < 4

    near = KEY[:-1] + rng.choice("abcdefgh")
    for key in (near, KEY + "x", KEY[:-1], "x"):
        yield f"subprotocol {key}", lambda key=key: wrong(subprotocols=["minivllm", f"key.{key}"])
        for name, value in (("Authorization", f"Bearer {key}"), ("x-api-key", key)):
            yield (
                f"{name} {key}",
                lambda name=name, value=value: wrong(subprotocols=None, additional_headers={name: value}),
            )
    for first in (
        None,
        "{",
        json.dumps({"type": "auth", "key": near}),
        json.dumps({"type": "auth", "key": 5}),
        "[" * 9999,
        json.dumps({"type": "completions", "id": "a", "body": LONG}),
    ):
        yield f"first {str(first)[:30]}", lambda first=first: none(first)
    yield "another origin", lambda: origin(ground)


def origin(ground: Ground) -> None:
    with ground.connect() as link:
        got = handshake(ground, link, f"Authorization: Bearer {ground.key}", "Origin: https://elsewhere.example")
        assert status_of(got) == 403, got[:100]


@line("F22", "WebSockets that are gone without a word, answer no ping, close while a prompt is computed, or flood")
def f22(ground: Ground, rng: random.Random) -> Any:
    long = {"type": "completions", "id": "a", "body": {**LONG, "prompt": "a b " * 30}}

    def silent() -> None:
        """Leave the server's pings without an answer, as after a cut cable."""
        with ground.connect(10) as link:
            handshake(ground, link)
            for ident in range(4):
                link.sendall(frame(TEXT, json.dumps({**long, "id": str(ident)}).encode()))
            start = time.monotonic()
            rest_within(ground, 8)
            assert time.monotonic() - start < 6
            got = receive(link)
            assert not got or b"\x88" in got

    def closed(data: bytes) -> None:
        with ground.connect(10) as link:
            handshake(ground, link)
            link.sendall(frame(TEXT, json.dumps(long).encode()) + data)
            if not data:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            link.close()
        rest_within(ground, 2)

    def flood() -> None:
        """Send pings endlessly without reading a pong."""
        before = memory_of(ground)
        link = narrow(ground)
        handshake(ground, link)
        pings, end = frame(PING, b"a" * 125) * 2000, time.monotonic() + 1.5
        link.settimeout(0.5)
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                link.sendall(pings)
        slim(ground, before)
        link.close()

    def churn() -> None:
        for _ in range(20):
            with talk(ground) as socket_:
                for ident in range(rng.randrange(1, 6)):
                    socket_.send(json.dumps({**long, "id": str(ident)}))
                    if rng.random() < 0.5:
                        socket_.send(json.dumps({"type": "cancel", "id": str(ident)}))
                time.sleep(rng.random() * 0.02)
                socket_.socket.close()

    yield "no pong", silent
    yield "close during prefill", lambda: closed(frame(CLOSE, struct.pack(">H", 1000)))
    yield "reset during prefill", lambda: closed(b"")
    yield "half a frame and gone", lambda: closed(frame(TEXT, b"a" * 100)[:50])
    yield "a flood of pings", flood
    yield "20 that come and go", churn


@line("frames", "fuzz: bytes that are no WebSocket frames, or nearly")
def frames(ground: Ground, rng: random.Random) -> Any:
    good = frame(TEXT, json.dumps({"type": "completions", "id": "a", "body": {**LONG, "max_tokens": 5}}).encode())

    def check() -> None:
        data = bytearray(good * 2 + frame(CLOSE, struct.pack(">H", 1000)))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(2)] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        with ground.connect(2) as link:
            handshake(ground, link)
            with contextlib.suppress(ConnectionError):
                link.sendall(bytes(data))
            link.settimeout(rng.random())
            receive(link)

    yield "24 at once", lambda: at_once([check] * 24, 12)


@line("F3", "a reader that takes nothing is cut, and others are served")
def f3(ground: Ground, rng: random.Random) -> Any:
    def fds() -> int:
        return ground.state()["server"]["process"]["fds"]

    def check() -> None:
        """Request more than the system's buffers hold."""
        before, link = fds(), narrow(ground)
        text = "a b " * rng.randrange(3500, 4000)
        link.sendall(ground.request({"prompt": text, "return_token_strs": True}, "/tokenize") * 60)
        end = time.monotonic() + 30
        while fds() > before:
            start = time.monotonic()
            assert ground.client.get("/health").status_code == 200 and time.monotonic() - start < 2
            assert start < end, "the connection is still there"
            time.sleep(0.2)
        link.close()

    yield "60 large answers", check
