"""The answers of a server after an internal error, texts that are not UTF-8, and log lines of clients that left."""

import base64
import contextlib
import json
import logging
import os
import socket
import struct
import time

import pytest

pytest.importorskip("fastapi")

import httpx
from http_helpers import served

from minivllm.server import compat, logs, operations, prefixes, weights
from minivllm.server.app import ADMIN, ROUTES
from minivllm.server.errors import INTERNAL, TYPES
from minivllm.server.ollama import models
from minivllm.server.openai import chat, completions, websocket
from minivllm.server.replicas import routes as replicas

HI = [{"role": "user", "content": "hi"}]
server = served(engine={"batch_invariant": False}, admin=True)


class Broken(Exception):
    """With a secret in its text, which no answer may tell."""

    def __str__(self):
        return "/secret/path"


def broken(*_, **__):
    raise Broken


def is_documented(answer, status=500, message=INTERNAL, path=""):
    assert answer.status_code == status and answer.headers["content-type"] == "application/json", answer.text
    assert answer.headers["x-request-id"]
    assert answer.json() == in_form_of(path, message, answer.headers)


def in_form_of(path, message, headers):
    """Return the body of an internal error in the form of a route's protocol."""
    if path.startswith("/api/"):
        return {"error": message}
    if path.startswith("/v1/messages"):
        error = {"type": "api_error", "message": message}
        return {"type": "error", "error": error, "request_id": headers["request-id"]}
    return {"error": {"message": message, "type": TYPES[500], "param": None, "code": 500}}


# ---------------------------------------------------------------- 500

BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": HI},
    "/invocations": {"messages": HI, "max_tokens": 2},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
}
OPERATOR_BODIES = {  # of routes that need the operator's key
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/cache/prefixes": {"name": "a", "prompt": "b"},
    "/pause": {"keep_requests": True},
    "/sleep": {"level": 1},
    "/update_weights": {"path": "a"},
    "/cache/prefixes/{name}/export": {"file": "a.tar"},
    "/cache/import": {"file": "a.tar"},
}
CACHE = ("/cache/prefixes", "/cache/prefixes/{name}")
BREAKS = {  # route -> the object that it uses, in which an error is caused
    "/v1/models": lambda s: (operations, "_card"),
    "/v1/models/{model:path}": lambda s: (s, "check_model"),
    "/tokenize": lambda s: (s.tokens, "encode"),
    "/detokenize": lambda s: (s.tokens, "need"),
    "/tokenizer_info": lambda s: (s.tokens, "need"),
    "/version": lambda s: (operations, "JSONResponse"),
    "/metrics": lambda s: (s.metrics, "text"),
    "/start_profile": lambda s: (s.client, "profile"),
    "/stop_profile": lambda s: (s.client, "profile"),
    "/debug/state": lambda s: (s.client, "state"),
    "/reset_prefix_cache": lambda s: (s.client, "reset_prefix_cache"),
    **dict.fromkeys(CACHE, lambda s: (prefixes, "_client")),
    "/cache/prefixes/{name}/export": lambda s: (prefixes, "_places"),
    "/cache/import": lambda s: (prefixes, "_places"),
    "/cache/verify": lambda s: (prefixes, "_root"),
    **dict.fromkeys(
        ("/replicas", "/replicas/update", "/replicas/{number}/drain", "/replicas/{number}/resume"),
        lambda s: (replicas, "replicas_of"),
    ),
    **dict.fromkeys(("/weights", "/pause", "/resume", "/sleep", "/wake_up"), lambda s: (weights, "_answer")),
    "/update_weights": lambda s: (weights, "_folder"),
    "/v1/load_lora_adapter": lambda s: (s.adapters, "new"),
    "/v1/unload_lora_adapter": lambda s: (s.adapters, "unload"),
    "/v1/completions": lambda s: (s.client, "stream"),
    "/v1/chat/completions": lambda s: (s.client, "stream"),
    "/api/chat": lambda s: (s.client, "stream"),
    "/api/generate": lambda s: (s.client, "stream"),
    "/api/embed": lambda s: (s.client, "stream"),
    "/api/embeddings": lambda s: (s.client, "stream"),
    "/api/tags": lambda s: (models, "_card"),
    "/api/version": lambda s: (models, "JSONResponse"),
    "/api/ps": lambda s: (models, "_card"),
    "/api/show": lambda s: (models, "capabilities"),
    "/api/pull": lambda s: (models, "served_name"),
    "/props": lambda s: (compat, "JSONResponse"),
    "/apply-template": lambda s: (chat, "template_ids"),
    "/invocations": lambda s: (s.client, "stream"),
    "/load": lambda s: (compat, "JSONResponse"),
    "/server_info": lambda s: (compat, "JSONResponse"),
    "/": lambda s: (models, "PlainTextResponse"),
    "/v1/messages": lambda s: (s.client, "stream"),
    "/v1/messages/count_tokens": lambda s: (s.tokens, "chat"),
    "/v1/responses": lambda s: (s.client, "stream"),
    "/v1/responses/input_tokens": lambda s: (s.tokens, "chat"),
    "/v1/responses/{response_id}": lambda s: (s.responses, "get"),
    "/v1/responses/{response_id}/cancel": lambda s: (s.responses, "get"),
    "/v1/responses/{response_id}/input_items": lambda s: (s.responses, "get"),
    **dict.fromkeys(
        ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
        lambda s: (s.client, "stream"),
    ),
}


@pytest.mark.parametrize(
    "path, method", [(path, method) for path, _, method, _, _, codes in (*ROUTES, *ADMIN) if 501 not in codes]
)
def test_a_failure_in_any_route_is_the_error_object(server, monkeypatch, path, method):
    deletes_answer = method == "DELETE" and path not in CACHE
    part = (server.app.service.responses, "delete") if deletes_answer else BREAKS[path](server.app.service)
    monkeypatch.setattr(*part, broken)
    where = path.replace("{model:path}", "pocket").replace("{response_id}", "resp_0")
    body = {**BODIES, **OPERATOR_BODIES}.get(path, {}) if method == "POST" else None
    key = {"Authorization": f"Bearer {server.app.admin_token}"}
    where = where.replace("{name}", "a").replace("{number}", "0")
    name = {(route[0], route[2]): route[1].__name__ for route in ADMIN}.get((path, method))
    message = INTERNAL if name is None else f"{name} failed: Broken: /secret/path"  # an operator may see the reason
    is_documented(server.client.request(method, where, json=body, headers=key), message=message, path=path)


def test_a_failure_in_a_probe_in_the_guard_and_in_the_middleware_around_it_is_too(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.app.service.client, "healthy", broken)
        for path in ("/health", "/ready"):
            is_documented(server.client.get(path))
    with monkeypatch.context() as patch:
        patch.setattr(server.app.guard, "_check", broken)
        is_documented(server.client.get("/version"))
    with monkeypatch.context() as patch:
        patch.setattr(server.app, "asgi", broken)
        answer = server.client.get("/version")
        assert answer.status_code == 500 and answer.json()["error"]["message"] == INTERNAL
    assert server.client.get("/version").status_code == 200


STEPS = [
    (work, step)
    for work in (completions.Completion, chat.Chat)
    for step in ("__init__", "prepare", "opening", "choices", "whole")
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("work, step", STEPS)
def test_a_failure_at_any_step_of_an_answer_is_the_error_object(server, monkeypatch, work, step, stream):
    path = "/v1/completions" if work is completions.Completion else "/v1/chat/completions"
    monkeypatch.setattr(work, step, broken)
    answer = server.post(path, {**BODIES[path], "stream": stream})
    if (step == "whole") is stream and step in ("whole", "opening", "choices"):
        assert answer.status_code == 200  # the step is none of its
    elif not stream and step in ("opening", "choices"):
        assert answer.status_code == 200
    elif work is chat.Chat and step == "choices":  # the role was sent before
        assert answer.status_code == 200 and json.loads(answer.text.split("data: ")[-1])["error"]["message"] == INTERNAL
    else:
        is_documented(answer)
    monkeypatch.undo()
    server.at_rest()


@contextlib.contextmanager
def connected(server):
    """A WebSocket made by hand: (send, receive), whole frames of text."""
    with socket.create_connection((server.host, server.port), timeout=30) as link:
        key = base64.b64encode(os.urandom(16)).decode()
        link.sendall(
            f"GET /v1/ws HTTP/1.1\r\nHost: {server.host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        file = link.makefile("rb")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += file.readline()

        def send(text):
            data = text.encode()
            size = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + struct.pack(">H", len(data))
            link.sendall(b"\x81" + size + b"\0\0\0\0" + data)

        def receive():
            while True:
                kind, size = file.read(2)
                size = struct.unpack(">H", file.read(2))[0] if size == 126 else size
                data = file.read(size)
                if kind == 0x81:
                    return json.loads(data)

        yield head, file, send, receive


def test_a_failure_of_a_websocket_is_the_error_object_too(server, monkeypatch):
    with connected(server) as (_, _, send, receive), monkeypatch.context() as patch:
        patch.setattr(websocket.Connection, "_take", broken)
        send('{"type": "completions", "id": "a", "body": {"prompt": "a"}}')
        reported = receive()
        assert reported["id"] == "a" and reported["error"]["message"] == INTERNAL and reported["error"]["code"] == 500
    with connected(server) as (_, _, send, receive), monkeypatch.context() as patch:
        patch.setattr(completions.Completion, "prepare", broken)
        send('{"type": "completions", "id": "b", "body": {"prompt": "a"}}')
        assert receive()["error"]["message"] == INTERNAL
    with monkeypatch.context() as patch:
        patch.setattr(websocket.Connection, "serve", broken)
        with connected(server) as (head, file, _, _):
            assert b" 500 " in head.split(b"\r\n")[0] and b"application/json" in head
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(file.read(size))["error"]["message"] == INTERNAL
    server.at_rest()


# ---------------------------------------------------------------- text that is none

HALF = ("\\ud800", "a\\udfffb", "\\ud83d\\ud83d\\ude00")
TEXT_FIELDS = (
    "prompt", "model", "stop", "user", "cache_salt", "metadata", "tools", "tool_choice", "messages", "bad_words",
    "structured_outputs", "response_format", "logit_bias", "vllm_xargs", "suffix", "chat_template_kwargs", "request_id",
    "stream_options", "nobody_knows", "n", "temperature", "stop_token_ids",
)  # fmt: skip
SHAPES = ('"{}"', '["{}"]', '{{"a": "{}"}}', '{{"{}": 1}}', '[{{"role": "{}", "content": "{}"}}]',
          '[{{"type": "function", "function": {{"name": "{}"}}}}]')  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_half_a_character_in_any_field_of_any_body_is_a_400_that_names_it(server, path, field):
    rest = {name: value for name, value in BODIES[path].items() if name != field}
    for shape in SHAPES:
        for half in HALF[: 3 if shape is SHAPES[0] else 1]:
            body = json.dumps(rest)[:-1] + (", " if rest else "") + f'"{field}": {shape.replace("{}", half)}}}'
            body = body.replace("{{", "{").replace("}}", "}") if "{{" in shape else body
            answer = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
            error = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            named = error["param"] if "param" in error else message.split()[0]  # not every protocol names the field
            assert answer.status_code == 400 and named == field and "Unicode" in message, error


def test_half_a_character_in_a_name_or_as_raw_bytes_is_a_400_and_a_whole_one_is_text(server):
    kind = {"Content-Type": "application/json"}
    for body in (b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "é"}'.encode("utf-16")):
        answer = server.client.post("/v1/completions", content=body, headers=kind)
        assert answer.status_code == 400 and ("UTF-8" in answer.text or "Unicode" in answer.text)
    for body in (
        b'{"prompt": "\\ud83d\\ude00 \\\\ud800", "max_tokens": 1}',
        b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}',
    ):
        assert server.client.post("/v1/completions", content=body, headers=kind).status_code == 200


def test_on_a_websocket_the_id_whose_body_is_no_text_hears_of_it(server):
    with connected(server) as (_, _, send, receive):
        send('{"type": "completions", "id": "a", "body": {"prompt": "\\ud800"}}')
        reported = receive()
        assert (reported["type"], reported["id"], reported["error"]["code"]) == ("error", "a", 400)
        for message in (
            '{"type": "cancel", "id": "\\ud800"}',
            '{"type": "\\ud800", "id": "b"}',
            '{"\\ud800": 1, "id": "c"}',
        ):
            send(message)
            assert receive()["error"]["code"] == 400
        send('{"type": "completions", "id": "a", "body": {"prompt": "a", "max_tokens": 1, "stream": false}}')
        assert receive()["data"]["choices"]


NO_NUMBERS = ["9" * 5000, "-" + "9" * 5000, "1e999", "NaN", "Infinity", "1" * 41]
NUMBERS = ["1e308", "-1e308", "0." + "0" * 5000 + "1", "9" * 40, "-" + "9" * 40]
FIELDS = ("max_tokens", "seed", "temperature", "priority", "timeout_s", "top_k", "n", "prompt", "tokens", "logit_bias",
          "ttft_ms", "stop_token_ids", "min_tokens", "expected_tokens", "vllm_xargs")  # fmt: skip


def ask_with(server, path, field, text):
    body = json.dumps(BODIES[path])[:-1] + f', "{field}": {text}}}'
    answer = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert len(answer.content) < 4000
    return answer.status_code


@pytest.mark.parametrize("path", BODIES)
def test_a_number_that_nothing_counts_with_is_a_400_wherever_it_stands(server, path):
    for number in NO_NUMBERS:
        for field, text in (("seed", number), ("metadata", f'{{"a": [{number}]}}'), ("nobody_knows", f"[{number}]")):
            assert ask_with(server, path, field, text) == 400


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:8])
def test_the_largest_numbers_that_are_read_are_no_500_in_any_field(server, number):
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        for field in FIELDS:
            assert ask_with(server, path, field, number) in (200, 400), (path, field)


# ---------------------------------------------------------------- who has left


class Kept(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.rows = []

    def emit(self, record):
        self.rows.append({"message": record.getMessage(), **getattr(record, "event", {})})

    def request(self, seconds=20.0):
        end = time.monotonic() + seconds
        while True:
            if found := [row for row in self.rows if row["message"] == "request"]:
                return found[-1]
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def log():
    kept, level = Kept(), logs.log.level
    logs.log.addHandler(kept)
    logs.log.setLevel(logging.INFO)
    yield kept
    logs.log.removeHandler(kept)
    logs.log.setLevel(level)


LONG = {"max_tokens": 1000, "ignore_eos": True, "prompt": "Once upon a time"}


ABORTED = [{}, {"stream": True}, {"n": 3}, {"beam_width": 2}, {"stream": True, "stop": ["zzzz"]}]


@pytest.mark.parametrize("more", ABORTED, ids=str)
def test_the_line_of_a_request_that_was_aborted_tells_what_it_had_generated(server, log, more):
    before = server.stats()["steps"]
    if more.get("stream"):
        with server.client.stream("POST", "/v1/completions", json={**LONG, **more}) as answer:
            lines = answer.iter_lines()
            for _ in range(8):
                next(lines)
    else:
        link = socket.create_connection((server.host, server.port))
        body = json.dumps({**LONG, **more}).encode()
        head = f"Host: {server.host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        link.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        end = time.monotonic() + 30
        while server.stats()["steps"] < before + 6:
            assert time.monotonic() < end
            time.sleep(0.01)
        link.close()
    row = log.request()
    assert row["gone"] and row["finished"] == ["abort"] and row["prompt_tokens"] > 1
    assert 0 < row["completion_tokens"] < 3000 or "beam_width" in more
    assert row["ms"] > 0 and row["ttft_ms"] >= 0
    server.at_rest()


def test_a_request_that_goes_before_it_began_has_a_line_with_its_prompt(server, log, monkeypatch):
    import asyncio

    monkeypatch.setattr(server.app.service.client, "stream", lambda *_, **__: asyncio.sleep(60))
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=LONG, timeout=0.5)
    row = log.request()
    assert row["gone"] and row["prompt_tokens"] > 1 and row["completion_tokens"] == 0


def test_a_cancelled_request_of_a_websocket_tells_it_too(server, log):
    with connected(server) as (_, _, send, receive):
        send(json.dumps({"type": "completions", "id": "a", "body": LONG}))
        for _ in range(5):
            receive()
        send('{"type": "cancel", "id": "a"}')
        while receive()["type"] != "done":
            pass
    row = log.request()
    assert row["cancelled"] and row["finished"] == ["abort"] and row["completion_tokens"] >= 4 and row["ms"] > 0
