"""Packages that are not installed, made visible as pip would: their sources and the metadata of their entry points."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def write_metadata(pyproject: Path, into: Path) -> str:
    """The dist-info folder that pip would write for a package; returns the distribution's name."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    info = into / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    metadata = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    metadata += [f"Requires-Dist: {need}" for need in project.get("dependencies", ())]
    (info / "METADATA").write_text("\n".join(metadata) + "\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return project["name"]


def environment(packages: Iterable[Path], metadata: Path) -> dict[str, str]:
    """Environment of a process that sees the packages (folders with a pyproject.toml) as installed."""
    paths = [str(metadata)]
    for folder in packages:
        write_metadata(folder / "pyproject.toml", metadata)
        paths.append(str(folder / "src" if (folder / "src").is_dir() else folder))
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, root])}
