"""Ranks with different files or versions are detected, and the start ends with their names."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest
from test_multiprocess_executor import RANKS, Ending, Rank, folder, options  # noqa: F401 - a fixture

from minivllm import LLM, EngineDeadError, ResourceError
from minivllm.core.interfaces.executor import CacheWiring, Part, Wiring
from minivllm.plugins.executor import multiprocess
from minivllm.plugins.executor.fingerprint import NONE, PIECE, differences, fingerprint
from minivllm.plugins.executor.multiprocess import FINGERPRINT, Multiprocess
from minivllm.runtime.processes.channel import Message
from minivllm.runtime.processes.child import Child

PARTS = """
from dataclasses import replace
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA

class Parts(Sdpa):
    spec = replace(SDPA, impl="parts:Parts")
"""


def wiring(model_dir, **parts):
    own = {seam: Part(f"acme/{seam}", f"{target}:X") for seam, target in parts.items()}
    parts = {"model": Part("a", "minivllm.x:Y"), **own}
    return Wiring(str(model_dir), "auto", "cpu", "float32", 1, 8, 16, False, 0, parts, CacheWiring(4))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(8 * PIECE))
    return path


def test_it_changes_with_a_byte_of_a_model_and_with_the_size_of_its_weights(model):
    first = fingerprint(wiring(model))
    assert first == fingerprint(wiring(model)) and {"torch", "minivllm", "source of minivllm"} <= set(first)
    (model / "config.json").write_text("{ }")
    assert "model file config.json is " in differences(first, fingerprint(wiring(model)))
    (model / "config.json").write_text("{}")
    for change in (lambda data: data[:-1], lambda data: b"\1" + data[1:], lambda data: data[:-1] + b"\1"):
        (model / "model.safetensors").write_bytes(change(bytes(8 * PIECE)))
        words = differences(first, fingerprint(wiring(model)))
        assert words.startswith("model file model.safetensors is ") and "bytes, and rank 0 has" in words
    (model / "model.safetensors").unlink()
    assert f"model.safetensors is {NONE}" in differences(first, fingerprint(wiring(model)))


def test_weights_that_are_made_up_do_not_count(model):
    made_up = replace(wiring(model), load_format="dummy")
    first = fingerprint(made_up)
    (model / "model.safetensors").unlink()
    assert fingerprint(made_up) == first


def test_the_package_of_a_plug_in_counts_with_all_its_modules_and_is_not_imported(model, tmp_path, monkeypatch):
    package = tmp_path / "acme_ranks"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    requested = wiring(model, attention="acme_ranks.inner")
    first = fingerprint(requested)
    (package / "helper.py").write_text("x = 1")
    assert differences(first, fingerprint(requested)).startswith("plug-in package acme_ranks is ")
    assert "acme_ranks" not in sys.modules
    assert fingerprint(wiring(model, sampler="no_such_package"))["plug-in package no_such_package"] == NONE


def test_many_differences_are_counted():
    first = {f"file {i}": "a" for i in range(9)}
    words = differences(first, dict.fromkeys(first, "b"))
    assert words.count("rank 0 has a") == 4 and words.endswith("; and 5 more")
    assert differences(first, dict(first)) == ""


def reported(**words):
    return Message(FINGERPRINT, bytearray(json.dumps(words).encode()))


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (Rank(reported(torch="2.12.0")), ResourceError, "^rank 1 of 2 .* than rank 0 of 2 .*: torch is 2.12.0, "),
        (Ending(), EngineDeadError, "rank 1 of 2 .* has ended, exit code 0"),
        (Rank(), ResourceError, "not started within 0 s: rank 1 of 2"),
        (Rank(Message(99, bytearray())), EngineDeadError, "unexpected message of kind 99"),
    ],
    ids=["differs", "dies", "says nothing", "says another thing"],
)  # fmt: skip
def test_a_start_goes_on_only_with_ranks_that_have_said_the_same(second, error, words):
    executor = Multiprocess()
    executor.options.start_timeout = 0.2
    executor._child, executor._others = Rank(reported(torch="2.13.0")), [second]
    with pytest.raises(error, match=words):
        executor._compare_all(2)
    executor._child, executor._others = Rank(reported(torch="2.13.0")), [Rank(reported(torch="2.13.0"))]
    executor._compare_all(2)


def test_a_rank_that_would_import_another_plug_in_is_refused_within_seconds(folder, tmp_path, monkeypatch):  # noqa: F811
    for place, text in (("one", PARTS), ("two", PARTS + "\nOTHER = True\n")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "parts.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "one")
    made = []

    class Second(Child):
        """The second one finds the other file first."""

        def __init__(self, *args):
            sys.path[0] = str(tmp_path / ("two" if made else "one"))
            super().__init__(*args)
            made.append(self.pid)

    monkeypatch.setattr(multiprocess, "Child", Second)
    begun = time.monotonic()
    with pytest.raises(
        ResourceError, match=r"^rank 1 of 2 .* than rank 0 of 2 .*: plug-in package parts is \w{12}, and"
    ):
        LLM(**options(folder, **RANKS, attention="parts:Parts", allow_targets=["parts"]))
    assert time.monotonic() - begun < 20 and len(made) == 2
