# /// script
# dependencies = ["openai>=2,<4"]
# ///
"""The official Python client: sync, async, streams, log-probabilities, tools, parsed answers, errors."""

import asyncio
import os
from importlib.metadata import version
from typing import Literal

import openai
from pydantic import BaseModel

print("version openai", version("openai"))
URL, MODEL, KEY = os.environ["BASE_URL"] + "/v1", os.environ["MODEL"], os.environ["API_KEY"]
client = openai.OpenAI(base_url=URL, api_key=KEY)
ASK = [{"role": "user", "content": "What is 2 + 3?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def ok(name):
    print("ok", name)


assert MODEL in [m.id for m in client.models.list().data]
assert client.models.retrieve(MODEL).id == MODEL
ok("models")

whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=24)
choice = whole.choices[0]
assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
ok("chat")

chunks = list(
    client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == choice.message.content, (text, choice.message.content)
assert chunks[0].choices[0].delta.role == "assistant"
assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
    choice.finish_reason
]
assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
ok("chat, streamed")

several = client.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=7, temperature=1, max_tokens=8)
again = client.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=7, temperature=1, max_tokens=8)
assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
assert [c.index for c in several.choices] == [0, 1, 2]
ok("n and seed")

scored = client.chat.completions.create(
    model=MODEL, messages=ASK, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
)
for entry in scored.choices[0].logprobs.content:
    assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
ok("log-probabilities")

plain = client.completions.create(model=MODEL, prompt="The cat", temperature=0, max_tokens=12, logprobs=2, echo=True)
assert plain.choices[0].text.startswith("The cat")
lp = plain.choices[0].logprobs
assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.text_offset) and lp.token_logprobs[0] is None
streamed = client.completions.create(model=MODEL, prompt="The cat", temperature=0, max_tokens=12, stream=True)
assert "The cat" + "".join(c.choices[0].text for c in streamed if c.choices) == plain.choices[0].text
batch = client.completions.create(model=MODEL, prompt=["The cat", "A dog"], temperature=0, max_tokens=5)
assert [c.index for c in batch.choices] == [0, 1]
ok("completions")

stopped = client.completions.create(model=MODEL, prompt="1 2 3 4 5 6", temperature=0, max_tokens=40, stop=[" "])
assert " " not in stopped.choices[0].text
ok("stop")

for tool_choice in ("required", {"type": "function", "function": {"name": "add"}}):
    called = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice=tool_choice, temperature=0, max_tokens=120
    )
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "add" and call.id
    __import__("json").loads(call.function.arguments)
parts = list(
    client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=120,
        stream=True,
        parallel_tool_calls=False,
    )
)
deltas = [t for c in parts if c.choices for t in c.choices[0].delta.tool_calls or []]
assert [d.function.name for d in deltas if d.function.name] == ["add"]
__import__("json").loads("".join(d.function.arguments or "" for d in deltas))
assert len(deltas) > 2, "the arguments come as they are written"
ok("tools")


# schemas as pydantic makes them say nothing of other properties: a forced call ends by itself all the same
class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    old: bool | None = None


tool = {"type": "function", "function": {"name": "keep", "parameters": Pet.model_json_schema()}}
named = {"type": "function", "function": {"name": "keep"}}
for seed in range(12):
    called = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[tool], tool_choice=named, temperature=1, seed=seed, max_tokens=80
    )
    assert called.choices[0].finish_reason == "stop", seed
    assert Pet.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
for tokens in range(1, 9):
    for choice in (named, "required"):
        cut = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL, tool], tool_choice=choice, temperature=0, max_tokens=tokens
        )
        assert cut.choices[0].finish_reason == "length" and not cut.choices[0].message.content, (tokens, cut)
ok("forced calls that end, and that are cut")

seen = client.chat.completions.create(
    model=MODEL, messages=ASK, max_tokens=4, extra_body={"top_a": 0.5, "max_new_tokens": 4, "repeat_penalty": 1.1}
)
assert [warning["field"] for warning in seen.warnings] == ["top_a"]
allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
one = client.chat.completions.create(
    model=MODEL,
    messages=[*ASK, {"role": "assistant", "content": None, "refusal": "No."}, *ASK],
    tools=[TOOL],
    tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    max_tokens=4,
)
assert one.choices[0].finish_reason
ok("fields of others, a refusal, allowed tools")


class Sum(BaseModel):
    total: int
    even: bool


parsed = (
    client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Sum, temperature=0, max_tokens=120)
    .choices[0]
    .message.parsed
)
assert isinstance(parsed, Sum)
ok("parse")

for kind, error, ask in (
    ("unknown model", openai.NotFoundError, dict(model="nobody", messages=ASK)),
    ("bad temperature", openai.BadRequestError, dict(model=MODEL, messages=ASK, temperature=9)),
    ("no messages", openai.BadRequestError, dict(model=MODEL, messages=[])),
):
    try:
        client.chat.completions.create(**ask)
    except error as e:
        assert e.body["message"] and "type" in e.body, e.body
    else:
        raise AssertionError(kind)
for base, words in ((os.environ["BASE_URL"], "/v1/chat/completions"), (URL + "/v1", "once")):  # without /v1, and twice
    try:
        openai.OpenAI(base_url=base, api_key=KEY).chat.completions.create(model=MODEL, messages=ASK)
    except openai.NotFoundError as e:
        assert words in e.message, e.message
    else:
        raise AssertionError(base)
try:
    openai.OpenAI(base_url=URL, api_key="wrong").models.list()
except openai.AuthenticationError:
    ok("errors")
else:
    raise AssertionError("a wrong key")


async def many():
    other = openai.AsyncOpenAI(base_url=URL, api_key=KEY)

    async def one(i):
        stream = await other.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"What is {i} + 1?"}],
            temperature=0,
            max_tokens=16,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    texts = await asyncio.gather(*(one(i) for i in range(16)))
    assert all(texts)
    # one that is given up in the middle does not disturb the next
    stream = await other.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    assert await one(2)


asyncio.run(many())
ok("async")
