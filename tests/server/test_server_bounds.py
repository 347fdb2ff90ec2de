"""The size of a body is bounded and checked before it is used.  Suggestions are made for a few names only."""

import difflib
import json

import pytest

pytest.importorskip("fastapi")

from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.json_schema.depth import text_depth
from minivllm.server import pool_jobs
from minivllm.server.errors import ApiError
from minivllm.server.http import bounds
from minivllm.server.http.body import SMALL, parse_object
from minivllm.server.openai import bodies, field_table, fields
from minivllm.server.openai.bodies import ChatBody, CompletionBody, TokenizeBody

TEXT = st.text(st.sampled_from('ab"\\[]{},:\n\u00e9\U0001f98a'), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def counted(value):
    """(holders, depth, values), the other way round."""
    if not isinstance(value, (list, dict)):
        return 0, 0, 1
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + sum(one[0] for one in inner),
        1 + max((one[1] for one in inner), default=0),
        1 + sum(one[2] for one in inner),
    )


@given(JSON, st.booleans())
def test_the_shape_of_a_text_is_that_of_its_value(value, escaped):
    text = json.dumps(value, ensure_ascii=escaped)
    shape = bounds.shape_of(text.encode("utf-8", "surrogatepass"))
    holders, depth, values = counted(value)
    assert (shape.holders, shape.depth) == (holders, depth)
    # each comma adds a value; an empty list has none
    assert values - 1 <= shape.values <= values + holders
    assert text_depth(text) == depth


@given(st.binary(max_size=64))
def test_a_shape_is_found_whatever_the_bytes_are(raw):
    bounds.shape_of(raw)


@given(st.dictionaries(TEXT, JSON, max_size=3), st.sampled_from(["", "body"]))
def test_what_a_seat_reads_is_what_is_read_here(value, inner):
    whole = {inner: value} if inner else value
    _, rest, *more = pool_jobs.read(json.dumps(whole).encode(), inner)
    assert json.loads(rest) == whole and not more


DEEP = "[" * bounds.MOST_DEPTH + "]" * bounds.MOST_DEPTH
SHAPES = {
    "fields": (json.dumps({f"f{i}": i for i in range(bounds.MOST_FIELDS + 1)}), str(bounds.MOST_FIELDS)),
    "depth of lists": (f'{{"a": {DEEP}}}', "nested too deeply"),
    "depth of objects": ('{"a":' * (bounds.MOST_DEPTH + 1) + "1" + "}" * (bounds.MOST_DEPTH + 1), "nested too deeply"),
    "depth in brackets that stay open": ('{"a":' + "[" * 9000, "nested too deeply"),
    "objects": ('{"a":[' + "{}," * bounds.MOST_HOLDERS + "{}]}", str(bounds.MOST_HOLDERS)),
    "lists": ('{"a":[' + "[]," * bounds.MOST_HOLDERS + "[]]}", str(bounds.MOST_HOLDERS)),
    "numbers": ('{"allowed_token_ids":[' + "5," * bounds.MOST_VALUES + "5]}", str(bounds.MOST_VALUES)),
    "keys": (json.dumps({"allowed_token_ids": dict.fromkeys(range(bounds.MOST_VALUES + 9))}), str(bounds.MOST_VALUES)),
    "numbers in a prompt that are no ids": ('{"prompt":[' + "5.5," * bounds.MOST_VALUES + "5]}", "expected at most"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_body_of_more_than_a_request_can_need_is_refused_by_the_limit(name):
    text, word = SHAPES[name]
    with pytest.raises(ApiError) as refused:
        pool_jobs.read(text.encode(), "")
    assert refused.value.status == 400 and word in str(refused.value)
    if name != "fields":
        with pytest.raises(ApiError, match=word):
            pool_jobs.read(b'{"body":' + text.encode() + b"}", "body")


FIELDS = [
    *CompletionBody.model_fields,
    *ChatBody.model_fields,
    *(name for name, row in field_table.OTHER.items() if row.use != field_table.REFUSED),
    *fields.NESTED,
]
MANY = {
    "a list": lambda n: [5] * n,
    "an object": lambda n: {f"{i}": i for i in range(n)},
    "lists in a list": lambda n: [[5] * 99] * (n // 100),
    "objects in an object": lambda n: {f"{i}": {"a": 1} for i in range(n // 2 + 1)},
}


@pytest.mark.parametrize("many", MANY)
def test_no_field_holds_more_values_than_it_can_need_and_the_answer_names_it(many):
    for name in dict.fromkeys([*FIELDS, "unknown"]):
        most = bounds.MOST_IN.get(name, bounds.MOST_IN_FIELD)
        if name in bounds.IDS:
            continue
        with pytest.raises(ApiError, match=str(most)) as refused:
            bounds.check_fields({name: MANY[many](most + 100)})
        assert refused.value.status == 400 and refused.value.param == name
        bounds.check_fields({name: MANY[many](most - 200)})


@given(JSON)
def test_values_are_counted_as_they_are_nested(value):
    inner = counted(value)[2] - 1
    assert bounds.values_in(value, 10**6) == inner
    assert (bounds.values_in(value, 3) > 3) == (inner > 3)


@pytest.mark.parametrize("prompt", [[7] * 300_000, [[7] * 1000, [8], [9] * 900], list(range(1 << 20))])
def test_token_ids_travel_as_they_are_however_many(prompt):
    received, rest, column = pool_jobs.read(json.dumps({"prompt": prompt, "n": 1}).encode(), "")
    (name, lengths), flat = (
        json.loads(received)["columns"][0],
        [i for one in prompt for i in one] if lengths_of(prompt) else prompt,
    )
    assert (name, lengths) == ("prompt", lengths_of(prompt)) and json.loads(rest) == {"prompt": None, "n": 1}
    assert pool_jobs.np.frombuffer(column, "i8").tolist() == flat


def lengths_of(prompt):
    return [len(one) for one in prompt] if isinstance(prompt[0], list) else None


@pytest.mark.parametrize(
    "prompt", [[1.5] * 999, [True] * 999, [[1] * 999, []], [[1] * 999, "a"], [10**30] * 999, ["1"] * 999]
)
def test_what_is_no_list_of_token_ids_stays_what_it_is(prompt):
    _, rest = pool_jobs.read(json.dumps({"prompt": prompt}).encode(), "")
    assert json.loads(rest) == {"prompt": prompt}


# ---- suggestions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def searches(monkeypatch):
    """Return a list that receives the arguments of each call of difflib."""
    requested = []
    search = difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda *args, **more: requested.append(args) or search(*args, **more)
    )
    return requested


@pytest.mark.parametrize("name", ["zz_{}", "max_tokenq_{}_" + "x" * 60, "é{}"])
def test_a_near_name_is_looked_for_for_the_first_few_unknown_ones(searches, name):
    body = CompletionBody(prompt="a", **{name.format(i): 1 for i in range(10_000)})
    _, warnings = fields.check(body)
    assert len(searches) == fields.SEARCHES and len(warnings) == 32
    body = CompletionBody(prompt="a", max_tokenz=1)
    with pytest.raises(ApiError, match="Did you mean 'max_tokens'"):
        fields.check(body)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (CompletionBody, {"prompt": "a", "stream_options": {f"include_usag{i}": 1 for i in range(10_000)}}),
        (ChatBody, {"messages": [], "stream_options": {f"include_usag{i}": 1 for i in range(10_000)}}),
        (TokenizeBody, {"prompt": 5, "model": 5, **{f"x{i}": 1 for i in range(10_000)}}),
    ],
)
def test_faults_of_a_model_cost_a_few_searches_however_many_they_are(searches, model, values):
    with pytest.raises(ApiError):
        bodies.read(model, values)
    assert len(searches) <= 64


@pytest.mark.parametrize("where", ["structured_outputs", "vllm_xargs"])
def test_one_unknown_name_in_a_table_is_told_not_ten_thousand(searches, where):
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.errors import RequestError

    names = {f"jsom{i}": 1 for i in range(10_000)}
    if where == "structured_outputs":
        with pytest.raises(RequestError):
            SamplingParams.make(structured_outputs=names)
    else:
        SamplingParams.make(extra=names)
    assert len(searches) <= 1


def test_a_body_that_is_read_at_once_is_small():
    assert SMALL <= 1 << 16
    with pytest.raises(ApiError, match="JSON"):
        parse_object(b"")
