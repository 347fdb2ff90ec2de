"""Start a new Python process with this process's import path, for workers and for inspecting plug-ins.

A *target* is a text "module:name".  Specs, wirings and command lines use targets to name objects to import.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from minivllm.errors import shown

# Set the import path first, because earlier imports could find other versions of the modules.
_CODE = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
from minivllm.registration.fresh import import_target
import_target(sys.argv[2])(*sys.argv[3:])
"""


def import_target(target: str) -> Any:
    """Import and return ``package.module:Name`` (or ``:Name.attribute``).

    ImportError for a text of another form.  Exceptions of the import pass through."""
    module, _, path = target.partition(":")
    if not path or not module:
        raise ImportError(f"{shown(target)} is not of the form 'package.module:Name'")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def command(target: str, *words: str) -> list[str]:
    """Return the command line of a process that calls the function ``target`` ("module:function") with ``words``.

    The process has the current import path of this process, so it also finds modules in folders that were added to
    ``sys.path`` at run time.  Nothing else is passed on: no module, no object, no pickle.
    """
    return [sys.executable, "-c", _CODE, "\n".join(import_path()), target, *words]


def import_path() -> list[str]:
    """Return ``sys.path`` with absolute folders, so that it is valid in another working directory."""
    return [os.path.abspath(folder) for folder in sys.path]


def environ() -> dict[str, str]:
    """Return this process's environment with its current import path in PYTHONPATH.

    Use it for a process that is started by a separate command line, such as ``python -m minivllm``.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
