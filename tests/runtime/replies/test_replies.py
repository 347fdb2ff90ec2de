"""Reasoning and calls in the text of a model: every division of a text into pieces gives the same parts."""

import json
import random

import pytest
from chat_templates import TEMPLATES
from reply_recordings import (
    FORMATS,
    FUNCTIONS,
    call,
    calls,
    context,
    divided,
    found,
    marked,
    texts,
    words,
)

from minivllm.runtime.replies import ReplyContext
from minivllm.runtime.replies.write import write_calls, write_reply

PLAIN = ReplyContext(FUNCTIONS)


def parsed(name, text, request=PLAIN, cut=False):
    """Return the parts that a format finds in a text that comes one character at a time."""
    return found(FORMATS[name]().start(request), list(text), cut)


def check(name, seed, splits, rng):
    """Compare divisions of one recording: its first two-way splits, random splits, and single characters."""
    parser, request = FORMATS[name](), context(name, seed)
    text = marked(texts(name, seed), request.marks)
    places = range(1, len(text))
    two = list(places) if splits > 100 else rng.sample(places, min(len(places), 10))
    trials = [list(text), *(divided(text, [at]) for at in two)]
    trials += [divided(text, rng.sample(places, rng.randrange(min(len(places), 30) + 1))) for _ in range(splits)]
    for cut in (False, True):
        want = found(parser.start(request), [text], cut)
        assert not any("\ud800" <= char <= "\udfff" for char in str(want)), (name, seed, text)
        for pieces in trials:
            assert found(parser.start(request), pieces, cut) == want, (name, seed, cut, pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_every_division_of_a_text_gives_the_same_parts(name):
    rng = random.Random(name)
    for seed in range(84):
        check(name, seed, 4, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_thousand_divisions_of_a_text_give_the_same_parts(name):
    rng = random.Random(name)
    for seed in range(210):
        check(name, seed, 1000, rng)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_written_are_read_back(name):
    """Each spelling of a format, with marks for tags and without."""
    form = FORMATS[name].format
    marks = {tag: chr(0xDC80 + k) for k, tag in enumerate(form.tags)}
    for seed in range(60):
        rng = random.Random(seed)
        made = calls(rng, name)
        thought, reported = words(rng).strip(), words(rng).strip()
        reported = (
            "" if not form.channels and not form.calls[0].open and not form.calls[0].begin.strip("[") else reported
        )
        text = write_reply(form, thought if form.channels or form.reasoning else "", reported, made)
        for request in (PLAIN, ReplyContext(FUNCTIONS, marks=marks, hidden=frozenset(marks))):
            spelled = marked(text, request.marks)
            seen, shown, got = parsed(name, spelled, request)
            assert [(n, json.loads(a), e) for n, a, e in got] == [(n, a, True) for n, a in made], text
            assert shown.strip() == reported and (seen == thought or not (form.channels or form.reasoning)), text
        for spelling in form.calls[1:]:
            _, shown, got = parsed(name, write_calls(spelling, made))
            assert [(n, json.loads(a)) for n, a, _ in got] == made and not shown, spelling


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_answer_keeps_complete_calls_only(name):
    """At every position: the complete calls are a beginning of all calls, and no part of a call is content."""
    form = FORMATS[name].format
    made = [("get_weather", {"city": 'a"}</b', "days": 3}), ("f", {"flags": [1, {"k": "]"}]})]
    text = write_reply(form, "", "", made)
    before = 0
    for at in range(len(text) + 1):
        thought, reported, got = parsed(name, text[:at], cut=True)
        whole = [(n, json.loads(a)) for n, a, ended in got if ended]
        assert whole == made[: len(whole)] and before <= len(whole) <= before + 1, text[:at]
        before = len(whole)
        reported = reported.strip()
        tags = [tag for tag in form.tags if tag.startswith(reported)]
        assert not reported or tags, (text[:at], reported)  # an incomplete tag may be a word like another
        assert not thought
    assert before == 2


def test_text_that_can_be_no_call_is_returned_at_once():
    for name, text in (
        ("hermes", "See <tool_call> in"),
        ("qwen3", "Use `<tool_call>"),
        ("qwen3", "a < b and <thin"[:-4] + "ice"),
        ("mistral", "[TOOL_CALLS] are y"),
        ("pythonic", "[see f"),
        ("pythonic", "[f(x)"),
        ("llama3_json", '{"answer"'),
        ("json", '["a"'),
        ("json", '{"name": "Anna", "age"'),
        ("glm4", "<tool_call> f g"),
        ("gemma", "<|tool_call>call me"),
        ("deepseek_r1", "<｜tool▁calls▁begin｜>x"),
    ):
        reply = FORMATS[name]().start(PLAIN)
        parts = [part for char in text for part in reply.feed(char)]
        assert "".join(part.text for part in parts) == text, name


def test_a_tag_token_is_a_tag_and_text_that_spells_it_is_none():
    marks = {"<tool_call>": "\udc80", "</tool_call>": "\udc81", "<think>": "\udc82", "</think>": "\udc83"}
    inner = '{"name": "f", "arguments": {"a": 1}}'
    request = ReplyContext(FUNCTIONS, marks=marks)
    spelled = f"<tool_call>{inner}</tool_call> <think>x</think>"
    assert parsed("qwen3", spelled, request) == ("", spelled, [])
    assert parsed("qwen3", f"\udc80{inner}\udc81", request) == ("", "", [["f", '{"a": 1}', True]])
    assert parsed("qwen3", "see \udc80 and \udc81.", request)[1] == "see <tool_call> and </tool_call>."
    hidden = ReplyContext(FUNCTIONS, marks=marks, hidden=frozenset(marks))
    assert parsed("qwen3", "see \udc80 and \udc81.", hidden)[1] == "see  and ."
    quoted = '{"a": "\udc81 in a string"}'
    found_calls = parsed("qwen3", f'\udc80{{"name": "f", "arguments": {quoted}}}\udc81', request)[2]
    assert found_calls == [["f", '{"a": "</tool_call> in a string"}', True]]


def test_quoted_tags_are_text():
    block = '```\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n```'
    for text in (block, "Write `<tool_call>` before it.", f"So:\n{block}\n<think>no</think>"):
        assert parsed("qwen3", text) == ("", text, [])
    after = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed("qwen3", f"{block}\n{after}") == ("", f"{block}\n", [["f", "{}", True]])


def test_a_call_ends_reasoning_that_is_not_closed():
    inner = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    opened = ReplyContext(FUNCTIONS, opened=True)
    assert parsed("qwen3", f"hm\n{inner}", opened) == ("hm", "", [["f", "{}", True]])
    assert parsed("qwen3", f"hm\n{inner}\n</think>\n\nSo.", opened) == ("hm", "So.", [["f", "{}", True]])
    assert parsed("qwen3", "a `<tool_call>` or <tool_call> b</think>c", opened)[:2] == (
        "a `<tool_call>` or <tool_call> b",
        "c",
    )
    silent = ReplyContext(FUNCTIONS, opened=True, calls=False)
    assert parsed("qwen3", f"hm</think>{inner}", silent) == ("hm", inner, [])


def test_reasoning_begins_where_the_prompt_or_the_answer_opens_it():
    for name in ("qwen3", "qwen3_coder", "deepseek_r1", "glm4"):
        parser = FORMATS[name]()
        assert parser.opens("<|im_start|>assistant\n<think>\n") and parser.opens("x<think>")
        assert not parser.opens("<think>\n\n</think>\n\n") and not parser.opens("x")
        assert parsed(name, "<think>\n a\nb \n</think>\n\nc") == ("a\nb", "c", [])
        assert parsed(name, "a</think>c", ReplyContext(opened=True)) == ("a", "c", [])
        assert parsed(name, "a", ReplyContext(opened=True)) == ("a", "", [])
        assert parsed(name, "a <think>b</think>")[:2] == ("", "a <think>b</think>")
    assert FORMATS["gemma"]().opens("<|turn>model\n<|channel>thought\n")
    assert parsed("gemma", "<|channel>thought\na<channel|>b") == ("a", "b", [])


def test_functions_that_are_not_offered_are_text():
    request = ReplyContext(FUNCTIONS, only=frozenset({"g"}))
    for name in FORMATS:
        if name == "gpt_oss":
            continue
        text = write_calls(FORMATS[name].format.calls[0], [("f", {"a": 1})])
        thought, reported, got = parsed(name, text, request)
        assert (thought, got) == ("", []) and reported == text, name
    text = write_reply(FORMATS["gpt_oss"].format, "", "", [("f", {"a": 1})])
    assert parsed("gpt_oss", text, request) == ("", '{"a": 1}', [])


def test_values_without_quotes_are_typed_by_the_schema():
    properties = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "on": {"type": "boolean"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "data": {"type": ["object", "null"]},
        "free": {},
    }
    request = ReplyContext({"f": {"type": "object", "properties": properties}})
    for key, written, want in (
        ("text", "12", "12"),
        ("text", "  a\n\nb ", "  a\n\nb "),
        ("text", "null", "null"),
        ("count", "12", 12),
        ("count", "12.5", "12.5"),
        ("count", "twelve", "twelve"),
        ("on", "True", True),
        ("on", "false", False),
        ("either", "null", None),
        ("either", "7", "7"),
        ("data", '{"a": [1]}', {"a": [1]}),
        ("data", "{broken", "{broken"),
        ("free", "7", 7),
        ("free", '"7"', '"7"'),
        ("free", "NaN", "NaN"),
        ("other", "x y", "x y"),
    ):
        coder = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
        for name, text in (("qwen3_coder", coder), ("glm4", glm)):
            ((_, arguments, _),) = parsed(name, text, request)[2]
            assert json.loads(arguments) == {key: want}, (name, key, written)


def test_repeated_beginnings_of_calls_are_read_in_any_division():
    shapes = ("<", "[", "{", "`", "\n", "<tool_call>", '<tool_call>{"id":', "[f(a=[", '{"name": "f", "arguments": {')
    for name in FORMATS:
        for shape in shapes:
            text = shape * (4000 // len(shape))
            for cut in (False, True):
                whole = found(FORMATS[name]().start(PLAIN), [text], cut)
                assert parsed(name, text, cut=cut) == whole, (name, shape)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2.5", "hermes"),
        ("qwen3", "qwen3"),
        ("qwen3 coder", "qwen3_coder"),
        ("hermes", "hermes"),
        ("glm", "glm4"),
        ("mistral", "mistral"),
        ("llama3", "llama3_json"),
    ],
)
def test_calls_that_chat_templates_write_are_read(template, name):
    jinja2 = pytest.importorskip("jinja2.sandbox")
    environment = jinja2.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = lambda text: pytest.fail(text)
    for seed in range(10):
        made = [call(random.Random(seed))]
        function = {"name": made[0][0], "arguments": made[0][1]}
        message = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": function}]}
        prompt = [{"role": "user", "content": "x"}]
        values = {"tools": [], "bos_token": "", "eos_token": ""}
        rendered = environment.from_string(TEMPLATES[template][0]).render(messages=[*prompt, message], **values)
        before = environment.from_string(TEMPLATES[template][0]).render(messages=prompt, **values)
        text = rendered[len(before) :]
        for lead in ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|assistant|>"):
            text = text.removeprefix(lead)
        got = parsed(name, text)[2]
        assert [(n, json.loads(a)) for n, a, _ in got] == made, text
