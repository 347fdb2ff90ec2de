"""Requests to routes of other servers get an error that names the route of this server."""

import re

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

from minivllm.server.app import ROUTES
from minivllm.server.errors import ApiError
from minivllm.server.http import unknown_routes
from minivllm.server.openai.field_table import REFUSED, names_of

server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
HERE = [path for path, *_ in ROUTES if "{" not in path] + ["/health", "/ready", "/ping", "/openapi.json"]

INSTEAD = {
    "/messages": "use /v1/messages", "/v1/v1/messages": "and /v1, once",
    "/v1/messages/batches": "batches of messages are not stored", "/v1/messages/batches/b1/results": MESSAGES,
    "/classify": "no classifier", "/pooling": "/v1/embeddings", "/v1/embed": "/v1/embeddings",
    "/v1/audio/speech": "only text", "/v1/files/file-1": "batches are not stored",
    "/chat/completions": "use /v1/chat/completions", "/v1/v1/chat/completions": "and /v1, once",
    "/api/v1/chat/completions": "and /v1, once",
    "//v1//models": "use /v1/models", "/v1/chat/completion": "did you mean /v1/chat/completions?",
    "/v1/tokenize": "use /tokenize", "/models": "use /v1/models",
    "/v1/engines/pocket/completions": "the model in the body",
    "/openai/deployments/pocket/chat/completions": "the model in the body",
    "/completion": COMPLETIONS,
    "/generate": COMPLETIONS, "/api/v1/generate": COMPLETIONS,
    "/api/tag": "did you mean /api/tags?", "/info": "/tokenizer_info", "/healthz": "/health",
    "/redoc": "/openapi.json", "/v1/ws": "WebSocket",
    "/v1": CHAT, "/nothing/like/it": CHAT, "/v1/" + "x" * 4000: CHAT,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(INSTEAD), ids=lambda path: path[:40])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_route_that_is_elsewhere_is_answered_with_what_to_ask_here(server, path, method):
    more = {"json": {}} if method == "POST" else {}
    answer = server.client.request(method, server.url + path, **more)
    request_id = answer.headers["x-request-id"]
    assert answer.status_code == 404 and answer.json() == ApiError(404, message_of(answer)).body(path, request_id)
    assert INSTEAD[path] in message_of(answer) and len(message_of(answer)) < 300


def message_of(answer):
    """Return the message of an error in the form of any protocol."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


def test_a_slash_at_the_end_of_a_path_means_nothing(server):
    for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/tokenizer_info", "/openapi.json"):
        with_slash, without = (server.client.get(server.url + one) for one in (path + "/", path))
        assert with_slash.status_code == without.status_code == 200, path
    name = server.client.get(server.url + "/v1/models").json()["data"][0]["id"]
    assert server.client.get(f"{server.url}/v1/models/{name}/").status_code == 200
    for path in ("/v1/completions/", "/v1/chat/completions/", "/tokenize/", "/detokenize/"):
        answer = server.client.post(server.url + path, json={})
        assert answer.status_code == 400, "the route has looked at the body"
    assert server.client.get(server.url + "/v1/completions/").status_code == 405
    for path in ("/health//", "//", "/health/x/"):
        assert server.client.get(server.url + path).status_code == 404


def test_what_is_told_of_other_servers_is_a_route_that_is_here():
    for form, why in unknown_routes.OTHERS:
        for named in re.findall(r"(?:GET|POST) (/[a-z0-9_/.]+)", why):
            assert named in (*HERE, "/debug/state", "/reset_prefix_cache"), (form.pattern, why)
        assert not any(form.fullmatch(path) for path in HERE if not path.startswith("/api/")), form.pattern


def test_each_row_of_the_table_is_what_answers_its_path():
    for form, why in unknown_routes.OTHERS:
        path = form.pattern.replace("(/.*)?", "").replace("[^/]+", "x").replace("\\", "")
        received, named = str(unknown_routes.missing(path, HERE)), re.findall(r"(?:GET|POST) (/[a-z0-9_/.]+)", why)
        assert why in received or any(f"did you mean {one}?" in received for one in named), (path, received)


def test_a_long_path_costs_no_more_than_a_short_one():
    import time

    begin = time.process_time()
    for path in ("/" + "a/" * 60 + "b", "/v1" * 16_000, "/" * 30_000, "/v1/chat/completions" * 6, "\x00" * 100):
        unknown_routes.missing(path, HERE)
    assert time.process_time() - begin < 0.5


def test_the_wrong_method_is_told_the_right_one(server):
    for method, path, want in (("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"), ("DELETE", "/health", "GET")):
        answer = server.client.request(method, path, **({"json": {}} if method != "GET" else {}))
        assert answer.status_code == 405 and answer.headers["allow"] == want
        assert answer.json()["error"]["message"] == f"the route {path} does not accept {method}; expected {want}"


def test_head_is_get_without_a_body(server):
    for path in ("/health", "/ready", "/v1/models", "/v1/models/pocket", "/version", "/metrics", "/v1/nowhere"):
        head, get = server.client.head(path), server.client.get(path)
        assert head.status_code == get.status_code and head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
        assert "content-length" in head.headers
    assert server.client.head(CHAT).status_code == 405
    raw = server.raw(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 200") and raw.endswith(b"\r\n\r\n")


def test_an_unknown_model_is_told_those_that_are_served(server):
    for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = server.post(path, {**body, "model": "gpt-4o"}).json()["error"]
        assert error["code"] == 404 and "'pocket'" in error["message"] and "`gpt-4o` does not exist" in error["message"]


@pytest.mark.slow
def test_what_an_answer_would_lack_is_refused_and_empty_it_asks_for_nothing(server):
    for name in names_of(REFUSED):
        for path, body in ((CHAT, {**HI, "max_tokens": 1}), (COMPLETIONS, {"prompt": "a", "max_tokens": 1})):
            if name in body:
                continue
            answer = server.post(path, {**body, name: [1]})
            assert answer.status_code == 400 and name in answer.json()["error"]["message"], (name, answer.text)
            for nothing in (None, False, "", [], {}):
                if nothing is None or name not in ("suffix",):
                    assert server.post(path, {**body, name: nothing}).status_code == 200, (name, nothing)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"prompt": "hi"}, "it is a field of /v1/completions"),
        (CHAT, {"input": "hi"}, "send messages"),
        (CHAT, {"prompt": [5] * 9000}, "it is a field of /v1/completions"),
        (COMPLETIONS, {"messages": [{"role": "user", "content": "hi"}]}, "/v1/chat/completions"),
        (COMPLETIONS, {"inputs": "hi", "parameters": {"max_new_tokens": 3}}, "a prompt"),
        (COMPLETIONS, {"input_ids": [5]}, "token ids as the prompt"),
    ],
)
def test_a_body_of_another_route_is_told_which(server, path, body, words):
    error = server.post(path, body).json()["error"]
    assert error["code"] == 400 and " is missing, and " in error["message"] and words in error["message"]


@pytest.mark.parametrize(
    ("name", "like"),
    [("topK", "top_k"), ("maxTokens", "max_tokens"), ("stop-sequences", "stop_sequences"), ("Seed", "seed")],
)
def test_names_in_another_spelling_are_slips(server, name, like):
    error = server.post(COMPLETIONS, {"prompt": "a", name: 1}).json()["error"]
    assert error["code"] == 400 and f"Did you mean {like!r}?" in error["message"]
