"""What the documents and the examples show is run: commands, Python blocks, configuration files, tables.

``python tests/test_docs.py`` writes the tables of options, server settings and hooks into their pages again.

In a document a ``toml`` or ``python`` block whose first line is ``# name.ext`` is a file of that name; other Python
blocks run one after another in one namespace.  ``print(...)  # → text`` must print exactly that; a ``console`` line
``$ minivllm ...`` is run, and where an error is shown it must be that error.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
from packages import write_metadata

from minivllm.cli import main
from minivllm.config import SEAMS, EngineConfig, load_config
from minivllm.config.server import ServerConfig
from minivllm.core.request import SamplingParams
from minivllm.hooks.contract import WRAPPERS, HookContracts
from minivllm.hooks.manager import NAMES
from minivllm.registry import Catalog
from minivllm.spec import KINDS
from minivllm.testing import base
from minivllm.testing.cli import main as conformance
from minivllm.text.outputs import CompletionOutput, RequestOutput
from minivllm.wiring import resolve

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# ([\w/.-]+\.\w+)\n")
EXPECTED = re.compile(r"^\s*print\(.*\)  # → (.*)$", re.M)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to run in, which is also on the import path; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before, threads = set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield tmp_path
    torch.set_num_threads(threads)
    forget("acme", "deepest", "my_", known=before)
    sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]


def forget(*names, known=()):
    """Modules of packages whose names begin so."""
    for name in set(sys.modules) - set(known):
        if name.partition(".")[0].startswith(names):
            del sys.modules[name]


def blocks(path: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def run_document(path: Path, capsys) -> int:
    """Run the blocks in order; returns how many commands and Python blocks were run."""
    space, count = {"__name__": path.stem}, 0
    for kind, text in blocks(path):
        name = FILE.match(text)
        if kind in ("toml", "python") and name:
            file = Path(name[1])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            if file.name == "pyproject.toml":
                write_metadata(file, Path("."))
        elif kind == "python":
            run_python(path, text, space, capsys)
            count += 1
        elif kind == "console":
            count += run_console(text, capsys)
    return count


def run_python(path: Path, text: str, space: dict, capsys) -> None:
    capsys.readouterr()
    exec(compile(text, str(path), "exec"), space)
    printed = capsys.readouterr().out.splitlines()
    for want in EXPECTED.findall(text):
        assert want in printed, f"{path.name} promises {want!r}; printed were {printed}"


def run_console(text: str, capsys) -> int:
    """Commands of minivllm; others (pip, git) are only read."""
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    count = 0
    for command, _, output in (part.partition("\n") for part in parts):
        words = shlex.split(command)
        if words[:2] == ["pip", "install"] and words[-1].startswith("./"):
            folder = Path(words[-1].partition("[")[0])
            write_metadata(folder / "pyproject.toml", Path("."))
            sys.path.insert(1, str((folder / "src").resolve()))
        if words[:3] == ["python", "-m", "minivllm.testing"]:
            base.find.cache_clear()
            forget("my_")  # its files may have changed
            code, shown = conformance(words[3:]), capsys.readouterr().out.splitlines()
            assert bool(code) == ("  FAIL  " in output), shown
            shown = [re.sub(r"\(\d+\.\d s\)", "(0.0 s)", line) for line in shown]
            assert all(line in shown for line in output.splitlines() if line not in ("", "...", "```")), shown
            count += 1
            continue
        if words[0] != "minivllm":
            continue
        try:
            code = main(words[1:])
        except SystemExit as end:  # --version
            code = end.code or 0
        out, error = capsys.readouterr()
        if words[1] in ("config", "plugins") and not code:
            assert set(output.splitlines()) <= {*out.splitlines(), "...", "```"}, out
        shown = [line for line in output.splitlines() if line.startswith("minivllm: ")]
        assert all(line in error.splitlines() for line in shown), f"{command}: {error!r}"
        assert bool(code) == any(line.startswith("minivllm: error:") for line in shown), f"{command}: {code} {error}"
        if words[1] == "diff":  # the verdict and the line about the tokens
            assert out.splitlines()[:2] == output.splitlines()[:2], out
        count += 1
    return count


def test_the_quickstart_runs_as_it_is_written(here, capsys):
    assert run_document(DOCS / "quickstart.md", capsys) > 15
    assert json.loads((here / "steps.json").read_text())["traceEvents"]
    for names in (RequestOutput._names(), CompletionOutput._names()):
        assert " ".join(names) + "\n" in (DOCS / "quickstart.md").read_text()


def test_the_page_about_configuration_is_true(here, capsys):
    assert run_document(DOCS / "configuration.md", capsys) >= 12


def test_the_page_about_structured_output_is_true(here, capsys):
    pytest.importorskip("llguidance")
    assert run_document(DOCS / "structured.md", capsys) == 2


def test_the_page_about_the_cache_is_true(here, capsys):
    assert run_document(DOCS / "caching.md", capsys) == 1


def test_what_reproducibility_shows_runs_as_shown(here, capsys):
    assert run_document(DOCS / "reproducibility.md", capsys) == 2


def test_the_experiment_of_the_page_changes_one_part_and_proves_it(here, capsys):
    assert run_document(DOCS / "experiments.md", capsys) >= 8
    lru, deepest = (json.loads((here / name).read_text())["results"] for name in ("lru.json", "deepest.json"))
    assert lru["tokens_hash"] == deepest["tokens_hash"] and deepest["prefix_hit_rate"] > 2 * lru["prefix_hit_rate"]
    assert deepest["stats"]["evictions"] < lru["stats"]["evictions"]


def test_the_plug_ins_of_the_guide_work(here, capsys):
    assert run_document(DOCS / "plugins.md", capsys) >= 5


def test_the_tutorial_ends_in_a_working_package(here, capsys):
    assert run_document(DOCS / "plugins" / "tutorial.md", capsys) >= 8
    done = conformance(["my-evictor", "-k", "spec or options"])
    assert done == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_compile_and_those_with_pocket_run(name, here, capsys):
    path, space = ROOT / name, {"__name__": "document"}
    if not path.is_file():
        pytest.skip(f"no {name} in this checkout")
    for kind, text in blocks(path):
        if kind == "python":
            compile(text, str(path), "exec")
            if "pocket" in text:
                run_python(path, text, space, capsys)


def test_links_between_documents_lead_somewhere():
    for path in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "contrib").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.name} links to {link}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
                slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}
                assert anchor in slugs, f"{path.name} links to {link}; there are {sorted(slugs)}"


# ---- examples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples").iterdir() if p.suffix != ".py"))
def test_an_example_file_gives_a_line_for_each_prompt(name, here, capsys):
    path = ROOT / "examples" / name
    assert main(["run", str(path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = load_config([path])
    assert [line["prompt"] for line in lines] == list(wanted.run.prompts)
    for line in lines:
        assert len(line["outputs"]) == wanted.sampling.get("n", 1)
        assert all(o["finish_reason"] in ("stop", "length") for o in line["outputs"])


def test_the_stream_example_prints_a_story_and_the_times(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stream.py", "Tell me a story about a hen."])
    runpy.run_path(str(ROOT / "examples" / "stream.py"), run_name="__main__")
    story, times = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert len(story.split()) > 10 and "plan_ms" in times


# ---- tables --------------------------------------------------------------------------------------------------------


def table(path: Path, name: str) -> list[str]:
    found = re.search(rf"^<!-- table: {name} -->\n(.*?)^<!-- end -->$", path.read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"{path.name} has no table {name}"
    return found[1].splitlines()


LISTS = ("processors", "strategies", "hooks")  # options that take several plug-ins


def options_table() -> list[str]:
    rows = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        default, meaning = field.default, field.description or ""
        if name in SEAMS:
            default, meaning = default.name, "which plug-in fills the seam"
        elif name in LISTS:
            default, meaning = [choice.name for choice in default], "plug-ins, in order"
        rows.append(f"| `{name}` | {values_of(name, field)} | `{default}` | {meaning} |")
    return rows


def values_of(name: str, field) -> str:
    """What a field takes, in words."""
    kind = field.annotation
    if name in SEAMS:
        return "plug-in"
    if name in LISTS:
        return "plug-ins"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    words = {"list[str]": "names", "str": "text", "int": "whole number", "float": "number", "bool": "true, false"}
    text = next(word for name, word in words.items() if name in str(kind))
    limits = [f"{word} {getattr(m, key)}" for m in field.metadata for key, word in BOUNDS if hasattr(m, key)]
    return " ".join([text, ", ".join(limits)]).strip()


BOUNDS = (("ge", "from"), ("gt", "above"), ("le", "to"))


def test_the_table_of_engine_options_is_the_configuration():
    shown = table(DOCS / "quickstart.md", "options")
    assert shown == options_table(), "run `python tests/test_docs.py`"


def test_the_table_of_sampling_parameters_has_them_all_with_their_defaults():
    def default(f):
        return f.default_factory() if f.default is dataclasses.MISSING else f.default

    rows = [row.split(" | ") for row in table(DOCS / "quickstart.md", "sampling")[2:]]
    shown = [(row[0].strip("| `"), row[1].strip("`")) for row in rows]
    assert shown == [(f.name, repr(default(f))) for f in dataclasses.fields(SamplingParams)]


def test_the_table_of_claims_is_the_one_in_the_code():
    shown = {row.split("|")[1].strip(" `"): row for row in table(DOCS / "plugins.md", "claims")[2:]}
    assert set(shown) == {name for name, kind in KINDS.items() if kind.features or kind.traits}
    for name, row in shown.items():
        for claim, text in (*KINDS[name].features.items(), *KINDS[name].traits.items()):
            assert f"`{claim}`: {text}" in row, (name, claim)


def test_the_table_of_facts_names_what_each_seam_is_asked():
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table(DOCS / "plugins.md", "facts")[2:]]
    facts = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows}
    assert set(facts) == set(KINDS)
    options = {"model": "pocket", "device": "cpu", "kvcache_block_size": 16, "hooks": ["step_log"]}
    loaded = load_config(keywords=options)
    for selection in resolve(loaded.engine, Catalog.discover(environ={}, entry_points=NoPoints())).selections:
        gpu_only = {"sm"}
        assert set(selection.request.facts) == facts[selection.kind] - gpu_only, selection.kind


def hooks_table() -> list[str]:
    rows = ["| hook | kind | is told | when |", "|---|---|---|---|"]
    for name in NAMES:
        contract = getattr(HookContracts, name)
        first = contract.minivllm_spec["firstresult"]
        kind = "first result" if first else "wrapper" if name in WRAPPERS else "observer"
        told = [f"`{p.name}: {p.annotation}`" for p in inspect.signature(contract).parameters.values()][1:]
        when = " ".join(contract.__doc__.split()).replace("``", "`")
        rows.append(f"| `{name}` | {kind} | {', '.join(told).replace('| None', 'or None')} | {when} |")
    return rows


def test_the_table_of_hooks_is_the_contract():
    assert table(DOCS / "hooks.md", "hooks") == hooks_table(), "run `python tests/test_docs.py`"


def test_the_page_about_hooks_runs_as_it_is_written(here, capsys):
    pytest.importorskip("rich", reason='pip install "minivllm[live]"')
    assert run_document(DOCS / "hooks.md", capsys) >= 5


class NoPoints:
    groups = ()


def settings_table() -> list[str]:
    rows = ["| name | default | what it is |", "|---|---|---|"]
    for name, field in ServerConfig.model_fields.items():
        rows.append(f"| `{name}` | `{field.default}` | {field.description} |")
    return rows


def test_the_table_of_server_settings_is_the_configuration():
    assert table(DOCS / "server.md", "settings") == settings_table(), "run `python tests/test_docs.py`"


def write_tables() -> None:
    made = (("quickstart.md", "options", options_table), ("hooks.md", "hooks", hooks_table))
    for page, name, rows in (*made, ("server.md", "settings", settings_table)):
        path = DOCS / page
        text, now = path.read_text(encoding="utf-8"), "\n".join(rows())
        begin = text.index(f"<!-- table: {name} -->\n") + len(f"<!-- table: {name} -->\n")
        path.write_text(text[:begin] + now + text[text.index("\n<!-- end -->", begin) :], encoding="utf-8")


if __name__ == "__main__":
    write_tables()
