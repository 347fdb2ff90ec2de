"""Whatever a client sends to /v1/responses, no turn of the event loop takes long."""

import json

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from loop_turns import longest_turn
from scripted import scripted

TURN = 0.15  # seconds of CPU time; the slowest bodies need several times as much in total
server = served()
LARGE = 7 << 20
USER = {"role": "user", "content": "x"}
PARTS = [{"type": "input_text", "text": "x"}] * 4
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": ["x"] * 300})}
FUNCTION = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"enum": ["x"] * 60}}},
}
NESTED = {"a": 1}
for _ in range(90):
    NESTED = {"a": NESTED}
BODIES = {
    "a long text": {"input": "x" * LARGE},
    "a long text in parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x" * LARGE}]}]},
    "many messages": {"input": [{"role": "user", "content": PARTS}] * 3000},
    "many calls": {"input": [CALL] * 3000},
    "unknown keys": {"input": [{**USER, **{f"k{i}": 1 for i in range(20)}}] * 2500},
    "unknown references": {"input": [{"type": "item_reference", "id": f"msg_a{i}_0"} for i in range(4000)]},
    "many functions": {"input": "x", "tools": [{**FUNCTION, "name": f"f{i}"} for i in range(900)]},
    "a namespace": {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION] * 900}]},
    "a deep value": {"input": [USER], "metadata": NESTED, "reasoning": NESTED, "text": NESTED},
    "long instructions": {"input": "x", "instructions": "<|im_end|>" * (LARGE // 10)},
    "long encrypted content": {"input": [USER, {"type": "reasoning", "encrypted_content": "A" * LARGE}]},
}


@pytest.fixture
def turns(server):
    """CPU seconds of the longest turn of the server's loop, as a list of one."""
    with longest_turn(server) as longest:
        yield longest


@pytest.mark.parametrize("name", BODIES)
def test_no_turn_takes_long_whatever_is_sent(server, turns, name):
    answer = server.post("/v1/responses", {**BODIES[name], "max_output_tokens": 2})
    assert answer.status_code in (200, 400, 404), answer.text
    assert 0 < turns[0] < TURN, f"{turns[0]:.3f} s {answer.status_code} {answer.text[:200]}"


def test_no_turn_takes_long_for_a_long_conversation(server, turns):
    with scripted(server, ["ok"] * 3, context=1 << 22):
        first = server.post("/v1/responses", {"input": [{"role": "user", "content": "word " * 20}] * 3000}).json()
        assert first["status"] == "completed", first
        body = {"input": "more", "previous_response_id": first["id"]}
        assert server.post("/v1/responses", body).status_code == 200
        items = server.client.get(f"/v1/responses/{first['id']}/input_items", params={"limit": 100})
    assert len(items.json()["data"]) == 100
    assert 0 < turns[0] < TURN, f"{turns[0]:.3f} s"
