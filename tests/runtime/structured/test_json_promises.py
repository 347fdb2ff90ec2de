"""The promises for JSON, in both libraries: answers drawn at random under the masks fit the schema, or the schema was
refused by name.
"""

from __future__ import annotations

import json
import random
from decimal import Decimal

import pytest

pytest.importorskip("jsonschema")

import jsonschema
from json_helpers import Maker, allowed, check, compiled, draw, library, takes

from minivllm.plugins.grammar.ecma_regex import pattern
from minivllm.plugins.grammar.json_schema import prepare
from minivllm.plugins.grammar.xgrammar_schema import HELD, unheld

_ = library  # the fixture


@pytest.mark.parametrize("seeds", [range(600)], ids=["600"])
def test_what_is_drawn_under_the_masks_of_a_random_schema_fits_it(library, seeds):
    finished = refused = 0
    for seed in seeds:
        schema = Maker(seed).schema()
        grammar = compiled(library, "json", schema)
        refused += grammar is None
        for n in range(4 if grammar is not None else 0):
            text = draw(library, grammar, random.Random(1000 * seed + n))
            if text is not None:
                finished += 1
                try:
                    check(schema, text)
                except Exception as e:
                    pytest.fail(f"seed {seed}: {json.dumps(schema)} -> {text}: {e}")
    assert finished > 1.5 * len(seeds) and refused < 0.6 * len(seeds), (finished, refused)


# ---- spellings -------------------------------------------------------------------------------------------------------

AGE = {"type": "object", "properties": {"age": {"type": "integer"}, "a/b": {"const": 1}, "\u00e9\n": {}}}


@pytest.mark.parametrize("escaped", [
    r"\u0061ge", r"a\u0067e", r"ag\u0065", r"\u0061\u0067\u0065", r"\u0061GE", r"a\/b", r"a\u002fb", r"\u00e9\n",
    r"\u00E9\n", r"é\u000a", r"\ud83d\ude00", r"\ud83d",
])  # fmt: skip
def test_no_name_is_a_declared_one_in_disguise(library, escaped):
    """No name occurs twice either, because each allowed name has one spelling."""
    for more in ({}, {"additionalProperties": {"type": "string"}}, {"additionalProperties": False}):
        grammar = compiled(library, "json", {**AGE, **more})
        for text in (f'{{"{escaped}":"x"}}', f'{{"age":1,"{escaped}":"x"}}', f'{{"age":1,"x":"","{escaped}":"x"}}'):
            assert not takes(library, grammar, text), text
        assert takes(library, grammar, '{"age":1}') and takes(library, grammar, '{"age":1,"a/b":1,"\u00e9\\n":1}')
        assert not takes(library, grammar, '{"age":1,"age":1}')
        assert takes(library, grammar, '{"age":1,"other":"x"}') == (more.get("additionalProperties") is not False)


def test_names_that_match_a_pattern_are_not_disguised(library):
    schema = {"type": "object", "patternProperties": {"^a\n": {"type": "integer"}}, "additionalProperties": False}
    grammar = compiled(library, "json", schema)
    assert takes(library, grammar, r'{"a\nb":1}') and not takes(library, grammar, r'{"a\u000ab":1}')
    assert compiled(library, "json", {"type": "object", "patternProperties": {r"^\W": {}}}) is None, (
        "of several readings"
    )
    assert not takes(library, grammar, r'{"\u0061\n":1}') and not takes(library, grammar, r'{"a\n":"x"}')


@pytest.mark.parametrize("value, written, others", [
    ("a/", '"a/"', [r'"\u0061/"', r'"a\/"', r'"a\u002f"']),
    ("\U0001f600", '"\U0001f600"', [r'"\ud83d\ude00"', r'"\ud83d"']),
    ('"\\\b\t\n\f\r', r'"\"\\\b\t\n\f\r"', [r'"\u0022\\\b\t\n\f\r"', r'"\"\\\b\t\u000a\f\r"']),
    ("\u2028\u00e9", '"\u2028\u00e9"', [r'"\u2028\u00e9"', r'"\u2028\u00E9"', '"\u2028e\u0301"']),
    ("\u00e91\u0100f\U0001f6001", '"\u00e91\u0100f\U0001f6001"', ['"\u0e91\u0100f\U0001f6001"', '"\u00e91\u0100"']),
    ({"a": [1]}, '{"a":[1]}', [r'{"\u0061":[1]}', '{"a":[1.5]}', '{"a":[1],"a":[1]}']),
])  # fmt: skip
def test_a_value_has_one_spelling_which_is_the_usual_one(library, value, written, others):
    for schema in ({"const": value}, {"enum": [value, 1]}):
        grammar = compiled(library, "json", schema)
        assert takes(library, grammar, written)
        assert [text for text in others if takes(library, grammar, text)] == []


@pytest.mark.parametrize("schema", [
    {"const": "\x01"}, {"const": {"a": "\x7f"}}, {"const": {"\x01": 1}}, {"enum": [["\x1f"]]}, {"const": 10**20},
    {"type": "string", "pattern": "^\\x01$"}, {"type": "object", "patternProperties": {"^\\x00": {}}},
    {"type": "integer", "minimum": 2**60}, {"multipleOf": 1 / 3, "type": "number"}, {"enum": [0.1 + 0.2]},
    {"type": "string", "format": "color"}, {"type": "string", "format": "idn-email"}, {"uniqueItems": True},
    {"type": "string", "format": "ipvanyaddress"}, {"type": "string", "format": "json-string"},
    {"type": "object", "minProperties": 2}, {"enum": [1, True], "type": "string"}, {"$defs": {"a": {"$id": "x"}}},
    {"not": {}}, {"contains": {}}, {"$schema": "http://json-schema.org/draft-04/schema#", "if": {}, "then": False},
])  # fmt: skip
def test_what_is_not_held_is_refused(library, schema):
    assert compiled(library, "json", schema) is None


ODD = [None, True, 5, 1.5, -1, "[", [], [1], ["a"], [[]], [{}], {}, {"a": 1}, {"a": {"type": 5}}, 10**400, -(10**400)]
BESIDE = [
    {}, {"type": "string"}, {"type": 5}, {"type": None}, {"type": [[]]}, {"format": "date"},
    {"type": "array", "minItems": 2}, {"type": "number", "exclusiveMinimum": 0.5},
    {"type": "object", "required": ["a"], "properties": {"a": {}}},
]  # fmt: skip


@pytest.mark.parametrize("key", sorted(HELD | {"oneOf", "multipleOf", "additionalItems", "$id", "$defs", "$schema"}))
def test_a_keyword_with_any_value_is_held_or_refused(key):
    for value in ODD:
        for beside in BESIDE:
            schema = json.loads(json.dumps({**beside, key: value}))
            try:
                list(unheld(prepare(schema, pattern)))
            except ValueError as e:
                assert 0 < len(str(e)) < 300, (beside, value)


@pytest.mark.parametrize("schema, says", [
    ({"type": "number", "minimum": 10**400}, "minimum=1000"),
    ({"exclusiveMaximum": -(10**400)}, "exclusiveMaximum=-1000"),
    ({"type": 5, "format": "date"}, "type=5: expected"), ({"type": None, "format": "date"}, "type=None: expected"),
    ({"type": "string", "format": 5}, "format=5: expected"), ({"type": ["string", 5]}, "expected a list of texts"),
    ({"allOf": 5}, "allOf=5: expected a list"), ({"required": [[]]}, "expected a list of texts"),
])  # fmt: skip
def test_what_is_misshapen_is_refused_by_name(schema, says):
    with pytest.raises(ValueError) as e:
        prepare(schema, pattern)
    assert says in str(e.value) and len(str(e.value)) < 200


@pytest.mark.parametrize("schema", [
    {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"allOf": [{"$ref": "#"}]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
])  # fmt: skip
def test_references_that_never_end_are_refused(library, schema):
    assert compiled(library, "json", schema) is None


def test_references_that_may_end_do(library):
    tree = {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}
    assert takes(library, compiled(library, "json", tree), '{"n":{"n":{}}}')
    loop = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]}
    either = {"$defs": {"a": loop}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
    grammar = compiled(library, "json", either)
    assert grammar is None or allowed(library, library.start(grammar)) == [ord("n")]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_are_within_their_bounds(library):
    near = ["0", "0.01", "-0.01", "0.00", "0.5", "1e0", "1E-1", "-0", "-0.0", "1e999"]
    edges = [None, -20, -1.5, -1, -0.05, 0, 0.5, 1, 1.05, 1.5, 10]
    for kind in ("number", "integer"):
        for low, high in [(a, b) for a in edges for b in edges]:
            for least, most in (("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")):
                schema = {k: v for k, v in {"type": kind, least: low, most: high}.items() if v is not None}
                grammar = compiled(library, "json", schema)
                if grammar is None:
                    continue
                points = [
                    format(Decimal(repr(edge)) + Decimal(n), "f") for edge in (low or 0, high or 0) for n in near[:4]
                ]
                for text in {*points, *near}:
                    if takes(library, grammar, text):
                        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                        assert kind == "number" or Decimal(text) % 1 == 0


def test_an_integer_is_written_without_a_fraction_and_any_value_within_is_written(library):
    grammar = compiled(library, "json", {"type": "integer", "minimum": -3, "exclusiveMaximum": 12})
    written = {n for n in range(-30, 40) if takes(library, grammar, str(n))}
    assert written == set(range(-3, 12))
    assert not any(takes(library, grammar, text) for text in ("1.0", "1e0", "01", "+1", "-03", ".5"))


@pytest.mark.parametrize("bound", [1, 0.1, -2.5, 99.99, 12345.678])
def test_nothing_is_read_as_the_bound_that_it_must_not_be(library, bound):
    """The other bound is near it, and a reader of doubles could not distinguish them."""
    for keys, sign in ((("exclusiveMinimum", "maximum"), 1), (("exclusiveMaximum", "minimum"), -1)):
        grammar = compiled(library, "json", {"type": "number", keys[0]: bound, keys[1]: bound + sign * 0.25})
        for step in ("1e-40", "1e-20", "1e-17", "1e-15", "0"):
            text = format(Decimal(repr(bound)) + sign * Decimal(step), "f")
            assert not takes(library, grammar, text) or (float(text) - bound) * sign > 0, text


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        (
            {"type": "object", "properties": {}, "required": ["q"], "additionalProperties": False},
            "it requires a property",
        ),
        ({"type": "array", "minItems": 1, "items": False}, "it requires a property or an item that it excludes"),
        ({"$ref": "#"}, "its references form a cycle"),
    ],
)
def test_a_schema_that_no_value_fits_is_refused_for_its_own_reason(schema, cause):
    with pytest.raises(ValueError, match=f"no finite value fits the schema, because {cause}"):
        prepare(schema, pattern)
