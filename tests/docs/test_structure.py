"""Check the imports of the tree: which part may import which, and that neither files nor folders import in a circle.

The picture orders the parts (rooms) by their imports at run time; all arrows point down.

    │ cli                                                   the commands
    │ server.cluster                                        servers as deployments of Ray Serve
    │ server.batch                                          requests of a file, by the application without a socket
    │ server.serve  server.app  server.operations  server.prefixes  server.weights  server.compat  server.pool_jobs
    │ server.page                                           the page, and the state of the engine for it
    │ server.replicas                                       several engines behind one address
    │ server.anthropic                                      Anthropic's Messages API, over the chats of OpenAI's
    │ server.responses                                      OpenAI's Responses API, over its chats
    │ server.ollama                                         another protocol, by the classes of OpenAI's
    │ server.embedding                                      vectors of texts
    │ server.openai                                         OpenAI's API, over the wire and the link to the engine
    │ server.link  server.http                              which do not import each other
    │ lab.bench  testing  testing.scaffold  pocket  lab.simulate  lab.replay  lab.compare_hf  lab.quantize
    │ lab.traces
    │ frontend                                              text to requests, tokens to text
    │ config  runtime.structured                            a configuration, a grammar -> the engine's input
    │ runtime.images                                        images of requests to pixels and placeholders
    │ frontend.record  plugins
    │ runtime.text  core.engine                             the host side: the engine needs no torch
    │ device.functions  device.worker                       the device side
    │ device.loading  device.layers  device.kernels         the parts of models
    │ runtime.hooks  core  core.wiring
    │ runtime.energy                                        counters of joules, and the account of each request
    │ runtime.replies                                       reasoning and calls in the text of a model
    │ core.interfaces                                       one file a seam
    │ core.declared_params                                         the request parameters that plug-ins declare
    │ registry  registration                                find plug-ins, choose one
    │ server  runtime.tenant_cache  core.json_schema  runtime.processes
    │ device.compile_processes  plugins.specs
    │ registration.spec  registration.parameters  registration.fresh  registration.given
    │ device.native  device.loading.gguf_file
    │ runtime.usage                                         statistics that stay on this machine
    │ plugin                                                names for authors, each imported when it is used
    ▼ minivllm  device.hardware  device.early  files  validation  errors  limits  moved    imported from everywhere

A room is a package or a file of its own name; a module without a row belongs to the room of its package, so ``server``
is the part that all of the server's folders share: errors, queues, logs.  Two graphs are checked:

* run time: imports within functions and those of a lazy public name (``from minivllm import LLM``) count, imports under
  ``TYPE_CHECKING`` do not;
* reading order: imports under ``TYPE_CHECKING`` count, imports within functions do not.  No files and no folders of the
  first level form a circle in it.

The plug-ins that a specification names, and targets that another process imports, are data in both.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minivllm

LAZY = minivllm._LAZY  # public names of the package -> their module
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "minivllm"
# rooms that any room which is not one of them may import
BASE = ("minivllm", "files", "validation", "errors", "limits", "moved")
# room -> what it may import beside itself and BASE, top to bottom as in the picture
MAY_IMPORT = {
    "cli": (
        "server.cluster server.batch server.serve server.openai "
        "lab.bench pocket lab.simulate lab.replay lab.compare_hf lab.quantize lab.traces "
        "frontend config frontend.record core.engine plugins runtime.hooks core.interfaces core.declared_params "
        "registry registration server runtime.processes registration.spec registration.fresh "
        "runtime.replies runtime.usage device.hardware"
    ),
    "server.cluster": "server.serve server.app server.replicas server.link server.http config plugins server",
    "server.batch": "server.serve server.app server.replicas server",
    "server.serve": (
        "server.app server.replicas server.openai server.link server.http frontend runtime.text core.declared_params "
        "server runtime.processes"
    ),
    "server.app": (
        "server.operations server.prefixes server.weights server.page server.replicas server.embedding server.compat "
        "server.anthropic server.responses server.ollama server.openai server.http server"
    ),
    "server.operations": "server.anthropic server.openai server.link server.http server",
    "server.prefixes": "server.openai plugins core.interfaces server",
    "server.weights": "server.openai server",
    "server.compat": "server.openai server",
    "server.pool_jobs": (
        "server.openai server.link server.http runtime.text runtime.replies core.interfaces server runtime.processes"
    ),
    "server.page": "server.openai server.http server",
    "server.replicas": (
        "server.openai server.link core.engine core.interfaces server registry registration registration.spec"
    ),
    "server.anthropic": "server.openai server.http runtime.text server",
    "server.responses": "server.openai server.link server.http runtime.text server runtime.processes",
    "server.ollama": "server.embedding server.openai server.http server",
    "server.embedding": "server.openai server.http frontend core.interfaces server",
    "server.openai": (
        "server.link server.http runtime.images runtime.text runtime.replies core.interfaces core.declared_params "
        "server runtime.processes runtime.tenant_cache core.json_schema registry registration registration.spec"
    ),
    "server.link": (
        "frontend config frontend.record runtime.text core.engine core core.interfaces server "
        "runtime.processes registration.fresh device.hardware device.early"
    ),
    "server.http": "server runtime.processes",
    "lab.bench": (
        "pocket lab.traces frontend config device.worker device.layers runtime.hooks runtime.energy "
        "core.interfaces registry registration.fresh device.hardware"
    ),
    "testing": (
        "frontend config core.engine plugins runtime.text device.worker device.loading device.layers runtime.hooks "
        "core core.wiring runtime.replies core.interfaces core.declared_params registry registration registration.spec "
        "registration.parameters device.hardware"
    ),
    "testing.scaffold": "config plugins.specs registration.spec",
    "pocket": "core.interfaces",
    "lab.simulate": "lab.replay lab.traces frontend config core.engine plugins runtime.hooks core.interfaces registry",
    "lab.replay": "lab.traces config core.engine plugins runtime.hooks core core.interfaces registry",
    "lab.compare_hf": "frontend device.layers core.interfaces",
    "lab.quantize": "runtime.text plugins device.loading device.kernels",
    "lab.traces": "core.engine core.interfaces",
    "frontend": (
        "config runtime.structured runtime.images frontend.record runtime.text core.engine device.functions "
        "device.loading device.worker runtime.hooks core runtime.energy core.interfaces registry registration.given "
        "device.compile_processes runtime.usage device.hardware device.early"
    ),
    "config": (
        "runtime.images frontend.record runtime.text device.loading runtime.hooks core.interfaces core.declared_params "
        "registry registration.spec device.native device.hardware"
    ),
    "runtime.structured": "core.interfaces registry runtime.replies runtime.tenant_cache",
    "runtime.images": "runtime.text core.interfaces registry runtime.processes registration.spec",
    "frontend.record": (
        "core.interfaces runtime.text device.loading core.declared_params registration registration.given "
        "registration.spec device.native device.hardware"
    ),
    "plugins": (
        "runtime.text device.worker device.loading device.layers device.kernels device.native runtime.hooks core "
        "core.wiring runtime.replies core.interfaces core.json_schema runtime.processes registration.spec "
        "registration.fresh device.loading.gguf_file device.early"
    ),
    "runtime.text": (
        "core.engine core.interfaces registry runtime.replies runtime.processes registration.fresh "
        "device.loading.gguf_file"
    ),
    "core.engine": "core core.interfaces core.declared_params",
    "device.functions": "device.worker core core.interfaces",
    "device.worker": (
        "device.loading device.layers device.kernels device.native core core.wiring core.interfaces registry "
        "device.compile_processes device.hardware device.early"
    ),
    "device.loading": "device.layers core core.interfaces registration.given device.loading.gguf_file",
    "device.layers": "device.kernels core.interfaces device.native device.hardware",
    "device.kernels": "core.interfaces registration.fresh device.compile_processes device.early",
    "runtime.hooks": "core registry registration",
    "core": "core.interfaces",
    "core.wiring": "core.interfaces",
    "runtime.energy": "",
    "runtime.replies": "core.json_schema",
    "core.interfaces": "core.declared_params core.json_schema registration.spec registration.parameters",
    "core.declared_params": "registry plugins.specs registration.spec registration.parameters",
    "registry": "registration registration.spec registration.fresh registration.given",
    "registration": "plugins.specs registration.spec registration.fresh",
    "server": "runtime.processes",
    "runtime.tenant_cache": "",
    "core.json_schema": "",
    "runtime.processes": "registration.fresh",
    "device.compile_processes": "registration.fresh",
    "plugins.specs": "",
    "registration.spec": "registration.parameters",
    "registration.parameters": "",
    "registration.fresh": "",
    "registration.given": "",
    "device.native": "",
    "device.loading.gguf_file": "",
    "runtime.usage": "",
    "plugin": "",
    "minivllm": "device.hardware device.early errors moved",
    "device.hardware": "",
    "device.early": "",
    "files": "validation errors",
    "validation": "errors",
    "errors": "",
    "limits": "",
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
        yield from (found for found in named(node, package) if found != module)
        todo += ast.iter_child_nodes(node)


def named(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules of this package that an import statement names; ``package`` is where the statement is."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in FILES)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            found = f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base
            found = LAZY.get(alias.name, found) if base == "minivllm" else found
            if found in FILES:
                yield found


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
    """The check goes both ways, so that the table is exact, and a permission that is no longer needed must be
    removed.
    """
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


def read_imports(module: str) -> Iterator[str]:
    """Yield the modules that ``module`` imports outside of functions, under ``TYPE_CHECKING`` too."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield from (found for found in named(node, package) if found != module)
        todo += ast.iter_child_nodes(node)


def folder(module: str) -> str:
    """Return the first-level folder, or the loose module, that a module belongs to."""
    return ".".join(module.split(".")[1:2])


READ = {module: set(read_imports(module)) for module in FILES}


def short(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return a graph without the name of the package in front of each node."""
    return {a.partition(".")[2]: {b.partition(".")[2] for b in others} for a, others in arrows.items() if "." in a}


def test_files_stand_in_no_circle():
    assert not circles(short(ARROWS))
    assert not circles(short(READ))


def test_folders_stand_in_no_circle():
    folders: dict[str, set[str]] = {}
    for module, others in READ.items():
        if here := folder(module):
            folders.setdefault(here, set()).update(
                there for other in others if (there := folder(other)) not in (here, "")
            )
    assert not circles(folders)


def test_the_first_level_is_small():
    """Twelve folders and seven loose modules, beside ``__init__`` and ``__main__``."""
    folders = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    loose = [path for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(folders) <= 12 and len(loose) <= 7, (sorted(folders), sorted(loose))


def test_the_host_is_imported_without_torch():
    """Every module of the engine's room, and the offline simulator of it."""
    host = sorted(m for m in FILES if room(m) in ("core", "core.engine") or m == "minivllm.lab.simulate.cases")
    code = f"import importlib, sys\nfor m in {host}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"


def test_an_arrow_is_seen_wherever_it_stands(tmp_path, monkeypatch):
    """Imports within a function, relative ones, of a module from its package, and by a lazy name are found.

    Imports under TYPE_CHECKING are not.
    """
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from minivllm import llm\n"
        "def f():\n    from .worker import runner\n    from ..errors import told\n    import minivllm.files\n"
        "    from minivllm import LLM\n"
    )
    monkeypatch.setitem(FILES, "minivllm.device.x", path)
    found = ["minivllm.device.worker.runner", "minivllm.errors", "minivllm.files", "minivllm.frontend.llm"]
    assert sorted(imports("minivllm.device.x")) == found


def test_a_class_name_is_used_once():
    """This holds in the package, so a search for a name has one result."""
    where: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}


@pytest.mark.parametrize(
    "code",
    [
        "import minivllm; minivllm.LLM; minivllm.SamplingParams",
        "from minivllm.cli import main; main(['generate', 'Once', '--max-tokens', '2'])",
        "from minivllm import LLM\nwith LLM(model='pocket') as llm: llm.chat([{'role': 'user', 'content': 'hi'}])",
    ],
    ids=["import", "generate", "chat"],
)
def test_what_runs_a_model_loads_nothing_of_the_laboratory_or_the_kit(code):
    ask = "import sys; print([m for m in sys.modules if m.startswith(('minivllm.lab', 'minivllm.testing'))])"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ask}"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout.splitlines()[-1] == "[]", found.stdout
