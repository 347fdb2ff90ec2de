"""Messages and fields over HTTP: the prompt equals the prompt of ``LLM.chat``, and an error names the client's
field.
"""

import asyncio

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from chat_templates import CHATML, HERMES_TOOLS, RAG
from http_helpers import served
from literal_models import NOBODY, byte_level

from minivllm.runtime.text.tokenizer import Tokenizer
from minivllm.server.errors import ApiError
from minivllm.server.openai.tokens import Tokens

server = served()
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "What is 2 + 3?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"name": "a", "schema": {"type": "object"}}
PART = {"type": "image_url", "image_url": {"url": "x"}}

# (fields beside messages, field that the error names, text of the error)
REFUSED = [
    ({"max_completion_tokens": 10**6}, "max_completion_tokens", "maximum context length"),
    ({"max_new_tokens": 10**6}, "max_new_tokens", "maximum context length"),
    ({"max_tokens": 10**6}, "max_tokens", "maximum context length"),
    ({"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens", "max_tokens was sent as max_completion_tokens"),
    (
        {"messages": [*ASK, *ASK, {"role": "user", "content": [PART]}]},
        "messages[2].content[0].type",
        "it is not read here",
    ),
    ({"messages": [*ASK, {"role": "wizard", "content": "a"}]}, "messages[1].role", "expected one of"),
    ({"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "messages[0].images", "it is not read here"),
    ({"messages": [{"role": "user", "contnt": "a", "content": None}]}, "messages[0].content", "is missing"),
    ({"response_format": {"type": "json_object", "foo": 1}}, "response_format.foo", "unknown field"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "unknown field"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "stict": True}}},
        "response_format.json_schema.stict",
        "Did you mean 'strict'",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "schema": {"type": "objec"}}}},
        "response_format",
        "sent as response_format",
    ),
    ({"tools": [ADD], "tool_choice": {**NAMED, "foo": 1}}, "tool_choice", "tool_choice.foo"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add", "x": 1}}}, "tool_choice", ".x"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
        "tools",
        "Did you mean 'parameters'",
    ),
    ({"stream_options": {"include_usag": True}, "stream": True}, "stream_options.include_usag", "include_usage"),
    ({"documents": [{"text": "a"}]}, "documents", "no place for them"),
    ({"documents": "a"}, "documents", "expected a list"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "the text of a template is never accepted"),
    ({"chat_template": "tool_use"}, "chat_template", "(default)"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "text only"),
    ({"multi_modal_data": {"image": "x"}}, "multi_modal_data", "text only"),
]


@pytest.mark.parametrize(("body", "field", "says"), REFUSED, ids=[field for _, field, _ in REFUSED])
def test_an_error_names_the_field_that_was_sent(server, body, field, says):
    pytest.importorskip("llguidance")
    answer = server.post(CHAT, {"messages": ASK, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and says in error["message"], error


def test_a_completion_takes_the_newer_name_of_max_tokens(server):
    body = {"prompt": "a", "ignore_eos": True}
    assert server.post(COMPLETION, {**body, "max_completion_tokens": 3}).json()["usage"]["completion_tokens"] == 3
    error = server.post(COMPLETION, {**body, "max_completion_tokens": 10**6}).json()["error"]
    assert error["param"] == "max_completion_tokens"


def test_fields_of_openais_clients_are_taken_and_keys_without_effect_are_warned_of(server):
    body = {"user": "u", "metadata": {}, "store": True, "service_tier": "auto", "chat_template": "default"}
    message = {
        **ASK[0],
        "name": None,
        "foo": 1,
        "metadata": {"a": 1},
        "content": [{"type": "text", "text": "a", "bar": 1}],
    }
    answer = server.post(CHAT, {**body, "messages": [message], "max_tokens": 1})
    assert answer.status_code == 200
    received = [warning["field"] for warning in answer.json()["warnings"]]
    assert {"messages[0].foo", "messages[0].content[0].bar"} <= set(received) and "messages[0].name" not in received


def test_empty_and_null_keys_of_a_message_change_no_prompt(server):
    answer = {"role": "assistant", "content": "5"}
    empty = {"tool_calls": [], "function_call": None, "refusal": None, "audio": None, "annotations": [], "name": None}
    bare, full = [
        server.post("/tokenize", {"messages": [*ASK, one, *ASK]}).json()["tokens"]
        for one in (answer, {**answer, **empty})
    ]
    assert bare == full


def test_an_anthropic_choice_can_forbid_parallel_calls(server):
    from minivllm.server.openai.tools import read_tools

    requested = read_tools([ADD], {"type": "any", "disable_parallel_tool_use": True}, None)
    assert requested.choice == "required" and not requested.parallel
    assert read_tools([ADD], {"type": "any"}, None).parallel


def test_the_server_chooses_a_template_by_the_tools_or_by_its_name():
    templates = {"default": CHATML, "tool_use": HERMES_TOOLS, "rag": RAG}
    tokenizer = Tokenizer(byte_level(("<s>", "<|im_start|>", "<|im_end|>")), None, {"bos_token": "<s>"}, templates)
    documents = [{"title": "t", "text": "x"}]

    async def check():
        tokens = Tokens(tokenizer, 4096)
        try:
            for tools, more in (
                (None, {}),
                ([ADD], {}),
                (None, {"documents": documents, "template": "rag"}),
                ([ADD], {"template": "default"}),
            ):
                requested = {"chat_template": more.get("template"), "documents": more.get("documents"), "tools": tools}
                want = tokenizer.encode_chat(tokenizer.chat_prompt(ASK, **requested))
                assert await tokens.chat(ASK, tools, True, None, NOBODY, **more) == want
            with pytest.raises(ApiError, match=r"default, rag, tool_use") as refused:
                await tokens.chat(ASK, None, True, None, NOBODY, template="other")
            assert refused.value.param == "chat_template"
            with pytest.raises(ApiError, match="name one that has, with chat_template: rag"):
                await tokens.chat(ASK, None, True, None, NOBODY, documents=documents)
        finally:
            await tokens.pool.close()

    asyncio.run(check())
