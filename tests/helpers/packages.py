"""Packages that are not installed, made visible by their sources and the metadata of their entry points, as by pip."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import minivllm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def write_metadata(pyproject: Path, into: Path) -> str:
    """Write the dist-info folder of a package as pip does, and return the distribution's name."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    info = into / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    metadata = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    metadata += [f"Requires-Dist: {need}" for need in project.get("dependencies", ())]
    (info / "METADATA").write_text("\n".join(metadata) + "\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "RECORD").touch()
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return project["name"]


def environment(packages: Iterable[Path], metadata: Path) -> dict[str, str]:
    """Return the environment of a process in which the packages (folders with a pyproject.toml) are installed."""
    paths = [str(metadata)]
    for folder in packages:
        write_metadata(folder / "pyproject.toml", metadata)
        paths.append(str(folder / "src" if (folder / "src").is_dir() else folder))
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, root])}


# Modules of minivllm that a package may import, besides the names of ``import minivllm``.
PUBLIC = ("minivllm.plugin", "minivllm.testing", "minivllm.device.layers", "minivllm.device.kernels")


def public_imports(folder: Path) -> list[str]:
    """Return the imports of private names of minivllm in a package, each as "file: name"."""
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                # ``from minivllm import LLM`` is public, but ``from minivllm import core`` is a module
                one = node.module in ("minivllm", "minivllm.core")
                names = [f"{node.module}.{a.name}" for a in node.names] if one else [node.module]
            for name in names:
                fine = name == "minivllm" or f"{name}.".startswith(tuple(f"{p}." for p in PUBLIC)) or _exported(name)
                if name.split(".")[0] == "minivllm" and not fine:
                    wrong.append(f"{path.relative_to(folder)}: {name}")
    return wrong


def _exported(name: str) -> bool:
    package, _, attribute = name.rpartition(".")
    return package == "minivllm" and attribute in minivllm.__all__
