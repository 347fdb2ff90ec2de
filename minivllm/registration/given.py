"""Plug-in classes that a program passes as objects: ``LLM(evictor=MyEvictor)``.

A configuration is text, so each class gets a target that only this process can import.  The target needs no permission,
because the class is part of the user's program.  A target always means the same class object: if a notebook defines the
class again, the new class gets a new target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Given:
    """A class that the program passed.  ``name`` is "module:Class", which is the same in every run of the program.
    ``source`` is a ``frontend.record.sources.Source``: the source code of the class when it was passed."""

    cls: type
    name: str
    source: Any


_given: dict[str, Given] = {}


def give(cls: type, source_of: Callable[[type], Any]) -> str:
    """Register a class and return its target.  Each call reads the source code again, because it may have changed."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    key = f"{''.join(c if c.isalnum() else '_' for c in cls.__qualname__)}_{len(_given)}"
    _given[key] = Given(cls, name, source_of(cls))
    return f"{__name__}:{key}"


def is_given(target: str) -> bool:
    """Return whether a target stands for a class that a program passed as an object, in this or another process."""
    return target.partition(":")[0] == __name__


def find(target: str) -> Given | None:
    """Return the passed class of a target, or None if another process created the target."""
    return _given.get(target.partition(":")[2]) if is_given(target) else None


def __getattr__(name: str) -> Any:
    """Return the class that a target names, so that targets can be imported from this module.

    AttributeError for a name that no class of this process has."""
    if name in _given:
        return _given[name].cls
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"{name} is a class that another process passed as an object: {WANTED}")


WANTED = "put it into a separate module and name it 'module:Class'"
