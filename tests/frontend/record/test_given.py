"""Classes that a program passes.  Any seam accepts one, and a record contains its code or reports that it cannot."""

from __future__ import annotations

import importlib
import json
import linecache
import subprocess
import sys
import types

import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.errors import PluginError
from minivllm.frontend.record.diff import compare
from minivllm.frontend.record.live import source_of_class
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.registration import given
from minivllm.runtime.hooks import Hooks, hookimpl

SIZES = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 4, "max_model_len": 256}
HEAD = "import functools, logging\nimport numpy as np\nfrom minivllm.plugins.evictor.lru import Lru\n"
PLAIN = HEAD + "class Mine(Lru):\n    def victims(self, n):\n        return super().victims(n)\n"


class Notebook:
    """Cells in a module without a file, whose lines are stored as in IPython."""

    def __init__(self, name: str, monkeypatch) -> None:
        self.module, self.monkeypatch = types.ModuleType(name), monkeypatch
        self.count = 0
        monkeypatch.setitem(sys.modules, name, self.module)

    def cell(self, text: str, kept: bool = True):
        self.count += 1
        file = f"<ipython-input-{self.module.__name__}-{self.count}>"
        if kept:
            # the next test's cells have the same names
            kept_lines = (len(text), None, text.splitlines(keepends=True), file)
            self.monkeypatch.setitem(linecache.cache, file, kept_lines)
        exec(compile(text, file, "exec"), self.module.__dict__)
        return self.module.__dict__.get("Mine")


@pytest.fixture
def notebook(monkeypatch):
    return lambda name="book_of_mine": Notebook(name, monkeypatch)


def bill_of(**parts):
    with LLM("pocket", **SIZES, **parts) as llm:
        llm.generate("One day", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        return llm.bill_of_materials()


def test_any_seam_takes_a_class_with_options_and_in_lists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # step_log writes where it is

    class First(Fcfs):
        pass

    class Draw(DefaultSampler):
        pass

    class Watch(Hooks):
        steps = 0

        @hookimpl
        def minivllm_step_finished(self, step):
            Watch.steps += 1

    with LLM("pocket", **SIZES, scheduler={"name": First}, evictor=Lru, sampler=Draw, hooks=["step_log", Watch]) as llm:
        out = llm.generate("One day", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
        assert out[0].tokens and Watch.steps >= 4
        assert type(llm.engine.planner.policy) is First
        text = llm.explain("scheduler")
    assert "local/test_given:test_any_seam_takes_a_class_with_options_and_in_lists.<locals>.First" in text
    for wrong in ({"evictor": Fcfs}, {"hooks": [Lru]}, {"evictor": {"prefer": [Fcfs, "lru"]}}):
        with pytest.raises(PluginError, match="is not a subclass of"):
            LLM("pocket", **SIZES, **wrong)


def test_the_same_class_makes_no_difference_and_another_text_of_it_only_that_one(
    notebook, tmp_path, monkeypatch, capsys
):
    book = notebook()
    one, same = bill_of(evictor=book.cell(PLAIN)), bill_of(evictor=book.cell(PLAIN))
    other = bill_of(evictor=book.cell(PLAIN.replace("victims(n)", "victims(n)  # changed")))
    assert compare(one, same).verdict == "nothing that decides the tokens differs"
    assert compare(one, other).verdict == "only evictor differs"
    (part,) = [p for p in one["parts"] if p["seam"] == "evictor"]
    assert part["name"] == "local/book_of_mine:Mine" and "missing" not in part["source"]
    assert part["source"]["texts"] == {"book_of_mine:Mine": PLAIN.partition(HEAD)[2]}
    assert "minivllm.plugins.evictor.lru" in part["source"]["files"]
    for name, bill in (("a", one), ("b", same), ("c", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(bill))
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    assert main(["diff", a, b]) == 0 and main(["diff", a, c, "--only", "evictor"]) == 0
    assert "does not differ" not in capsys.readouterr().err
    assert main(["diff", a, b, "--only", "evictor"]) == 0
    assert "--only evictor: does not differ" in capsys.readouterr().err
    monkeypatch.setattr(given, "_given", {})  # another process
    with pytest.raises(PluginError, match="was a class of the program that wrote this; put it into a separate module"):
        LLM(config=a)


def test_a_record_is_of_the_class_that_was_given_though_the_notebook_defines_it_again(notebook):
    book = notebook()
    with LLM("pocket", **SIZES, evictor=book.cell(PLAIN)) as llm:
        book.cell(PLAIN.replace("victims(n)", "victims(n)[:]"))
        late = llm.bill_of_materials()
    assert compare(late, bill_of(evictor=notebook("book_of_mine").cell(PLAIN))).subjects == ()


USES = {
    "a constant": ("LIMIT = {}\n", "LIMIT", (3, 4)),
    "a function": ("def helper(n):\n    return n * {}\n", "helper(1)", (1, 2)),
    "a function of a function": (
        "def deep():\n    return {}\ndef helper(n):\n    return deep()\n",
        "helper(1)",
        (1, 2),
    ),
    "an array": ("TABLE = np.full(3, {})\n", "TABLE[0]", (1, 2)),
    "a partial": ("half = functools.partial(max, {})\n", "half(1)", (1, 2)),
    "a lambda": ("pick = lambda n: n + {}\n", "pick(1)", (1, 2)),
    "a nested table": ("T = dict(a=[1, (2, {})], b=None)\n", "T['a']", (1, 2)),
    "a used class": ("class Part:\n    def size(self):\n        return {}\n", "Part().size()", (1, 2)),
}


@pytest.mark.parametrize("what", USES)
def test_what_a_typed_class_uses_of_its_surroundings_counts(what, notebook):
    before, used, values = USES[what]
    made = []
    for value in (values[0], values[0], values[1]):
        book = notebook()
        book.cell(HEAD + before.format(value))  # in a cell of its own
        text = PLAIN.partition(HEAD)[2].replace("return super", f"{used}\n        return super")
        made.append(source_of_class(book.cell(text)))
    assert all(one.hash and not one.missing for one in made), made
    assert made[0].hash == made[1].hash != made[2].hash


UNKNOWN = {
    "a file that is open": "import io\nHELD = io.StringIO('x')\n",
    "a generator": "HELD = (n for n in [1])\n",
    "an object": "class Any: pass\nHELD = Any()\n",
    "a table of objects": "HELD = {'a': object()}\n",
    "what exec made": "exec('def HELD(): return 1')\n",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_known_is_unknown_and_never_nothing(what, notebook):
    book = notebook()
    book.cell(HEAD + UNKNOWN[what])
    text = PLAIN.partition(HEAD)[2].replace("return super", "HELD\n        return super")
    bill = bill_of(evictor=book.cell(text))
    found = compare(bill, bill)
    assert found.verdict == "unknown whether evictor differs; nothing else differs" and found.unknown == ("evictor",)
    assert "HELD" in found.warnings[0]


def test_lines_that_nobody_keeps_are_unknown_and_end_diff_with_6(notebook, tmp_path, capsys):
    """A prompt of Python before 3.13, and exec."""
    bill = bill_of(evictor=notebook().cell(PLAIN, kept=False))
    (tmp_path / "a.json").write_text(json.dumps(bill))
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 6
    out = capsys.readouterr().out
    assert out.startswith("unknown whether evictor differs; nothing else differs\n")
    assert "Python has not kept the source lines of book_of_mine:Mine" in out


def test_a_base_class_of_another_cell_counts_as_much_as_the_class_itself(notebook):
    base = PLAIN.replace("Mine", "Base")
    hashes = []
    for text in (base, base, base.replace("victims(n)", "victims(n)[:]")):
        book = notebook()
        book.cell(text)
        source = source_of_class(book.cell("class Mine(Base):\n    def extra(self):\n        return 1\n"))
        assert not source.missing and set(source.texts) == {"book_of_mine:Mine", "book_of_mine:Base"}
        hashes.append(source.hash)
    assert hashes[0] == hashes[1] != hashes[2]


def write(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_a_class_of_a_file_that_the_program_changes_is_not_the_one_of_the_file(tmp_path, monkeypatch):
    """By an attribute, a constant of its module, a method from elsewhere, a closure."""
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        HEAD + "LIMIT = 3\nSTART = __import__('time').time()\nlog = logging.getLogger('x')\n"
        "class Mine(Lru):\n    share = 0.5\n    def victims(self, n):\n        log.debug(START)\n"
        "        return super().victims(max(n, LIMIT, self.share))\n"
        "def make(k):\n    class Made(Lru):\n        def victims(self, n):\n            return super().victims(n + k)\n"
        "    return Made\n"
    )

    def fresh():
        module = write(tmp_path, "file_of_mine", text)
        return module, source_of_class(module.Mine).hash

    module, first = fresh()
    assert fresh()[1] == first and not source_of_class(module.Mine).missing, "a time that it takes is not part of it"
    module, _ = fresh()
    module.LIMIT = 4
    assert source_of_class(module.Mine).hash != first
    module, _ = fresh()
    module.Mine.share = 0.6
    assert source_of_class(module.Mine).hash != first
    module, _ = fresh()
    module.Mine.victims = lambda self, n: Lru.victims(self, n)
    assert source_of_class(module.Mine).hash != first
    module, _ = fresh()
    assert source_of_class(module.make(1)).hash == source_of_class(module.make(1)).hash
    assert source_of_class(module.make(1)).hash != source_of_class(module.make(2)).hash
    assert source_of_class(module.make(object())).missing


def test_a_class_typed_behind_a_script_is_not_taken_for_one_of_the_script(tmp_path, monkeypatch):
    """``python -i script.py``: the module has a file, and the class is not in it."""
    monkeypatch.syspath_prepend(tmp_path)
    module = write(tmp_path, "script_of_mine", PLAIN)
    exec(compile(PLAIN.partition(HEAD)[2].replace("victims(n)", "victims(0)"), "<stdin>", "exec"), module.__dict__)
    source = source_of_class(module.Mine)
    assert "Python has not kept the source lines of script_of_mine:Mine" in source.missing
    exec("class Bare(Lru): pass", module.__dict__)
    assert source_of_class(module.Bare).missing


SCRIPT = """
import sys
from minivllm import LLM, SamplingParams
from minivllm.plugins.evictor.lru import Lru

class Mine(Lru):
    "Of a script."
    def victims(self, n):
        return super().victims(n)

if __name__ == "__main__":
    with LLM("pocket", device="cpu", num_kvcache_blocks=64, max_num_seqs=2, evictor=Mine, record=sys.argv[1]) as llm:
        llm.generate("One day", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
"""


def test_a_script_gives_its_own_class_and_its_text_is_in_the_record(tmp_path):
    (tmp_path / "exp.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "exp.py", "run.json"], cwd=tmp_path, check=True)
    bill = json.loads((tmp_path / "run.json").read_text())
    (part,) = [p for p in bill["parts"] if p["seam"] == "evictor"]
    assert part["name"] == "local/__main__:Mine" and "missing" not in part["source"]
    assert '"Of a script."' in part["source"]["texts"]["__main__:Mine"] and "__main__" in part["source"]["files"]


def test_a_worker_process_that_cannot_have_a_class_says_so_and_host_parts_need_none():
    class First(Fcfs):
        pass

    class Draw(DefaultSampler):
        pass

    with LLM("pocket", **SIZES, executor="process", scheduler=First) as llm:
        assert llm.generate("One day", SamplingParams(max_tokens=2), use_tqdm=False)[0].tokens
    with pytest.raises(PluginError, match="passed as an object: put it into a separate module and name it"):
        LLM("pocket", **SIZES, executor="process", sampler=Draw)


def test_a_class_may_hold_what_is_no_value_of_its_own(notebook):
    """Loggers, library modules and functions are identified by a name or a version."""
    book = notebook()
    book.cell(HEAD + "import heapq, packaging.version\nlog = logging.getLogger('a')\nfrom math import ceil\n")
    text = PLAIN.partition(HEAD)[2].replace(
        "return super",
        "log, heapq.heappush, np.float32, ceil, packaging.version.Version, functools\n        return super",
    )
    source = source_of_class(book.cell(text))
    assert not source.missing and "version of packaging" in source.files
