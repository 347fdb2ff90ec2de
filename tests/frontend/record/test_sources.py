"""The files that the source of a part covers, and the report if the source is unknown."""

from __future__ import annotations

import json
import sys
import types

import pytest
from plugin_helpers import write_package
from record_helpers import EVICTOR, bills, changed, one_thread, tiny_model

from minivllm.cli import main
from minivllm.frontend.record import sources
from minivllm.frontend.record.diff import compare

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


PATHS = {
    "os.path": "import os\nT = open(os.path.join(os.path.dirname(__file__), 't.json'))\n",
    "a sum of texts": "import os\nT = open(os.path.dirname(__file__) + '/t.json')\n",
    "an f-string": "import os\nH = os.path.dirname(__file__)\nT = open(f'{H}/t.json')\n",
    "a part of a name": "H = Path(__file__).parent\ndef load(n):\n    return (H / f't{n}son').read_text()\n",
    "a format": "import os\nT = open('{}/t.json'.format(os.path.dirname(__file__)))\n",
    "a percent": "import os\nT = open('%s/t.json' % os.path.dirname(__file__))\n",
    "a constant": "N = 't.json'\nT = (Path(__file__).parent / N).read_text()\n",
    "a function's argument": "def load(n):\n    return (Path(__file__).parent / n).read_text()\nT = load('t.json')\n",
    "a function's answer": "def here():\n    return Path(__file__).parent\nT = open(here() / 't.json')\n",
    "a default": "def load(h=Path(__file__).parent):\n    return open(h / 't.json')\n",
    "a loop": "for n in ('t.json', 'u'):\n    T = open(Path(__file__).parent / n)\n",
    "a resource": "from importlib import resources\nT = resources.files(__package__).joinpath('t.json')\n",
    "pkgutil": "import pkgutil\nT = pkgutil.get_data(__name__, 't.json')\n",
    "its spec": "import os\nT = open(os.path.join(os.path.dirname(__spec__.origin), 't.json'))\n",
    "the current folder": "T = open('t.json')\n",
    "a pattern": "T = list(Path(__file__).parent.glob('*.json'))\n",
    "a list of all": "T = [p.read_text() for p in Path(__file__).parent.iterdir()]\n",
    "annotated": "H: Path = Path(__file__).parent\nT = (H / 't.json').read_text()\n",
}


@pytest.mark.parametrize("how", PATHS)
def test_a_data_file_is_covered_however_its_path_is_put_together(how, write, tmp_path):
    write("opens_of_mine", "from pathlib import Path\n" + PATHS[how] + EVICTOR)
    found = []
    for text in "112":
        (tmp_path / "t.json").write_text(text)
        found.append(sources.plugin_source("opens_of_mine:Mine").hash)
    assert found[0] == found[1] != found[2]


def test_data_of_the_package_counts_and_a_word_of_a_docstring_does_not(write, tmp_path):
    package = tmp_path / "pack_of_mine"
    (package / "deep").mkdir(parents=True)
    (package / "data").mkdir()
    for name in ("__init__.py", "deep/__init__.py"):
        (package / name).write_text("")
    (package / "deep" / "part.py").write_text(
        '"""Reads notes.txt never."""\nfrom pathlib import Path\n'
        "T = Path(__file__).parents[1] / 'data' / 'a.json'\nnp = None\nnp.save(T.with_name('made.npy'), 1)\n" + EVICTOR
    )
    for name in ("data/a.json", "data/made.npy", "data/b.json", "deep/notes.txt"):
        (package / name).write_text("1")
    files = sources.plugin_source("pack_of_mine.deep.part:Mine").files
    assert [name for name in files if ":" in name] == ["pack_of_mine.deep.part:../data/a.json"]
