"""Anthropic's Messages API on the wire: bodies, events, errors and counts, as its reference describes them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running, served
from scripted import scripted

from minivllm.server.anthropic import translate
from minivllm.server.openai import tools as openai_tools
from minivllm.server.openai.calls import Said, Thought

server = served()
PATH = "/v1/messages"
HI = {"max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
ADD = {
    "name": "add",
    "description": "adds two numbers",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def events(server, body):
    """Return the events of a stream as (name, data)."""
    with server.client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def refused(server, body, *words, path=PATH):
    answer = server.post(path, body)
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error", answer.text
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    for word in words:
        assert word in error["error"]["message"], error
    return error["error"]["message"]


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(words):
    return {"type": "text", "text": words}


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_message_has_the_members_of_the_reference(server):
    with scripted(server, ["Hello there."]):
        message = server.post(PATH, {**HI, "model": "pocket"}).json()
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "pocket",
        "content": [text("Hello there.")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage.keys() == {
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
    }
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0


def test_the_events_of_a_stream_add_up_to_the_message(server):
    words = f"Let me see.\n{CALL}{CALL}"
    with scripted(server, [words, words]):
        found = events(server, {**HI, "tools": [ADD], "max_tokens": 400})
        message = server.post(PATH, {**HI, "tools": [ADD], "max_tokens": 400}).json()
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert found[0]["message"]["content"] == [] and found[0]["message"]["stop_reason"] is None
    blocks, pieces = [], []
    for event in found[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            pieces = []
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind = event["delta"].pop("type")
            assert kind == {"text": "text_delta", "tool_use": "input_json_delta"}[blocks[-1]["type"]]
            pieces += event["delta"].values()
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            whole = "".join(pieces)
            blocks[-1].update({"text": whole} if blocks[-1]["type"] == "text" else {"input": json.loads(whole)})
    ids = [block.pop("id") for block in [*blocks, *message["content"]] if block["type"] == "tool_use"]
    assert len(set(ids)) == 4 and all(name.startswith("toolu_") for name in ids)
    assert blocks == message["content"] and [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    assert blocks[1] == {"type": "tool_use", "name": "add", "input": {"a": 1, "b": 2}}
    assert (
        found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        and message["stop_reason"] == "tool_use"
    )
    assert found[-2]["usage"] == message["usage"]


def test_the_stop_reason_says_what_ended_the_answer(server):
    with scripted(server, ["one two three", "one two three", CALL, CALL + " and more"]):
        stopped = server.post(PATH, {**HI, "stop_sequences": ["three", "four"]}).json()
        cut = server.post(PATH, {**HI, "max_tokens": 2}).json()
        called = server.post(PATH, {**HI, "max_tokens": 200, "tools": [ADD]}).json()
        called_and_stopped = {**HI, "max_tokens": 200, "tools": [ADD], "stop_sequences": ["more"]}
        both = server.post(PATH, called_and_stopped).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
    assert stopped["content"] == [text("one two ")]
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    assert called["stop_reason"] == both["stop_reason"] == "tool_use" and both["stop_sequence"] is None


def test_the_end_of_the_context_ends_an_answer_before_max_tokens(server):
    with scripted(server, ["word " * 200] * 2, context=64):
        message = server.post(PATH, {**HI, "max_tokens": 1000}).json()
        last = events(server, {**HI, "max_tokens": 1000})[-2]
    usage = message["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 64 and last["usage"] == usage
    assert message["stop_reason"] == last["delta"]["stop_reason"] == "model_context_window_exceeded"


def test_whitespace_between_calls_is_no_block_and_an_empty_answer_has_none(server):
    with scripted(server, [f"\n\n{CALL}\n\n{CALL}\n", "", "\n\n", "\n\nHello"]):
        called = server.post(PATH, {**HI, "max_tokens": 200, "tools": [ADD]}).json()
        others = [server.post(PATH, HI).json()["content"] for _ in range(3)]
    assert [block["type"] for block in called["content"]] == ["tool_use", "tool_use"]
    assert others == [[], [text("\n\n")], [text("\n\nHello")]]


def test_a_call_that_max_tokens_cuts_is_in_the_stream_only(server):
    begun = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22222222222222222222'
    with scripted(server, [begun] * 2):
        body = {**HI, "tools": [ADD], "tool_choice": {"type": "any"}, "max_tokens": 50}
        message, found = server.post(PATH, body).json(), events(server, body)
    assert message["content"] == [] and message["stop_reason"] == "max_tokens"
    deltas = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas).startswith('{"a": 1') and found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert [event["type"] for event in found][-3] == "content_block_stop"


def test_arguments_that_are_no_object_become_one(server):
    texts = [
        f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
        for written in ('"{\\"a\\": 1}"', '"x"', "{}")
    ]
    with scripted(server, texts * 2):
        body = {**HI, "tools": [ADD], "max_tokens": 200}
        wholes = [server.post(PATH, body).json()["content"][0]["input"] for _ in texts]
        streams = [events(server, body) for _ in texts]
    assert wholes == [{"a": 1}, {"arguments": "x"}, {}]
    for whole, stream in zip(wholes, streams, strict=True):
        deltas = [event["delta"]["partial_json"] for event in stream if event["type"] == "content_block_delta"]
        assert json.loads("".join(deltas)) == whole


def test_the_usage_divides_the_prompt_into_cached_and_other_tokens(server):
    body = {**HI, "messages": [{"role": "user", "content": "a long story about the sea " * 20}], "max_tokens": 1}
    first, second = server.post(PATH, body).json()["usage"], server.post(PATH, body).json()["usage"]
    total = server.post(f"{PATH}/count_tokens", {"messages": body["messages"]}).json()
    assert first["input_tokens"] + first["cache_read_input_tokens"] == total["input_tokens"]
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == total["input_tokens"]
    started = events(server, body)[0]["message"]["usage"]
    assert started["cache_read_input_tokens"] == second["cache_read_input_tokens"]


def test_a_last_message_of_the_assistant_is_continued(server):
    body = {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": "Once upon a"}]}
    with scripted(server, [" time", "new"]) as script:
        continued = server.post(PATH, body).json()
        empty = {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": ""}]}
        assert server.post(PATH, empty).json()["content"] == [text("new")]
    assert continued["content"] == [text(" time")]
    assert script.prompts[0].endswith("Once upon a") and script.prompts[1].endswith("assistant\n")


# ---- thinking --------------------------------------------------------------------------------------------------------


class Thinks:
    """Parser that reads the text before a bar as reasoning."""

    def __init__(self):
        self._thinks = True

    def feed(self, text, final):
        found = []
        if self._thinks:
            before, bar, text = text.partition("|")
            found = [Thought(before)] if before else []
            self._thinks = not bar
        return [*found, Said(text)] if text else found


@pytest.fixture(scope="module")
def thinking():
    openai_tools.register("bar", Thinks)
    running = Running(tool_parser="bar", engine={"batch_invariant": False, "max_num_seqs": 8})
    yield running
    running.close()
    del openai_tools.PARSERS["bar"]


def test_reasoning_is_a_block_with_a_signature(thinking):
    body = {**HI, "tools": [ADD]}
    with scripted(thinking, ["I think so.|\nYes."] * 4):
        message, found = thinking.post(PATH, body).json(), events(thinking, body)
        omitted = {**body, "thinking": {"type": "adaptive", "display": "omitted"}}
        hidden, hidden_events = thinking.post(PATH, omitted).json(), events(thinking, omitted)
    block, answer = message["content"]
    assert block["type"] == "thinking" and block["thinking"] == "I think so." and block["signature"]
    assert answer == text("\nYes.") and message["stop_reason"] == "end_turn"
    assert hidden["content"] == [{**block, "thinking": ""}, answer]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    thought = [delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta"]
    signatures = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
    assert "".join(thought) == "I think so." and signatures == [block["signature"]]
    assert not any(event.get("delta", {}).get("thinking") for event in hidden_events)


def test_thinking_blocks_are_taken_back(thinking):
    blocks = [
        {"type": "thinking", "thinking": "so", "signature": "x"},
        {"type": "redacted_thinking", "data": "abc"},
        text("Yes."),
    ]
    body = {**HI, "messages": [*HI["messages"], assistant(*blocks), user(text("why?"))]}
    with scripted(thinking, ["because"]):
        message = thinking.post(PATH, body).json()
    assert [warning["field"] for warning in message["warnings"]] == ["messages[1].content[1]"]
    refused(thinking, {**HI, "messages": [*HI["messages"], assistant(*blocks[:2])]}, "messages[1]", "no text")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("enabled", "thinking='enabled': expected an object"), ({}, "thinking.type=None: expected enabled"),
        ({"type": "enabled"}, "thinking.budget_tokens=None"), ({"type": "sometimes"}, "adaptive, disabled"),
        ({"type": "enabled", "budget_tokens": 0}, "expected a whole number >= 1"),
        ({"type": "adaptive", "display": "all"}, "thinking.display='all'"),
    ],
)  # fmt: skip
def test_thinking_without_meaning_is_refused(server, value, words):
    refused(server, {**HI, "thinking": value}, words)


def test_a_budget_of_thinking_bounds_the_reasoning(server, monkeypatch):
    """The vocabulary has the tags, so that the engine can force the end."""
    tokenizer = server.app.service.tokens.tokenizer
    monkeypatch.setitem(tokenizer.__dict__, "added_tokens", {**tokenizer.added_tokens, "<think>": 50, "</think>": 51})
    budgets = []

    def answer(prompt):
        (stream,) = server.app.service.client._streams.values()
        budgets.append(stream.params.extra["thinking_token_budget"])
        return "ok"

    with scripted(server, [answer]):
        message = server.post(PATH, {**HI, "thinking": {"type": "enabled", "budget_tokens": 9}}).json()
    assert budgets == [9]
    assert [warning["field"] for warning in message["warnings"]] == ["thinking"]  # the template cannot switch it


# ---- conversations ---------------------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}


def result(**more):
    return {"type": "tool_result", "tool_use_id": "toolu_1", **more}


def prompt_of(server, **body):
    with scripted(server, ["ok"]) as script:
        answer = server.post(PATH, {"max_tokens": 9, **body})
        assert answer.status_code == 200, answer.text
    return script.prompts[0]


def test_calls_and_results_are_a_prompt(server):
    chat = [
        {"role": "user", "content": "add"},
        assistant(text("I add."), USE),
        user(text("and now?"), result(content=[text("3"), text("done")])),
    ]
    prompt = prompt_of(server, messages=chat, tools=[ADD], system=[text("Be brief."), text("Be kind.")])
    order = [
        "Be brief.\nBe kind.",
        "adds two numbers",
        "I add.",
        '"arguments": {"a": 1, "b": 2}',
        "3\ndone",
        "and now?",
    ]
    places = [prompt.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"content": "no such file", "is_error": True}, "Error: no such file"), ({"is_error": True}, "tool\nError"),
        ({"content": "fine", "is_error": False}, "tool\nfine"), ({}, "tool\n<|im_end|>"),
    ],
)  # fmt: skip
def test_a_failed_call_is_marked_in_its_text(server, more, words):
    chat = [*HI["messages"], assistant(USE), user(result(**more))]
    assert words in prompt_of(server, messages=chat, tools=[ADD])


def test_consecutive_messages_of_a_role_are_one_turn(server):
    split = [
        {"role": "user", "content": "one"},
        user(text("two")),
        assistant(text("three")),
        assistant(text("four")),
        {"role": "user", "content": "five"},
    ]
    joined = [user(text("one"), text("two")), assistant(text("three"), text("four")), user(text("five"))]
    assert prompt_of(server, messages=split) == prompt_of(server, messages=joined)
    system = {"role": "system", "content": "Be brief."}
    first = prompt_of(server, messages=[system, *joined])
    assert first == prompt_of(server, messages=joined, system="Be brief.")


def test_cache_control_has_no_effect_and_no_warning(server):
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        **HI,
        **mark,
        "system": [{**text("Be brief."), **mark}],
        "tools": [{**ADD, **mark}],
        "messages": [user({**text("hi"), **mark})],
    }
    with scripted(server, ["ok"] * 2) as script:
        answer = server.post(PATH, body)
        server.post(PATH, {**HI, "system": "Be brief.", "tools": [ADD]})
    assert "warnings" not in answer.json() and script.prompts[0] == script.prompts[1]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: expected a non-empty list"), ("hi", "messages: expected a non-empty list"),
        ([5], "messages[0]=5: expected an object"), ([{"role": "user"}], "messages[0].content=None"),
        ([{"role": "tool", "content": "x"}], "messages[0].role='tool': expected user, assistant, system"),
        ([{"role": "system", "content": "x"}], "expected a message of role user"),
        ([{"role": "assistant", "content": ""}], "expected a message of role user"),
        ([{"role": "user", "content": ""}], "messages[0].content: is empty"),
        ([user()], "messages[0].content: is empty"), ([user("x")], "messages[0].content[0]='x'"),
        ([user({"type": "text"})], "messages[0].content[0].text=None"),
        ([user(text("see"), IMAGE)], "messages[0].content[1].type='image': it is not read here"),
        ([user({"type": "document", "source": {}})], "messages[0].content[0].type='document'"),
        ([user(USE)], "messages[0].content[0].type='tool_use': expected text, tool_result"),
        ([user({"type": "server_tool_use"})], "expected text, tool_result"),
        ([user(result(content="3"))], "messages[0].content[0].tool_use_id='toolu_1'"),
        ([*HI["messages"], assistant(USE), user(result(content=[IMAGE]))], "messages[2].content[0].content[0].type"),
        ([*HI["messages"], assistant(USE), user(result(is_error="yes"))], "messages[2].content[0].is_error='yes'"),
        ([*HI["messages"], assistant(USE)], "messages[1]: the last message has tool_use blocks"),
        ([*HI["messages"], assistant({**USE, "input": "x"})], "messages[1].content[0].input='x': expected an object"),
        ([*HI["messages"], assistant({**USE, "id": ""})], "messages[1].content[0].id=''"),
        ([*HI["messages"], assistant({"type": "thinking"})], "messages[1].content[0].thinking=None"),
        ([{"role": "user", "content": "x"}] * 4097, "4097 messages and blocks; expected at most 4096 together"),
        ([user(*[text("x")] * 4096)], "4097 messages and blocks"),
        ([*HI["messages"], assistant(USE), user(result(content=[text("x")] * 4096))], "4101 messages and blocks"),
    ],
)  # fmt: skip
def test_an_error_of_a_conversation_names_the_place(server, messages, words):
    refused(server, {**HI, "messages": messages}, words)
    refused(server, {"messages": messages}, words, path=f"{PATH}/count_tokens")


# ---- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens='9'"),
        ({"system": 5}, "system=5"), ({"system": [IMAGE]}, "system[0].type='image'"),
        ({"stop_sequences": 5}, "stop_sequences"), ({"temperature": -1}, "temperature"), ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"), ({"tools": ["f"]}, "tools[0]='f'"),
        ({"tools": [ADD] * 129}, "129 tools; expected at most 128"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "two functions have the name 'add'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type='web_search_20250305'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "which the client runs"),
        ({"tools": [{"type": "text_editor_20250728", "name": "e"}]}, "the server runs no tools and defines none"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, '"sub" is not the name'),
        ({"tools": [ADD], "tool_choice": {"type": "some"}}, "tool_choice"), ({"tool_choice": {"type": "any"}}, "tools"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"n": 2}, "a message has one answer"), ({"num_return_sequences": 2}, "n=2: expected 1"),
        ({"logprobs": True}, "use /v1/chat/completions"),
        ({"response_format": {"type": "json_object"}}, "use output_config.format"),
        ({"thread": {"id": "t"}}, "stores no"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type='text'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort='huge'"),
        ({"output_config": 5}, "output_config=5"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}}, "output_config.format"),
        ({"max_token": 5}, "Did you mean"), ({"min_tokens": 70}, "expected at most max_tokens=64"),
    ],
)  # fmt: skip
def test_an_error_names_the_clients_field(server, body, words):
    refused(server, {**HI, **body}, words)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"metadata": {"user_id": "u"}, "service_tier": "auto"}, {"metadata", "service_tier"}),
        ({"container": "c", "context_management": {"edits": []}}, {"container", "context_management"}),
        ({"speed": "fast"}, {"speed"}), ({"speed": "standard", "n": 1, "logprobs": False, "mcp_servers": []}, set()),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, {"thinking", "output_config.effort"}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, {"thinking", "thinking.budget_tokens"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking", "thinking.budget_tokens"}),
        ({"output_config": {"effort": "low", "more": 1}}, {"output_config.effort", "output_config.more"}),
        ({"messages": [{"role": "user", "content": "x", "id": "m"}]}, {"messages[0].id"}),
        ({"messages": [user({**text("x"), "odd": 1})]}, {"messages[0].content[0].odd"}),
        ({"tools": [{**ADD, "defer_loading": True, "input_examples": [{"a": 1}]}]},
         {"tools[0].defer_loading", "tools[0].input_examples"}),
        ({"tools": [{**ADD, "type": "custom", "allowed_callers": ["direct"], "eager_input_streaming": True}]}, set()),
        ({"anything": 1}, {"anything"}),
    ],
)  # fmt: skip
def test_a_field_without_effect_is_a_warning(server, body, fields):
    with scripted(server, ["ok"] * 2):
        answer, found = server.post(PATH, {**HI, **body}), events(server, {**HI, **body})
    warnings = answer.json().get("warnings", [])
    assert {warning["field"] for warning in warnings} == fields
    assert found[0]["message"].get("warnings", []) == warnings
    assert bool(answer.headers.get("x-warnings")) == bool(fields)


def test_the_header_of_betas_is_a_warning(server):
    with scripted(server, ["ok"]):
        answer = server.post(f"{PATH}?beta=true", HI, headers={"anthropic-beta": "context-1m-2025-08-07"})
    assert [warning["field"] for warning in answer.json()["warnings"]] == ["anthropic-beta"]


def test_extensions_of_chats_are_served(server):
    once, again = (server.post(PATH, {**HI, "seed": 5, "temperature": 1, "max_tokens": 8}).json() for _ in range(2))
    assert once["content"] == again["content"]
    pytest.importorskip("llguidance")
    chosen = server.post(PATH, {**HI, "structured_outputs": {"choice": ["yes", "no"]}}).json()
    assert chosen["content"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add"}, {"type": "any", "disable_parallel_tool_use": True}]
)
def test_forced_calls_are_tool_use(server, choice):
    pytest.importorskip("llguidance")
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"a": digit}, "required": ["a"], "additionalProperties": False}
    tool = {"name": "add", "input_schema": schema}
    message = server.post(PATH, {**HI, "tools": [tool], "tool_choice": choice, "temperature": 0}).json()
    assert message["stop_reason"] == "tool_use", message
    block = message["content"][0]
    assert block["name"] == "add" and 0 <= block["input"]["a"] <= 9


def test_no_tools_are_shown_with_the_choice_none(server):
    prompt = prompt_of(server, messages=HI["messages"], tools=[ADD], tool_choice={"type": "none"})
    assert prompt == prompt_of(server, messages=HI["messages"])


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_schema_is_the_form_of_the_answer(server, place):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "schema": schema}
    more = {"output_config": {"format": wanted}} if place == "output_config" else {"output_format": wanted}
    message = server.post(PATH, {**HI, **more}).json()
    assert json.loads(message["content"][0]["text"])["n"] in (1, 2)


def test_the_count_is_that_of_the_message(server):
    chat = [{"role": "user", "content": "add"}, assistant(text("I add."), USE), user(result(content="3"))]
    body = {"messages": chat, "tools": [ADD], "system": "Be brief.", "model": "pocket"}
    count = server.post(f"{PATH}/count_tokens", body).json()
    usage = server.post(PATH, {**body, "max_tokens": 1}).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    without = server.post(f"{PATH}/count_tokens", {**body, "tools": []}).json()
    assert without["input_tokens"] < count["input_tokens"]


# ---- errors and models -----------------------------------------------------------------------------------------------


def test_an_unknown_model_and_stored_batches_are_not_found(server):
    for path, body in ((PATH, {**HI, "model": "claude"}), (f"{PATH}/batches", {"requests": []})):
        answer = server.post(path, body)
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert "batches of messages are not stored; use POST /v1/messages" in answer.json()["error"]["message"]
    answer = server.client.get(f"{PATH}/batches/msgbatch_1/results")
    assert answer.status_code == 404 and "not stored" in answer.json()["error"]["message"]


def test_an_error_in_the_middle_of_a_stream_is_an_event(server):
    with scripted(server, ["one two three four " * 9], pause=0.05):
        body = {**HI, "stream": True, "timeout_s": 0.2}
        with server.client.stream("POST", PATH, json=body) as answer:
            blocks = "".join(answer.iter_text()).split("\n\n")[:-1]
    assert blocks[0].startswith("event: message_start")
    name, data = blocks[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and error["type"] == "error" and error["error"]["type"] == "timeout_error"
    assert error["request_id"] == answer.headers["request-id"]


def test_a_silent_stream_gets_pings():
    running = Running(keep_alive=0.2, engine={"batch_invariant": False, "max_num_seqs": 8})
    with scripted(running, ["one two"], pause=2.5):
        found = [event["type"] for event in events(running, HI)]
    running.close()
    assert found.count("ping") >= 2 and found[-1] == "message_stop"


def test_a_key_is_accepted_in_both_headers():
    running = Running(["secret"], engine={"batch_invariant": False, "max_num_seqs": 8})
    url = f"{running.url}{PATH}"
    running.client.headers.pop("authorization")
    statuses = [
        running.client.post(url, json={**HI, "max_tokens": 1}, headers=headers).status_code
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}, {}, {"x-api-key": "wrong"})
    ]
    error = running.client.post(url, json=HI).json()
    running.client.headers["authorization"] = "Bearer secret"
    running.close()
    assert statuses == [200, 200, 401, 401]
    assert error["type"] == "error" and error["error"]["type"] == "authentication_error" and error["request_id"]


def test_a_body_that_is_too_large_is_refused_in_the_same_form():
    running = Running(max_body_bytes=2048, engine={"batch_invariant": False, "max_num_seqs": 8})
    answer = running.post(PATH, {**HI, "system": "x" * 4096})
    running.close()
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "request_too_large"


def test_models_have_the_form_that_the_client_expects(server):
    form = {"anthropic-version": "2023-06-01"}
    listed = server.client.get("/v1/models", headers=form).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "pocket", "pocket")
    (card,) = listed["data"]
    assert card["type"] == "model" and card["id"] == card["display_name"] == "pocket"
    assert server.client.get("/v1/models/pocket", headers=form).json() == card
    assert server.client.get("/v1/models").json()["object"] == "list"
    missing = server.client.get("/v1/models/claude", headers=form)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert missing.json()["request_id"] == missing.headers["request-id"]
    for query in ("limit=0", "limit=x", "after_id=claude", "before_id=claude", "limit=1001"):
        assert server.client.get(f"/v1/models?{query}", headers=form).status_code == 400, query


def test_pages_of_models_follow_the_cursors():
    names = ["one", "two", "three"]
    running = Running(served_model_name=names, engine={"batch_invariant": False, "max_num_seqs": 8})
    form = {"anthropic-version": "2023-06-01"}

    def page(query):
        found = running.client.get(f"/v1/models?{query}", headers=form).json()
        return [card["id"] for card in found["data"]], found["has_more"]

    pages = [page(query) for query in ("limit=2", "limit=2&after_id=two", "limit=1&before_id=three", "before_id=one")]
    running.close()
    assert pages == [(["one", "two"], True), (["three"], False), (["two"], True), ([], False)]


def test_the_page_names_every_field_that_is_refused_or_has_no_effect():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    section = page.partition("## Anthropic Messages")[2].partition("## Tools")[0]
    missing = [name for name in (*translate.NO_EFFECT, *translate.REFUSED, "thread") if f"`{name}`" not in section]
    assert not missing
