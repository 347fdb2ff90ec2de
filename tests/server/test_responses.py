"""/v1/responses over HTTP: the object, the events in their order, tools, reasoning, formats and refusals."""

import asyncio
import json
import time
from array import array

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from scripted import scripted

from minivllm.server.link.scored import Scored
from minivllm.server.link.streams import TextPiece
from minivllm.server.openai import tools as parsers
from minivllm.server.openai.answers import Slices
from minivllm.server.openai.calls import Said, Thought
from minivllm.server.responses.items import ItemConversation
from minivllm.server.responses.work import text_scores

server = served(["sk-1", "sk-2"])
ASK = {"input": "What is 2 + 3?", "temperature": 0, "max_output_tokens": 20}
ADD = {
    "type": "function",
    "name": "add",
    "description": "add numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
FIELDS = {
    "background", "completed_at", "created_at", "error", "id", "incomplete_details", "instructions",
    "max_output_tokens", "max_tool_calls", "metadata", "model", "object", "output", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "status", "store",
    "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage", "user",
}  # fmt: skip


TEXT_EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
]  # fmt: skip


class Thinking:
    """A parser of <think>...</think>, for tests."""

    def __init__(self):
        self.kind, self.held = Said, ""

    def feed(self, text, final):
        found, self.held = [], self.held + text
        while self.held:
            mark = "<think>" if self.kind is Said else "</think>"
            before, whole, after = self.held.partition(mark)
            if not whole and "<" in self.held and not final:
                break
            if before:
                found.append(self.kind(before))
            if whole:
                self.kind = Thought if self.kind is Said else Said
            self.held = after
        return found


parsers.register("thinking-for-tests", Thinking)


@pytest.fixture
def thinking(server):
    config = server.app.service.server
    before = config.tool_parser
    object.__setattr__(config, "tool_parser", "thinking-for-tests")
    yield
    object.__setattr__(config, "tool_parser", before)


def ask(server, status=200, **body):
    answer = server.post("/v1/responses", {"input": "hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def events(server, **body):
    """The events of a stream, after a check of their names and numbers."""
    with server.client.stream("POST", "/v1/responses", json={"input": "hi", **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def types(found):
    """The types of events, each run of the same type once."""
    return [e["type"] for i, e in enumerate(found) if not i or e["type"] != found[i - 1]["type"]]


def test_the_object_is_complete(server):
    made = ask(server, **ASK, metadata={"a": "b"}, instructions="Be brief.", user="u")
    assert made.keys() >= FIELDS and made["object"] == "response" and made["status"] == "completed"
    assert made["id"].startswith("resp_") and made["metadata"] == {"a": "b"} and made["instructions"] == "Be brief."
    (message,) = made["output"]
    assert message["type"] == "message" and message["role"] == "assistant" and message["status"] == "completed"
    (part,) = message["content"]
    assert part["type"] == "output_text" and part["text"] and part["annotations"] == []
    usage = made["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert [w["field"] for w in made["warnings"]] == ["user"]


def test_the_text_is_that_of_a_chat(server):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK["input"]}]
    chat = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 20}).json()
    made = ask(server, **ASK, instructions="Be brief.")
    assert made["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert made["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_input_tokens_are_counted_without_an_answer(server):
    body = {"input": "What is 2 + 3?", "instructions": "Be brief.", "tools": [ADD]}
    counted = server.post("/v1/responses/input_tokens", body)
    with scripted(server, ["ok"]):
        made = ask(server, **body)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    assert server.post("/v1/responses/input_tokens", {"input": []}).json()["error"]["param"] == "input"
    warned = server.post("/v1/responses/input_tokens", {**body, "user": "u"})
    assert [warning["field"] for warning in warned.json()["warnings"]] == ["user"]
    assert warned.headers["x-warnings"] == "user"


def test_events_of_a_text_come_in_openai_s_order(server):
    with scripted(server, ["one two three"], pause=0.02):
        found = events(server)
    assert types(found) == TEXT_EVENTS
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(e["delta"] for e in deltas) == "one two three"
    whole = found[-1]["response"]
    assert whole["output"] == [found[-2]["item"]] and whole["usage"]["output_tokens"] > 1
    assert {e["item_id"] for e in deltas} == {whole["output"][0]["id"]}
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    assert found[0]["response"]["id"] == whole["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(server, stream):
    with scripted(server, ["one two three four five"]):
        if stream:
            found = events(server, max_output_tokens=3)
            assert found[-1]["type"] == "response.incomplete"
            made = found[-1]["response"]
        else:
            made = ask(server, max_output_tokens=3)
    assert made["status"] == "incomplete" and made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["output"][0]["status"] == "incomplete" and made["usage"]["output_tokens"] == 3


def test_calls_are_items_and_their_results_continue_the_chat(server):
    texts = ["Let me see.\n" + call("add", {"a": 1}) + "\n" + call("add", {"a": 2}), "done"]
    with scripted(server, texts) as script:
        found = events(server, tools=[ADD])
        message, first, second = found[-1]["response"]["output"]
        results = [
            {"type": "function_call_output", "call_id": one["call_id"], "output": f"result {one['arguments']}"}
            for one in (first, second)
        ]
        history = [{"role": "user", "content": "hi"}, message, first, second, *results]
        made = ask(server, input=history, tools=[ADD])
    assert (first["type"], first["name"], json.loads(first["arguments"])) == ("function_call", "add", {"a": 1})
    assert first["id"].startswith("fc_") and first["call_id"] != second["call_id"] and first["status"] == "completed"
    done = [e for e in found if e["type"] == "response.function_call_arguments.done"]
    assert [json.loads(e["arguments"]) for e in done] == [{"a": 1}, {"a": 2}]
    assert made["output"][0]["content"][0]["text"] == "done"
    prompt = script.prompts[1]
    # one message of the assistant with the text and both calls, then both results
    assert prompt.count("<|im_start|>assistant") == 2 and prompt.count("<|im_start|>tool") == 2
    assert prompt.index("Let me see.") < prompt.index('{"a": 1}') < prompt.index("result {")


def test_whitespace_before_a_call_is_no_message(server):
    with scripted(server, ["\n\n" + call("add", {"a": 1}), "  \n"]):
        called = ask(server, tools=[ADD])
        blank = ask(server, tools=[ADD])
    assert [item["type"] for item in called["output"]] == ["function_call"]
    assert blank["output"][0]["content"][0]["text"] == "  \n"


def test_custom_tools_and_namespaces_keep_their_names(server):
    custom = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    }
    space = {"type": "namespace", "name": "crm", "description": "d", "tools": [ADD]}
    tools = [custom, space, {"type": "web_search"}]
    with scripted(server, [call("patch", {"input": "*** Begin"}) + call("crm__add", {"a": 1}), "done"]) as script:
        found = events(server, tools=tools, tool_choice="auto")
        items = found[-1]["response"]["output"]
        outputs = [{"type": "custom_tool_call_output", "call_id": items[0]["call_id"], "output": "patched"}]
        outputs.append(
            {
                "type": "function_call_output",
                "call_id": items[1]["call_id"],
                "output": [{"type": "input_text", "text": "added"}],
            }
        )
        ask(server, input=[{"role": "user", "content": "hi"}, *items, *outputs], tools=tools)
    patch, add = items
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert (add["type"], add["name"], add["namespace"]) == ("function_call", "add", "crm")
    assert "response.custom_tool_call_input.done" in types(found)
    warned = [w["field"] for w in found[0]["response"]["warnings"]]
    assert warned == ["tools[0].format", "tools[2]"]
    assert "start: /x/" in script.prompts[0]
    assert '"crm__add"' in script.prompts[1] and "patched" in script.prompts[1] and "added" in script.prompts[1]


def test_forced_calls_and_allowed_tools(server):
    other = {**ADD, "name": "other"}
    named = ask(server, tools=[ADD, other], tool_choice={"type": "function", "name": "other"}, max_output_tokens=40)
    assert [i["name"] for i in named["output"]] == ["other"] and named["tool_choice"]["name"] == "other"
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    allowed = ask(server, tools=[ADD, other], tool_choice=only, parallel_tool_calls=False, max_output_tokens=40)
    assert [i["name"] for i in allowed["output"]] == ["add"] and allowed["parallel_tool_calls"] is False
    none = ask(server, tools=[ADD], tool_choice="none", max_output_tokens=4)
    assert [i["type"] for i in none["output"]] == ["message"]
    custom = {"type": "custom", "name": "say"}
    forced = ask(server, tools=[custom], tool_choice={"type": "custom", "name": "say"}, max_output_tokens=60)
    assert forced["output"][0]["type"] == "custom_tool_call"


def test_reasoning_is_an_item_with_its_events(server, thinking):
    with scripted(server, ["<think>I think so.</think>Yes."] * 2) as script:
        made = ask(server, tools=[ADD], include=["reasoning.encrypted_content"])
        found = events(server, tools=[ADD], reasoning={"effort": "low", "summary": "auto"})
        script.texts = ["ok"] * 2
        reasoning, message = made["output"]
        ask(server, input=[{"role": "user", "content": "hi"}, reasoning, message, {"role": "user", "content": "and?"}])
    assert reasoning["id"].startswith("rs_") and reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think so."}]
    assert message["content"][0]["text"] == "Yes."
    assert 0 < made["usage"]["output_tokens_details"]["reasoning_tokens"] < made["usage"]["output_tokens"]
    assert types(found)[2:8] == [event.replace("output_text", "reasoning_text") for event in TEXT_EVENTS[2:8]]
    assert "encrypted_content" not in found[-1]["response"]["output"][0]
    assert "reasoning.summary" in [w["field"] for w in found[-1]["response"]["warnings"]]


def test_encrypted_content_alone_carries_the_reasoning():
    from minivllm.server.responses.items import _thought, sealed, unsealed

    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed("why — so")}
    assert _thought(item) == "why — so" and unsealed("gAAAA made elsewhere") == ""
    assert _thought({"summary": [{"type": "summary_text", "text": "short"}]}) == "short"


def test_reasoning_goes_back_to_the_model_in_its_message():
    import asyncio

    from minivllm.server.openai.answers import Slices
    from minivllm.server.responses.items import ItemConversation, sealed

    items = [
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("so")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "and"}]},
        {"type": "message", "role": "assistant", "content": "No."},
    ]
    conversation = ItemConversation(None)
    asyncio.run(conversation.extend(items, "input", Slices()))
    _, first, second = conversation.messages
    assert (first["reasoning_content"], first["content"], len(first["tool_calls"])) == ("so", "Yes.", 1)
    assert second == {"role": "assistant", "reasoning_content": "and", "content": "No."}
    assert conversation.places["messages[1].tool_calls[0].function"] == "input[3]"


def test_log_probabilities_are_in_deltas_and_in_the_response(server):
    more = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(server, **more)["output"][0]["content"][0]
    found = events(server, **more)
    deltas = [row for e in found if e["type"] == "response.output_text.delta" for row in e["logprobs"]]
    done = next(e for e in found if e["type"] == "response.output_text.done")
    last = found[-1]["response"]["output"][0]["content"][0]
    tokens = [row["token"] for row in whole["logprobs"]]
    assert "".join(tokens) == whole["text"] and all(len(row["top_logprobs"]) == 2 for row in whole["logprobs"])
    for rows in (deltas, done["logprobs"], last["logprobs"]):
        assert [row["token"] for row in rows] == tokens
    assert ask(server, **ASK)["output"][0]["content"][0]["logprobs"] == []


def test_the_text_has_the_form_that_is_asked(server):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    made = ask(server, text={"format": form, "verbosity": "low"})
    assert json.loads(made["output"][0]["content"][0]["text"])["n"] in (1, 2) and made["text"]["format"] == form
    assert [w["field"] for w in made["warnings"]] == ["text.verbosity"]


def test_leading_instructions_are_one_message(server):
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Second."}]}
    system = {"role": "system", "content": "Third."}
    with scripted(server, ["ok"]) as script:
        ask(server, instructions="First.", input=[developer, system, {"role": "user", "content": "hi"}])
    assert "First.\n\nSecond.\n\nThird." in script.prompts[0] and script.prompts[0].count("<|im_start|>system") == 1


def test_many_instructions_are_joined_in_linear_time():
    items = [{"type": "message", "role": "system", "content": f"{i} " + "a" * 3000} for i in range(4000)]
    conversation = ItemConversation("First.")
    start = time.thread_time()
    asyncio.run(conversation.extend(items, "input", Slices()))
    took = time.thread_time() - start
    (message,) = conversation.messages
    assert message["content"].startswith("First.\n\n0 aa") and message["content"].count("\n\n") == 4000
    assert took < 1.5, took  # adding each to the text before it copies 24 GB


def test_reasoning_that_another_server_encrypted_is_a_warning(server):
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA=x"}
    with scripted(server, ["ok"]):
        made = ask(server, input=[{"role": "user", "content": "hi"}, foreign])
    assert [warning["field"] for warning in made["warnings"]] == ["input[1].encrypted_content"]


REFUSALS = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "[", "call_id": "c"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": {"style": 1}}, "text.style"),
    ({"reasoning": "high"}, "reasoning"),
    ({"include": ["everything"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"num_return_sequences": 2}, "num_return_sequences"),
    ({"num_beams": 2, "num_return_sequences": 2}, "num_beams"),
    ({"messages": []}, "messages"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"truncation": "middle"}, "truncation"),
    ({"top_logprobs": 99}, "logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"stream_options": {}, "stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("body", "param"), REFUSALS)
def test_wrong_fields_are_refused_by_name(server, body, param):
    error = ask(server, 400, **body)
    assert error["param"] == param, error
    assert "messages[" not in error["message"] and "max_tokens=" not in error["message"]


def test_extensions_of_the_chat_work_and_unknown_fields_warn(server):
    with scripted(server, ["one two three"]):
        made = ask(server, stop=[" three"], top_k=5, client_metadata={"a": "b"}, service_tier="auto")
    assert made["output"][0]["content"][0]["text"] == "one two"
    assert {w["field"] for w in made["warnings"]} == {"client_metadata", "service_tier"}
    assert "max_output_tokens" in ask(server, 400, max_output_token=5)["message"]


def test_a_failure_in_the_middle_ends_the_stream_with_response_failed(server):
    from minivllm.server.errors import ApiError
    from minivllm.server.openai.generate import Answer

    take, count = Answer.take, [0]

    async def failing(self, tell=None):
        count[0] += 1
        if count[0] == 3:
            raise ApiError(500, "the engine failed")
        return await take(self, tell)

    Answer.take = failing
    try:
        with scripted(server, ["one two three four five"]):
            found = events(server)
    finally:
        Answer.take = take
    assert [e["type"] for e in found[-2:]] == ["error", "response.failed"]
    assert found[-1]["response"]["status"] == "failed" and found[-1]["response"]["error"]["code"] == "server_error"


class Everything:
    """A set that contains every number."""

    def __contains__(self, number):
        return True


def test_an_answer_that_the_server_ends_is_a_503_and_stored_as_failed(server):
    with scripted(server, ["one two three"] * 2) as script:
        script.stopped = Everything()
        whole = server.post("/v1/responses", {"input": "hi"})
        found = events(server)
    assert whole.status_code == 503 and "ended the answer" in whole.json()["error"]["message"]
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    stored = server.client.get(f"/v1/responses/{found[-1]['response']['id']}").json()
    assert stored["status"] == "failed" and stored["error"] == found[-1]["response"]["error"]


def test_the_time_limit_ends_the_stream_with_response_failed(server):
    with scripted(server, ["one two three four five six"], pause=0.3):
        found = events(server, timeout_s=0.8)
    assert found[-1]["type"] == "response.failed" and found[-2]["type"] == "error"


def test_text_of_the_client_is_never_a_special_token(server):
    counts = []
    for text in ("<|im_end|>", "a"):
        call_item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": text})}
        output = {"type": "function_call_output", "call_id": "c", "output": text}
        with scripted(server, ["ok"]):
            made = ask(server, input=[{"role": "user", "content": text}, call_item, output], tools=[ADD])
        counts.append(made["usage"]["input_tokens"])
    assert counts[0] >= counts[1] + 3 * 2  # as special tokens the marks would be one token each


@pytest.mark.parametrize(
    "reason, stop, left", [("stop", None, 2), ("stop", 7, 2), ("stop", "end", 3), ("length", None, 3), (None, None, 3)]
)
def test_scores_leave_out_the_token_that_ended_the_answer(reason, stop, left):
    scored = Scored()
    scored.tokens, scored.chosen, scored.rank = array("i", [1, 2, 7]), array("f", [-1.0] * 3), array("i", [1] * 3)
    scored.ends = array("q", [0, 0, 0, 0])
    piece = TextPiece(0, "ab", [1, 2, 7], scored, reason, stop)
    assert [row.token for row in text_scores(piece).rows()] == [1, 2, 7][:left]
    assert text_scores(TextPiece(0, "ab", [1], None, reason, stop)) is None
