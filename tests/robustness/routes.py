"""Routes, methods, headers, keys and names: A8, A9, A11, A12, A38 to A40, A42 and A44."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from .api import either
from .bad_requests import CHAT, COMPLETIONS
from .ground import KEY, Ground, at_once, refused, status_of
from .lines import line


@line("A8", "routes that are not there")
def a8(ground: Ground, rng: random.Random) -> Any:
    word = "".join(rng.choice("abcxyz/.%-_") for _ in range(rng.randrange(1, 60)))
    for path in ("/v2", "/v1", "/", "/v1/completions/", "/v1/chat", "/../etc/passwd", f"/v1/{word}", "/" + "a" * 5000):
        yield path[:30], lambda path=path: refused(ground.client.get(f"{ground.url}{path}"), 404)


@line("A9", "the wrong method")
def a9(ground: Ground, rng: random.Random) -> Any:
    for path, method in (
        (COMPLETIONS, "GET"),
        (CHAT, "DELETE"),
        ("/tokenize", "PUT"),
        ("/health", "POST"),
        ("/v1/models", "PATCH"),
    ):

        def check(path: str = path, method: str = method) -> None:
            answer = ground.client.request(method, path)
            refused(answer, 405)
            assert answer.headers["allow"] in ("POST", "GET"), answer.headers

        yield f"{method} {path}", check


@line("A11", "no key, or nearly the key")
def a11(ground: Ground, rng: random.Random) -> Any:
    at = rng.randrange(len(KEY))
    near = [KEY[:-1], KEY + "x", KEY[:at] + "_" + KEY[at + 1 :], KEY.upper(), f" {KEY} x", "", "é", "\x00", "a" * 5000]
    for word in [None, *near]:
        forms = (
            [{}]
            if word is None
            else [
                {"Authorization": f"Bearer {word}"},
                {"x-api-key": word},
                {"Authorization": word},
                {"Authorization": f"Basic {word}"},
            ]
        )
        for headers in forms:
            raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]

            def check(raw: Any = raw) -> None:
                lines = b"".join(k + b": " + v + b"\r\n" for k, v in raw)
                got = ground.raw(
                    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + lines + b"\r\n"
                )
                assert status_of(got) in (401, 400), got[:200]

            yield f"{word and word[:12]!r} {list(headers)}", check


@line("A12", "paths and hosts that look like others open nothing")
def a12(ground: Ground, rng: random.Random) -> Any:
    for target, host in (
        ("/v1/models", "x/?"),
        ("/v1/models", "x/health?"),
        ("//v1/models", "localhost"),
        ("/%2fv1/models", "localhost"),
        ("/V1/models", "localhost"),
        ("/v1/models;a", "localhost"),
        ("/v1/models/../../health", "localhost"),
        ("/health/../v1/models", "localhost"),
        ("/health/%2e%2e/v1/models", "localhost"),
        ("/health?/v1/models", "localhost"),
        ("http://x/v1/models", "localhost"),
        ("http://health/v1/models", "health"),
        ("/health%00/v1/models", "localhost"),
        ("/v1/models#/health", "localhost"),
        ("*", "localhost"),
        ("/health;/v1/models", "localhost"),
    ):

        def check(target: str = target, host: str = host) -> None:
            got = ground.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            if status_of(got) == 200:
                assert target.startswith("/health?") and b'"status":"ok"' in got.replace(b" ", b""), got[:300]
            else:
                assert status_of(got) in (400, 401, 403, 404), got[:200]

        yield f"{target} at {host}", check


@line("A38", "a model that is a path")
def a38(ground: Ground, rng: random.Random) -> Any:
    for model in (
        "../../etc",
        "/etc/passwd",
        "..\\..",
        "pocket/../pocket",
        "pocket\x00",
        "\u202epocket",
        "a" * 10**5,
        "file:///etc",
    ):
        yield repr(model[:20]), lambda model=model: refused(ground.post(*either_of(rng, model)), 404, "model")
    for model in (5, [], {}, True):
        yield repr(model), lambda model=model: refused(ground.post(*either_of(rng, model)), 400, "model")


def either_of(rng: random.Random, model: Any) -> tuple[str, dict[str, Any]]:
    return either(rng, model=model)


@line("A39", "headers that are large or many")
def a39(ground: Ground, rng: random.Random) -> Any:
    size, many = rng.randrange(40 << 10, 200 << 10), rng.randrange(101, 2000)
    for name, lines, wanted in (
        ("large", ["X-Big: " + "a" * size], (431,)),
        ("many", [f"X-{i}: a" for i in range(many)], (431,)),
        ("a long name", ["a" * size + ": a"], (431,)),
        ("1 MiB", ["X-Big: " + "a" * (1 << 20)], (431, 400, 0)),
        ("20,000", [f"X-{i}: a" for i in range(20_000)], (431, 400, 0)),
    ):

        def check(lines: list[str] = lines, wanted: tuple[int, ...] = wanted) -> None:
            got = ground.raw(ground.head("/version", *lines, "Connection: close", method="GET") + b"\r\n")
            assert status_of(got) in wanted, got[:200]

        yield name, check
    url = "/version?" + "a" * rng.randrange(100_000, 1_000_000)
    yield (
        "a long address",
        lambda: no_success(ground.raw(ground.head(url, "Connection: close", method="GET") + b"\r\n")),
    )


def no_success(got: bytes) -> None:
    assert status_of(got) in (0, 200, 400, 414, 431), got[:200]  # the parser limits the length of a query


@line("A40", "a request id that is long or has control characters")
def a40(ground: Ground, rng: random.Random) -> Any:
    for ident in (
        "x" * 10_000,
        "\x1b[31mred",
        "a\tb",
        "é",
        "a;b",
        "a\u0080b",
        '"}{"',
        "x" * 129,
        "http://127.0.0.1:9/",
    ):

        def check(ident: str = ident) -> None:
            before = len(getattr(ground, "log", []))
            line_ = b"X-Request-Id: " + ident.encode("latin-1") + b"\r\n"
            got = ground.raw(ground.head("/version", "Connection: close", method="GET") + line_ + b"\r\n")
            head = got.partition(b"\r\n\r\n")[0].lower()
            if status_of(got) == 200:
                (echoed,) = [v.split(b": ")[1] for v in head.split(b"\r\n") if v.startswith(b"x-request-id")]
                assert echoed == ident.encode("latin-1") or len(echoed) == 32, echoed
                assert all(32 < c < 127 for c in echoed) and len(echoed) <= 128, echoed
            else:
                assert status_of(got) in (400, 431), got[:100]
            time.sleep(0.02)
            new = [json.loads(row) for row in getattr(ground, "log", [])[before:]]
            assert len([row for row in new if row.get("path") == "/version"]) <= 1

        yield repr(ident[:12]), check


@line("A42", "one request id for two requests at once")
def a42(ground: Ground, rng: random.Random) -> Any:
    def check() -> None:
        bodies = [{"prompt": [5 + i, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True} for i in range(4)]
        alone = [ground.post(COMPLETIONS, body).json()["choices"][0]["text"] for body in bodies]
        same = {"X-Request-Id": f"mine-{rng.randrange(99)}", "Connection": "close"}
        got = at_once([lambda body=body: ground.post(COMPLETIONS, body, headers=same) for body in bodies * 2])
        assert [a.json()["choices"][0]["text"] for a in got] == alone * 2
        assert len({a.json()["id"] for a in got}) == 8
        assert {a.headers["x-request-id"] for a in got} == {same["X-Request-Id"]}

    yield "eight", check


@line("A44", "routes of an operator are not there without --admin", "plain")
def a44(ground: Ground, rng: random.Random) -> Any:
    for path in (
        "/sleep",
        "/wake_up",
        "/start_profile",
        "/stop_profile",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/docs",
        "/redoc",
        "/debug/state",
        "/invocations",
        "/pause",
        "/load_lora_adapter",
        "/admin",
        "/shutdown",
        "/.env",
    ):
        for method in ("GET", "POST"):
            yield f"{method} {path}", lambda path=path, method=method: refused(ground.client.request(method, path), 404)
