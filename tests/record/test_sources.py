"""What the source of a part covers, and what is said where nobody knows it."""

from __future__ import annotations

import json
import sys
import types

import pytest
from plugin_helpers import write_package
from record_helpers import EVICTOR, bills, changed, one_thread, tiny_model

from minivllm.cli import main
from minivllm.record import sources
from minivllm.record.diff import compare

write = pytest.fixture(write_package)
model = pytest.fixture(scope="module")(tiny_model)
single = pytest.fixture(autouse=True)(one_thread)
made = pytest.fixture(bills)


def test_a_base_class_of_another_package_is_covered_through_the_package_that_hands_it_on(tmp_path, monkeypatch):
    lib, own = tmp_path / "site-packages" / "base_lib", tmp_path / "site-packages" / "own_plugin"
    for folder in (lib, own):
        folder.mkdir(parents=True)
    (lib / "__init__.py").write_text("from .real import Base\nfrom .other import x\n")
    (lib / "real.py").write_text("class Base:\n    keep = 1\n")
    (lib / "other.py").write_text("x = 1\n")
    (own / "__init__.py").write_text("import base_lib as b\nimport json\nclass Mine(b.Base, json.JSONEncoder): pass\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    first = sources.plugin_source("own_plugin:Mine")
    assert set(first.files) == {"own_plugin", "base_lib", "base_lib.real"}
    (lib / "real.py").write_text("class Base:\n    keep = 2\n")
    assert sources.plugin_source("own_plugin:Mine").hash != first.hash


@pytest.mark.parametrize(
    ("handed_on", "mine"),
    [("from .real import *", "class Mine(b.Base)"), ("from .real import Base", "B = b.Base\nclass Mine(B)")],
)
def test_a_base_class_behind_a_star_or_another_name_is_covered(tmp_path, monkeypatch, handed_on, mine):
    site = tmp_path / "site-packages"
    (site / "star_lib").mkdir(parents=True)
    (site / "star_lib" / "__init__.py").write_text(handed_on + "\n")
    (site / "star_lib" / "real.py").write_text("class Base:\n    keep = 1\n")
    (site / "star_plugin.py").write_text(f"import star_lib as b\n{mine}: pass\n")
    monkeypatch.syspath_prepend(site)
    assert set(sources.plugin_source("star_plugin:Mine").files) == {"star_plugin", "star_lib", "star_lib.real"}


@pytest.mark.parametrize(
    "text",
    [
        "LOG = 'out.txt'\nopen(LOG, 'w')\n",
        "open(Path(__file__).parent / 'out.txt', 'w')\n",
        "HERE = Path(__file__).parent\n(HERE / 'out.txt').write_text('x')\n",
        "(Path(__file__).parent / 'out.txt').open(mode='a')\n",
    ],
)
def test_a_file_that_a_part_writes_is_no_source_of_it(tmp_path, text):
    (tmp_path / "out.txt").write_text("1")
    assert not list(sources.beside(tmp_path / "m.py", text.encode()))
    read = b"HERE = Path(__file__).parent\nopen(HERE / 'out.txt')\n"
    assert [name for name, _ in sources.beside(tmp_path / "m.py", read)] == ["out.txt"]


def test_data_files_that_a_part_names_beside_itself_are_covered(write, tmp_path):
    write(
        "table_of_mine",
        "from pathlib import Path\nA = Path(__file__).parent / 'tables' / 'a.json'\n"
        "B = open(str(Path(__file__).with_name('b.bin')), 'rb')\nC = '../c.txt'\n" + EVICTOR,
    )
    folder = tmp_path
    (folder / "tables").mkdir()
    for name in ("tables/a.json", "b.bin", "unnamed.json"):
        (folder / name).write_text("1")
    first = sources.plugin_source("table_of_mine:Mine")
    assert {n for n in first.files if ":" in n} == {"table_of_mine:tables/a.json", "table_of_mine:b.bin"}
    (folder / "tables" / "a.json").write_text("2")
    assert sources.plugin_source("table_of_mine:Mine").hash != first.hash


def test_where_a_source_is_unknown_headline_and_exit_code_say_so(made, monkeypatch, tmp_path, capsys):
    module = types.ModuleType("typed_in")
    exec(EVICTOR, module.__dict__)
    module.Mine.__module__ = "typed_in"
    monkeypatch.setitem(sys.modules, "typed_in", module)
    one = made(evictor="typed_in:Mine", allow_targets=["typed_in"])
    found = compare(one, one)
    assert found.verdict == "unknown whether evictor differs; nothing else differs" and found.unknown == ("evictor",)
    other = changed(one, versions__torch="9")
    assert compare(one, other).verdict == "unknown whether evictor differs; torch differs"
    file = tmp_path / "a.json"
    file.write_text(json.dumps(one))
    assert main(["diff", str(file), str(file)]) == 6 and main(["diff", str(file), str(file), "--only", "nothing"]) == 6
    assert main(["diff", str(file), str(file), "--only", "evictor"]) == 0
    assert "unknown whether evictor differs" in capsys.readouterr().out


def test_a_hook_without_a_source_leaves_nothing_unknown(made):
    one = made()
    hook = {**one["parts"][0], "seam": "hooks.typed_in", "source": {"hash": "", "files": {}}}
    bill = {**one, "parts": [*one["parts"], hook]}
    found = compare(bill, bill)
    assert found.unknown == () and found.verdict == "nothing that decides the tokens differs"
    assert any("hooks.typed_in" in line for line in found.warnings)
    hook["seam"] = "drafter.typed_in"
    assert compare(bill, bill).unknown == ("drafter.typed_in",)
