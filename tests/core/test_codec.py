"""Plans, masks and results as bytes.  Decoded values equal the encoded ones, and other bytes are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import test_storm
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.interfaces import codec
from minivllm.core.interfaces.codec import CodecError
from minivllm.core.interfaces.plan import (
    FORMS,
    NO_CHANGE,
    STOP_IDS,
    Delta,
    Join,
    LateInputs,
    LogProbs,
    StepError,
    StepForm,
    StepPlan,
    StepResult,
)
from minivllm.core.interfaces.sampling import Row
from minivllm.plugins.executor import steps

WHOLE = st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(width=32)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def same(a, b):
    """Return whether two values are equal, arrays by dtype, shape and value.  NaN equals NaN."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def through(encode, decode, *value):
    data = bytearray(b"".join(encode(*value)))
    return decode(data), data


def array(draw, dtype, *shape):
    items = {"i4": WHOLE, "i8": LONG, "f4": REAL, "f8": st.floats(), "u1": st.integers(0, 255)}[dtype]
    n = int(np.prod(shape))
    return np.array(draw(st.lists(items, min_size=n, max_size=n)), dtype).reshape(shape)


@st.composite
def joins(draw):
    n = draw(st.integers(0, 3))
    names = ["slot", "known", "computed", "prompt", "end", "sample", "min_end", "n_eos"]
    one = {name: array(draw, "i4", n) for name in names}
    bound = []
    for _ in range(draw(st.integers(0, 3))):
        rows = {}
        for i in draw(st.lists(st.integers(0, 5), max_size=2, unique=True)):
            shape = draw(st.sampled_from([(), (3,), (0,), (2, 2)]))
            dtype = draw(st.sampled_from(["float64", "float32", "int64", "int32", "int8", "bool", "uint8"]))
            rows[i] = Row({draw(NAMES): np.ones(shape, dtype)}, draw(st.integers(0, 2**63 - 1)))
        bound.append(rows)
    return Join(
        **one,
        seed=array(draw, "i8", n),
        stop_ids=array(draw, "i4", n, STOP_IDS),
        bound=tuple(bound),
        tokens=array(draw, "i4", draw(st.integers(0, 5))),
        saved=array(draw, "i8", draw(st.sampled_from([0, n]))),
        steer=array(draw, "i4", draw(st.integers(0, 2)), 2),
        vectors=array(draw, "f4", draw(st.integers(0, 4))),
        adapter=array(draw, "i4", draw(st.sampled_from([0, n]))),
    )


@st.composite
def plans(draw):
    r = draw(st.integers(0, 4))
    size = st.integers(0, 3)
    widths = dict(fork=3, table=4, trim=4, copy=3, token=2, adapter=2)
    delta = Delta(
        join=draw(st.none() | joins()),
        leave=array(draw, "i4", draw(size)),
        forget=array(draw, "i8", draw(size)),
        keep=array(draw, "i8", draw(size), 2),
        **{n: array(draw, "i4", draw(size), w) for n, w in widths.items()},
    )
    rows = {name: array(draw, "i4", r) for name in ("slots", "q_len", "computed")}
    own = {name: array(draw, "i4", draw(size)) for name in ("samples", "late", "host", "held", "draft")}
    return StepPlan(
        id=draw(LONG),
        topk=draw(WHOLE),
        prompt=array(draw, "i4", draw(size), 2),
        guided=array(draw, "i4", draw(size), 2),
        scale=array(draw, "f4", draw(size)),
        taps=array(draw, "i4", draw(size), 3),
        steered=array(draw, "i4", draw(size)),
        pooled=array(draw, "i4", draw(size), 3),
        prompt_topk=draw(WHOLE),
        delta=delta,
        **rows,
        **own,
    )


@st.composite
def tables(draw):
    n, k = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return LogProbs(array(draw, "f4", n), array(draw, "i4", n), array(draw, "i4", n, k), array(draw, "f4", n, k))


@st.composite
def results(draw):
    n = draw(st.integers(0, 4))
    errors = st.builds(StepError, NAMES, NAMES, NAMES, st.lists(st.integers(0, 9), max_size=3).map(tuple))
    return StepResult(
        id=draw(LONG),
        **{name: array(draw, "i4", n) for name in ("slots", "tokens", "count")},
        flags=array(draw, "u1", n),
        logprobs=draw(st.none() | tables()),
        prompt=draw(st.none() | tables()),
        logits=draw(st.none() | st.integers(1, 3).map(lambda v: np.full((n, v), np.nan, np.float32))),
        errors=tuple(draw(st.lists(errors, max_size=2))),
        device_ms=draw(st.floats(allow_nan=False)),
        drafted=array(draw, "i4", draw(st.integers(0, 2))),
        taps=array(draw, "f4", draw(st.integers(0, 5))),
        pooled=draw(st.sampled_from([(0, 0), (1, 2), (3, 4)]).flatmap(lambda shape: st.just(np.full(shape, 1 / 3)))),
        seams=draw(st.dictionaries(NAMES, st.floats(0, 9))),
        lost=draw(st.dictionaries(st.integers(0, 9), NAMES, max_size=2)),
        form=StepForm(draw(st.sampled_from(FORMS)), draw(st.integers(0, 4096)), draw(st.integers(0, 1 << 30))),
        shared=draw(st.integers(0, 1 << 20)),
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_decoded_plan_equals_the_encoded_one(plan):
    found, _ = through(codec.encode_plan, codec.decode_plan, plan)
    assert same(found, plan)


@settings(max_examples=60, deadline=None)
@given(results())
def test_a_decoded_result_equals_the_encoded_one(result):
    found, _ = through(codec.encode_result, codec.decode_result, result)
    assert same(found, result)


@given(st.integers(0, 5), st.integers(1, 9), LONG)
def test_decoded_masks_equal_the_encoded_ones(rows, words, step):
    late = LateInputs(np.arange(rows * words, dtype=np.int32).reshape(rows, words))
    found, _ = through(codec.encode_late, codec.decode_late, step, late)
    assert same(found, (step, late))


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_bytes_that_end_early_or_late_are_refused(plan, data):
    _, whole = through(codec.encode_plan, codec.decode_plan, plan)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(CodecError):
            codec.decode_plan(wrong)


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_damaged_bytes_are_decoded_to_a_plan_or_refused_and_never_read_beyond(plan, data):
    """A wrong number cannot be detected, but no number may cause a read outside of the bytes."""
    _, whole = through(codec.encode_plan, codec.decode_plan, plan)
    for _ in range(8):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        assert isinstance(codec.decode_plan(whole), StepPlan)


@given(st.binary(max_size=600))
def test_foreign_bytes_are_refused(data):
    for decode in (codec.decode_plan, codec.decode_result, codec.decode_late):
        with pytest.raises(CodecError):
            decode(data)


def test_bytes_of_another_kind_or_version_are_refused_and_named(monkeypatch):
    _, late = through(codec.encode_late, codec.decode_late, 7, LateInputs(np.zeros((1, 2), np.int32)))
    with pytest.raises(CodecError, match=r"kind 2; expected .* kind 1"):
        codec.decode_plan(late.ljust(2000, b"\0"))
    monkeypatch.setattr(codec, "VERSION", 99)
    with pytest.raises(CodecError, match=r"11, kind 2; expected .* 99, kind 2"):
        codec.decode_late(late)


def test_a_column_of_another_dtype_length_or_width_is_named():
    ids = np.zeros(2, np.int32)
    plan = StepPlan(0, ids, ids, ids, ids)
    for wrong, words in (
        (replace(plan, computed=np.zeros(2, np.int64)), r"computed: int64 \[2\]; expected int32 \[2\]"),
        (replace(plan, q_len=ids[:1]), r"q_len: int32 \[1\]; expected int32 \[2\]"),
        (replace(plan, prompt=np.zeros((1, 3), np.int32)), r"prompt: int32 \[1, 3\]; expected int32 \[1, 2\]"),
    ):
        with pytest.raises(CodecError, match=words):
            codec.encode_plan(wrong)


def test_nothing_but_numbers_goes_over():
    """An object in a row would need pickle, which is not used."""
    none = np.zeros(0, np.int32)
    bound = ({0: Row({"c": np.array([object()])})},)
    join = Join(*[none] * 5, none.astype(np.int64), none, none, np.zeros((0, STOP_IDS), np.int32), none, none, bound)
    with pytest.raises(CodecError, match="column c is bound to object"):
        codec.encode_plan(StepPlan(0, none, none, none, none, delta=Delta(join)))


def test_every_plan_of_a_storm_survives_the_codec(monkeypatch):
    """Encode and decode every plan and result of many random requests."""
    make, kinds = test_storm.sim_engine, []

    def made(**options):
        engine = make(**options)
        sent, came, answered, heard = steps.Plans(), steps.Plans(), steps.StepResults(), steps.StepResults()
        slots = []
        submit, collect = engine.executor.submit, engine.executor.collect

        def encoded(plan):
            found, _ = through(codec.encode_plan, codec.decode_plan, plan)
            assert same(found, plan)
            kind, parts = sent.encode(plan)
            found = came.decode(kind, bytearray(b"".join(parts)))
            assert same(found, plan)
            kinds.append(kind)
            slots.append((plan.slots, found.slots))
            submit(found)

        def decoded(in_flight):
            out = []
            for result in collect(in_flight):
                found, _ = through(codec.encode_result, codec.decode_result, result)
                assert same(found, result)
                ours, theirs = slots.pop(0)
                kind, parts = answered.encode(result, theirs)
                found = heard.decode(kind, bytearray(b"".join(parts)), ours)
                assert same(found, result)
                kinds.append(kind)
                out.append(found)
            return out

        engine.executor.submit, engine.executor.collect = encoded, decoded
        return engine

    monkeypatch.setattr(test_storm, "sim_engine", made)
    test_storm.run(4, 8)
    assert kinds.count(steps.PLAN) > 100 and kinds.count(steps.NEXT) > 20
    assert kinds.count(steps.RESULT) > 50


def test_steps_like_the_last_equal_what_was_encoded_and_damaged_ones_are_refused():
    ids = np.arange(3, dtype=np.int32)
    plan, sent, came = StepPlan(1, ids, np.ones(3, np.int32), ids, ids), steps.Plans(), steps.Plans()
    for delta in (NO_CHANGE, NO_CHANGE, Delta(table=np.ones((2, 4), np.int32)), Delta(leave=ids), NO_CHANGE):
        plan = plan.further(plan.id + 1, plan.computed + np.int32(1), delta)
        kind, parts = sent.encode(plan)
        data = bytearray(b"".join(parts))
        assert kind == (steps.NEXT if plan.id > 2 and delta.leave is not ids else steps.PLAN)
        assert same(came.decode(kind, data), plan)
    for wrong in (data[:-1], data[:10], data + b"\0", b"xxxx" + data[4:], data[:4] + b"\xff" + data[5:]):
        with pytest.raises(CodecError):
            came.decode(steps.NEXT, wrong)
    with pytest.raises(CodecError, match="which is none"):
        steps.Plans().decode(steps.NEXT, data)
    with pytest.raises(CodecError, match=r"computed: int64 \[3\]"):
        sent.encode(plan.further(9, ids.astype(np.int64), NO_CHANGE))


def test_plain_results_equal_what_was_encoded_and_damaged_ones_are_refused():
    ids, answered, heard = np.arange(3, dtype=np.int32), steps.StepResults(), steps.StepResults()
    for step, kind in ((1, steps.RESULT), (2, steps.PLAIN)):
        result = StepResult(
            step,
            ids,
            ids,
            ids,
            np.arange(3, dtype=np.uint8),
            seams={"model": 0.5 * step},
            device_ms=3.5,
            form=StepForm("mixed", 8 * step, 512),
            shared=step,
        )
        found, parts = answered.encode(result, ids)
        data = bytearray(b"".join(parts))
        assert found == kind and same(heard.decode(kind, data, ids), result)
    for wrong in (data[:-1], data[:10], data + b"\0", b"xxxx" + data[4:], data[:4] + b"\xff" + data[5:]):
        with pytest.raises(CodecError):
            heard.decode(steps.PLAIN, wrong, ids)
    for slots in (None, ids[:2]):
        with pytest.raises(CodecError, match="a result of 3 rows and 1 seams for"):
            heard.decode(steps.PLAIN, data, slots)
    errors = (StepError("rows", "x", "y", (1,)),)
    changes = {"errors": errors}, {"slots": ids.copy()}, {"lost": {3: "it failed"}}
    for special in (replace(result, **change) for change in changes):
        assert answered.encode(special, ids)[0] == steps.RESULT
