"""Clients that leave, read nothing, send half a request, or are too many; keys; deadlines; the end of the server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")

import httpx
from http_helpers import Running

from minivllm.cli import main
from minivllm.config.server import ServerConfig
from minivllm.errors import ConfigError
from minivllm.server.http.auth import check_keys

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def ask(body, keep=b"", path="/v1/completions"):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n"
    return head.encode() + keep + b"\r\n" + data


def until(found, seconds=20.0):
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server():
    """Two run at once, four may wait."""
    running = Running(
        engine={"max_num_seqs": 2, "max_num_batched_tokens": 64},
        max_queue=4,
        write_timeout=1.0,
        keep_alive=1.0,
        body_timeout=0.5,
        header_timeout=0.5,
    )
    running._bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel's buffer for a slow reader
    yield running
    running.at_rest()
    running.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_at_once_while_it_runs_or_waits(server, stream):
    links = []
    for _ in range(5):  # two run, three wait
        links.append(socket.create_connection((server.host, server.port)))
        links[-1].sendall(ask({**LONG, "stream": stream}))
    until(lambda: server.stats()["running"] == 2 and server.stats()["waiting"] == 3)
    for link in links:
        link.close()
    start = time.monotonic()
    until(lambda: server.stats()["running"] + server.stats()["waiting"] == 0)
    assert time.monotonic() - start < 10  # all five to their end: 13 s and more
    server.at_rest()


def test_what_does_not_fit_gets_429_exactly_and_what_was_accepted_is_served(server):
    body = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True}

    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60, trust_env=False) as client:
            slow = [asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": 40}))]
            while server.app.service.door.inside < 1:
                await asyncio.sleep(0.005)
            slow += [
                asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": 30})) for _ in range(5)
            ]
            while server.app.service.door.inside < 6:
                await asyncio.sleep(0.005)
            late = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(10)))
            health = await client.get("/health")
            return await asyncio.gather(*slow), late, health

    accepted, late, health = asyncio.run(main())
    assert [answer.status_code for answer in accepted] == [200] * 6 and health.status_code == 200
    assert [answer.status_code for answer in late] == [429] * 10
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in late)
    server.at_rest()


def test_who_reads_nothing_is_aborted_and_holds_nobody_up(server):
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect((server.host, server.port))
    wide = {"prompt": "Once", "n": 2, "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "stream": True}
    link.sendall(ask(wide))
    until(lambda: server.app.service.door.inside == 1)
    until(lambda: server.app.service.door.inside == 0, 30)
    link.close()
    server.at_rest()


def test_half_a_request_is_closed_and_half_a_body_gets_408(server):
    assert server.raw(b"POST /v1/completions HT", 20) == b""
    assert server.raw(ask({"prompt": "a"})[:-4], 20).startswith(b"HTTP/1.1 408")
    assert server.raw(b"GARBAGE\r\n\r\n", 20).startswith(b"HTTP/1.1 400")
    server.at_rest()


def test_who_sends_too_large_a_body_hears_why_at_once_and_may_send_on(server):
    """If the server closed the connection at once, bytes in flight would reset it, and the answer would be lost."""
    data = ask({"prompt": "a" * (8 << 20)})
    link = socket.create_connection((server.host, server.port))
    link.sendall(data[:-1])
    link.settimeout(20)
    got = link.recv(12)
    link.sendall(data[-1:])
    while part := link.recv(4096):
        got += part
    assert got.startswith(b"HTTP/1.1 413") and b"8388608 bytes" in got
    link.close()
    chunked = ask(LONG).partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    stalls = chunked + b"%x\r\n" % (9 << 20) + b"a" * (9 << 20) + b"\r\n"  # too large, and no end follows
    assert server.raw(stalls, 5).startswith(b"HTTP/1.1 413")
    head = ask(LONG).partition(b"Content-Length")[0] + b"Content-Length: 8388609\r\nExpect: 100-continue\r\n\r\n"
    assert server.raw(head).startswith(b"HTTP/1.1 413")
    server.at_rest()


def test_an_answer_that_takes_too_long_ends_with_an_error(server):
    answer = server.post("/v1/completions", {**LONG, "timeout_s": 0.2})
    assert answer.status_code == 408 and answer.json()["error"]["type"] == "RequestTimeoutError"
    events = server.events("/v1/completions", {**LONG, "timeout_s": 0.5})
    assert events[-1]["error"]["code"] == 408 and all("choices" in event for event in events[:-1]) and len(events) > 1
    server.at_rest()


def test_a_waiting_stream_is_kept_alive_by_comments(server):
    links = [socket.create_connection((server.host, server.port)) for _ in range(3)]
    for link in links:
        link.sendall(ask({**LONG, "stream": True}))
    links[2].settimeout(5)
    got = b""
    while b": keep-alive" not in got:
        part = links[2].recv(4096)
        assert part, got
        got += part
    for link in links:
        link.close()
    server.at_rest()


def test_a_request_that_fails_in_the_engine_fails_alone(server):
    """For example, its processor raises.

    The answer is an error without internal details, and later requests succeed.
    """
    engine = server.app.service.client._engine
    step, calls = engine.step, []

    def failing():
        worked = step()
        calls.append(worked)
        if len(calls) == 3:
            engine.finish(next(iter(engine.requests.values())).sequences[0], "error", error="planted")
        return worked

    engine.step = failing
    try:
        answer = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 8, "ignore_eos": True})
        calls.clear()
        events = server.events("/v1/completions", {"prompt": "Once", "max_tokens": 8, "ignore_eos": True})
    finally:
        engine.step = step
    assert answer.status_code == 500 and "planted" not in answer.text
    assert events[-1]["error"]["code"] == 500 and len(events) > 1
    server.at_rest()


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_every_route_but_health_needs_a_key(capsys):
    server = Running(keys=["secret-1", "secret-2"], admin=True)
    try:
        bare = httpx.Client(base_url=server.url, trust_env=False)
        paths = {route.path: route.methods for route in server.app.api.routes if hasattr(route, "methods")}
        open_to_all = set()
        for path, methods in paths.items():
            answer = bare.request(min(methods), path.replace("{model:path}", "x"))
            if answer.status_code != 401:
                open_to_all.add(path)
            else:
                assert "Authorization: Bearer KEY" in str(answer.json()["error"])
        assert open_to_all == {"/health", "/ping"} and "/start_profile" in paths and "/openapi.json" in paths
        for wrong in ("", "Bearer", "Bearer secret-", "Bearer secret-11", "secret-1", "Basic secret-1"):
            assert bare.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
        for right in (
            {"Authorization": "Bearer secret-2"},
            {"authorization": "bearer secret-1"},
            {"x-api-key": "secret-1"},
        ):
            assert bare.get("/v1/models", headers=right).status_code == 200
        # the cache of one key's requests is not used for another key
        ask = {"prompt": "The quick brown fox went over the hill to see the lazy dog. " * 8, "max_tokens": 1}
        cached = [
            bare.post("/v1/completions", json=ask, headers={"x-api-key": key}).json()["usage"]
            for key in ("secret-1", "secret-1", "secret-2")
        ]
        counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached]
        assert counts[0] == 0 and counts[1] > 50 and counts[2] == 0
        key = server.app.admin_token  # there are two keys: neither is the operator's
        assert bare.post("/reset_prefix_cache", headers={"x-api-key": key}).json() == {"reset": True}
        bare.close()
    finally:
        server.close()
    assert "secret-" not in capsys.readouterr().err


# ---- many ------------------------------------------------------------------------------------------------------------


def test_64_streams_at_once_are_what_each_is_alone():
    server = Running(engine={"max_num_seqs": 64, "num_kvcache_blocks": 2048})
    bodies = [{"prompt": f"Once upon a time {i}", "max_tokens": 8, "seed": i, "top_k": 20} for i in range(64)]

    def text(events):
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    texts: list = [None] * 64

    def one(i):
        texts[i] = text(server.events("/v1/completions", bodies[i]))

    try:
        threads = [threading.Thread(target=one, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for i in range(0, 64, 16):
            assert texts[i] == server.post("/v1/completions", bodies[i]).json()["choices"][0]["text"]
        assert None not in texts and len(set(texts)) > 32
        server.at_rest()
    finally:
        server.close()


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*more):
    return [sys.executable, "-m", "minivllm", "serve", "pocket", "--max-model-len", "1024", *more]


@pytest.fixture
def served():
    made = []

    def start(*more):
        process = subprocess.Popen(command("--port", "0", *more), stderr=subprocess.PIPE, text=True)
        made.append(process)
        for line in process.stderr:
            if '"url"' in line:
                return process, json.loads(line)["url"]
        raise AssertionError(process.wait())

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(("drain", "tokens", "code"), [pytest.param(30, 60, 0, marks=pytest.mark.slow), (0.3, 900, 6)])
def test_sigterm_lets_streams_end_and_the_exit_says_whether_they_did(served, drain, tokens, code):
    process, url = served("--drain-timeout", str(drain))
    body = {**LONG, "max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 503)
        got = [line for line in lines if line]
    assert got[-1] == "data: [DONE]" if code == 0 else json.loads(got[-1][6:])["error"]["code"] == 503
    assert process.wait(5) == code
    rows = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert rows[-1]["message"] == "stopped" and not any("traceback" in row for row in rows)


def test_a_port_in_use_a_bad_flag_and_bad_keys_end_with_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        empty = tmp_path / "keys"
        empty.write_text("# none\n")
        cases = {
            5: ["--port", str(taken.getsockname()[1])],
            2: ["--api-key-file", str(empty)],
        }
        for code, more in cases.items():
            done = subprocess.run(command(*more), capture_output=True, text=True, timeout=60)
            assert done.returncode == code and done.stderr.startswith("minivllm: error: ")
            assert len(done.stderr.splitlines()) == 1
    for flags in (["--port", "abc"], ["--port", "70000"], ["--log-format", "xml"], ["--tool-parser", "hermse"]):
        try:
            assert main(["serve", *flags]) == 2
        except SystemExit as end:
            assert end.code == 2


KEYS = [
    *("sk-1", "a b", "é ключ 你好", "x" * 512, "#\"'\\", "Bearer", "Bearer k", "k:v, w", "\U0001f642"),
    *(" k", "k ", "\tk", "k\t", "a\tb", "a\nb", "a\r", "a\x00b", "a\x7fb", "a\x85b", "x" * 513, "é" * 257, "\u3000k"),
]


def test_every_key_that_a_start_accepts_opens_the_server():
    """A start refuses keys that no header could carry, without showing them."""
    limit = {"max_header_bytes": 1024}
    accepted = []
    for key in KEYS:
        try:
            check_keys([key], ServerConfig(**limit))
            accepted.append(key)
        except ConfigError as error:
            assert len(key) < 3 or key not in str(error)
    assert accepted == KEYS[:9]
    running = Running(keys=accepted, **limit)
    try:
        for key in accepted:
            for name, value in (("Authorization", f"Bearer {key}"), ("x-api-key", key)):
                response = httpx.get(f"{running.url}/v1/models", headers={name: value.encode()}, trust_env=False)
                assert response.status_code == 200, (name, key)
    finally:
        running.close()


@pytest.mark.parametrize("source", ["flag", "environment", "operator", "file"])
def test_a_key_that_no_header_carries_ends_the_start_wherever_it_is_from(source, tmp_path, monkeypatch, capsys):
    long = "x" * 40_000
    flags = []
    if source == "flag":
        flags = ["--api-key", long]
    elif source == "file":
        path = tmp_path / "keys"
        path.write_text(f"sk-1\n{long}\n")
        flags = ["--api-key-file", str(path)]
    else:
        monkeypatch.setenv("MINIVLLM_API_KEY" if source == "environment" else "MINIVLLM_ADMIN_KEY", long)
    assert main(["serve", "pocket", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert "a key has 40000 bytes; expected at most 16384, half of server.max_header_bytes" in error
    assert long not in error


TURNS = [{"role": "user", "content": "Once"}]
STREAMS = {
    "/v1/completions": {"prompt": "Once", "stream": True},
    "/v1/chat/completions": {"messages": TURNS, "stream": True},
    "/v1/responses": {"input": "Once", "stream": True},
    "/v1/messages": {"model": "pocket", "messages": TURNS, "max_tokens": 9, "stream": True},
    "/api/chat": {"model": "pocket", "messages": TURNS},
    "/api/generate": {"model": "pocket", "prompt": "Once"},
}


@pytest.fixture(scope="module")
def paused():
    """A server that generates nothing until its end, with rare comments in silent streams."""
    running = Running(keep_alive=600.0, admin=True)
    admin = {"Authorization": f"Bearer {running.app.admin_token}"}
    assert running.post("/pause", {}, headers=admin).status_code == 200
    yield running
    assert running.post("/resume", {}, headers=admin).status_code == 200
    running.at_rest()
    running.close()


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_a_silent_stream_ends_its_request_at_once(paused, path):
    """It has read all that was sent, so its kernel closes the connection as if it only sent no more."""
    with socket.create_connection((paused.host, paused.port), timeout=20) as link:
        link.sendall(ask(STREAMS[path], path=path))
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert paused.app.service.door.inside == 1
    until(lambda: paused.app.service.door.inside == 0, 10)


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_only_sends_no_more_gets_its_stream(server, path):
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    body = {**STREAMS[path], "model": model}
    with socket.create_connection((server.host, server.port), timeout=20) as link:
        link.sendall(ask(body, path=path))
        got = link.recv(1 << 16)
        link.shutdown(socket.SHUT_WR)
        while part := link.recv(1 << 16):
            got += part
    assert got.startswith(b"HTTP/1.1 200 ") and got.endswith(b"0\r\n\r\n")
