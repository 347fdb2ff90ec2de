"""Calls that a grammar constrains in the model's own format: forced, strict, and beside an answer in JSON."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from http_helpers import served
from scripted import scripted

server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}},
}
NAMED = {"type": "function", "function": {"name": "add"}}


def function(name, strict=None, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    more = {} if strict is None else {"strict": strict}
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


ADD = function("add", True, a=DIGIT, b={"enum": [1, 2]})
OTHER = function("other")


def sent_form(server):
    """The form in the parameters that the server last sent to the engine."""
    return server.app.service.client._last_written[1].get("structured_outputs")


@pytest.fixture
def parser(server, monkeypatch):
    """Choose the parser of the server."""
    service = server.app.service

    def choose(name):
        monkeypatch.setattr(service, "server", service.server.model_copy(update={"tool_parser": name}))

    return choose


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm4", "pythonic", "gemma", "json", "llama3_json"])
def test_forced_calls_have_the_format_of_the_model(server, parser, name):
    parser(name)
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        body = {**ASK, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 150}
        choice = server.post(CHAT, {**body, "seed": 3, "temperature": 1}).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["a"] in range(10) and arguments["b"] in (1, 2) and set(arguments) == {"a", "b"}
        assert choice["finish_reason"] == reason and choice["message"]["content"] is None
        assert "reply" in sent_form(server)


def test_a_schema_that_the_format_cannot_express_is_forced_as_a_list_in_json(server, parser):
    parser("qwen3_coder")
    tool = function("f", **{"a>b": DIGIT})
    body = {**ASK, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    (call,) = server.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"a>b"} and "json" in sent_form(server)
    tool["function"]["strict"] = True
    refused = server.post(CHAT, {**ASK, "tools": [tool]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    assert "cannot express f: the argument 'a>b', whose name" in refused.json()["error"]["message"]


def test_a_call_that_the_model_chooses_fits_a_strict_function(server):
    """The tiny model writes no tag itself: a bias makes it begin one."""
    tag = server.app.service.tokens.tokenizer.encode("<tool_call>", False)
    body = {**ASK, "tools": [ADD, OTHER], "max_tokens": 120}
    text = server.post(CHAT, {**body, "max_tokens": 5}).json()["choices"][0]["message"]["content"]
    plain = server.post(CHAT, {**body, "max_tokens": 5, "tools": [function("add", a=DIGIT), OTHER]}).json()
    assert isinstance(text, str) and plain["choices"][0]["message"]["content"]
    assert sent_form(server) is None  # without a strict function nothing is constrained
    begun = [{"role": "assistant", "content": "<tool_cal"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "messages": [*ASK["messages"], *begun]}
    assert tag and server.post(CHAT, {**body, **more}).status_code == 200
    assert json.loads(sent_form(server)["reply"])["behind"] is False


def test_a_json_answer_beside_tools_is_the_json_or_calls(server, parser):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    tagged = '{"n": "<tool_call>\\n{}"}'
    body = {**ASK, "tools": [ADD, OTHER], "response_format": FORM, "max_tokens": 120}
    with scripted(server, [call, '{"n": 1}', tagged] * 2):
        made = [server.post(CHAT, body).json()["choices"][0] for _ in range(3)]
        events = [server.events(CHAT, body) for _ in range(3)]
    assert made[0]["finish_reason"] == "tool_calls" and made[0]["message"]["content"] is None
    assert [one["message"]["content"] for one in made[1:]] == ['{"n": 1}', tagged]
    assert not any("tool_calls" in one["message"] for one in made[1:])
    reported = ["".join(e["choices"][0]["delta"].get("content") or "" for e in found[:-1]) for found in events]
    assert reported == ["", '{"n": 1}', tagged]
    for seed in range(4):
        choice = server.post(CHAT, {**body, "seed": seed, "temperature": 1.5}).json()["choices"][0]
        if "tool_calls" in choice["message"]:
            assert choice["message"]["content"] is None
        elif choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) == {"n": 1}
    assert "reply" in sent_form(server)
    parser("json")
    assert server.post(CHAT, {**body, "max_tokens": 3}).status_code == 200
    assert "json" in sent_form(server)  # a call without a tag looks like the answer


def test_large_tools_are_read_by_the_worker_pool(server, parser):
    parser("qwen3_coder")
    many = {f"key_{number}": {"type": "string", "description": "d" * 90} for number in range(60)}
    tool = function("f", True, a=DIGIT)
    tool["function"]["parameters"]["properties"] |= many
    body = {**ASK, "tools": [tool], "max_tokens": 2}
    with scripted(server, ["so"], context=1 << 18):
        assert server.post(CHAT, body).status_code == 200
    assert json.loads(sent_form(server)["reply"])["behind"] is False
    assert "<parameter=key_59>" in sent_form(server)["reply"]
    large = function("f", True, a={"enum": ["x" * 300_000]})
    for choice in ("auto", "required"):
        refused = server.post(CHAT, {**body, "tools": [large], "tool_choice": choice})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
        assert "at most" in refused.json()["error"]["message"]


def test_a_schema_that_no_grammar_holds_names_the_tools(server):
    tool = function("f", True, a={"type": "array", "uniqueItems": True})
    for choice in ("auto", "required"):
        refused = server.post(CHAT, {**ASK, "tools": [tool], "tool_choice": choice})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
        assert "uniqueItems" in refused.json()["error"]["message"]
    tool["function"]["strict"] = False
    assert server.post(CHAT, {**ASK, "tools": [tool, ADD], "max_tokens": 2}).status_code == 200


def test_a_client_cannot_send_the_form_of_the_server(server):
    refused = server.post(CHAT, {**ASK, "structured_outputs": {"reply": "{}"}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"


def test_strict_calls_that_cannot_be_constrained_have_a_warning(server, monkeypatch):
    info = server.app.service.client.info
    monkeypatch.setattr(server.app.service.client, "info", type(info)(**{**vars(info), "forms": ["json"]}))
    answer = server.post(CHAT, {**ASK, "tools": [ADD], "max_tokens": 2}).json()
    assert [warning["field"] for warning in answer["warnings"]] == ["tools.function.strict"]
    body = {**ASK, "tools": [ADD], "tool_choice": "required", "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 200 and "json" in sent_form(server)
