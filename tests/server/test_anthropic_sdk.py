"""Anthropic's own client, the package anthropic, against this server: every call that is about text."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("anthropic")

import anthropic
from http_helpers import Running, served
from scripted import scripted

from minivllm.server.openai import tools as openai_tools
from minivllm.server.openai.calls import Said, Thought

server = served()
HI = {"model": "pocket", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "the weather of a city", "input_schema": SCHEMA}


def call(city):
    return f'<tool_call>{{"name": "weather", "arguments": {{"city": "{city}"}}}}</tool_call>'


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_create_returns_a_message(server, client):
    with scripted(server, ["Hello.", "one two three"]):
        message = client.messages.create(**HI, system=[{"type": "text", "text": "Be brief."}])
        sampling = {"temperature": 0.5, "top_k": 5, "top_p": 0.9}
        stopped = client.messages.create(**HI, stop_sequences=[" three"], extra_body=sampling)
    assert [block.text for block in message.content] == ["Hello."] and message.stop_reason == "end_turn"
    assert message.role == "assistant" and message.model == "pocket" and message._request_id
    assert message.usage.input_tokens > 0 and message.usage.cache_read_input_tokens == 0
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert client.messages.create(**{**HI, "max_tokens": 2}).stop_reason == "max_tokens"  # the model itself


def test_a_raw_stream_has_the_events_in_order(server, client):
    with scripted(server, ["one two three"], pause=0.05):
        kinds = [event.type for event in client.messages.create(**HI, stream=True)]
    deltas = kinds.count("content_block_delta")
    middle = ["content_block_start", *["content_block_delta"] * deltas, "content_block_stop"]
    assert kinds == ["message_start", *middle, "message_delta", "message_stop"] and deltas > 1


def test_the_stream_helper_adds_the_events_up(server, client):
    with scripted(server, ["one two three", f"See.{call('Rome')}"]):
        with client.messages.stream(**HI) as stream:
            assert "".join(stream.text_stream) == "one two three" == stream.get_final_text()
        with client.messages.stream(**HI, tools=[WEATHER]) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_message()
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= kinds
    assert [block.type for block in message.content] == ["text", "tool_use"] and message.stop_reason == "tool_use"
    assert message.content[1].input == {"city": "Rome"} and message.usage.output_tokens > 0


def test_the_asynchronous_client_is_served(server):
    async def run():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(**HI)
            async with client.messages.stream(**HI) as stream:
                streamed = await stream.get_final_message()
            return whole, streamed

    with scripted(server, ["same"] * 2):
        whole, streamed = asyncio.run(run())
    assert whole.content[0].text == streamed.content[0].text == "same"


def test_results_of_parallel_calls_are_passed_back(server, client):
    chat = [*HI["messages"]]
    with scripted(server, [f"I look.{call('Rome')}{call('Oslo')}", "Warm and cold."]) as script:
        message = client.messages.create(**HI, tools=[WEATHER])
        _, rome, oslo = message.content
        chat.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": rome.id, "content": [{"type": "text", "text": "27 degrees"}]},
            {"type": "tool_result", "tool_use_id": oslo.id, "content": "no station", "is_error": True},
        ]
        chat.append({"role": "user", "content": results})
        answer = client.messages.create(**{**HI, "messages": chat}, tools=[WEATHER])
    assert (rome.input, oslo.input) == ({"city": "Rome"}, {"city": "Oslo"}) and rome.id != oslo.id
    assert answer.content[0].text == "Warm and cold." and message.stop_reason == "tool_use"
    prompt = script.prompts[1]
    places = [prompt.index(words) for words in ("I look.", '"Rome"', '"Oslo"', "27 degrees", "Error: no station")]
    assert places == sorted(places)


def test_every_form_of_the_choice_is_served(server, client):
    pytest.importorskip("llguidance")
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False}
    tools = [{"name": "pick", "input_schema": schema}]
    body = {**HI, "max_tokens": 60, "tools": tools, "extra_body": {"temperature": 0}}
    alone = {"type": "any", "disable_parallel_tool_use": True}
    for choice in ({"type": "any"}, alone, {"type": "tool", "name": "pick"}):
        message = client.messages.create(**body, tool_choice=choice)
        assert message.stop_reason == "tool_use" and message.content[0].name == "pick", choice
        with client.messages.stream(**body, tool_choice=choice) as stream:
            assert stream.get_final_message().content[0].input == message.content[0].input
    for choice in ({"type": "auto"}, {"type": "none"}):
        assert client.messages.create(**body, tool_choice=choice).content[0].type == "text"


class Tagged:
    """Parser that reads the text before </think> as reasoning."""

    def __init__(self):
        self._left, self._thinks = "", True

    def feed(self, text, final):
        self._left += text
        if self._thinks and "</think>" not in self._left and not final:
            return []
        before, tag, after = self._left.rpartition("</think>")
        found = [Thought(before)] if tag and self._thinks else []
        self._left, self._thinks = "", False
        return [*found, Said(after)] if after else found


def test_thinking_blocks_are_streamed_and_passed_back():
    openai_tools.register("tagged", Tagged)
    running = Running(tool_parser="tagged", engine={"batch_invariant": False, "max_num_seqs": 8})
    requested = {**HI, "tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
    with (
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client,
        scripted(running, ["I think.</think>Yes."] * 3, context=4096),
    ):
        message = client.messages.create(**requested)
        with client.messages.stream(**requested) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        chat = [*HI["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": "why?"}]
        again = client.messages.create(**{**requested, "messages": chat})
    running.close()
    del openai_tools.PARSERS["tagged"]
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "I think.", "Yes.") and thought.signature
    assert [block.to_dict() for block in streamed.content] == [
        {"type": "thinking", "thinking": "I think.", "signature": thought.signature},
        {"type": "text", "text": "Yes."},
    ]
    assert {"thinking", "signature"} <= set(kinds) and again.stop_reason == "end_turn"


def test_the_count_is_that_of_the_message(server, client):
    body = {key: HI[key] for key in ("model", "messages")}
    count = client.messages.count_tokens(**body, system="Be brief.", tools=[WEATHER]).input_tokens
    usage = client.messages.create(**{**HI, "max_tokens": 1}, system="Be brief.", tools=[WEATHER]).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens > 20


def test_an_answer_is_parsed_into_a_model(server, client):
    pytest.importorskip("llguidance")
    if not hasattr(client.messages, "parse"):
        pytest.skip("this version of the package parses no answers")
    from typing import Literal

    import pydantic

    class Sum(pydantic.BaseModel):
        kind: Literal["sum", "product"]
        small: bool

    parsed = client.messages.parse(**HI, output_format=Sum)
    assert isinstance(parsed.parsed_output, Sum)
    with client.messages.stream(**HI, output_format=Sum) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Sum)
    beta = client.beta.messages.parse(**HI, output_format=Sum)
    assert isinstance(beta.parsed_output, Sum)


def test_the_tool_runner_calls_the_tools(server, client):
    if not hasattr(client.beta.messages, "tool_runner"):
        pytest.skip("this version of the package runs no tools")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: name of the city
        """
        if city == "Oslo":
            raise ValueError("no station")
        return f"27 degrees in {city}"

    texts = [call("Rome"), call("Oslo"), "Warm."]
    with scripted(server, texts * 2) as script:
        runner = client.beta.messages.tool_runner(**HI, tools=[weather])
        last = runner.until_done()
        streamed = client.beta.messages.tool_runner(**HI, tools=[weather], stream=True)
        finals = [stream.get_final_message() for stream in streamed]
    assert last.content[0].text == finals[-1].content[0].text == "Warm." and len(finals) == 3
    assert "27 degrees in Rome" in script.prompts[1] and "Error: " in script.prompts[2]
    assert "no station" in script.prompts[5]


def test_errors_are_the_exceptions_of_the_package(server, client):
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content: is empty") as caught:
        client.messages.create(**{**HI, "messages": [{"role": "user", "content": ""}]})
    assert caught.value.request_id == caught.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError, match="'pocket'"):
        client.messages.create(**{**HI, "model": "another"})
    with pytest.raises(anthropic.NotFoundError, match="not stored"):
        client.messages.batches.create(requests=[{"custom_id": "a", "params": HI}])
    with pytest.raises(anthropic.NotFoundError, match="not stored"):
        client.messages.batches.list()
    tool = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type='web_search_20250305'"):
        client.messages.create(**HI, tools=[tool])


def test_a_wrong_key_and_a_full_server_are_exceptions_too():
    running = Running(["secret"], max_queue=0, engine={"batch_invariant": False, "max_num_seqs": 1})
    wrong = anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0)
    right = anthropic.Anthropic(base_url=running.url, api_key="secret", max_retries=0)
    bearer = anthropic.Anthropic(base_url=running.url, auth_token="secret", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(**HI)
    assert caught.value.body["error"]["type"] == "authentication_error"
    for client in (right, bearer):
        assert client.messages.create(**{**HI, "max_tokens": 1}).usage.output_tokens == 1
    with scripted(running, ["one two three four " * 9], pause=0.05), right.messages.stream(**HI) as stream:
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError):
            bearer.messages.create(**HI)
    running.app.service.door.closed = True
    with pytest.raises(anthropic.InternalServerError) as caught:
        right.messages.create(**HI)
    running.app.service.door.closed = False
    running.close()
    assert caught.value.status_code == 503 and caught.value.body["error"]["type"] == "overloaded_error"


def test_an_error_in_the_middle_of_a_stream_is_an_exception(server, client):
    with scripted(server, ["one two three four " * 9], pause=0.05), pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(**HI, stream=True, extra_body={"timeout_s": 0.3}))
    assert caught.value.body["error"]["type"] == "timeout_error"


def test_models_are_listed(server, client):
    (model,) = list(client.models.list())
    assert model.id == "pocket" and model.type == "model" and model.created_at.year > 2000
    assert client.models.retrieve("pocket").max_input_tokens == model.max_input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


def test_warnings_and_extensions_reach_the_client(server, client):
    message = client.messages.create(**{**HI, "max_tokens": 4}, metadata={"user_id": "u"}, extra_body={"seed": 3})
    assert [warning["field"] for warning in message.warnings] == ["metadata"]
    beta = client.beta.messages.create(**{**HI, "max_tokens": 4}, betas=["context-1m-2025-08-07"])
    assert [warning["field"] for warning in json.loads(beta.to_json())["warnings"]] == ["anthropic-beta"]
