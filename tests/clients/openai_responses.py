# /// script
# dependencies = ["openai[realtime]>=3.50,<4"]
# ///
"""Responses with the official Python client: streams, calls, parsed answers, stored responses, the WebSocket."""

import os
from importlib.metadata import version
from typing import Literal

import openai
from pydantic import BaseModel

print("version openai", version("openai"))
URL, MODEL, KEY = os.environ["BASE_URL"] + "/v1", os.environ["MODEL"], os.environ["API_KEY"]
client = openai.OpenAI(base_url=URL, api_key=KEY)
ASK = {"model": MODEL, "input": "What is 2 + 3?", "temperature": 0, "max_output_tokens": 30}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


class Choice(BaseModel):
    word: Literal["red", "green"]


def ok(name):
    print("ok", name)


first = client.responses.create(**ASK)
assert first.output_text and first.status == "completed" and first.usage.output_tokens > 0
ok("create")

with client.responses.stream(**ASK) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == stream.get_final_response().output_text == first.output_text
ok("stream")

forced = client.responses.create(**ASK, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
(call,) = [item for item in forced.output if item.type == "function_call"]
output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
after = client.responses.create(**{**ASK, "input": [output]}, tools=[ADD], previous_response_id=forced.id)
assert after.previous_response_id == forced.id and after.output
ok("calls")

parsed = client.responses.parse(**{**ASK, "input": "Pick a colour."}, text_format=Choice)
assert parsed.output_parsed.word in ("red", "green")
with client.responses.stream(**ASK, text_format=Choice) as stream:
    assert stream.get_final_response().output_parsed.word in ("red", "green")
ok("parse")

scored = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
assert all(len(token.top_logprobs) == 2 for token in scored.output[0].content[0].logprobs)
ok("logprobs")

assert client.responses.retrieve(first.id).output_text == first.output_text
assert [item.type for item in client.responses.input_items.list(after.id, order="asc")] == [
    "message",
    "function_call",
    "function_call_output",
]
client.responses.delete(first.id)
try:
    client.responses.retrieve(first.id)
except openai.NotFoundError:
    ok("stored")
background = client.responses.create(
    **{**ASK, "max_output_tokens": 300}, background=True, extra_body={"ignore_eos": True}
)
assert client.responses.cancel(background.id).status in ("cancelled", "incomplete")
ok("background")

with client.responses.connect() as connection:
    previous = {}
    for _ in range(3):
        connection.response.create(**ASK, store=False, **previous)
        for event in connection:
            assert event.type != "error", event
            if event.type in ("response.completed", "response.incomplete"):
                previous = {"previous_response_id": event.response.id}
                break
ok("socket")

try:
    client.responses.create(**ASK, previous_response_id="resp_unknown")
except openai.BadRequestError as e:
    assert e.code == "previous_response_not_found"
    ok("errors")
