"""The forms of structured output that a request may set, and the ones that are refused before any compilation."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc

import pytest
from structured_helpers import deep

from minivllm import RequestError, SamplingParams, StructuredOutputsParams
from minivllm.core.interfaces.structured import group_depth
from minivllm.core.json_schema.closing import closed
from minivllm.core.json_schema.depth import text_depth, value_depth
from minivllm.core.json_schema.references import find
from minivllm.plugins.grammar.xgrammar_schema import unheld

# ---- what can be asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requested, says",
    [
        ({}, "structured_outputs: none given; expected exactly one of json, regex, choice, grammar, json_object"),
        ({"json": {}, "regex": "a"}, "json and regex given"),
        ({"jsn": {}}, "unknown field 'jsn'; expected json, regex, "),
        ({"regex": ""}, "structured_outputs.regex=: expected a text that is not empty"),
        ({"regex": 7}, "structured_outputs.regex=7"),
        ({"choice": "yes"}, "structured_outputs.choice=yes: expected a list of texts"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a"] * 10_001}, "structured_outputs.choice=10001 texts: expected at most 10000"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": "[" * 1000}, "structured_outputs.json=a schema 1000 levels deep: expected at most 100"),
        ({"json": deep(1000)}, "structured_outputs.json=a schema that is deeper"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json: not every value is JSON"),
        ({"json": 5}, "structured_outputs.json=5: expected a schema"),
        ({"json": '{"const": "' + "a" * 300_000 + '"}'}, "bytes: expected at most 262144"),
        ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "structured_outputs.regex=groups within 30000 others"),
        ({"regex": "\ud800"}, "structured_outputs.regex is not valid Unicode"),
        ({"regex": "a", "disable_any_whitespace": True}, "with regex, only with json"),
        ({"json": {}, "disable_any_whitespace": 1}, "expected True or False"),
        (5, "structured_outputs has the type int"),
        ({"json": ""}, "structured_outputs.json is not JSON"),
        ({"json": []}, "structured_outputs.json=[]: expected a schema: an object, true or false"),
        ({"json": 0}, "structured_outputs.json=0: expected a schema"),
        ({"json": "null"}, "structured_outputs.json=None: expected a schema"),
        ({"json": None}, "none given"),
        ({"json": False, "regex": "a"}, "json and regex given"),
        ({"regex": False}, "structured_outputs.regex=False: expected a text"),
        ({"grammar": 0}, "structured_outputs.grammar=0: expected a text"),
        ({"choice": {}}, "structured_outputs.choice={}: expected a list"),
        ({"choice": [""]}, "structured_outputs.choice=['']: expected a list of texts, none of them empty"),
        ({"json_object": False}, "none given"),
        ({"json_object": 1}, "structured_outputs.json_object=1: expected True or None"),
        ({"json_object": ""}, "structured_outputs.json_object=: expected True or None"),
        ({"regex": "a", "whitespace_pattern": ""}, "expected no whitespace_pattern with regex, only with json"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "expected no whitespace_pattern"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_field_and_what_was_wanted(requested, says):
    start = time.thread_time()
    with pytest.raises(RequestError) as e:
        SamplingParams(structured_outputs=requested)
    assert says in str(e.value) and e.value.param == "structured_outputs" and len(str(e.value)) < 300
    assert time.thread_time() - start < 2


def test_a_schema_that_contains_itself_is_refused():
    schema = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(RequestError, match="contains itself"):
        StructuredOutputsParams(json=schema)
    wide = [0]
    for _ in range(40):
        wide = [wide, wide]  # 2 ** 40 values for code that visits all of them
    with pytest.raises(RequestError, match="deeper"):
        StructuredOutputsParams(json={"enum": wide})


def test_text_mapping_and_model_are_the_same_schema():
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    texts = [
        StructuredOutputsParams(json=given).source.text
        for given in (Point, Point.model_json_schema(), json.dumps(Point.model_json_schema()))
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("given", [True, {}, "true", "{}"])
def test_every_value_that_is_a_schema_is_one(given):
    assert json.loads(StructuredOutputsParams(json=given).source.text) in (True, {})


def test_the_schema_false_is_refused_with_what_it_says():
    from minivllm.plugins.grammar.json_schema import prepare

    assert StructuredOutputsParams(json=False).source.text == "false"
    with pytest.raises(ValueError, match="nothing fits the schema false"):
        prepare(False, str)


def test_additional_properties_are_forbidden_where_the_schema_says_nothing():
    inner = {"type": "object", "properties": {"b": {}}, "additionalProperties": {"type": "null"}}
    schema = {"type": "object", "properties": {"a": inner}}
    requested = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert json.loads(requested.source.text) == {**schema, "additionalProperties": False}
    assert "additionalProperties" not in schema


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
INNER = {"type": "object", "properties": {"in": A}}
REFERRED = {"$defs": {"A": A}, "$ref": "#/$defs/A"}
BESIDE = {**REFERRED, "properties": {"b": {}}, "required": ["a"]}


@pytest.mark.parametrize("schema, fits, other", [
    (A, {"a": 1}, {"b": 1}), (INNER, {"in": {"a": 1}}, {"in": {"b": 1}}), (REFERRED, {"a": 1}, {"b": 1}),
    ({"allOf": [A, B]}, {"a": 1, "b": 2}, {"c": 1}), ({"allOf": [A]}, {"a": 1}, {"b": 1}),
    (BESIDE, {"a": 1}, {"a": 1, "c": 2}),
    ({**A, "anyOf": [B, {"required": ["a"]}]}, {"a": 1, "b": 1}, {"a": 1, "c": 1}),
    ({"anyOf": [A, {"type": "null"}]}, {"a": 1}, {"b": 1}), ({"type": "array", "items": A}, [{"a": 1}], [{"b": 1}]),
    ({"$defs": {"A": A}, "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [{"$ref": "#/$defs/A"}, B]}}},
     {"x": {"a": 1}, "y": {"a": 1, "b": 2}}, {"x": {"b": 1}}),
    ({"kept": {"A": A}, "items": {"$ref": "#/kept/A"}}, [{"a": 1}], [{"b": 1}]),
    ({"patternProperties": {"^x": {}}}, {"x1": 1}, {"y": 1}), ({**A, "required": ["r"]}, {"r": 2}, {"r": 2, "s": 1}),
    ({"properties": {"n": {"$ref": "#"}}}, {"n": {"n": {}}}, {"n": {"m": 1}}),
    ({"const": {"properties": {"a": 1}}}, {"properties": {"a": 1}}, {}),
    ({"enum": [{"required": []}]}, {"required": []}, 1),
])  # fmt: skip
def test_closed_objects_take_what_they_declare_and_nothing_else(schema, fits, other):
    jsonschema = pytest.importorskip("jsonschema")
    made = closed(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(fits)
    assert jsonschema.Draft202012Validator(made).is_valid(fits), made
    assert not jsonschema.Draft202012Validator(made).is_valid(other), made
    assert closed(made) == made


@pytest.mark.parametrize("schema", [
    True, {}, {"type": "object"}, {**A, "additionalProperties": True}, {**A, "unevaluatedProperties": {}},
    {"allOf": [A, {"additionalProperties": {"type": "integer"}}]}, {"type": "object", "additionalProperties": {}},
])  # fmt: skip
def test_objects_that_say_what_else_they_take_stay_open(schema):
    assert closed(schema) == schema


def test_objects_with_too_many_parts_in_common_are_refused_soon():
    both = lambda i: {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 2}"}], **A}  # noqa: E731
    schema = {"$defs": {str(i): both(i) for i in range(1500)}, "items": [{"$ref": "#/$defs/0"}]}
    schema["items"] = [{"properties": {}, "$ref": f"#/$defs/{i}"} for i in range(1500)]
    start = time.thread_time()
    with pytest.raises(RequestError, match="too many of its objects"):
        StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert time.thread_time() - start < 2


WIDE = {"properties": {f"n{i}": {} for i in range(5000)}}


def many(definition, count, **node):
    return {"$defs": {"a": definition}, "items": [{"$ref": "#/$defs/a", **node} for _ in range(count)]}


@pytest.mark.parametrize("schema", [
    many(WIDE, 3000, title="", properties={}), many({"required": [*WIDE["properties"]]}, 3000, properties={}),
    many({"patternProperties": WIDE["properties"]}, 3000, properties={}),
    many({"properties": {"n" * 100_000: {}}}, 3000, properties={}),
    many({"anyOf": [True] * 20_000}, 3000, properties={}),
    {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}] * 9000},
    {"$defs": {"a": {"$ref": "#/" + "a" * 100_000}}, "items": [{"$ref": "#/$defs/a", "properties": {}}] * 3000},
], ids=["names", "required", "patterns", "long names", "parts", "users", "a long reference"])  # fmt: skip
def test_objects_are_closed_or_refused_soon_and_in_little_memory(schema):
    schema = json.loads(json.dumps(schema))  # no part is there twice
    start = time.process_time()  # of this process: others may have the machine
    try:
        closed(schema)
    except ValueError as e:
        assert "in common" in str(e)
    assert time.process_time() - start < 2
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        closed(schema)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 << 20


def test_a_schema_is_measured_before_it_is_worked_on(monkeypatch):
    from minivllm.core.interfaces import structured as params
    from minivllm.server.errors import ApiError
    from minivllm.server.openai import tools

    def never(schema):
        raise AssertionError("closed before it was measured")

    monkeypatch.setattr(params, "closed", never)
    monkeypatch.setattr(tools, "closed", never)
    for large in ({"enum": ["a" * 300_000]}, {"properties": {str(i): {} for i in range(40_000)}}, deep(101)):
        with pytest.raises(RequestError, match="expected at most"):
            StructuredOutputsParams(json=large, disable_additional_properties=True)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"const": large}}}
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            with pytest.raises(ApiError, match=r"expected at most|deeper than"):
                tools.read_tools([tool], choice, True).form()


OWN = "http://x/y"


@pytest.mark.parametrize("reference, leads", [
    ("#", True), ("#/$defs/B", True), (f"{OWN}#/$defs/B", True), (OWN, True), (f"{OWN}#", True),
    ("#/$defs/~0~1%25", True), ("#/allOf/0", True), ("#/allOf/\u00b2", False), ("#/allOf/9", False),
    ("#/allOf/" + "9" * 5000, False),
    ("#name", False), ("http://x/z#/$defs/B", False), (f"{OWN}#name", False), (5, False), (None, False), ("B", False),
])  # fmt: skip
def test_a_reference_leads_to_one_place_whoever_follows_it(reference, leads):
    from minivllm.plugins.grammar.json_schema import Nodes
    from minivllm.server.openai.tools import _moved

    schema = {"$id": OWN, "$defs": {"B": B, "~/%": A}, "allOf": [{}], "$ref": reference}
    assert (find(schema, reference) is not None) == leads
    assert list(Nodes(schema)._targets) == [reference] * leads
    moved = _moved(schema, "#/$defs/t0")
    target, expected = find({"$defs": {"t0": moved}}, moved["$ref"]), find(schema, reference)
    assert target is moved if expected is schema else target == expected


def test_schemas_joined_by_references_to_their_id_are_closed_together():
    made = closed({"$id": OWN, "$defs": {"B": B}, "allOf": [{"$ref": f"{OWN}#/$defs/B"}, {**A, "required": ["x"]}]})
    assert made["additionalProperties"] is False and set(made["properties"]) == {"a", "b", "x"}
    assert "additionalProperties" not in made["$defs"]["B"] and "additionalProperties" not in made["allOf"][1]


def test_only_references_of_schemas_are_moved():
    from minivllm.server.openai.tools import _moved

    reported = {"$ref": "#/$defs/B"}
    notes = {"const": reported, "enum": [reported], "default": reported, "examples": [reported]}
    names = {"a": notes, "const": reported, "default": reported, "n": notes}
    moved = _moved(json.loads(json.dumps({"properties": names, "$defs": {"B": B}})), "#/x")
    there = {"$ref": "#/x/$defs/B"}
    assert moved["properties"] == {"a": notes, "const": there, "default": there, "n": notes}


def test_depths_count_what_nests_and_nothing_else():
    assert text_depth('{"a": ["[[[", "\\"[", {}]}') == 3 and value_depth({"a": [1, {"b": {}}]}) == 4
    assert group_depth(r"(a[((]\((b))") == 2


def test_choose_fn_cannot_be_used_beside_it():
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(choose_fn=lambda logits, ids: 0, structured_outputs={"regex": "a"})


@pytest.mark.parametrize("schema, finds", [
    ({"oneOf": []}, ["oneOf"]), ({"allOf": [{}, {"not": {}}]}, ["allOf of several", "not"]),
    ({"anyOf": [], "type": "integer"}, ["type beside anyOf"]), ({"enum": [1], "type": "integer"}, []),
    ({"type": "string", "pattern": "a", "maxLength": 2}, ["minLength and maxLength beside pattern or format"]),
    ({"type": "object", "properties": {"not": {"minimum": 3}}}, ["minimum without type"]),
    ({"type": "object", "required": ["a"]}, ["required properties that are not declared ('a')"]),
    ({"type": "object", "patternProperties": {"^a": {}}}, ["patternProperties beside other properties"]),
    ({"type": "object", "properties": {"\x01": {}}}, ["control characters in the names of properties"]),
])  # fmt: skip
def test_what_xgrammar_passes_over_is_found(schema, finds):
    assert list(unheld(schema)) == finds
