"""Classes that a program gave: ``LLM(evictor=MyEvictor)``.

A configuration is text, so each gets a target that this process alone can import, and that is allowed because it is the
program's own.  A target stands for one class object for ever: a notebook that defines the class again gives another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Given:
    """``name``: "module:Class", which two runs of one program share; ``source``: what was known of it when it was given
    (``frontend.record.sources.Source``)."""

    cls: type
    name: str
    source: Any


_given: dict[str, Given] = {}


def give(cls: type, source_of: Callable[[type], Any]) -> str:
    """The target of a class.  The same class may have changed since: it is looked at again."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    key = f"{''.join(c if c.isalnum() else '_' for c in cls.__qualname__)}_{len(_given)}"
    _given[key] = Given(cls, name, source_of(cls))
    return f"{__name__}:{key}"


def is_given(target: str) -> bool:
    """Whether a target has the form of those, of this process or another."""
    return target.partition(":")[0] == __name__


def find(target: str) -> Given | None:
    """None for one of another process."""
    return _given.get(target.partition(":")[2]) if is_given(target) else None


def __getattr__(name: str) -> Any:
    if name in _given:
        return _given[name].cls
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"{name} is a class that a program gave, which no other process has: {WANTED}")


WANTED = "put it into a module of its own and name it 'module:Class'"
