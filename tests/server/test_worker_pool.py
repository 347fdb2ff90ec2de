"""The worker pool: chat templates and texts are worked on elsewhere, within limits, and come back as if it were
here."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from literal_models import NOBODY, byte_level
from loop_turns import largest_allocation

from minivllm.core.interfaces.structured import StructuredOutputsParams
from minivllm.runtime.text.tokenizer import Tokenizer
from minivllm.server import pool_jobs, worker_pool
from minivllm.server.errors import ApiError, FlawedMessage
from minivllm.server.http.body import Bodies, parse_object
from minivllm.server.openai.bodies import ChatBody
from minivllm.server.openai.params import whole_form
from minivllm.server.openai.tokens import LONG, MANY, Tokens
from minivllm.server.openai.tools import read_tools
from minivllm.server.worker_pool import WorkerPool

MARKS = ("<|im_start|>", "<|im_end|>")
PLAIN = "{% for m in messages %}{{'<|im_start|>' + m.role + m.content + '<|im_end|>'}}{% endfor %}"
TURN = "{% if messages[0].content == 'bad' %}BAD{% endif %}" + PLAIN
HOSTILE = {  # action of a template on a conversation -> limit that ends it
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "time"),
    "a text times a number": ("{{ 'x' * 10 ** 10 }}", "memory"),
    "a list times a number": ("{{ ([1] * 10 ** 9) | length }}", "memory"),
    "a text that doubles": (
        "{% set n = namespace(t='xx') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "memory",
    ),
    "much that is printed": ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "memory"),
    "a format of great width": ("{{ '%4000000000d' | format(1) }}", "memory"),
    "a number of many digits": ("{% set n = 7 ** (7 ** (messages | length + 9)) %}{{ n > 1 }}", "time"),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "time",
    ),
}


def tokenizer_of(template):
    return Tokenizer(byte_level(MARKS), None, {"eos_token": MARKS[1]}, template)


def chat_of(text):
    return [{"role": "user", "content": text}]


def with_tokens(tokenizer, test, **limits):
    """Run ``test(tokens)``, a coroutine."""

    async def run():
        tokens = Tokens(tokenizer, 4096, WorkerPool(tokenizer, **limits))
        try:
            return await asyncio.wait_for(test(tokens), 100)
        finally:
            await tokens.pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_never_ends_or_takes_gigabytes_is_refused_and_the_next_chat_is_answered(name):
    bad, what = HOSTILE[name]
    tokenizer, good = tokenizer_of(TURN.replace("BAD", bad)), tokenizer_of(PLAIN)  # the bad one is never compiled here

    async def test(tokens):
        want = await tokens.chat(chat_of("good"), None, True, None, NOBODY)
        others = [tokens.chat(chat_of(f"good {i}"), None, True, None, ("b", ""), owner="b") for i in range(3)]
        refused = tokens.chat(chat_of("bad"), None, True, None, ("a", ""), owner="a")
        found = await asyncio.gather(refused, *others, return_exceptions=True)
        assert isinstance(found[0], ApiError) and found[0].status == 400 and found[0].param == "messages"
        assert f"takes more {what}" in str(found[0]), found[0]
        assert all(isinstance(ids, list) for ids in found[1:])
        assert await tokens.chat(chat_of("also good"), None, True, None, NOBODY)
        assert want == good.encode_chat(good.chat_prompt(chat_of("good")))

    with_tokens(tokenizer, test, seconds=0.3, megabytes=64)


ALWAYS = [HOSTILE["nested loops"][0], HOSTILE["a text times a number"][0], "{{ 7 ** (7 ** 10) }}"]


@pytest.mark.parametrize("bad", ALWAYS)
def test_a_template_that_is_always_bad_stops_no_other_work(bad):
    async def test(tokens):
        with pytest.raises(ApiError, match="chat template"):
            await tokens.chat(chat_of("a"), None, True, None, NOBODY)
        text = "a b c " * LONG
        assert await tokens.encode(text, True, NOBODY) == tokens.tokenizer.encode(text)

    with_tokens(tokenizer_of(bad), test, seconds=0.3, megabytes=64)


def test_errors_of_templates_and_messages_are_those_of_this_process():
    async def test(tokens):
        with pytest.raises(ApiError, match="refuses the messages: no such role") as refused:
            await tokens.chat([{"role": "tool", "content": "a"}], None, True, None, NOBODY)
        assert (refused.value.status, refused.value.param) == (400, "messages")
        with pytest.raises(ApiError, match="expected a string"):
            await tokens.chat([{"role": "user", "content": 5}], None, True, None, NOBODY)
        with pytest.raises(ApiError, match="maximum context length is 4096 tokens"):
            await tokens.chat(chat_of("a" * 50_000), None, True, {"twice": True}, NOBODY)
        with pytest.raises(ApiError, match=r"chat_template_kwargs\.tools"):
            await tokens.chat(chat_of("a"), None, True, {"tools": 1}, NOBODY)

    template = PLAIN + "{% if messages[0].role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}"
    with_tokens(tokenizer_of(template + "{% if twice %}" + PLAIN + "{% endif %}"), test)


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.fixture
def requested(monkeypatch):
    """Return a list that receives the conversations sent to a worker pool."""
    found, chat = [], WorkerPool.chat
    monkeypatch.setattr(
        WorkerPool,
        "chat",
        lambda self, conversation, *more: found.append(conversation) or chat(self, conversation, *more),
    )
    return found


def test_what_a_tenant_asked_is_kept_for_that_tenant_alone(requested):
    async def test(tokens):
        for tenant, count in (("a", 1), ("a", 1), ("b", 2), ("b", 2), ("", 3), ("a", 3)):
            whose = (tenant, "")
            ids = await tokens.chat(chat_of("hello"), None, True, None, whose)
            assert ids == tokens.tokenizer.encode_chat(tokens.tokenizer.chat_prompt(chat_of("hello")))
            assert len(requested) == count
        await tokens.chat(chat_of("hello"), None, True, None, ("a", ""), False)
        await tokens.chat(chat_of("hello"), None, False, None, ("a", ""))
        await tokens.chat(chat_of("hello"), None, True, {"x": 1}, ("a", ""))
        assert len(requested) == 6

    with_tokens(tokenizer_of(PLAIN), test)


@pytest.mark.parametrize("varies", ["{{ strftime_now('%f') }}", "{{ [1, 2] | random }}", "{{ lipsum(1) }}"])
def test_what_a_template_prints_anew_each_time_is_not_kept(requested, varies):
    async def test(tokens):
        for count in (1, 2):
            await tokens.chat(chat_of("hello"), None, True, None, NOBODY)
            assert len(requested) == count

    with_tokens(tokenizer_of(PLAIN + varies), test)


# ---- bodies and texts ------------------------------------------------------------------------------------------------


def test_large_bodies_and_texts_come_back_as_if_they_were_worked_on_here():
    values = [
        {"prompt": "é" * 60_000, "n": 1},
        {"prompt": "\U0001f98a a" * 20_000},
        {"messages": [{"a": ['\\"{['] * 9000}]},
        {"x": 1.5e300, "tools": [None, True, -7] * 9000, "prompt": [5] * 40_000, "tokens": [[1] * 300, [2] * 20_000]},
    ]
    bad = [b"{" + b" " * 40_000, b'{"a": NaN' + b" " * 40_000 + b"}", b"[" + b" " * 40_000 + b"]", b"\xff" * 40_000]

    async def test(tokens):
        bodies = Bodies(tokens.pool)
        for value in values:
            for inner in ("", "body"):
                raw = json.dumps({"id": "a", "body": value} if inner else value).encode()
                got = await bodies.parse(raw, "me", inner)
                body = got["body"] if inner else got
                if "tokens" in body:
                    body["prompt"], body["tokens"] = body["prompt"].tolist(), [one.tolist() for one in body["tokens"]]
                assert got == json.loads(raw)
        for raw in bad:
            with pytest.raises(ApiError) as here:
                parse_object(raw)
            with pytest.raises(ApiError) as there:
                await bodies.parse(raw, "me")
            assert str(here.value) == str(there.value)
        texts = ["a <|im_end|> b", "word " * LONG, "", "é" * LONG, "word " * LONG]
        for special in (True, False):
            want = [tokens.tokenizer.encode(t, special) for t in texts]
            assert await tokens.encode_all(texts, special, NOBODY) == want
        ids = tokens.tokenizer.encode("a <|im_end|> é" * MANY)
        for skip in (True, False):
            assert await tokens.decode(ids, skip) == tokens.tokenizer.decode(ids, skip)

    with_tokens(tokenizer_of(PLAIN), test)


def test_a_long_message_without_its_body_comes_back():
    value = {"id": "a", "other": "x" * 40_000}

    async def test(tokens):
        assert await Bodies(tokens.pool).parse(json.dumps(value).encode(), "me", "body") == value

    with_tokens(tokenizer_of(PLAIN), test)


def test_a_long_text_of_emoji_has_the_memory_that_its_tokens_take():
    text = "\U0001f98a" * 250_000

    async def test(tokens):
        (ids,) = await tokens.pool.encode([text], False, NOBODY)
        assert len(ids) >= 250_000

    with_tokens(tokenizer_of(PLAIN), test)


def test_long_texts_anywhere_in_a_body_are_read_as_json_reads_them():
    long = ["é" * 70_000, "\U0001f98a" + 'a\\"' * 50_000, "a" * 65_536, "a" * 65_537]
    value = {"prompt": long[0], "messages": [{"content": [{"text": long[1]}, long[2]]}, long[3], None], "n": 1}

    async def test(tokens):
        for inner in ("", "body"):
            message = {"id": "a", "type": long[3], "body": value} if inner else value
            assert await Bodies(tokens.pool).parse(json.dumps(message).encode(), "me", inner) == message
        for padding in ("", "a" * 70_000):  # read by the event loop, or by a worker
            raw = json.dumps({"id": "a", "body": {"prompt": "\ud800" + padding}}).encode()
            with pytest.raises(FlawedMessage, match="surrogate") as flawed:
                await Bodies(tokens.pool).parse(raw, "me", "body")
            assert flawed.value.message["id"] == "a"
            with pytest.raises(ApiError, match="surrogate"):
                await Bodies(tokens.pool).parse(raw, "me")

    with_tokens(tokenizer_of(PLAIN), test)


def test_the_paths_of_long_texts_do_not_repeat_a_long_name():
    """A name of 300,000 characters with 120 texts gave 36 MB of paths, which the loop parsed in one turn of 60 ms."""
    value = {"messages": [{"k" * 300_000: ["a" * 65_537] * 120, "k": "a" * 65_537}]}
    about, _, texts = pool_jobs.read(json.dumps(value).encode(), "")
    assert len(about) < 1 << 12 and len(texts) == 65_537


@pytest.mark.parametrize(
    "one, times",
    [("a", 1), ("\\\\", 1), ("é", 2), ("\U0001f98a", 4), ("a" * 4090 + "\U0001f98a", 4)],
    ids=["letters", "escapes", "latin", "wide", "a few wide"],
)
def test_no_turn_of_the_loop_allocates_more_than_the_text_of_a_body(one, times):
    """Text with one character above U+FFFF takes four bytes for each.  8 MiB of it took 72 MiB, and 40 to 170 ms."""
    text = one * ((1 << 20) // len(one))
    raw = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    size = times * len(text)

    async def test(tokens):
        bodies = Bodies(tokens.pool)
        assert (await bodies.parse(raw, "me"))["prompt"] == text
        pieces = [raw[at : at + 16_384] for at in range(0, len(raw), 16_384)]
        with largest_allocation() as most:
            found = await bodies.parse(pieces, "me")
        assert found["prompt"] == text
        assert most[0] < 1.5 * size + (1 << 18)

    with_tokens(tokenizer_of(PLAIN), test)


def test_who_leaves_gets_nobody_elses_answer_and_holds_no_seat():
    async def test(tokens):
        whose = ("a", "")
        first = await tokens.chat(chat_of("x"), None, True, None, whose)
        for number in range(20):
            leaving = asyncio.create_task(tokens.chat(chat_of(f"gone {number}"), None, True, None, whose))
            await asyncio.sleep(0.001 * (number % 4))
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            tokens._kept = type(tokens._kept)(1 << 20)
            assert await tokens.chat(chat_of("x"), None, True, None, whose) == first

    with_tokens(tokenizer_of(PLAIN), test)


def test_a_server_without_a_tokenizer_reads_large_bodies():
    async def main():
        made = WorkerPool(None)
        try:
            value = await Bodies(made).parse(b'{"prompt": [' + b"5," * 40_000 + b"5]}", "me")
            assert value["prompt"].tolist() == [5] * 40_001
        finally:
            await made.close()

    asyncio.run(main())


SCHEMA = {
    "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"allOf": [{"properties": {"c": True}}]}},
    "$defs": {"n": {"type": "object", "properties": {"c": {"type": "string"}}}},
}  # fmt: skip
TOOLS = {
    "tools": [
        {"type": "function", "function": {"name": f"f{i}", "parameters": SCHEMA, "strict": strict}}
        for i, strict in enumerate((None, True, False))
    ]
}
FORMS = {
    "a schema": {"structured_outputs": {"json": SCHEMA}},
    "a schema as text": {"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": "[ ]?"}},
    "a format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "any object": {"response_format": {"type": "json_object"}},
    "a regex": {"structured_outputs": {"regex": "a+"}},
    "choices": {"structured_outputs": {"choice": ["a", "b"]}},
    "some call": {**TOOLS, "tool_choice": "required"},
    "one call at most": {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "a named call": {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "f1"}}},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_is_worked_out_elsewhere_is_the_same_grammar(name):
    body = ChatBody(messages=[], **FORMS[name])
    want = StructuredOutputsParams.of(
        whole_form(body, read_tools(body.tools, body.tool_choice, body.parallel_tool_calls))
    )
    part = {field: getattr(body, field) for field in worker_pool.FORMS}
    got = json.loads(pool_jobs.form(json.dumps(part).encode())[1])
    assert StructuredOutputsParams.of(got).source == want.source
    body._known_form = got
    assert whole_form(body, read_tools(None, None, None)) == got
