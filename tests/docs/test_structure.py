"""Arrows between the rooms of the tree: which package may import which at run time.

    frontend, server, cli ──► core.engine ──► core.interfaces ◄── core.worker ──► layers, kernels, loading
                                   │                                  │
                                   └───────► core ◄───────────────────┘        (calls outwards, checks, times)

What only type checkers read (``if TYPE_CHECKING``) is no arrow; an import within a function is one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "minivllm"
# what each room of the core may import, beside itself and what is imported from everywhere (BASE)
BASE = frozenset({"errors", "files", "plain"})
ROOMS = {
    "core.interfaces": {"json_schema", "layers"},
    "core": {"core.interfaces"},
    "core.engine": {"core", "core.interfaces"},
    "core.functions": {"core", "core.interfaces", "core.worker"},
    "core.worker": {"core", "core.interfaces", "hardware", "kernels", "layers", "loading", "registry", "wiring"},
    "kernels": {"core.interfaces"},
    "layers": {"core.interfaces", "kernels"},
    "loading": {"core.interfaces", "layers"},
}
# what stands in a circle today; a package that leaves it is taken off, and none comes in
PAIRS: set[tuple[str, str]] = set()
CIRCLES: set[frozenset[str]] = set()


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
                if found in FILES and found != module:
                    yield found
        todo += ast.iter_child_nodes(node)


def room(module: str) -> str:
    """The package of a module below ``minivllm``: a folder of ``core`` is one of its own, a file beside it too."""
    parts = module.split(".")[1:]
    if parts[:1] == ["core"]:
        return ".".join(parts[:2]) if len(parts) > 1 and (PACKAGE / "core" / parts[1]).is_dir() else "core"
    return parts[0] if parts else ""


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


def test_rooms_of_the_core_import_only_what_is_below_them():
    up = [
        f"{module} imports {other}"
        for module, others in ARROWS.items()
        for other in others
        if room(module) in ROOMS
        and room(other) not in BASE | {room(module)} | ROOMS[room(module)]
        and room(other) != ""
    ]
    assert not up, "\n".join(up)


def test_no_two_packages_import_each_other():
    pairs = {(room(a), room(b)) for a, others in ARROWS.items() for b in others if room(a) != room(b)}
    assert {(a, b) for a, b in pairs if (b, a) in pairs and a < b} == PAIRS


def test_files_stand_in_no_circle():
    short = {a.partition(".")[2]: {b.partition(".")[2] for b in others} for a, others in ARROWS.items() if "." in a}
    assert set(circles(short)) == CIRCLES


def test_the_host_is_imported_without_torch():
    """Every module of the engine's room, and the offline simulator of it."""
    host = sorted(m for m in FILES if room(m) in ("core", "core.engine") or m == "minivllm.replay.serve")
    code = f"import importlib, sys\nfor m in {host}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"


def test_an_arrow_is_seen_wherever_it_stands(tmp_path, monkeypatch):
    """Within a function, relative, of a module from its package; not under TYPE_CHECKING."""
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from minivllm import llm\n"
        "def f():\n    from .worker import runner\n    from ..errors import told\n    import minivllm.files\n"
    )
    monkeypatch.setitem(FILES, "minivllm.core.x", path)
    assert sorted(imports("minivllm.core.x")) == ["minivllm.core.worker.runner", "minivllm.errors", "minivllm.files"]


def test_a_class_name_is_used_once():
    """In the package: a reader who searches for a name finds one thing."""
    where: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}
