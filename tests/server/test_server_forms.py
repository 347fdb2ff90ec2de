"""For a model with tags of reasoning, a form of the answer and forced calls begin behind the reasoning."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from http_helpers import served
from scripted import scripted

from minivllm.runtime.text import detokenize

server = served(tool_parser="qwen3", engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}}}
ASK = {
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"s":"%s"}}\n</tool_call>'
CALLS = f"{CALL % 'x'}\n{CALL % 'y'}"
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module", autouse=True)
def tagged(server):
    """Add the tags to the tokenizer of the server."""
    from tokenizers import AddedToken

    tokenizer = server.app.service.tokens.tokenizer
    detokenize._schemes.pop(tokenizer, None)
    for name in ("added_tokens", "special_ids"):
        tokenizer.__dict__.pop(name, None)
    tokenizer.backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return tokenizer


def asked_tags(server):
    """The tags in the parameters that the server last sent to the engine."""
    return server.app.service.client._last_written[1].get("thinking_tags")


def both(server, script, **more):
    """Return the message of an answer, after a comparison with the deltas of its stream."""
    with scripted(server, [script, script]):
        answer = server.post(CHAT, {**ASK, **more})
        assert answer.status_code == 200, answer.text
        events = server.events(CHAT, {**ASK, **more})
    message = answer.json()["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    written = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    calls = message.get("tool_calls", [])
    assert "".join(written) == "".join(call["function"]["arguments"] for call in calls)
    return message.get("reasoning"), message["content"], [call["function"]["arguments"] for call in calls]


@pytest.mark.parametrize("thought", ["", "hm <think> [{"])
def test_forced_calls_follow_the_reasoning(server, tagged, thought):
    begin, end = tagged.token_id("<think>"), tagged.token_id("</think>")
    plain = [part for char in thought for part in [tagged.token_id(char) or char]]
    script = [begin, *plain, end, CALLS]
    found = both(server, script, tool_choice="required")
    assert found == (thought or None, None, ['{"s":"x"}', '{"s":"y"}'])
    assert asked_tags(server) == {"start": [begin], "end": [end]}
    assert both(server, [*script[:-1], CALL % "x"], tool_choice=NAMED) == (thought or None, None, ['{"s":"x"}'])
    assert both(server, [CALLS], tool_choice="required")[0] is None
    assert both(server, script, tool_choice="required", include_reasoning=False)[0] is None


def test_an_open_prompt_continues_the_reasoning(server, tagged):
    messages = [*ASK["messages"], {"role": "assistant", "content": "<think>\n"}]
    more = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    script = ["so", tagged.token_id("</think>"), CALLS]
    found = both(server, script, tool_choice="required", **more)
    assert found == ("so", None, ['{"s":"x"}', '{"s":"y"}'])


def test_a_form_follows_the_reasoning(server, tagged):
    script = [tagged.token_id("<think>"), "hm", tagged.token_id("</think>"), '{"a":1}']
    thought, content, calls = both(server, script, response_format={"type": "json_object"}, tools=None)
    assert (thought, json.loads(content), calls) == ("hm", {"a": 1}, [])
    assert asked_tags(server) is not None
    both(server, ["hi"], tools=None)
    assert asked_tags(server) is None


def test_reasoning_that_the_parser_cannot_find_is_refused(server, monkeypatch):
    monkeypatch.setattr("minivllm.server.openai.thoughts.tags_around", lambda parser: None)
    for more, name in (
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"thinking_tags": {}}, "thinking_tags"),
    ):
        answer = server.post(CHAT, {**ASK, "tool_choice": "required", **more})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
        assert "finds no reasoning before forced calls" in answer.json()["error"]["message"]
    with scripted(server, [CALLS]):
        assert server.post(CHAT, {**ASK, "tool_choice": "required", "thinking_token_budget": -1}).status_code == 200
    assert asked_tags(server) is None
