"""Tools and forms over HTTP, through OpenAI's client package."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from http_helpers import served

from minivllm.server.errors import ApiError
from minivllm.server.openai.tools import read_tools

CHAT = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
server = served()


@pytest.fixture(scope="module")
def openai(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- tools and forms (the grammars are what makes a tiny model call functions) ---------------------------------------

ADD = {
    "type": "function",
    "function": {
        "name": "add", "description": "adds two numbers",
        "parameters": {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
            "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
    },
}  # fmt: skip
ONE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
PICK = {"type": "function", "function": {"name": "pick", "parameters": ONE}}


def joined(stream):
    """The tool calls of a stream, put together as clients do, and why it ended."""
    calls, reason = {}, None
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index not in calls and call.function.name
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments
    return [calls[i] for i in sorted(calls)], reason


def test_a_format_of_the_answer_does_not_restrict_forced_calls(server):
    pytest.importorskip("llguidance")
    body = {**CHAT, "tools": [PICK], "tool_choice": "required", "parallel_tool_calls": False}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    answer = server.post("/v1/chat/completions", {**body, "response_format": schema}).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "pick" and json.loads(call["function"]["arguments"])["n"] in (1, 2)
    refused = server.post("/v1/chat/completions", {**body, "structured_outputs": {"regex": "a"}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_openai_python_tools_required_and_named_are_forced(openai):
    pytest.importorskip("llguidance")
    ask = {"model": "pocket", **CHAT, "tools": [ADD, PICK], "max_tokens": 80}
    named = {"type": "function", "function": {"name": "add"}}
    answer = openai.chat.completions.create(**ask, tool_choice=named, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content is None
    assert joined(openai.chat.completions.create(**ask, tool_choice=named, stream=True)) == (
        [["add", call.function.arguments]],
        "stop",
    )
    answer = openai.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("add", "pick") and isinstance(json.loads(call.function.arguments), dict)
    assert answer.choices[0].finish_reason == "tool_calls"
    stream = openai.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False, stream=True)
    calls, reason = joined(stream)
    assert calls == [[call.function.name, call.function.arguments]] and reason == "tool_calls"
    assert openai.chat.completions.create(**ask, tool_choice="none").choices[0].message.tool_calls is None


def test_openai_python_parses_an_answer_into_a_model(openai):
    pytest.importorskip("llguidance")
    from typing import Literal

    import pydantic

    class Sum(pydantic.BaseModel):
        kind: Literal["sum", "product"]
        small: bool

    parsed = openai.chat.completions.parse(model="pocket", **CHAT, response_format=Sum, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    with openai.chat.completions.stream(model="pocket", **CHAT, response_format=Sum, max_tokens=60) as stream:
        kinds = {event.type for event in stream}
        assert "content.done" in kinds and stream.get_final_completion().choices[0].message.parsed
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    text = openai.chat.completions.create(model="pocket", **CHAT, extra_body=choice).choices[0].message.content
    assert text in ("yes", "no")


def test_a_conversation_with_calls_and_their_results_is_a_prompt(server):
    chat = [
        *CHAT["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    ids = server.post("/tokenize", {"messages": chat, "tools": [ADD]}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}' in text and "adds two numbers" in text
    assert server.post("/v1/chat/completions", {"messages": chat, "tools": [ADD], "max_tokens": 2}).status_code == 200


# ---- schemas as clients make them ------------------------------------------------------------------------------------

# None of the schemas sets additionalProperties, and a model that may invent names does so until its answer is cut.
PEOPLE = {
    "pydantic": {
        "$defs": {"Pet": {"properties": {"kind": {"enum": ["cat", "dog"], "title": "Kind", "type": "string"}},
                          "required": ["kind"], "title": "Pet", "type": "object"}},
        "properties": {"pet": {"anyOf": [{"$ref": "#/$defs/Pet"}, {"type": "null"}], "default": None},
                       "old": {"title": "Old", "type": "boolean"}},
        "required": ["old"], "title": "Person", "type": "object",
    },
    "LangChain": {"type": "object", "title": "person", "description": "Who", "required": ["age"],
                  "properties": {"age": {"description": "in years", "type": "integer", "minimum": 0, "maximum": 99}}},
    "instructor": {"properties": {"tags": {"items": {"enum": ["a", "b"]}, "type": "array", "maxItems": 2}},
                   "required": ["tags"], "type": "object"},
    "llm": {"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}}, "required": ["ok"]},
    "zod": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
            "allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
                      {"type": "object", "properties": {"b": {"type": "null"}}}]},
    "itself": {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
}  # fmt: skip


def received(answer):
    message = answer.choices[0].message
    return [message.content] if message.content else [call.function.arguments for call in message.tool_calls]


QUICK = ("instructor", "zod")  # the others run among the slow tests


@pytest.mark.parametrize(
    "maker", [pytest.param(m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in sorted(PEOPLE)]
)
def test_schemas_that_say_nothing_of_other_properties_end(openai, maker):
    """In a form, in the arguments of a named function and of one that is required."""
    pytest.importorskip("llguidance")
    schema = PEOPLE[maker]
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    names = {*schema.get("properties", {}), *(name for part in schema.get("allOf", ()) for name in part["properties"])}
    for more in (
        {"response_format": form},
        {"tools": [tool], "tool_choice": named},
        {"tools": [tool, ADD], "tool_choice": "required", "parallel_tool_calls": False},
    ):
        for seed in range(4):
            ask = {"model": "pocket", **CHAT, "temperature": 1.0, "seed": seed, "max_tokens": 150}
            answer = openai.chat.completions.create(**ask, **more)
            assert answer.choices[0].finish_reason in ("stop", "tool_calls"), (maker, more, received(answer))
            for text in received(answer):
                assert set(json.loads(text)) <= names | {"a", "b"}, text


def test_strict_false_is_the_letter_of_json_schema(openai):
    from minivllm.server.openai.bodies import ChatBody
    from minivllm.server.openai.params import form_of
    from minivllm.server.openai.tools import read_tools

    for strict, opens in ((None, False), (True, False), (False, True)):
        more = {} if strict is None else {"strict": strict}
        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": PEOPLE["llm"], **more}}
        requested = form_of(ChatBody(messages=[], response_format=form))
        assert requested["disable_additional_properties"] != opens and requested["json"] == PEOPLE["llm"]
        tool = {"type": "function", "function": {"name": "f", "parameters": PEOPLE["llm"], **more}}
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            made = read_tools([tool], choice, True).form()["json"]
            made = made["$defs"]["t0"] if choice == "required" else made
            assert ("additionalProperties" in made) != opens
    for more in (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "no"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
    ):
        import openai as client

        with pytest.raises(client.BadRequestError, match="strict: expected true or false"):
            openai.chat.completions.create(model="pocket", **CHAT, **more)


@pytest.mark.parametrize("parameters", ["", "{}", [], 0, False])
def test_parameters_that_are_no_object_are_refused(parameters):
    from minivllm.server.errors import ApiError
    from minivllm.server.openai.tools import read_tools

    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match=r"tools\[0\]: expected .*<JSON schema>"):
        read_tools([tool], "auto", True)


CHOICES = [
    ("any", "required", ""),
    ({"type": "any"}, "required", ""),
    ({"type": "required"}, "required", ""),
    ({"type": "auto"}, "auto", ""),
    ({"type": "none"}, "none", ""),
    ({"type": "tool", "name": "pick"}, "named", "pick"),
    ({"type": "function", "name": "pick"}, "named", "pick"),
    ({"type": "function", "function": {"name": "pick"}}, "named", "pick"),
]


@pytest.mark.parametrize(("given", "choice", "function"), CHOICES, ids=[json.dumps(one[0]) for one in CHOICES])
def test_a_choice_as_others_spell_it_is_the_same_choice(given, choice, function):
    made = read_tools([ADD, PICK], given, True)
    assert (made.choice, made.function) == (choice, function)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("f", 'tool_choice="f": expected none'),
        ({"type": "code"}, 'tool_choice={"type": "code"}: expected none'),
        ({"type": "tool"}, "null is not the name of a function"),
        ({"type": "function", "name": "nobody"}, '"nobody" is not the name of a function'),
        ({"type": "function", "function": "add"}, "null is not the name of a function"),
        ({"type": ["any"]}, "expected none"),
        (["required"], "expected none"),
        (7, "tool_choice=7: expected none"),
    ],
)
def test_a_choice_that_means_nothing_is_refused_as_it_came(given, words):
    with pytest.raises(ApiError) as refusal:
        read_tools([ADD, PICK], given, True)
    assert words in str(refusal.value) and refusal.value.param == "tool_choice"
