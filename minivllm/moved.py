"""Old import paths that the documentation once named.  Each still works for some time, with a warning that names the
new path.

``MOVED`` maps an old module or package to its new path and to the version of minivllm that drops the old path.  A
package includes all modules below it.  To move a folder, add one line to ``MOVED``.  The new path may itself be an old
path.  The old and the new path import the same module object, so a class has one identity.

Importing this module installs the finder, which handles names below ``minivllm.`` only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MOVED: dict[str, tuple[str, str]] = {  # old path -> (new path, version of minivllm that removes the old path)
    "minivllm.bench": ("minivllm.lab.bench", "0.3"),
    "minivllm.compare_hf": ("minivllm.lab.compare_hf", "0.3"),
    "minivllm.config_files": ("minivllm.config.files", "0.3"),
    "minivllm.core.functions": ("minivllm.device.functions", "0.3"),
    "minivllm.core.kernels": ("minivllm.device.kernels", "0.3"),
    "minivllm.core.layers": ("minivllm.device.layers", "0.3"),
    "minivllm.core.request": ("minivllm.core.interfaces.params", "0.3"),
    "minivllm.core.runner": ("minivllm.device.worker.runner", "0.3"),
    "minivllm.core.sampling": ("minivllm.device.worker.sampling", "0.3"),
    "minivllm.core.worker": ("minivllm.device.worker", "0.3"),
    "minivllm.declared": ("minivllm.core.declared_params", "0.3"),
    "minivllm.energy": ("minivllm.runtime.energy", "0.3"),
    "minivllm.fresh": ("minivllm.registration.fresh", "0.3"),
    "minivllm.gguf_file": ("minivllm.device.loading.gguf_file", "0.3"),
    "minivllm.hardware": ("minivllm.device.hardware", "0.3"),
    "minivllm.hooks": ("minivllm.runtime.hooks", "0.3"),
    "minivllm.json_schema": ("minivllm.core.json_schema", "0.3"),
    "minivllm.kernels": ("minivllm.device.kernels", "0.3"),
    "minivllm.layers": ("minivllm.device.layers", "0.3"),
    "minivllm.loading": ("minivllm.device.loading", "0.3"),
    "minivllm.native": ("minivllm.device.native", "0.3"),
    "minivllm.parameters": ("minivllm.registration.parameters", "0.3"),
    "minivllm.plain": ("minivllm.validation", "0.3"),
    "minivllm.processes": ("minivllm.runtime.processes", "0.3"),
    "minivllm.processes.fresh": ("minivllm.registration.fresh", "0.3"),
    "minivllm.quantize": ("minivllm.lab.quantize", "0.3"),
    "minivllm.record": ("minivllm.frontend.record", "0.3"),
    "minivllm.replay": ("minivllm.lab.replay", "0.3"),
    "minivllm.scaffold": ("minivllm.testing.scaffold", "0.3"),
    "minivllm.server.calls": ("minivllm.server.openai.calls", "0.3"),
    "minivllm.server.tools": ("minivllm.server.openai.tools", "0.3"),
    "minivllm.simulate": ("minivllm.lab.simulate", "0.3"),
    "minivllm.spec": ("minivllm.registration.spec", "0.3"),
    "minivllm.structured": ("minivllm.runtime.structured", "0.3"),
    "minivllm.tenant_cache": ("minivllm.runtime.tenant_cache", "0.3"),
    "minivllm.text": ("minivllm.runtime.text", "0.3"),
    "minivllm.traces": ("minivllm.lab.traces", "0.3"),
    "minivllm.usage": ("minivllm.runtime.usage", "0.3"),
    "minivllm.wiring": ("minivllm.core.wiring", "0.3"),
    "minivllm.worker": ("minivllm.device.worker.process", "0.3"),
}

used: dict[str, str] = {}  # old paths that this process has imported -> the text of the warning


def new_path(name: str) -> tuple[str, str] | None:
    """Return (new path, version that drops the old one) for a module's old path, or None for other paths.

    The longest matching package in ``MOVED`` is used.  If its new path has moved too, the last path is returned.
    """
    found = None
    for _ in range(len(MOVED) + 1):
        above = next((old for old in _upwards(name) if old in MOVED), None)
        if above is None:
            return found
        target, until = MOVED[above]
        name = target + name[len(above) :]
        found = name, found[1] if found else until
    raise RuntimeError(f"minivllm.moved.MOVED: the path {name} leads back to itself")


def _upwards(name: str) -> list[str]:
    """Return a dotted path and its parents, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 1, -1)]


class _Finder:
    """Finds modules by their old paths.  It precedes the finder of files, which would load a module a second time."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module by its old path, and warn about it.  Return None for any other name."""
        moved = new_path(name) if name.startswith("minivllm.") else None
        if moved is None:
            return None
        new, until = moved
        used[name] = f"{name} is {new} now; minivllm {until} drops the old path. Plug-ins import from minivllm.plugin"
        warnings.warn(used[name], DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(name, _Loader(new))  # type: ignore[arg-type]


class _Loader:
    """Replaces the module of the old path by the module of the new path."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: Any) -> None:
        """Return None, so that Python creates a temporary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new path into ``sys.modules`` under the old name."""
        sys.modules[module.__name__] = importlib.import_module(self.new)


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
