"""The grammar of a format.  Random texts that it allows are read as calls whose arguments fit their schemas."""

import json
import random

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema
from call_schemas import HOSTILE, functions
from reply_recordings import FORMATS, SPECIAL, summed

from minivllm.runtime.replies import Calls, DescribedParser, ReplyFormat
from minivllm.runtime.replies.grammar import ANSWER, AUTO, FORCED, Function, Spelling, reply_grammar, writes
from minivllm.runtime.replies.grammar_rules import Inexpressible
from minivllm.testing.reply_walks import Walker

PLAIN_NAMES = ("a", "b", "key_2", "z")
OBJECT = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"], "additionalProperties": False}
NOT_TOKENS = ("<function=", "</function>", "<parameter=", "</parameter>")  # of qwen3_coder


def walkers(name):
    """A vocabulary in which tags are text, and one in which they are tokens."""
    form = FORMATS[name].format
    marked = [tag for tag in form.tags if tag not in NOT_TOKENS]
    special = bool(marked) and SPECIAL.get(name, lambda tag: False)(marked[0])
    found = [Walker(form, marked, special)] if marked else []
    return found if form.channels else [*found, Walker(form)]


def grammar(name, walker, offered, mode, parallel=True, answer=OBJECT):
    """The source of a grammar of functions."""
    listed = [Function(function, schema) for function, schema in offered.items()]
    return reply_grammar(Spelling(FORMATS[name].format, walker.ids), listed, mode, parallel, answer)


def check(name, walker, offered, mode, parallel, text):
    """Read an answer, and compare its calls with the schemas."""
    reply = FORMATS[name]().start(walker.context(offered, answer=mode == ANSWER))
    parts = [part for char in text for part in reply.feed(char)]
    _, reported, calls = summed([*parts, *reply.feed("", True)])
    for function, arguments, ended in calls:
        assert ended, (name, text)
        jsonschema.validate(json.loads(arguments), offered[function])
    assert parallel or len(calls) <= 1, (name, text)
    if mode == FORCED:
        assert calls and not reported.strip(), (name, text)
    if mode == ANSWER:
        assert bool(calls) != bool(reported.strip()), (name, text)
        if not calls:
            jsonschema.validate(json.loads(reported), OBJECT)
    return len(calls)


def walk(name, mode, seeds, names=PLAIN_NAMES):
    """Draw random answers of random schemas, and return (number of answers, number of calls)."""
    answers = calls = 0
    for walker in walkers(name):
        for seed in seeds:
            rng = random.Random(f"{name}-{seed}")
            offered = functions(rng, names)
            parallel = rng.random() < 0.7
            try:
                compiled = walker.compiled(grammar(name, walker, offered, mode, parallel))
            except Inexpressible:
                continue
            for _ in range(4):
                text = walker.walk(compiled, rng, end=0 if mode == AUTO else 0.3)
                if text is not None:
                    answers += 1
                    calls += check(name, walker, offered, mode, parallel, text)
    return answers, calls


MODES = [(name, mode) for name in FORMATS for mode in (FORCED, AUTO, ANSWER)]
BESIDE = [pair for pair in MODES if pair not in (("json", ANSWER), ("llama3_json", ANSWER))]


@pytest.mark.parametrize(("name", "mode"), BESIDE)
def test_every_answer_of_a_grammar_has_calls_that_fit(name, mode):
    answers, calls = walk(name, mode, range(3))
    assert answers > 3 and (calls or mode != FORCED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), BESIDE)
def test_many_answers_of_grammars_have_calls_that_fit(name, mode):
    answers, calls = walk(name, mode, range(100))
    assert answers > 300 and calls


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "json"])
def test_hostile_names_and_values_are_text(name):
    answers, _ = walk(name, FORCED, range(30 if name == "pythonic" else 6), HOSTILE)
    assert answers


def test_an_answer_without_a_tag_cannot_be_told_from_a_call():
    for name in ("json", "llama3_json"):
        walker = walkers(name)[0]
        with pytest.raises(Inexpressible, match="cannot be distinguished"):
            grammar(name, walker, {"f": OBJECT}, ANSWER)
    walker = walkers("hermes")[0]
    with pytest.raises(Inexpressible, match="an answer that is no object"):
        grammar("hermes", walker, {"f": OBJECT}, ANSWER, answer={"type": "array"})


def spelled(properties, required=()):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("qwen3_coder", spelled({"a>b": {"type": "string"}}), "cannot stand within tags"),
        (
            "qwen3_coder",
            spelled({"a": {"type": ["string", "integer"], "minimum": 3}}),
            "either a string or a bounded number",
        ),
        ("qwen3_coder", spelled({"a": {"enum": ["</parameter>"]}}), "listed strings, none of which"),
        ("qwen3_coder", {"type": "object"}, "does not declare its members"),
        ("qwen3_coder", {**spelled({}), "minProperties": 1}, "minProperties"),
        ("qwen3_coder", spelled({}, ["a"]), "which is not declared"),
        ("glm4", spelled({"a": {"anyOf": [{"type": "string"}, {"not": {}}]}}), "strings with the schema keywords not"),
        ("glm4", spelled({"a": {"type": "array", "items": {"$ref": "#/properties/a"}}}), "names no definition"),
        ("pythonic", spelled({"a-b": {"type": "string"}}), "not a name in Python"),
        ("pythonic", spelled({"class": {"type": "string"}}), "not a name in Python"),
    ],
)
def test_a_schema_that_a_format_cannot_express_is_named(name, schema, words):
    walker = Walker(FORMATS[name].format)
    with pytest.raises(Inexpressible, match=words):
        grammar(name, walker, {"f": schema}, FORCED)
    listed = [Function("f", {}, False)]  # any arguments
    source = reply_grammar(Spelling(FORMATS[name].format, walker.ids), listed, FORCED)
    text = walker.walk(walker.compiled(source), random.Random(0))
    assert text is not None
    _, _, calls = summed(FORMATS[name]().start(walker.context({"f": {}})).feed(text, True))
    assert calls and all(isinstance(json.loads(arguments), dict) for _, arguments, _ in calls)


def test_a_grammar_is_bounded():
    large = spelled({f"k{number}": {"type": "string"} for number in range(20_000)})
    walker = walkers("qwen3_coder")[1]
    with pytest.raises(Inexpressible, match="bytes"):
        grammar("qwen3_coder", walker, {"f": large}, FORCED)


def test_a_tag_that_is_a_token_is_never_written_as_text():
    walker = walkers("qwen3")[0]
    compiled = walker.compiled(grammar("qwen3", walker, {"f": spelled({})}, FORCED))
    rng = random.Random(0)
    for _ in range(20):
        text = walker.walk(compiled, rng)
        assert text is None or "<tool_call>" not in text


def test_values_are_read_where_a_reference_names_their_type():
    """The type is the type of the definition, for a reference, a list of values, and a part of several."""
    definitions = {"T": {"type": "string"}, "O": {"type": "object"}}
    properties = {
        "t": {"$ref": "#/$defs/T"},
        "o": {"anyOf": [{"$ref": "#/$defs/O"}, {"type": "null"}]},
        "e": {"enum": ["1", "2"]},
        "w": {"allOf": [{"$ref": "#/$defs/T"}]},
        "i": {"type": "integer"},
    }
    walker = Walker(FORMATS["qwen3_coder"].format)
    request = walker.context({"f": {"type": "object", "properties": properties, "$defs": definitions}})
    for key, text, want in (
        ("t", "12", "12"),
        ("o", '{"a": 1}', {"a": 1}),
        ("o", "null", None),
        ("e", "1", "1"),
        ("w", "true", "true"),
        ("i", "2.0", 2),
        ("o", '{"a": "</parameter>"}', {"a": "</parameter>"}),
    ):
        written = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
        _, _, calls = summed(FORMATS["qwen3_coder"]().start(request).feed(written, True))
        assert json.loads(calls[0][1]) == {key: want}, (key, text)


def test_a_description_travels_as_json():
    from dataclasses import asdict

    for name, parser in FORMATS.items():
        spelling = Spelling(parser.format, {"<a>": 1})
        assert Spelling.of(json.loads(json.dumps(asdict(spelling)))) == spelling, name


def test_a_syntax_of_a_newer_description_has_no_grammar():
    class Other(DescribedParser):
        format = ReplyFormat(calls=(Calls("other"),))

    assert not writes(Spelling(Other.format, {}))
    assert not writes(Spelling(FORMATS["gpt_oss"].format, {})) and writes(Spelling(FORMATS["json"].format, {}))


def test_a_call_in_the_reasoning_is_text_where_calls_begin_behind_it():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    walker = Walker(FORMATS["qwen3"].format)
    for behind, thought, count in ((False, "", 2), (True, call, 1)):
        request = walker.context({"f": {}}, opened=True, behind=behind)
        found, reported, calls = summed(FORMATS["qwen3"]().start(request).feed(f"{call}</think>{call}", True))
        assert (found, reported, len(calls)) == (thought, "", count)
