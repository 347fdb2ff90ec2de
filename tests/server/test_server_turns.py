"""Whatever a client sends, no turn of the event loop takes long, and a body past the limit is refused at the limit."""

import json
import socket
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from loop_turns import longest_turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import attacks

LIMIT = 8 << 20
TURN = 0.25  # seconds of CPU time: each of these bodies took 0.3 to 15 where the loop read it
SHORT_TURN = 0.08  # seconds of CPU time; the goal is 0.05, but the machines of tests are slow
server = served()
EACH = [
    "unknown fields", "unknown fields, 30 KiB", "unknown stream options", "8 MiB of ids", "8 MiB of ids in lists",
    "8 MiB of objects", "8 MiB of objects in messages", "8 MiB of escapes", "8 MiB of biases", "100,000 biases",
    "60,000 tools", "arguments of a call", "1 M ids to detokenize", "256 prompts of 8,000", "a schema of references",
    "sockets: 8 MiB of objects", "sockets: unknown fields",
]  # fmt: skip


@pytest.fixture
def turns(server):
    """CPU seconds of the longest turn of the server's loop, as a list of one."""
    with longest_turn(server) as longest:
        yield longest


@pytest.mark.parametrize("name", EACH)
def test_no_turn_of_the_loop_takes_long_whatever_is_sent(server, turns, name):
    path, body = attacks.attacks()[name]
    status = attacks.send_once((server.host, server.port), path, body, "none")
    assert status in ("400", "200"), status
    assert 0 < turns[0] < TURN, f"{turns[0]:.3f} s"


@pytest.mark.parametrize("name", attacks.protocols())
def test_no_turn_takes_long_on_the_routes_of_other_protocols(server, turns, name):
    """Each took 60 to 460 ms in one turn, or may become so.  The shortest of three sends counts, because a collection
    of garbage may fall into a turn."""
    path, body = attacks.protocols()[name]
    took = []
    while len(took) < 3 and min(took, default=1) > SHORT_TURN:
        turns[0] = 0.0
        status = attacks.send_once((server.host, server.port), path, body, "none")
        took.append(turns[0])
        assert status in ("400", "200"), status
    assert 0 < min(took) < SHORT_TURN, f"{min(took):.3f} s"


# ---- 413 -------------------------------------------------------------------------------------------------------------


def test_a_length_past_the_limit_is_refused_before_the_body_comes(server):
    with socket.create_connection((server.host, server.port), timeout=30) as link:
        link.sendall(attacks.head("/v1/completions", "none", f"Content-Length: {LIMIT + 1}"))
        got = b""
        while part := link.recv(65536):  # until the server closes
            got += part
        assert got.startswith(b"HTTP/1.1 413") and b"connection: close" in got.lower() and b"8388608" in got


@pytest.mark.parametrize("size", [1000, 70_000, 1 << 20])
def test_a_body_in_chunks_is_refused_at_the_limit_and_not_read_on(server, size):
    """Its sender would go on for ever."""
    chunk, sent = b"%x\r\n" % size + b" " * size + b"\r\n", 0
    with socket.create_connection((server.host, server.port), timeout=30) as link:
        link.sendall(attacks.head("/v1/completions", "none", "Transfer-Encoding: chunked"))
        while sent <= LIMIT:
            link.sendall(chunk)
            sent += size
        assert link.recv(65536).startswith(b"HTTP/1.1 413")  # though no end was in sight
        with pytest.raises(ConnectionError):
            while sent < 100 * LIMIT:
                link.sendall(chunk * max(1, (1 << 20) // size))
                sent += size * max(1, (1 << 20) // size)
    server.at_rest()


def test_who_sends_a_body_that_is_too_large_to_its_end_still_reads_why(server):
    answer = server.client.post(
        "/v1/completions",
        content=b'{"prompt": "' + b"a" * (LIMIT + (1 << 20)) + b'"}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 413 and "8388608" in answer.json()["error"]["message"]


def test_bodies_on_their_way_are_bounded_for_each_asker(server, monkeypatch):
    from minivllm.server.http import body

    monkeypatch.setattr(body, "HELD", 1)
    head = attacks.head("/v1/completions", "none", f"Content-Length: {LIMIT}")
    with socket.create_connection((server.host, server.port), timeout=30) as first:
        first.sendall(head + b" " * (LIMIT - 1000))
        held = server.app.service.bodies.held
        end = time.monotonic() + 30
        while sum(held.values()) < LIMIT - 1000:
            assert time.monotonic() < end
            time.sleep(0.01)
        answer = server.post("/v1/completions", {"prompt": "a" * 2000, "max_tokens": 1})
        assert answer.status_code == 429 and answer.headers["retry-after"]
    end = time.monotonic() + 30
    while held:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_large_prompt_of_ids_is_answered_as_a_small_one_is(server):
    """It comes by another way."""
    ids = [5 + i % 90 for i in range(900)]
    more = {"max_tokens": 2, "temperature": 0, "echo": True, "return_token_ids": True}
    small = server.post("/v1/completions", {"prompt": ids, **more}).json()["choices"][0]
    padded = json.dumps({"prompt": [ids, ids], **more, "metadata": {"a": "b" * 100_000}})
    large = server.client.post("/v1/completions", content=padded, headers={"Content-Type": "application/json"}).json()
    assert [{**choice, "index": 0} for choice in large["choices"]] == [small, small]
    assert small["prompt_token_ids"] == ids
    for prompt, word in (([-1] * 900, "-1"), ([10**6] * 900, "1000000"), ([5] * 20_000, "maximum context length")):
        answer = server.post("/v1/completions", {"prompt": prompt, "metadata": "b" * 100_000})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]


def test_a_schema_that_is_worked_out_elsewhere_holds(server):
    properties = {f"property number {i}": {"type": "integer"} for i in range(200)}
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"enum": ["x"]}, **properties}}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    hi = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**hi, **form})
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["choices"][0]["message"]["content"].startswith('{"a":"x"')
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"structured_outputs": {"json": schema}}
    answer = server.post("/v1/chat/completions", {**hi, **form, "tools": [tool], "tool_choice": "required"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
