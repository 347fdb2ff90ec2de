"""Faults of values in the project's own words, for the models of plug-ins as well as for the engine's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from minivllm.validation import FieldFault, faults, source_of, sourced


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    a: int = Field(1, ge=0)
    b: int | str = 1


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    share: float = Field(1, gt=0, le=1)
    few: int | None = Field(None, ge=1)
    most: int = Field(1, le=64)
    step: int = Field(16, multiple_of=16)
    flag: bool = True
    names: Annotated[list[str], Field(min_length=1)] = ["x"]
    pair: tuple[int, int] = (1, 2)
    inner: Inner = Inner()
    many: list[Inner] = []
    by_name: dict[str, int] = {}
    either: Inner | dict[str, int] | str = "x"
    kind: Literal["auto", "off"] = "auto"
    finite: float = Field(1, allow_inf_nan=False)
    word: str = Field("x", min_length=1, pattern="^[a-z]+$")
    anything: Any = None
    needed: int
    checked: int = 0

    @field_validator("checked")
    @classmethod
    def _check(cls, value: int) -> int:
        if value:
            raise ValueError("expected the number of the beast")
        return value


def received(**values):
    with pytest.raises(ValidationError) as info:
        Model(**{"needed": 1, **values})
    return faults(info.value, Model, {"needed": 1, **values}, "x.options")


@pytest.mark.parametrize(
    "values, text",
    [
        ({"share": 2}, "x.options.share=2: expected a number above 0, at most 1"),
        ({"share": "a"}, "x.options.share='a': expected a number above 0, at most 1"),
        ({"few": 1.5}, "x.options.few=1.5: expected a whole number from 1"),
        ({"most": 65}, "x.options.most=65: expected a whole number of at most 64"),
        ({"step": 17}, "x.options.step=17: expected a whole number a multiple of 16"),
        ({"flag": "no"}, "x.options.flag='no': expected true or false"),
        ({"names": []}, "x.options.names is a list: expected a list of at least 1 (each: text)"),
        ({"names": ["a", 1]}, "x.options.names.1=1: expected text"),
        ({"pair": (1, 2, 3)}, "x.options.pair is a list: expected a list of 2"),
        ({"inner": {"a": -1}}, "x.options.inner.a=-1: expected a whole number from 0"),
        ({"inner": {"b": []}}, "x.options.inner.b is a list: expected a whole number or text"),
        ({"inner": 3}, "x.options.inner=3: expected a table"),
        ({"inner": {"q": 1}}, "unknown option 'x.options.inner.q'. There are: a, b."),
        ({"many": [{}, {"a": "x"}]}, "x.options.many.1.a='x': expected a whole number from 0"),
        ({"by_name": {"k": "v"}}, "x.options.by_name.k='v': expected a whole number"),
        ({"either": {"a": "x"}}, "x.options.either.a='x': expected a whole number from 0"),
        ({"either": 5}, "x.options.either=5: expected a table or text"),
        ({"kind": "of"}, "x.options.kind='of': expected 'auto' or 'off'. Did you mean 'off'?"),
        ({"kind": 3}, "x.options.kind=3: expected 'auto' or 'off'"),
        ({"finite": float("inf")}, "x.options.finite: expected a finite number"),
        ({"word": ""}, "x.options.word='': expected text that is not empty that matches ^[a-z]+$"),
        ({"word": "A" * 99}, f"x.options.word='{'A' * 56}...: expected text that is not empty that matches ^[a-z]+$"),
        ({"needed": None}, "x.options.needed=None: expected a whole number"),
        ({"checked": 1}, "x.options.checked: expected the number of the beast"),
        ({"neded": 1}, "unknown option 'x.options.neded'. Did you mean 'needed'?"),
    ],
)
def test_a_fault_says_which_value_is_wrong_and_what_the_option_takes(values, text):
    assert [fault.text for fault in received(**values)] == [text]


def test_a_missing_value_is_told_with_what_it_would_be():
    with pytest.raises(ValidationError) as info:
        Model()
    assert faults(info.value, Model, {}) == [FieldFault("needed", "needed is missing: expected a whole number")]


def test_a_model_that_no_schema_describes_is_told_all_the_same():
    class Odd(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

        thing: object.__class__ | None = None
        number: int = 0
        odd: range = range(1)

    with pytest.raises(ValidationError) as info:
        Odd(number="x", odd=3)
    texts = [fault.text for fault in faults(info.value, Odd, {"number": "x", "odd": 3})]
    assert texts[0].startswith("number: expected a valid integer") and texts[1] == "odd: expected an instance of range"


def test_the_source_of_a_value_is_its_own_or_that_of_the_nearest():
    origins = {"a": "f:1", "b.c": "--set", "b.d.e": "VAR", "k": "keyword"}
    assert [source_of(origins, path) for path in ("a", "a.x", "b.c.0", "b.d", "b.z", "zz")] == [
        "f:1",
        "f:1",
        "--set",
        "VAR",
        "--set",
        "",
    ]
    found = [FieldFault("a.x", "one"), FieldFault("k", "two"), FieldFault("zz", "three")]
    assert sourced(found, origins) == ["f:1: one", "two", "three"]
