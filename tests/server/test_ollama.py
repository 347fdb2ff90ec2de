"""Ollama's API over HTTP: chats, generation, streams as lines, and the list of models."""

import json
import time
from dataclasses import replace
from datetime import datetime

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from scripted import scripted

from minivllm.plugins.parser.hermes import Hermes
from minivllm.runtime.replies import ReplyContext
from minivllm.server.openai import tools
from minivllm.server.openai.calls import Said, Thought, ToolCall

CHAT, GENERATE = "/api/chat", "/api/generate"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HI = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
GREEDY = {"options": {"temperature": 0}}


class Thinker:
    """Parser of ``<think>...</think>`` and of Hermes' calls behind it, for tests."""

    def __init__(self):
        self.text = ""
        self.calls = Hermes().start(ReplyContext())
        self.thinks = True

    def feed(self, text, final):
        self.text += text
        found = []
        if self.thinks:
            head, end, rest = self.text.partition("</think>")
            if not end and not final:
                return []
            self.thinks = False
            found.append(Thought(head.removeprefix("<think>")))
            self.text = rest
        return [*found, *self.calls.feed(self._taken(), final)]

    def _taken(self):
        text, self.text = self.text, ""
        return text


class Odd:
    """A parser that finds a call with malformed arguments in every answer."""

    def __init__(self):
        self.done = False

    def feed(self, text, final):
        if self.done:
            return [Said(text)] if text else []
        self.done = True
        return [ToolCall("weather", '{"city": '), ToolCall("weather", "[1]"), ToolCall("weather", ""), Said(text)]


server = served(engine={"batch_invariant": False, "max_num_seqs": 8}, keep_alive=1)


@pytest.fixture
def parser(monkeypatch):
    """A function that registers a parser in place of the server's."""
    return lambda kind: monkeypatch.setitem(tools.PARSERS, "hermes", kind)


def lines(server, path, body):
    """Return the objects of a stream and its headers."""
    with server.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()], answer.headers


def test_a_stream_is_the_default_and_adds_up_to_the_whole_answer(server):
    parts, _ = lines(server, CHAT, {**HI, **GREEDY, "model": "pocket"})
    whole = server.post(CHAT, {**HI, **GREEDY, "model": "pocket", "stream": False}).json()
    *some, last = parts
    assert all(part["done"] is False and "done_reason" not in part for part in some) and some
    assert last["done"] and last["done_reason"] == "stop" and last["message"] == {"role": "assistant", "content": ""}
    assert "".join(part["message"]["content"] for part in some) == whole["message"]["content"] == "2 + 3 = 5"
    assert {part["model"] for part in parts} == {"pocket"}
    for end in (last, whole):
        assert end["eval_count"] == 8 and end["prompt_eval_count"] == 20 and end["load_duration"] == 0
        spans = end["prompt_eval_duration"], end["eval_duration"], end["total_duration"]
        assert all(type(span) is int and span > 0 for span in spans) and max(spans) == spans[2] < 60e9
    same = server.post("/v1/chat/completions", {**HI, "temperature": 0}).json()
    assert same["choices"][0]["message"]["content"] == whole["message"]["content"]


def test_a_prompt_goes_through_the_chat_template_unless_it_is_raw(server):
    with scripted(server, ["one", "two", "three"]) as script:
        parts, _ = lines(server, GENERATE, {"prompt": "hello", "system": "be brief"})
        assert "".join(part["response"] for part in parts) == "one" and parts[-1]["done_reason"] == "stop"
        raw = server.post(GENERATE, {"prompt": "hello", "raw": True, "stream": False}).json()
        assert raw["response"] == "two" and raw["done"] and raw["model"] == "pocket:latest"
        streamed, _ = lines(server, GENERATE, {"prompt": "hello", "raw": True})
        assert "".join(part["response"] for part in streamed) == "three"
    assert "be brief" in script.prompts[0] and "hello" in script.prompts[0] and "<|" in script.prompts[0]
    assert script.prompts[1:] == ["hello", "hello"]


def test_a_raw_answer_may_use_the_rest_of_the_context(server):
    text = "word " * 40
    with scripted(server, [text, text]):
        whole = server.post(GENERATE, {"prompt": "a", "raw": True, "stream": False}).json()
        cut = server.post(GENERATE, {"prompt": "a", "raw": True, "stream": False, "options": {"num_predict": 5}}).json()
    assert whole["response"] == text and whole["done_reason"] == "stop"
    assert cut["eval_count"] == 5 and cut["done_reason"] == "length" and text.startswith(cut["response"])


def test_options_are_those_of_sampling(server):
    options = {"num_predict": 3, "temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 7}
    requested = {**HI, "stream": False, "options": {**options, "repeat_penalty": 1.1, "stop": ["zzz"]}}
    first, second = (server.post(CHAT, requested).json() for _ in range(2))
    assert first["message"] == second["message"] and first["eval_count"] == 3 and first["done_reason"] == "length"
    assert "warnings" not in first
    stopped = server.post(CHAT, {**HI, "stream": False, "options": {"temperature": 0, "stop": [" ="]}}).json()
    assert stopped["message"]["content"] == "2 + 3" and stopped["done_reason"] == "stop"
    assert server.post(CHAT, {**HI, "stream": False, "options": {"seed": -1, "num_predict": 1}}).status_code == 200


def test_a_schema_is_held(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    for path, body in ((CHAT, HI), (GENERATE, {"prompt": "a number"})):
        answer = server.post(path, {**body, **GREEDY, "format": schema, "stream": False}).json()
        text = answer["response"] if path == GENERATE else answer["message"]["content"]
        assert json.loads(text)["a"] in (1, 2) and " " not in text
    body = {**HI, "format": "json", "stream": False, "options": {"temperature": 0, "num_predict": 60}}
    assert server.post(CHAT, body).json()["message"]["content"].startswith("{")


def test_reasoning_and_calls_have_members_of_their_own(server, parser):
    parser(Thinker)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    text = f"<think>hm, rain?</think>{call}{call.replace('Rome', 'Oslo')}"
    with scripted(server, [text, text, "<think>so</think>It rains."]):
        whole = server.post(CHAT, {**HI, "tools": [WEATHER], "stream": False}).json()
        parts, _ = lines(server, CHAT, {**HI, "tools": [WEATHER]})
        third, _ = lines(server, CHAT, {**HI, "tools": [WEATHER]})
    message = whole["message"]
    assert message["thinking"] == "hm, rain?" and message["content"] == "" and whole["done_reason"] == "stop"
    rome, oslo = message["tool_calls"]
    assert rome["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
    assert oslo["function"] == {"index": 1, "name": "weather", "arguments": {"city": "Oslo"}}
    assert rome["id"] != oslo["id"]
    messages = [part["message"] for part in parts]
    assert "".join(part.get("thinking", "") for part in messages) == "hm, rain?"
    calls = [call["function"] for part in messages for call in part.get("tool_calls", ())]
    assert calls == [rome["function"], oslo["function"]]
    assert "".join(part["content"] for part in messages) == ""
    assert "".join(part["message"]["content"] for part in third) == "It rains."


def test_malformed_arguments_are_text(server, parser):
    parser(Odd)
    with scripted(server, ["done", "done"]):
        whole = server.post(CHAT, {**HI, "tools": [WEATHER], "stream": False}).json()
        parts, _ = lines(server, CHAT, {**HI, "tools": [WEATHER]})
    for messages in ([whole["message"]], [part["message"] for part in parts]):
        text = "".join(part["content"] for part in messages)
        assert '"arguments": "{\\"city\\": "' in text and '"[1]"' in text and text.endswith("done")
        calls = [call["function"] for part in messages for call in part.get("tool_calls", ())]
        assert calls == [{"index": 0, "name": "weather", "arguments": {}}]
    assert parts[-1]["done"]


def test_a_call_that_the_length_cuts_is_dropped(server):
    with scripted(server, ['<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>']):
        body = {**HI, "tools": [WEATHER], "stream": False, "options": {"num_predict": 9}}
        answer = server.post(CHAT, body).json()
    assert answer["done_reason"] == "length" and answer["message"] == {"role": "assistant", "content": ""}


def test_calls_of_earlier_turns_are_objects_and_results_have_a_tool_name(server):
    call = {"id": "c1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call], "images": None},
        {"role": "tool", "content": "rain in Rome", "tool_name": "weather"},
    ]
    with scripted(server, ["ok"]) as script:
        answer = server.post(CHAT, {"messages": messages, "tools": [WEATHER], "stream": False})
    assert answer.status_code == 200 and "x-warnings" not in answer.headers
    assert "rain in Rome" in script.prompts[0] and "index" not in script.prompts[0]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_request_without_a_prompt_loads_the_model(server, path):
    for empty in ({}, {"messages": []} if path == CHAT else {"prompt": "", "system": "x"}):
        answer = server.post(path, {"model": "pocket", **empty})
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert found["done"] is True and found["done_reason"] == "load" and found["model"] == "pocket"
        assert found.get("response", "") == "" and "eval_count" not in found
    unload = server.post(path, {"keep_alive": 0})
    assert unload.headers["x-warnings"] == "keep_alive" and unload.json()["done_reason"] == "load"
    assert server.post(path, {"model": "llama3"}).status_code == 404


@pytest.mark.parametrize("name", ["pocket", "pocket:latest", "", None])
def test_the_tag_latest_may_be_left_out(server, name):
    answer = server.post(CHAT, {**HI, "model": name, "stream": False, "options": {"num_predict": 1}})
    assert answer.status_code == 200 and answer.json()["model"] == (name or "pocket:latest")


def test_name_is_the_older_name_of_model(server):
    for path, body in ((CHAT, HI), (GENERATE, {"prompt": "a"}), (GENERATE, {})):
        with scripted(server, ["ok"]):
            answer = server.post(path, {**body, "name": "pocket", "stream": False}).json()
        assert answer["model"] == "pocket" and "warnings" not in answer, answer
        assert server.post(path, {**body, "name": "none"}).status_code == 404


def test_an_unknown_model_has_the_text_that_clients_look_for(server):
    for name in ("llama3", "pocket:7b", "pocket:latest:latest", "x" * 999):
        for path, body in ((CHAT, HI), (GENERATE, {"prompt": "a"}), (CHAT, {"messages": []})):
            answer = server.post(path, {**body, "model": name})
            assert answer.status_code == 404 and set(answer.json()) == {"error"}
            assert answer.json()["error"].startswith(f"model '{name[:90]}") and "not found" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {**HI, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {**HI, "tools": {}, "stream": 3}, "stream"),
        (CHAT, {**HI, "template": "x"}, "template"),
        (CHAT, {**HI, "think": "very"}, "low, medium, high"),
        (CHAT, {**HI, "think": 3}, "think"),
        (CHAT, {**HI, "format": 3}, "format"),
        (CHAT, {**HI, "format": "xml"}, "format"),
        (CHAT, {**HI, "format": {"type": "nothing"}}, "format"),
        (CHAT, {**HI, "options": []}, "options"),
        (CHAT, {**HI, "options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {**HI, "options": {"num_predict": 0}}, "num_predict"),
        (CHAT, {**HI, "options": {"n": 2}}, "n=2: expected 1"),
        (CHAT, {**HI, "options": {"num_return_sequences": 2}}, "n=2: expected 1"),
        (GENERATE, {"prompt": "a", "num_return_sequences": 2}, "n=2: expected 1"),
        (GENERATE, {"prompt": "a", "raw": True, "best_of": 2}, "best_of"),
        (CHAT, {**HI, "taps": [{}]}, "taps is not supported"),
        (CHAT, {**HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HI, "logprobs": True, "top_logprobs": 99}, "logprobs"),
        (GENERATE, {"prompt": 3}, "prompt"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        (GENERATE, {"prompt": "a", "context": [1, 2]}, "context is not supported"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, "images is not supported"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template is not supported"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, "raw mode does not support system"),
        (GENERATE, {"prompt": "a", "raw": True, "context": [1]}, "raw mode does not support context"),
        (GENERATE, {"prompt": "a", "raw": True, "top_logprobs": 1}, "top_logprobs"),
        (GENERATE, {"prompt": "word " * 2000}, "maximum context length"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_have_ollamas_form_and_name_the_field(server, path, body, words, stream):
    answer = server.post(path, {"stream": stream, **body})
    assert answer.status_code == 400 and set(answer.json()) == {"error"}, answer.text
    assert words in answer.json()["error"]


def test_empty_values_of_what_is_refused_request_nothing(server):
    nothing = {"suffix": "", "context": [], "images": [], "template": "", "format": "", "options": {}, "system": ""}
    body = {"prompt": "a", "stream": False, **nothing, "options": {"num_predict": 1, "n": 1}}
    answer = server.post(GENERATE, body)
    assert answer.status_code == 200 and "warnings" not in answer.json()
    raw = server.post(GENERATE, {**body, "raw": True})
    assert raw.status_code == 200 and "warnings" not in raw.json()


def test_fields_without_effect_are_warnings(server):
    raw = server.post(
        GENERATE, {"prompt": "a", "raw": True, "think": True, "stream": False, "options": {"num_predict": 1}}
    )
    assert raw.headers["x-warnings"] == "think"
    body = {
        **HI,
        "keep_alive": "5m",
        "think": True,
        "options": {"num_predict": 1, "num_ctx": 4096, "nonsense": 1},
        "user": "x",
    }
    parts, headers = lines(server, CHAT, body)
    fields = {warning["field"] for warning in parts[-1]["warnings"]}
    assert fields == {"keep_alive", "think", "num_ctx", "options.nonsense", "user"}
    assert set(headers["x-warnings"].split(",")) == fields
    assert all("warnings" not in part for part in parts[:-1])


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HI), (GENERATE, {"prompt": "a b"}), (GENERATE, {"prompt": "a b", "raw": True})]
)
def test_log_probabilities_come_with_their_tokens(server, path, body):
    body = {**body, "logprobs": True, "top_logprobs": 2, "options": {"temperature": 0, "num_predict": 4}}
    parts, _ = lines(server, path, body)
    whole = server.post(path, {**body, "stream": False}).json()
    text = whole["response"] if path == GENERATE else whole["message"]["content"]
    streamed = [score for part in parts for score in part.get("logprobs", ())]
    assert [score["token"] for score in streamed] == [score["token"] for score in whole["logprobs"]]
    assert len(streamed) == 4 and "".join(score["token"] for score in streamed) == text
    for score in whole["logprobs"]:
        assert score["logprob"] <= 0 and len(score["top_logprobs"]) == 2
        assert bytes(score["bytes"]).decode() == score["token"] == score["top_logprobs"][0]["token"]
    none = server.post(path, {**body, "stream": False, "logprobs": False, "top_logprobs": None}).json()
    assert "logprobs" not in none


def test_an_error_in_the_middle_of_a_stream_is_the_last_line(server, monkeypatch):
    from minivllm.errors import EngineDeadError

    def dies(prompt):
        return ["some text"] if prompt else []

    with scripted(server, [dies], pause=0.2) as script, server.client.stream("POST", CHAT, json=HI) as answer:
        found = answer.iter_lines()
        first = json.loads(next(found))
        assert first["done"] is False
        service = server.app.service

        async def fail():
            for stream in list(service.client._streams.values()):
                stream.fail(EngineDeadError("gone"))

        server.do(fail)
        *_, last = (json.loads(line) for line in found)
    assert last == {"error": "the engine is not running; the server's log has the reason"} and script.texts == []


def test_a_silent_stream_sends_lines_that_clients_can_read(server):
    with scripted(server, ["two words"], pause=2.5):
        begin = time.monotonic()
        parts, _ = lines(server, CHAT, HI)
    assert time.monotonic() - begin > 2
    silent = [part for part in parts if "model" not in part]
    assert silent and all(part == {"message": {"role": "assistant", "content": ""}, "done": False} for part in silent)
    assert parts[-1]["done"] and "".join(part["message"]["content"] for part in parts) == "two words"


def test_tags_and_version(server):
    (model,) = server.client.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "pocket:latest" and model["size"] > 0 and len(model["digest"]) == 64
    assert model["details"]["family"] == "qwen3" and model["details"]["quantization_level"] == "float32"
    numbers = server.client.get("/api/version").json()["version"].split(".")
    assert len(numbers) == 3 and tuple(map(int, numbers)) > (0, 6, 4)
    for path in (CHAT, GENERATE):
        wrong = server.client.get(path)
        assert wrong.status_code == 405 and set(wrong.json()) == {"error"}


def test_the_model_is_described_and_always_loaded(server):
    for body in ({"model": "pocket"}, {"name": "pocket:latest"}, {"model": "pocket", "verbose": True}):
        found = server.post("/api/show", body).json()
        assert found["capabilities"] == ["completion", "tools"] and "messages" in found["template"]
        assert found["details"] == server.client.get("/api/tags").json()["models"][0]["details"]
        info = found["model_info"]
        assert info["general.architecture"] == "qwen3" and info["qwen3.context_length"] == 1024
        assert info["qwen3.embedding_length"] > 0 and info["qwen3.block_count"] > 0
        assert dict(line.split() for line in found["parameters"].splitlines())["num_ctx"] == "1024"
    unknown = server.post("/api/show", {"model": "llama3"})
    assert unknown.status_code == 404 and unknown.json() == {"error": "model 'llama3' not found"}
    (running,) = server.client.get("/api/ps").json()["models"]
    assert running["name"] == "pocket:latest" and running["context_length"] == 1024 and running["size_vram"] == 0
    assert datetime.fromisoformat(running["expires_at"]).year > 2100


def test_a_template_that_switches_reasoning_is_a_capability(server, monkeypatch):
    tokenizer = server.app.service.tokens.tokenizer
    for read, thinks in (
        (("messages", "enable_thinking"), True),
        (("reasoning_effort",), True),
        (("messages",), False),
    ):
        monkeypatch.setattr(tokenizer, "template_variables", lambda *_, read=read: frozenset(read))
        found = server.post("/api/show", {"model": "pocket"}).json()["capabilities"]
        assert found == ["completion", "tools", *(["thinking"] if thinks else [])]
    client = server.app.service.client
    monkeypatch.setattr(client, "info", replace(client.info, for_embeddings=True))
    assert server.post("/api/show", {"model": "pocket"}).json()["capabilities"] == ["completion", "tools", "embedding"]


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (True, {"enable_thinking": True, "reasoning_effort": None}),
        (False, {"enable_thinking": False}),
        ("low", {"reasoning_effort": "low"}),
        ("max", {"reasoning_effort": "xhigh"}),
    ],
)
def test_think_sets_variables_of_the_chat_template(server, monkeypatch, think, variables):
    tokens = server.app.service.tokens
    seen = []
    whole = tokens.chat

    async def chat(messages, shown, begin, given, *more):
        seen.append(given)
        return await whole(messages, shown, begin, None, *more)

    monkeypatch.setattr(tokens, "chat", chat)
    monkeypatch.setattr(tokens.tokenizer, "template_variables", lambda *_: {"enable_thinking", "reasoning_effort"})
    for path, body in ((CHAT, HI), (GENERATE, {"prompt": "a"})):
        answer = server.post(path, {**body, "think": think, "stream": False, "options": {"num_predict": 1}})
        assert answer.status_code == 200 and "x-warnings" not in answer.headers
        assert {name: seen[-1].get(name) for name in variables} == variables


def test_pulling_the_served_model_succeeds_and_the_list_cannot_change(server):
    parts, _ = lines(server, "/api/pull", {"model": "pocket"})
    assert parts == [{"status": "pulling manifest"}, {"status": "success"}]
    assert server.post("/api/pull", {"name": "pocket:latest", "stream": False}).json() == {"status": "success"}
    other = server.post("/api/pull", {"model": "llama3"})
    assert other.status_code == 404 and "model 'llama3' not found" in other.json()["error"]
    for path, method in (("push", "POST"), ("create", "POST"), ("copy", "POST"), ("delete", "DELETE")):
        answer = server.client.request(method, f"/api/{path}", json={"model": "pocket"})
        assert answer.status_code == 501 and answer.json()["error"].startswith(f"{path} is not supported")


def test_embeddings_in_the_forms_of_both_routes(server):
    long = "word " * 2000
    cut = server.post("/api/embed", {"model": "pocket", "input": [long, "a"]}).json()
    assert cut["prompt_eval_count"] == 1025 and len(cut["embeddings"]) == 2 and "usage" not in cut
    begin = server.post("/api/embed", {"input": "word " * 1500}).json()["embeddings"][0]
    assert cut["embeddings"][0] == pytest.approx(begin, abs=1e-4), "the end is cut"
    wrong = [
        ({"input": long, "truncate": False}, "input"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": {}}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "options": 1}, "options"),
    ]
    for body, words in wrong:
        answer = server.post("/api/embed", body)
        assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    assert "prompt" in server.post("/api/embeddings", {"prompt": 1}).json()["error"]
    warned = server.post("/api/embed", {"input": "a", "keep_alive": 1, "options": {"num_ctx": 1}}).json()
    assert [warning["field"] for warning in warned["warnings"]] == ["keep_alive", "options.num_ctx"]
    assert server.post("/api/embed", {"model": "pocket", "input": ""}).json() == {"model": "pocket", "embeddings": []}
    assert server.post("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}
    for path, body in (("/api/embed", {"input": ""}), ("/api/embeddings", {"prompt": "a"})):
        assert server.post(path, {**body, "model": "x"}).status_code == 404


def test_probes_of_the_root_succeed(server):
    found = server.client.get("/")
    assert found.status_code == 200 and "Ollama is running" in found.text and found.text.startswith("minivllm")
    assert server.client.head("/").status_code == 200 and server.client.post("/", json={}).status_code == 405


def test_programs_need_not_declare_json_and_pages_are_refused(server):
    raw = json.dumps({**HI, "stream": False, "options": {"num_predict": 1}})
    for kind in (None, "application/x-www-form-urlencoded", "text/plain"):
        headers = {} if kind is None else {"Content-Type": kind}
        assert server.client.post(CHAT, content=raw, headers=headers).status_code == 200
        page = server.client.post(CHAT, content=raw, headers={**headers, "Sec-Fetch-Site": "same-origin"})
        assert page.status_code == 415 and "Content-Type" in page.json()["error"]
    empty = server.client.post(CHAT)
    assert empty.status_code == 400 and "not JSON" in empty.json()["error"]
