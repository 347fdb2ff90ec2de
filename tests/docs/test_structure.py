"""Arrows between the rooms of the tree: which package may import which at run time.  All of them go down.

    │ cli                                                   what a user starts
    │ server.serve  server.app  server.operations  server.desk_work
    │ server.openai                                         OpenAI's API, over the wire and the link to the engine
    │ server.link  server.http                              which do not know of each other
    │ bench  testing  scaffold  pocket  simulate  replay  compare_hf  quantize
    │ traces
    │ frontend                                              text to requests, tokens to text
    │ config  structured                                    a configuration, a grammar -> what the engine is given
    │ record  text  core.engine                             the host: the engine's room needs no torch
    │ plugins  core.functions  core.worker                  the device
    │ loading  layers  kernels                              what models are built of
    │ hooks  core  wiring
    │ energy                                                counters of joules, and whose they were
    │ core.interfaces                                       one file a seam
    │ declared                                              what plug-ins read of a request
    │ registry  registration                                finds plug-ins, chooses one
    │ server  tenant_cache  json_schema  processes  plugins.specs  validation  spec  parameters  native  gguf_file
    │ usage                                                 statistics that stay on this machine
    │ plugin                                                names for authors, each imported when it is used
    ▼ minivllm  hardware  files  plain  errors  moved       what is imported from everywhere

A room is a package or a file of its own name; what a package has no row for is in the room of the package, so
``server`` is what all of the server's folders share: errors, queues, logs.  What only type checkers read (``if
TYPE_CHECKING``) is no arrow, and no import of a name that is data: the plug-ins that a specification names, and targets
that another process imports.  An import within a function is one, and so is one of a lazy public name (``from minivllm
import LLM``).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import minivllm

LAZY = minivllm._LAZY  # public names of the package -> their module
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "minivllm"
BASE = ("minivllm", "files", "plain", "errors", "moved")  # any room that is not one of them may import them
# room -> what it may import beside itself and BASE, top to bottom as in the picture
MAY_IMPORT = {
    "cli": (
        "server.serve pocket simulate replay compare_hf quantize bench traces frontend config record hooks core.engine "
        "core.interfaces registry registration server processes plugins spec usage hardware declared"
    ),
    "server.serve": "server.app server.openai server.link server.http text server processes declared",
    "server.app": "server.operations server.openai server.http server",
    "server.operations": "server.openai server.link server.http server",
    "server.desk_work": "server.openai server.link server.http text core.interfaces server processes",
    "server.openai": "server.link server.http text core.interfaces server tenant_cache json_schema validation declared",
    "server.link": "frontend config record text core.engine core core.interfaces server processes hardware",
    "server.http": "server",
    "bench": (
        "pocket traces frontend config energy core.worker layers hooks core.interfaces registry processes hardware"
    ),
    "testing": (
        "frontend config core.engine plugins core.worker loading layers hooks core wiring core.interfaces registry "
        "registration spec hardware declared parameters"
    ),
    "scaffold": "config plugins.specs spec",
    "pocket": "core.interfaces",
    "simulate": "replay traces config core.engine plugins hooks core.interfaces registry",
    "replay": "traces config core.engine plugins hooks core core.interfaces registry",
    "compare_hf": "frontend layers core.interfaces",
    "quantize": "text loading plugins kernels",
    "traces": "core.engine",
    "frontend": (
        "config structured record text core.engine core.functions core.worker hooks core energy core.interfaces "
        "registry registration usage hardware"
    ),
    "config": "record text loading hooks core.interfaces registry validation spec hardware declared native",
    "structured": "core.interfaces registry tenant_cache",
    "record": "text loading registration spec hardware declared native",
    "text": "core.engine core.interfaces gguf_file processes",
    "core.engine": "core core.interfaces declared",
    "plugins": "core.worker layers kernels hooks core wiring core.interfaces json_schema processes spec",
    "core.functions": "core.worker core core.interfaces",
    "core.worker": "loading layers kernels core wiring core.interfaces registry hardware",
    "loading": "layers core.interfaces gguf_file",
    "layers": "kernels core.interfaces native",
    "kernels": "core.interfaces",
    "hooks": "core registry registration",
    "core": "core.interfaces",
    "wiring": "core.interfaces",
    "energy": "",
    "core.interfaces": "json_schema declared parameters",
    "declared": "registry plugins.specs parameters spec",
    "registry": "registration processes validation spec",
    "registration": "processes plugins.specs spec",
    "server": "processes",
    "tenant_cache": "",
    "json_schema": "",
    "processes": "",
    "plugins.specs": "",
    "validation": "",
    "spec": "parameters",
    "parameters": "",
    "native": "",
    "gguf_file": "",
    "usage": "",
    "plugin": "",
    "minivllm": "hardware errors moved",
    "hardware": "",
    "files": "plain errors",
    "plain": "errors",
    "errors": "",
    "moved": "",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(p): p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts}


def imports(module: str) -> Iterator[str]:
    """The modules of this package that ``module`` imports at run time, somewhere."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base
                found = LAZY.get(alias.name, found) if base == "minivllm" else found
                if found in FILES and found != module:
                    yield found
        todo += ast.iter_child_nodes(node)


def room(module: str) -> str:
    """The row of a module: the longest that is its name, or the name of a package that it is in."""
    name = module.partition(".")[2] or module
    around = [row for row in MAY_IMPORT if name == row or name.startswith(f"{row}.")]
    return max(around, key=len, default="cli" if name == "__main__" else f"no row for {name}")


ARROWS = {module: set(imports(module)) for module in FILES}


def circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """Strongly connected components of several nodes (Tarjan 1972, by reachability: the graph is small)."""

    def reach(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for after in graph.get(todo.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    reached = {node: reach(node) for node in graph}
    found = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph}
    return [one for one in found if len(one) > 1]


def test_a_room_imports_what_its_row_allows_and_the_rows_allow_nothing_else():
    """Both ways, so that the table says what is: a permission that nobody needs any longer is taken out."""
    found: dict[str, set[str]] = {row: set() for row in MAY_IMPORT}
    up = []
    for module, others in ARROWS.items():
        here = room(module)
        for other in others:
            there = room(other)
            if there == here or (there in BASE and here not in BASE):
                continue
            if there in MAY_IMPORT.get(here, "").split():
                found[here].add(there)
            else:
                up.append(f"{module} imports {other}: {here} may not import {there}")
    assert not up, "\n".join(up)
    assert found == {row: set(rooms.split()) for row, rooms in MAY_IMPORT.items()}


def test_every_arrow_goes_down():
    """A row allows rooms below it only, hence no circle of rooms; the picture has the rows in their order."""
    rows = list(MAY_IMPORT)
    for row, rooms in MAY_IMPORT.items():
        above = [other for other in rooms.split() if rows.index(other) <= rows.index(row)]
        assert not above, f"{row} may import {above}, and stands no higher"
    lines = [line[6:].partition("   ")[0].split() for line in __doc__.splitlines() if line[4:5] in ("│", "▼")]
    assert [name for line in lines for name in line] == rows


def test_files_stand_in_no_circle():
    short = {a.partition(".")[2]: {b.partition(".")[2] for b in others} for a, others in ARROWS.items() if "." in a}
    assert not circles(short)


def test_the_host_is_imported_without_torch():
    """Every module of the engine's room, and the offline simulator of it."""
    host = sorted(m for m in FILES if room(m) in ("core", "core.engine") or m == "minivllm.simulate.cases")
    code = f"import importlib, sys\nfor m in {host}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"


def test_an_arrow_is_seen_wherever_it_stands(tmp_path, monkeypatch):
    """Within a function, relative, of a module from its package, by a lazy name; not under TYPE_CHECKING."""
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from minivllm import llm\n"
        "def f():\n    from .worker import runner\n    from ..errors import told\n    import minivllm.files\n"
        "    from minivllm import LLM\n"
    )
    monkeypatch.setitem(FILES, "minivllm.core.x", path)
    found = ["minivllm.core.worker.runner", "minivllm.errors", "minivllm.files", "minivllm.frontend.llm"]
    assert sorted(imports("minivllm.core.x")) == found


def test_a_class_name_is_used_once():
    """In the package: a reader who searches for a name finds one thing."""
    where: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}
