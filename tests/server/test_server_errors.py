"""Bad requests: each is refused with the right code and a message about its error, and changes nothing."""

import json
import time

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running
from robustness.bad_requests import BAD, BODIES, CHAT, COMPLETIONS, HI


@pytest.fixture(scope="module")
def server():
    running = Running(engine={"num_kvcache_blocks": 32, "kvcache_block_size": 16, "batch_invariant": False})
    assert running.app.service.client.info.kv_tokens < 1000
    yield running
    running.at_rest()
    running.close()


def refused(server, answer, status, *words, rest=True):
    """An error in OpenAI's shape, bounded, and nobody else was harmed."""
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert len(answer.content) < 2000 and "Traceback" not in answer.text and "/minivllm/" not in answer.text
    for word in words:
        assert word in error["message"] or word == error["param"], error
    if rest:
        server.at_rest()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_refused_by_name_and_the_next_request_is_served(server, name):
    (path, body), status, *words = BAD[name]
    start = time.process_time()
    kind = {"Content-Type": "application/json"}
    answer = server.client.post(path, content=json.dumps(body), headers=kind)
    assert time.process_time() - start < 1
    refused(server, answer, status, *words)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_json_object_is_refused(server, name):
    body, status, word = BODIES[name]
    answer = server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    if status == 200:
        assert answer.status_code == 200 and {w["field"] for w in answer.json()["warnings"]} >= {"", "a b"}
    else:
        refused(server, answer, status, word)


def test_routes_and_methods_that_are_not_there(server):
    for path in (
        "/v2",
        "/sleep",
        "/start_profile",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/redoc",
        "/debug/state",
        "//v1/models",
        "/%2fv1/models",
        "/V1/models",
        "/v1/models;a",
        "/v1/completions//",
    ):
        refused(server, server.client.get(f"{server.url}{path}"), 404, rest=False)
    answer = server.client.get(COMPLETIONS)
    refused(server, answer, 405)
    assert answer.headers["allow"] == "POST"
    refused(server, server.client.post(COMPLETIONS, content="hi", headers={"Content-Type": "text/plain"}), 415, "json")


def test_headers_are_bounded(server):
    refused(server, server.client.get("/version", headers={"X-Big": "a" * (64 << 10)}), 431)
    refused(server, server.client.get("/version", headers={f"X-{i}": "a" for i in range(1000)}), 431)


def test_two_lengths_of_a_body_are_refused(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for more in (b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"):
        assert server.raw(head + more + b"\r\nabcde", 1).startswith(b"HTTP/1.1 400")
    server.at_rest()


def test_a_host_header_opens_no_route():
    server = Running(keys=["k"])
    try:
        for host, status in ((b"localhost", b"401"), (b"localhost/health?", b"400")):
            got = server.raw(b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 " + status)
    finally:
        server.close()


def test_fields_without_effect_are_accepted_and_said(server):
    body = {"messages": HI, "user": "me", "store": True, "metadata": {"a": "b"}, "foo_bar": 1, "max_tokens": 2}
    answer = server.post(CHAT, body).json()
    assert [w["field"] for w in answer["warnings"]] == ["user", "store", "metadata", "foo_bar"]
    first = server.events(CHAT, body)[0]
    assert [w["field"] for w in first["warnings"]] == ["user", "store", "metadata", "foo_bar"]
    quiet = {
        "messages": HI,
        "user": None,
        "functions": None,
        "tools": [],
        "logprobs": False,
        "n": None,
        "max_tokens": 2,
    }
    assert "warnings" not in server.post(CHAT, quiet).json()


def test_fields_of_a_request_that_allow_no_token_together_are_the_clients_error(server):
    pytest.importorskip("llguidance")
    fields = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "[a-z]{3}"}, "allowed_token_ids": [1, 2]}
    answer = server.post(COMPLETIONS, fields)
    refused(
        server, answer, 400, "structured_outputs and allowed_token_ids allow no token in common", "structured_outputs"
    )
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
