"""The examples in the documents are run: commands, Python blocks, configuration files, tables.

``python tests/docs/test_docs.py`` writes the tables of options, server settings and hooks into their pages again.
``doc_runner`` runs and compares the blocks.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

# as pytest does, for ``python tests/docs/test_docs.py``
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import pytest
import torch
from doc_runner import Page, both, forget
from doc_runner import blocks as doc_blocks

from minivllm.cli import main
from minivllm.config import SEAMS, EngineConfig, load_config
from minivllm.config.resolve import resolve
from minivllm.config.server import ServerConfig
from minivllm.core import declared_params
from minivllm.core.interfaces.params import SamplingParams
from minivllm.plugins.executor.options import MultiprocessOptions, RayOptions, SimOptions
from minivllm.registration.spec import KINDS
from minivllm.registry import Catalog
from minivllm.runtime.hooks.contract import FIGURES, WRAPPERS, HookContracts
from minivllm.runtime.hooks.manager import NAMES
from minivllm.testing.cli import main as conformance

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to an empty folder that is also on the import path.  Modules imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in (("DEVICE", "cpu"), ("DTYPE", "float32")):  # elsewhere ``auto`` may find others, with other sums
        monkeypatch.setenv(f"MINIVLLM__{name}", value)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    before, threads = set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield tmp_path
    torch.set_num_threads(threads)
    forget("acme", "deepest", "my_", known=before)
    sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]


# page -> how many commands and Python blocks are run at least
PAGES = {
    "quickstart": 7,
    "page": 0,
    "terminal": 0,
    "options": 3,
    "sampling": 10,
    "python": 8,
    "configuration": 11,
    "structured": 2,
    "taps": 2,
    "expert-routes": 2,
    "adapters": 2,
    "weights": 1,
    "images": 0,
    "caching": 1,
    "tiers": 2,
    "compression": 6,
    "sessions": 1,
    "reproducibility": 2,
    "speculative": 1,
    "experiments": 10,
    "bench": 5,
    "plugins": 9,
    "plugins/tutorial": 8,
    "eviction": 3,
    "scheduling": 0,
    "simulator": 5,
    "energy": 7,
    "quantization": 2,
    "quantized-checkpoints": 0,
    "tensor-parallelism": 1,
    "server": 2,
    "api": 0,
    "replicas": 1,
    "accelerators": 1,
    "vllm-names": 0,
    "attention": 0,
    "compare-hf": 2,
    "performance": 0,
    "glossary": 0,
    "finding-your-way": 0,
    "compatibility": 0,
    "models": 1,
    "architecture": 0,
    "architecture/overview": 0,
    "architecture/step": 1,
    "architecture/scheduling": 0,
    "architecture/cache": 0,
    "architecture/device": 0,
    "architecture/server": 0,
}


SLOW = ("plugins", "plugins/tutorial")  # they install a package, and run the kit several times


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PAGES])
def test_a_page_shows_what_is_printed(name, here):
    if name == "structured":
        pytest.importorskip("llguidance")
    assert Page(DOCS / f"{name}.md").run() >= PAGES[name]
    if name == "python":
        assert json.loads((here / "steps.json").read_text())["traceEvents"]
    if name == "experiments":
        lru, deepest = (json.loads((here / file).read_text())["results"] for file in ("lru.json", "deepest.json"))
        assert lru["tokens_hash"] == deepest["tokens_hash"] and deepest["prefix_hit_rate"] > 2 * lru["prefix_hit_rate"]
        assert deepest["stats"]["evictions"] < lru["stats"]["evictions"]
    if name == "plugins":
        assert conformance(["acme/naive"]) == 0
        assert conformance(["acme/no_double"]) == 3  # its values are in the page's test class
    if name == "plugins/tutorial":
        assert conformance(["my-evictor", "-k", "spec or options"]) == 0


def test_the_page_about_hooks_shows_what_is_printed(here):
    pytest.importorskip("rich", reason='pip install "minivllm[live]"')
    assert Page(DOCS / "hooks.md").run() >= 6


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_blocks_beside_the_pages_run_or_parse(name, here):
    path = ROOT / name
    if not path.is_file():
        pytest.skip(f"no {name} in this checkout")
    Page(path).run()


def test_each_story_of_the_readme_is_what_the_model_tells(here):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^> \*(.+?)\* ((?:.*\n)(?:> .*\n)*)", page, re.M)
    flags = re.search(r"`minivllm generate --chat \"\.\.\.\" (.*)`", page)[1].split()
    assert quotes
    for prompt, story in quotes:
        with both() as out:
            assert main(["generate", "--chat", prompt, *flags, "--max-tokens", "400"]) == 0
        received = out.getvalue().rpartition("\n")[0].rpartition("\n")[0]  # without the line of figures
        assert " ".join(received.split()) == " ".join(story.replace("\n> ", " ").split())


def test_every_page_is_run():
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    generated = {page for page in pages if page.startswith("plugins/")} - {"plugins/tutorial"}  # test_plugin_pages
    assert pages - generated == {*PAGES, "hooks"}


def test_what_is_not_compared_has_a_reason():
    marks = [block for path in (*DOCS.glob("*.md"), ROOT / "README.md") for block in doc_blocks(path) if block.mark]
    assert marks and all(len(block.mark.partition(": ")[2]) > 10 for block in marks)
    for block in marks:  # figures of a machine need its name and a date
        assert not block.mark.startswith("measured") or re.search(r"20\d\d-\d\d", block.mark), block


def test_links_between_documents_lead_somewhere():
    beside = [path for folder in ("contrib", "benchmarks", "minivllm") for path in (ROOT / folder).rglob("*.md")]
    for path in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *beside]:
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)  # code has brackets too
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
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


@pytest.mark.parametrize(
    "name", sorted(p.name for p in (ROOT / "examples").iterdir() if p.suffix not in (".py", ".ipynb"))
)
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


LISTS = ("processors", "strategies", "hooks", "kvstore", "adapters")  # options that take several plug-ins


def options_table() -> list[str]:
    """Return the table of engine options, without those whose default is the plug-in ``auto``."""
    rows = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        if name in SEAMS and field.default.name == "auto":
            continue
        default, meaning = field.default, field.description or ""
        if name in SEAMS:
            default, meaning = default.name, "plug-in of the seam"
        elif name in LISTS:
            default, meaning = [choice.name for choice in default], "names of plug-ins, in the order in which they act"
        rows.append(f"| `{name}` | {values_of(name, field)} | `{default}` | {meaning} |")
    return rows


def test_the_page_names_the_options_whose_default_plugin_is_auto():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    shown = re.search(r"The value of these options is a plug-in, `auto` by default: (.*?)\.\n", page, re.S)[1]
    automatic = [
        name for name, field in EngineConfig.model_fields.items() if name in SEAMS and field.default.name == "auto"
    ]
    assert re.findall(r"`(\w+)`", shown) == automatic


def values_of(name: str, field) -> str:
    """Return the values of a field in words."""
    kind = field.annotation
    if name in SEAMS:
        return "plug-in"
    if name in LISTS:
        return "plug-ins"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if kind == bool | Literal["auto"]:
        return "`auto`, true, false"
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is Literal:
        return "some of " + ", ".join(f"`{value}`" for value in get_args(get_args(kind)[0]))
    words = {
        "dict": "table",
        "list[str]": "names",
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true, false",
    }
    text = next(word for name, word in words.items() if name in str(kind))
    limits = [f"{word} {getattr(m, key)}" for m in field.metadata for key, word in BOUNDS if hasattr(m, key)]
    return " ".join([text, ", ".join(limits)]).strip()


BOUNDS = (("ge", "from"), ("gt", "above"), ("le", "to"))


def test_the_table_of_engine_options_is_the_configuration():
    shown = table(DOCS / "options.md", "options")
    assert shown == options_table(), "run `python tests/docs/test_docs.py`"


def test_the_table_of_sampling_parameters_has_them_all_with_their_defaults():
    def default(f):
        return f.default_factory() if f.default is dataclasses.MISSING else f.default

    rows = [row.split(" | ") for row in table(DOCS / "options.md", "sampling")[2:]]
    shown = [(row[0].strip("| `"), row[1].strip("`")) for row in rows]
    assert shown == [(f.name, repr(default(f))) for f in dataclasses.fields(SamplingParams)]


def seams_of(plugins: Iterable[str]) -> str:
    """Return the names of plug-ins behind the name of their seam, such as "sampler `typical`"."""
    found: dict[str, list[str]] = {}
    for plugin in plugins:
        seam, _, name = plugin.partition(" ")
        found.setdefault(seam, []).append(re.sub(r"'(.*)'", r"`\1`", name))
    return ", ".join(f"{seam} {', '.join(names)}" for seam, names in found.items())


def declared_table() -> list[str]:
    rows = ["| name | default | range | of | meaning |", "|---|---|---|---|---|"]
    for name, one in declared_params.builtin().items():
        by = seams_of(one.by)
        rows.append(f"| `{name}` | `{one.param.default!r}` | {one.param.wants} | {by} | {one.param.summary} |")
    return rows


def test_the_table_of_declared_parameters_is_what_the_specs_say():
    assert table(DOCS / "options.md", "declared") == declared_table(), "run `python tests/docs/test_docs.py`"


@pytest.mark.parametrize("seam", KINDS)
def test_the_page_of_a_seam_shows_the_claims_in_the_code(seam):
    lines = table(DOCS / f"plugins/{seam}.md", "spec")
    kind = KINDS[seam]
    wanted = [f"* `{name}`: {text}" for names in (kind.features, kind.traits) for name, text in names.items()]
    assert [line for line in lines if line.startswith("* ")] == wanted


def test_the_table_of_facts_names_what_each_seam_is_asked():
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table(DOCS / "plugins.md", "facts")[2:]]
    seams = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    facts = {seam: {fact for fact, shown in seams.items() if seam in shown} for seam in KINDS}
    assert all(facts[seam] == set(kind.facts) for seam, kind in KINDS.items())
    options = {"model": "pocket", "device": "cpu", "kvcache_block_size": 16, "hooks": ["step_log"]}
    loaded = load_config(keywords=options)
    for selection in resolve(loaded.engine, Catalog.discover(environ={}, entry_points=NoPoints())).selections:
        gpu_only = {"sm"}
        assert set(selection.request.facts) == facts[selection.kind] - gpu_only, selection.kind


def hooks_table() -> list[str]:
    rows = ["| hook | kind | arguments | what it does |", "|---|---|---|---|"]
    for name in NAMES:
        contract = getattr(HookContracts, name)
        first = contract.minivllm_spec["firstresult"]
        kind = "first result" if first else "wrapper" if name in WRAPPERS else "observer"
        kind = "figures" if name == FIGURES else kind
        received = [f"`{p.name}: {p.annotation}`" for p in inspect.signature(contract).parameters.values()][1:]
        when = " ".join(contract.__doc__.split()).replace("``", "`")
        rows.append(f"| `{name}` | {kind} | {', '.join(received).replace('| None', 'or None')} | {when} |")
    return rows


def test_the_table_of_hooks_is_the_contract():
    assert table(DOCS / "hooks.md", "hooks") == hooks_table(), "run `python tests/docs/test_docs.py`"


class NoPoints:
    groups = ()


def settings_table() -> list[str]:
    rows = ["| name | default | what it is |", "|---|---|---|"]
    for name, field in ServerConfig.model_fields.items():
        rows.append(f"| `{name}` | `{field.default}` | {field.description} |")
    return rows


def test_the_table_of_server_settings_is_the_configuration():
    assert table(DOCS / "server.md", "settings") == settings_table(), "run `python tests/docs/test_docs.py`"


def executor_table(name: str) -> list[str]:
    rows = [f"| option of `{name}` | values | default | |", "|---|---|---|---|"]
    for option, field in EXECUTORS[name][1].model_fields.items():
        rows.append(f"| `{option}` | {values_of(option, field)} | `{field.default}` | {field.description} |")
    return rows


RANKS = "tensor-parallelism.md"
EXECUTORS = {
    "sim": ("simulator.md", SimOptions),
    "multiprocess": (RANKS, MultiprocessOptions),
    "ray": (RANKS, RayOptions),
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_table_of_an_executor_is_its_options(name):
    page = DOCS / EXECUTORS[name][0]
    assert table(page, name) == executor_table(name), "run `python tests/docs/test_docs.py`"


def write_tables() -> None:
    made = (("options.md", "options", options_table), ("hooks.md", "hooks", hooks_table))
    more = (("options.md", "declared", declared_table), ("server.md", "settings", settings_table))
    ours = ((page, name, partial(executor_table, name)) for name, (page, _) in EXECUTORS.items())
    for page, name, rows in (*made, *more, *ours):
        path = DOCS / page
        text, now = path.read_text(encoding="utf-8"), "\n".join(rows())
        begin = text.index(f"<!-- table: {name} -->\n") + len(f"<!-- table: {name} -->\n")
        path.write_text(text[:begin] + now + text[text.index("\n<!-- end -->", begin) :], encoding="utf-8")


if __name__ == "__main__":
    write_tables()
