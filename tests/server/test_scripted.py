"""The scripted model writes its texts through the server's own detokenizer, stop strings and parser."""

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from scripted import scripted

server = served()
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def test_each_request_gets_the_next_text_and_the_script_keeps_the_prompts(server):
    with scripted(server, ["one", lambda prompt: f"{len(prompt)} characters"]) as script:
        first = server.post("/v1/chat/completions", CHAT).json()
        second = server.events("/v1/chat/completions", CHAT)
        none_left = server.post("/v1/chat/completions", CHAT)
    assert first["choices"][0]["message"]["content"] == "one" and first["choices"][0]["finish_reason"] == "stop"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in second[:-1])
    assert text == f"{len(script.prompts[1])} characters" and "hello" in script.prompts[1]
    assert none_left.status_code == 400 and "no text left" in none_left.text


def test_stop_strings_lengths_and_calls_are_the_servers(server):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with scripted(server, ["one two three", "one two three", call]):
        stopped = server.post("/v1/chat/completions", {**CHAT, "stop": [" three"]}).json()["choices"][0]
        cut = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 2}).json()
        called = server.post("/v1/chat/completions", {**CHAT, "tools": tools}).json()["choices"][0]
    assert stopped["message"]["content"] == "one two" and stopped["stop_reason"] == " three"
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 2
    assert called["finish_reason"] == "tool_calls" and called["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_context_of_any_length_is_served(server):
    long = {"messages": [{"role": "user", "content": "word " * 5000}]}
    with scripted(server, ["short"], context=1 << 17):
        answer = server.post("/v1/chat/completions", long)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] > 5000
    assert server.post("/v1/chat/completions", long).status_code == 400
