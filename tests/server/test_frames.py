"""Frames between a client and its engine.  Frames arrive unchanged, and other bytes are refused."""

from __future__ import annotations

import ast
import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minivllm
from minivllm.server.link.frames import COLUMNS, KINDS, MAX_FRAME, FrameError, Splitter, decode, encode

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text("xyz", max_size=3), JSON, max_size=3)


@st.composite
def columns(draw):
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, max_size=5))
    sizes = {name: draw(st.integers(0, 5)) * np.dtype(COLUMNS[name]).itemsize for name in names}
    return {n: np.frombuffer(draw(st.binary(min_size=s, max_size=s)), COLUMNS[n]) for n, s in sizes.items()}


def same(got, kind, header, cols):
    assert got.kind == kind and got.header == header and list(got.columns) == list(cols)
    for name, column in cols.items():
        assert got.columns[name].dtype == np.dtype(COLUMNS[name])
        assert got.columns[name].tobytes() == column.tobytes()


@given(st.lists(st.tuples(st.sampled_from(KINDS), HEADERS, columns()), max_size=4), st.integers(1, 40))
def test_frames_arrive_as_they_were_sent_however_the_bytes_are_cut(frames, cut):
    data = b"".join(encode(*frame) for frame in frames)
    splitter, got = Splitter(), []
    for at in range(0, len(data), cut):
        got += splitter.feed(data[at : at + cut])
    assert len(got) == len(frames)
    for one, frame in zip(got, frames, strict=True):
        same(one, *frame)


@given(st.binary(max_size=80))
def test_bytes_that_are_no_frame_raise_frame_error_and_nothing_else(data):
    with contextlib.suppress(FrameError):
        decode(data)


@given(st.tuples(st.sampled_from(KINDS), HEADERS, columns()), st.data())
def test_a_frame_that_was_damaged_is_refused_or_still_has_columns_of_the_known_types(frame, data):
    body = bytearray(encode(*frame)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        got = decode(bytes(body))
    except FrameError:
        return
    assert isinstance(got.header, dict) and all(c.dtype == np.dtype(COLUMNS[n]) for n, c in got.columns.items())


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, -1])
def test_a_frame_that_was_cut_is_refused(cut):
    body = encode("frame", {"a": 1}, {"tokens": np.arange(5)})[4:]
    with pytest.raises(FrameError):
        decode(body[:cut])
    with pytest.raises(FrameError, match="after the last column"):
        decode(body + b"x")


def test_a_size_beyond_the_limit_is_refused_before_anything_is_kept_for_it():
    with pytest.raises(FrameError, match="expected at most"):
        Splitter().feed(struct.pack("<I", MAX_FRAME + 1))


def test_what_json_cannot_hold_is_refused_where_it_is_sent():
    with pytest.raises(ValueError):
        encode("add", {"x": float("nan")})
    with pytest.raises(TypeError):
        encode("add", {"x": object()})
    assert decode(encode("add", {"x": np.int64(3), "y": (1, 2)})[4:]).header == {"x": 3, "y": [1, 2]}


def test_the_package_imports_nothing_that_runs_code_from_data():
    bad = {"pickle", "marshal", "dill", "cloudpickle", "shelve", "multiprocessing"}
    for path in (Path(minivllm.__file__).parent / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.partition(".")[0] for n in names} & bad, path
