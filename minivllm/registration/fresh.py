"""A fresh Python process that imports what this one would: for workers, and to look at plug-ins from a distance.

A *target* is "module:name", the form in which specs, wirings and command lines name what is to be imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from minivllm.errors import shown

# the path goes first: what is imported before it is set could be found elsewhere
_CODE = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
from minivllm.registration.fresh import import_target
import_target(sys.argv[2])(*sys.argv[3:])
"""


def import_target(target: str) -> Any:
    """Import ``package.module:Name`` (or ``:Name.attribute``).  The exceptions of the import pass through."""
    module, _, path = target.partition(":")
    if not path or not module:
        raise ImportError(f"{shown(target)} is not of the form 'package.module:Name'")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def command(target: str, *words: str) -> list[str]:
    """The command line of a process that calls the function ``target`` ("module:function") with ``words``.

    It has this process's import path as it is now, so a module from a folder that was put on ``sys.path`` by hand is
    found there too.  Nothing else is handed on: no module, no object, no pickle.
    """
    return [sys.executable, "-c", _CODE, "\n".join(import_path()), target, *words]


def import_path() -> list[str]:
    """``sys.path`` with the folders written out, so that it means the same in another working directory."""
    return [os.path.abspath(folder) for folder in sys.path]


def environ() -> dict[str, str]:
    """This process's environment, with its import path as it is now: for one that is started by a command line of its
    own, such as ``python -m minivllm``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
