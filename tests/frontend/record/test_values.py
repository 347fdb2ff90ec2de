"""Values that a part's code reads and its text does not contain: module and class values, counters, caches."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.errors import ConfigError
from minivllm.frontend.record import assigned, recorder, sources, values
from minivllm.frontend.record.diff import NOTHING, compare
from minivllm.frontend.record.plain_values import MOST, UnknownValueError, ValueText
from minivllm.frontend.record.replay import check
from minivllm.plugins.specs import BUILTINS
from minivllm.registration.fresh import import_target

SIZES = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 4, "max_model_len": 256}
HEAD = "import itertools, json, os, time\nimport numpy as np\nfrom minivllm.plugins.evictor.lru import Lru\n"
CLASS = "class Mine(Lru):\n    def free(self, keys):\n        n = len(keys)\n        {}\n        super().free(keys)\n"


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A function that writes an evictor into a module, imports it afresh and gives the bill of a run with it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LIMIT_OF_MINE", "3")

    def fresh(before: str, uses: str = "", others: dict[str, str] | None = None):
        for name, text in {"values_of_mine": HEAD + before + CLASS.format(uses or "pass"), **(others or {})}.items():
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        monkeypatch.setattr(recorder, "engines", 0)  # another process
        return importlib.import_module("values_of_mine")

    yield fresh
    for name in ("values_of_mine", "aid_of_mine"):
        sys.modules.pop(name, None)


def bill_of():
    options = {"evictor": "values_of_mine:Mine", "allow_targets": ["values_of_mine"]}
    with LLM("pocket", **SIZES, **options, record=None) as llm:
        llm._recorder.prepare()  # when recording begins
        llm.generate("One day", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        return llm.bill_of_materials()


COMPUTED = {
    "a file elsewhere": ("SCALE = float(open(os.environ['OTHER']).read())\n", "SCALE"),
    "the environment": ("LIMIT = int(os.environ['LIMIT_OF_MINE'])\n", "LIMIT"),
    "a list": ("WEIGHTS = [i * int(os.environ['LIMIT_OF_MINE']) for i in range(9)]\n", "WEIGHTS"),
    "a list that a loop fills": ("W = []\nfor i in range(9):\n    W.append(os.environ['LIMIT_OF_MINE'])\n", "W"),
    "json": ("TABLE = json.loads('{\"a\": ' + os.environ['LIMIT_OF_MINE'] + '}')\n", "TABLE['a']"),
    "an array": ("T = np.full(20, float(os.environ['LIMIT_OF_MINE']))\n", "T[0]"),
    "a tensor": ("import torch\nT = torch.full((5,), float(os.environ['LIMIT_OF_MINE'])).half()\n", "T[0]"),
    "an object": ("class At:\n    def __init__(self): self.k = os.environ['LIMIT_OF_MINE']\nAT = At()\n", "AT.k"),
    "a condition": ("if os.environ['LIMIT_OF_MINE'] == '3':\n    K = 1\nelse:\n    K = 2\n", "K"),
    "a default": ("def f(k=os.environ['LIMIT_OF_MINE']):\n    return k\n", "f()"),
    "a class attribute": ("class Knobs:\n    share = float(os.environ['LIMIT_OF_MINE'])\n", "Knobs.share"),
    "a function's": ("K = os.environ['LIMIT_OF_MINE']\ndef f():\n    return K\n", "f()"),
    "a closure": ("def outer(k):\n    return lambda: k\nf = outer(os.environ['LIMIT_OF_MINE'])\n", "f()"),
    "a table of functions": ("K = os.environ['LIMIT_OF_MINE']\ndef f():\n    return K\nT = {'f': f}\n", "T['f']()"),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_a_computed_value_that_is_another_one_differs_by_its_name_and_both_values(what, part, tmp_path, monkeypatch):
    before, uses = COMPUTED[what]
    (tmp_path.parent / "other.txt").write_text("3")
    monkeypatch.setenv("OTHER", str(tmp_path.parent / "other.txt"))
    part(before, uses)
    one, same = of_class(), of_class()
    (tmp_path.parent / "other.txt").write_text("4")
    monkeypatch.setenv("LIMIT_OF_MINE", "4")
    part(before, uses)
    other = of_class()
    assert one == same and all(known["digest"] for known in one.values())
    differing = [name for name in one if values.verdict(one[name], other[name], True) == values.OTHER]
    assert len(differing) == 1 and one[differing[0]]["shown"] != other[differing[0]]["shown"]


def of_class():
    return values.of_part("values_of_mine:Mine", ["values_of_mine"], False)[1]


def test_diff_names_the_value_and_only_accepts_its_part(part, tmp_path, monkeypatch, capsys):
    records = []
    for limit in "334":
        monkeypatch.setenv("LIMIT_OF_MINE", limit)
        part("LIMIT = int(os.environ['LIMIT_OF_MINE'])\n", "LIMIT")
        records.append(tmp_path / f"{len(records)}.json")
        records[-1].write_text(json.dumps(bill_of()))
    a, b, c = map(str, records)
    assert main(["diff", a, b, "--only", "nothing"]) == 0
    assert capsys.readouterr().out.startswith(NOTHING)
    assert main(["diff", a, c, "--only", "evictor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("only evictor differs (values_of_mine.LIMIT: 3 -> 4, values_of_mine.environ[LIMIT_OF_MINE]:")
    assert "values_of_mine.LIMIT = 3 -> 4" in out.partition("parts")[2]
    assert main(["diff", a, c, "--only", "nothing"]) == 1
    prints = [json.loads(record.read_text())["fingerprint"] for record in records]
    assert prints[0] == prints[1] != prints[2]
    with pytest.raises(ConfigError, match=r"evictor was values_of_mine\.LIMIT = 3 and is 4"):
        check(json.loads(records[0].read_text()), json.loads(records[2].read_text()), a)


MOVING = {
    "a counter": ("COUNT = 0\ndef count():\n    global COUNT\n    COUNT += 1\n", "count()"),
    "a cache": ("SEEN = {}\n", "SEEN[len(SEEN)] = n"),
    "a cache by another name": ("SEEN = []\ndef keep(held=SEEN):\n    held.append(1)\n", "keep(); SEEN"),
    "numbers from a counter": ("NUMBERS = itertools.count()\n", "next(NUMBERS)"),
    "a class attribute": ("class Tally:\n    calls = 0\n", "Tally.calls += 1"),
    "attributes of an object": ("class Tally:\n    pass\nT = Tally()\nT.n = 0\n", "T.n += 1"),
    "a lock": ("import threading\nLOCK = threading.Lock()\n", "LOCK.acquire(False)"),
}


@pytest.mark.parametrize("what", MOVING)
def test_what_a_run_changes_makes_no_difference_in_a_new_process(what, part):
    bills = []
    for _ in range(2):
        part(*MOVING[what])
        bills.append(bill_of())
    found = compare(*bills)
    assert found.verdict == NOTHING and not found.unknown and bills[0]["fingerprint"] == bills[1]["fingerprint"]


@pytest.mark.parametrize("what", [name for name in MOVING if name != "attributes of an object"])
def test_what_an_earlier_engine_has_left_in_a_counter_or_a_cache_makes_no_difference(what, part):
    module = part(*MOVING[what])
    one = bill_of()
    exec(MOVING[what][1], {**vars(module), "n": 1})  # an eviction
    found = compare(one, bill_of())
    assert found.verdict == NOTHING and not found.unknown


def test_a_computed_value_that_a_run_changes_is_unknown_to_a_later_engine_and_known_in_a_new_process(part, monkeypatch):
    text = "SEEN = [os.environ['LIMIT_OF_MINE']]\n"
    module = part(text, "SEEN.append(n)")
    one = bill_of()
    module.SEEN.append(5)
    found = compare(one, bill_of())
    assert found.unknown == ("evictor",) and "values_of_mine.SEEN, which evictor reads, is" in found.warnings[0]
    part(text, "SEEN.append(n)")
    assert compare(one, bill_of()).verdict == NOTHING


def test_what_cannot_be_told_is_unknown_and_ends_diff_with_6(part, tmp_path, capsys):
    part("HELD = (i for i in range(3))\n", "HELD")
    bill = bill_of()
    (tmp_path / "a.json").write_text(json.dumps(bill))
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 6
    out = capsys.readouterr().out
    assert out.startswith("unknown whether evictor differs; nothing else differs\n")
    assert "values_of_mine.HELD, which evictor reads, is a generator: whether it is the same is not known" in out


def test_a_reading_of_the_clock_is_shown_and_not_counted_and_a_seed_of_it_counts(part):
    part("START = time.time()\n", "START")
    one = bill_of()
    part("START = time.time()\n", "START")
    found = compare(one, bill_of())
    assert found.verdict == NOTHING and [d.counts for d in found.differences] == [False]
    part("SEED = time.time_ns()\n", "SEED")
    one = bill_of()
    part("SEED = time.time_ns()\n", "SEED")
    assert compare(one, bill_of()).subjects == ("evictor",)


def test_a_helper_s_value_counts_by_whatever_way_it_is_read_and_one_that_nobody_reads_does_not(part, monkeypatch):
    helper = {"aid_of_mine": "import os\nSCALE = os.environ['LIMIT_OF_MINE']\nUNREAD = os.environ['LIMIT_OF_MINE']\n"}
    for before, uses in (
        ("import aid_of_mine\n", "aid_of_mine.SCALE"),
        ("from aid_of_mine import SCALE\n", "SCALE"),
        ("import aid_of_mine as h\n", "h.SCALE"),
    ):
        found = []
        for limit in "34":
            monkeypatch.setenv("LIMIT_OF_MINE", limit)
            part(before, uses, helper)
            found.append(values.of_part("values_of_mine:Mine", ["values_of_mine", "aid_of_mine"], False)[1])
        assert [name.rpartition(".")[2] for name in found[0] if found[0][name] != found[1][name]] == ["SCALE"]


def test_a_module_that_one_of_two_runs_has_not_loaded_makes_no_difference(part):
    """Imported within a function, or a built-in part that is not loaded yet: neither diff nor fingerprint."""
    part("", "import aid_of_mine", {"aid_of_mine": "import os\nSCALE = os.environ['LIMIT_OF_MINE']\n"})
    one = bill_of()
    assert "aid_of_mine" in sys.modules
    other = bill_of()
    assert compare(one, other).verdict == NOTHING and one["fingerprint"] == other["fingerprint"]


def test_where_a_part_lies_does_not_matter_and_a_secret_is_not_shown(part, monkeypatch):
    monkeypatch.setenv("LIMIT_OF_MINE", "so secret a text")
    text = (
        "from pathlib import Path\nHERE = Path(__file__).parent / 'x'\nAT = os.path.dirname(__file__)\n"
        "API_KEY = os.environ['LIMIT_OF_MINE']\n"
    )
    module = part(text, "HERE, AT, API_KEY")
    known = of_class()
    assert str(module.AT) not in json.dumps(known) and "so secret" not in json.dumps(known)
    assert known["values_of_mine.AT"]["shown"] == "'.'"


def test_built_in_parts_read_nothing_that_cannot_be_told_and_two_looks_at_them_are_the_same():
    """All that can be loaded here: no ``diff`` of built-ins ends with unknown."""
    seen = 0
    for _, _, target in BUILTINS:
        impl = import_target(target).impl
        try:
            importlib.import_module(impl.partition(":")[0])
        except ImportError:  # a library that is not here
            continue
        files = sources.plugin_source(impl).files
        one, other = (values.of_part(impl, files, True)[1] for _ in range(2))
        assert one == other and not [name for name, known in one.items() if not known["digest"]], impl
        seen += 1
    assert seen > len(BUILTINS) * 0.8


RECEIVED = [
    (1, 1.0), (1, True), ("a", b"a"), ([1, 2], (1, 2)), ([1, 2], [2, 1]), ({1: 2}, {1: 3}), ({"a"}, {"b"}),
    (None, "None"), (float("nan"), 0.0), (0.0, -0.0), ([[1], [2]], [[1, 2]]), (range(3), range(4)),
]  # fmt: skip


@pytest.mark.parametrize("one, other", RECEIVED)
def test_two_values_share_a_digest_only_if_they_are_alike(one, other):
    import copy

    text = lambda value: ValueText().digest(value)  # noqa: E731
    assert text(one) == text(copy.deepcopy(one)) != text(other)


def test_a_value_of_any_size_takes_a_bounded_time_and_one_that_holds_itself_ends():
    with pytest.raises(UnknownValueError, match="more than"):
        ValueText().digest([[i] for i in range(MOST + 1)])
    around = [1]
    around.append(around)
    assert ValueText().digest(around)


def test_what_a_text_says_about_its_names(tmp_path):
    text = (
        "import time\nA = 1\nB = {}\nC = time.time()\nD = int(time.time())\nE = f()\nF = [1]\nF += g()\n"
        "G = {}\nfill(G)\n"
        "if E:\n    H = 1\nclass K:\n    s = 0.5\n    t = f()\n"
    )
    (tmp_path / "m.py").write_text(text)
    begins = assigned._of_file(str(tmp_path / "m.py"), 0).begins
    computed = dict.fromkeys(["D", "E", "F", "G", "H", "K.t"], "computed")
    assert begins == {"A": "said", "B": "said", "C": "clock", "K.s": "said", **computed}
