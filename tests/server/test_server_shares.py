"""The limits of one key: branches of a request, memory of its requests, and turns that belong to others."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
server = served(
    ["sk-one", "sk-two"], engine={"max_num_seqs": 4, "max_num_batched_tokens": 64}, max_branches=32, max_queue=2,
    max_batch=64,
)  # fmt: skip

PRODUCTS = {  # body, the product that the error names, the field
    "n": ({"prompt": ["a"] * 11, "n": 3}, "11 prompts times n=3 are 33 branches", "n"),
    "best_of": ({"prompt": ["a"] * 11, "best_of": 3}, "11 prompts times best_of=3 are 33", "best_of"),
    "n of best_of": ({"prompt": ["a"] * 3, "n": 2, "best_of": 11}, "3 prompts times best_of=11 are 33", "best_of"),
    "beam_width": ({"prompt": ["a"] * 11, "beam_width": 3}, "11 prompts times beam_width=3 are 33", "beam_width"),
    "n beams": ({"prompt": ["a"] * 11, "beam_width": 3, "n": 2}, "11 prompts times beam_width=3", "beam_width"),
    "vLLM's beams": ({"prompt": ["a"] * 11, "use_beam_search": True, "n": 3}, "times beam_width=3", "beam_width"),
    "lists of ids": ({"prompt": [[5, 6]] * 33}, "33 prompts times n=1 are 33 branches", "n"),
    "one prompt": ({"prompt": "a", "n": 33}, "1 prompt times n=33 are 33 branches", "n"),
    "a chat": ({"messages": HI, "n": 33}, "1 prompt times n=33 are 33 branches", "n"),
    "beams of a chat": ({"messages": HI, "beam_width": 33}, "1 prompt times beam_width=33 are 33", "beam_width"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_branches_of_a_request_are_bounded_together_whatever_they_are(server, name):
    body, product, field = PRODUCTS[name]
    before = server.stats()["finished"]
    path = CHAT if "messages" in body else COMPLETIONS
    answer = server.post(path, {**body, "max_tokens": 1})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field, error
    message = error["message"]
    assert product in message and "expected at most 32" in message and "max_branches" in message
    assert server.stats()["finished"] == before


def test_as_many_branches_as_are_allowed_are_served(server):
    answer = server.post(COMPLETIONS, {"prompt": ["a", "b"] * 4, "n": 4, "max_tokens": 1})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 32


def test_a_websocket_has_the_same_limit(server):
    websockets = pytest.importorskip("websockets.sync.client")
    url = server.url.replace("http", "ws") + "/v1/ws"
    with websockets.connect(url, subprotocols=["minivllm", "key.sk-two"], proxy=None) as socket:
        for name, (body, product, field) in PRODUCTS.items():
            kind = "chat.completions" if "messages" in body else "completions"
            socket.send(json.dumps({"type": kind, "id": name, "body": {**body, "max_tokens": 1, "stream": False}}))
            last = json.loads(socket.recv(timeout=20))
            assert last["type"] == "error" and last["id"] == name, last
            assert product in last["error"]["message"] and last["error"]["param"] == field


def test_a_key_that_fills_its_room_and_all_rows_holds_nobody_else_up(server):
    """All rows run for as long as they can, and the request of the other key is served beside them."""
    long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    flood = [server.client.stream("POST", COMPLETIONS, json={**long, "seed": i}) for i in range(6)]
    try:
        answers = [one.__enter__() for one in flood]
        assert [a.status_code for a in answers] == [200] * 6
        first = answers[0].iter_lines()
        assert next(first).startswith("data: ")
        mine = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        assert mine.status_code == 429 and "6 of your prompts run or wait" in mine.json()["error"]["message"]
        other = {"Authorization": "Bearer sk-two"}
        before = server.stats()["finished"]
        for i in range(3):
            answer = server.post(COMPLETIONS, {"prompt": "There", "max_tokens": 2, "seed": i}, headers=other)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
        assert server.stats()["finished"] == before + 3, "the others' requests were not waited for"
    finally:
        for one in flood:
            one.__exit__(None, None, None)
    server.at_rest(20)
