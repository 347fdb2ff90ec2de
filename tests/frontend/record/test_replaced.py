"""Changes of a part that its files do not show: environment variables, functions replaced at run time, torch."""

from __future__ import annotations

import sys

import pytest
import record_helpers
import torch

from minivllm.frontend.record import environment_reads, replaced
from minivllm.frontend.record.diff import compare
from minivllm.plugins.evictor.lru import Lru

OWN = """
import os

from minivllm.plugins.evictor.lru import Lru

NAME = "OWN_SPARE"


def helper(n):
    return n


class Own(Lru):
    RATE = 1

    def victims(self, n):
        more = self.RATE * int(os.environ.get(NAME, "0")) + len(os.environ["OWN_API_KEY"])
        return super().victims(max(helper(n), more))
"""
PRECISION, EXACT = "torch.float32_matmul_precision", "torch.deterministic_algorithms"

model = pytest.fixture(scope="module")(record_helpers.tiny_model)
make = pytest.fixture(record_helpers.bills)


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_reads.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OWN_API_KEY", "hunter2")
    sys.modules.pop("own_reads", None)
    import own_reads

    yield own_reads
    sys.modules.pop("own_reads", None)


def more(self):
    return 1


CHANGES = {
    "own_reads.environ[OWN_SPARE]: not set -> '3'": lambda patch, own: patch.setenv("OWN_SPARE", "3"),
    "own_reads.environ[OWN_API_KEY]: a secret (": lambda patch, own: patch.setenv("OWN_API_KEY", "hunter3"),
    "own_reads.helper(): what its file says -> ": lambda patch, own: patch.setattr(own, "helper", more),
    "own_reads.Own.RATE: 1 -> 2": lambda patch, own: patch.setattr(own.Own, "RATE", 2),
    "own_reads.Own.more(): what its file says -> ": lambda patch, own: patch.setattr(
        own.Own, "more", more, raising=False
    ),
    "minivllm.plugins.evictor.lru.Lru.free(): what its file says -> ": lambda patch, own: patch.setattr(
        Lru, "free", more
    ),
}


FIRST = next(iter(CHANGES))


@pytest.mark.parametrize(
    "reason", [FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in CHANGES if one != FIRST)]
)
def test_a_part_that_changes_without_its_files_differs_and_the_verdict_names_what_changed(
    make, own, monkeypatch, reason
):
    options = {"evictor": "own_reads:Own", "allow_targets": ["own_reads"]}
    before = make(**options)
    assert compare(before, make(**options)).verdict == "nothing that decides the tokens differs"
    CHANGES[reason](monkeypatch, own)
    after = make(**options)
    verdict = compare(before, after).verdict
    assert verdict.startswith(f"only evictor differs ({reason}"), verdict
    assert before["fingerprint"] != after["fingerprint"] and "hunter" not in str([before, after])


@pytest.mark.slow
@pytest.mark.parametrize("setting", [PRECISION, EXACT, "the machine"])
def test_global_settings_of_torch_differ_by_their_names(make, setting):
    before, threads = make(), torch.get_num_threads()
    if setting == PRECISION:
        torch.set_float32_matmul_precision("medium")
    elif setting == EXACT:
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_num_threads(threads + 1)
    try:
        verdict = compare(before, make()).verdict
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert verdict.startswith(f"only {setting} differs")
    assert setting != "the machine" or "(threads: " in verdict


@pytest.mark.slow
def test_functions_of_the_engine_and_of_torch_that_were_replaced_are_named(make, monkeypatch):
    from minivllm.device.worker import step

    before = make()
    with monkeypatch.context() as patch:
        patch.setattr(step, "rows_of", more)
        assert compare(before, make()).verdict == "only minivllm.device.worker.step.rows_of() differs"
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "silu", more)
        after = make()
        assert compare(before, after).verdict == "only torch.nn.functional.silu() differs"
        assert before["fingerprint"] != after["fingerprint"]
    assert compare(before, make()).verdict == "nothing that decides the tokens differs"


def test_no_function_of_the_package_is_taken_for_a_replaced_one():
    import minivllm.device.worker.runner
    import minivllm.plugins.attention.sdpa
    import minivllm.runtime.structured.service  # noqa: F401

    names = replaced.engine_modules()
    assert len(names) > 60 and replaced.of_modules(names) == {} and replaced.of_torch() == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('import os\nx = os.environ["A"]', {"A"}),
        ('import os\nx = os.environ.get("A", "B")', {"A"}),
        ('from os import environ, getenv\nx = environ["A"] + getenv("B")', {"A", "B"}),
        ('import os\nN = "A"\ndef f():\n    return os.getenv(N)', {"A"}),
        ('import os\nx = "A" in os.environ', {"A"}),
        ("import os\ndef f(n):\n    return os.environ[n]", {"?"}),
        ("import os\nx = dict(os.environ)", {"?"}),
        ("import os\nfor name in os.environ:\n    print(name)", {"?"}),
        ("x = {}\nx.get('A')", set()),
        ("not python(", set()),
    ],
)
def test_variables_are_those_that_the_text_reads(text, found):
    assert set(environment_reads.names(text)) == found


def test_a_variable_whose_name_is_computed_makes_the_verdict_unknown(make, tmp_path, monkeypatch):
    (tmp_path / "own_computed.py").write_text(OWN.replace("os.environ.get(NAME", 'os.environ.get("OWN" + NAME'))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OWN_API_KEY", "x")
    options = {"evictor": "own_computed:Own", "allow_targets": ["own_computed"]}
    assert compare(make(**options), make(**options)).verdict.startswith("unknown whether evictor differs")
    sys.modules.pop("own_computed", None)
