"""F15 to F17 and the second half of F23: signals, and the behaviour of a server until it has ended."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from typing import Any

import httpx

from .ground import Served, children, gone, receive, status_of
from .lines import line

COMPLETIONS = "/v1/completions"


def stream(server: Served, tokens: int) -> socket.socket:
    link = server.connect(60)
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    link.sendall(server.request(body))
    assert b" 200 " in receive(link, b"data: ")[:40]
    return link


def ready(server: Served) -> int:
    try:
        return httpx.get(
            f"{server.url}/ready", headers=dict(server.client.headers), trust_env=False, timeout=5
        ).status_code
    except httpx.HTTPError:
        return 0


def ended(server: Served, inner: list[int], code: int, seconds: float) -> None:
    """Check that a server ended in time with this status and a last log line, and that no process of it is left."""
    start = time.monotonic()
    assert server.process.wait(seconds + 20) == code, (server.process.returncode, server.log[-5:])
    took = time.monotonic() - start
    assert took < seconds, f"it took {took:.1f} s to end"
    gone(inner)
    server._reader.join(5)
    server.check_log()
    assert any(json.loads(row)["message"] == "stopped" for row in server.log), server.log[-3:]


@line("F15", "SIGTERM with running streams: all finish, new requests get 503, exit 0", "")
def f15(ground: Any, rng: random.Random) -> Any:
    server = Served("--set", "server.drain_timeout=60")
    try:

        def check() -> None:
            inner = children(server.process.pid)
            links = [stream(server, rng.randrange(60, 120)) for _ in range(8)]
            server.process.send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
            end = time.monotonic() + 2
            while ready(server) != 503:
                assert time.monotonic() < end, "it is ready still"
                time.sleep(0.02)
            answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
            for link in links:
                got = receive(link, b"[DONE]")
                assert b"[DONE]" in got and b'"error"' not in got, got[-200:]
                link.close()
            ended(server, inner, 0, 8)

        yield "eight streams", check
    finally:
        server.stop()


@line("F16", "SIGTERM with streams that are too long, and a second signal", "")
def f16(ground: Any, rng: random.Random) -> Any:
    for name, drain, second in (("the time is over", 1.0, False), ("a second signal", 60.0, True)):
        server = Served("--set", f"server.drain_timeout={drain}")
        try:

            def check(server: Served = server, second: bool = second) -> None:
                inner = children(server.process.pid)
                links = [stream(server, 480) for _ in range(8)]
                half = server.connect(30)  # some connections send half a request, and must not delay the end
                half.sendall(b"POST /v1/compl")
                body = server.connect(30)
                body.sendall(server.head(COMPLETIONS, "Content-Length: 99") + b"\r\n{")
                server.process.send_signal(signal.SIGTERM)
                if second:
                    time.sleep(0.2)
                    server.process.send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
                for link in links:
                    got = receive(link)
                    assert b"[DONE]" not in got and b'"code":503' in got.replace(b" ", b""), got[-300:]
                    link.close()
                reported = status_of(receive(half)), status_of(receive(body))
                assert reported[0] in (0, 400) and reported[1] in (0, 400, 408, 503), reported
                ended(server, inner, 6, 6)

            yield name, check
        finally:
            server.stop()


@line("F17", "a signal while the model is loaded", "")
def f17(ground: Any, rng: random.Random) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = Served("--port", str(port), wait=False)
        try:

            def check(server: Served = server, number: int = number, port: int = port) -> None:
                end = time.monotonic() + 60
                while True:
                    try:
                        answer = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=2)
                        break
                    except httpx.HTTPError:
                        assert time.monotonic() < end, server.log
                        time.sleep(0.02)
                assert answer.status_code == 503 and server._url is None
                time.sleep(rng.random() * 1.5)
                inner = children(server.process.pid)
                started = time.monotonic()
                server.process.send_signal(number)
                code = server.process.wait(30)
                assert time.monotonic() - started < 5, "it took long"
                assert code in (0, 6), (code, server.log)
                gone(inner)
                server._reader.join(5)
                assert not any("Traceback" in row or "never" in row for row in server.log), server.log

            yield signal.Signals(number).name, check
        finally:
            server.stop()
