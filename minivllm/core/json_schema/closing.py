"""Objects that take no properties but those that their schema declares, where it says nothing of others.

So OpenAI's strict mode has it, and XGrammar's: a model that may invent names may do so for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from .references import find

DECLARE = ("properties", "patternProperties")
SAY = ("additionalProperties", "unevaluatedProperties")
BRANCHES = ("allOf", "anyOf", "oneOf")
MAPS = (*DECLARE, "$defs", "definitions", "dependentSchemas")
INNER = (
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
)
MOST_STEPS = 20_000  # over the parts of all objects that have several, and their names: objects may share them
MOST_ADDED = 256 << 10  # characters of names that are added


def closed(schema: Any) -> Any:
    """A copy in which ``additionalProperties`` is false wherever names are declared and nothing is said of others.

    Where several schemas speak of one object (``allOf``, or ``$ref`` and ``anyOf`` beside ``properties``), none of them
    is closed but all together: to the names that any of them declares.  ValueError if there are too many of those."""
    made = copy.deepcopy(schema)
    _Closing(made).close()
    return made


def schemas(root: Any) -> list[dict[str, Any]]:
    """All schemas that are objects within one, wherever a reference finds them, each once."""
    return list(_Closing(root).nodes.values())


class _Closing:
    """The schemas of one that are objects, those that share an object with others (``shared``), and those that join
    such (``joining``)."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.nodes: dict[int, dict[str, Any]] = {}
        self.parts: dict[
            int, list[Any]
        ] = {}  # of each node: the schemas that speak of the same value, right within it
        self.steps = 0
        left = [root]
        while left:
            node = left.pop()
            if isinstance(node, dict) and id(node) not in self.nodes:
                self.nodes[id(node)] = node
                self.parts[id(node)] = self._parts(node)
                left += [*self.parts[id(node)], *_children(node)]
        users: dict[int, list[dict[str, Any]]] = {}
        for node in self.nodes.values():
            for part in self.parts[id(node)]:
                users.setdefault(id(part), []).append(node)
        self.joining: set[int] = set()
        self.shared: set[int] = set()
        joining = [node for node in self.nodes.values() if _joins(node)]
        while joining:
            node = joining.pop()
            if id(node) in self.joining:
                continue
            self.joining.add(id(node))
            for part in self.parts[id(node)]:
                if isinstance(part, dict) and id(part) not in self.shared:
                    self.shared.add(id(part))
                    # its own parts speak of that object too, and whoever else uses it has to close it himself
                    joining += [part, *users[id(part)]]

    def close(self) -> None:
        added = 0
        found: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
        for node in self.nodes.values():
            if id(node) in self.shared:
                continue
            parts = self._all_parts(node) if id(node) in self.joining else [node]
            says = any(key in part for part in parts for key in SAY)
            if says or not any(key in part for part in parts for key in DECLARE):
                continue
            missing: dict[str, dict[str, Any]] = {key: {} for key in DECLARE}
            for part in parts:
                names = {key: _map(part, key) for key in DECLARE}
                required = _required(part)
                self._count(0 if part is node else sum(map(len, names.values())) + len(required))
                for key in DECLARE:
                    missing[key].update(
                        (name, True) for name in names[key] if name not in _map(node, key)
                    )
                missing["properties"].update(
                    (name, True) for name in required if name not in _map(node, "properties")
                )
            added += sum(len(name) for names in missing.values() for name in names)
            if added > MOST_ADDED:
                raise ValueError("too many of its objects have too many names in common")
            found.append((node, missing))
        for node, missing in found:
            for key in DECLARE:
                if missing[key]:
                    node[key] = {**_map(node, key), **missing[key]}
            node["additionalProperties"] = False

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise ValueError("too many of its objects have too many parts or names in common")

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        """The schemas that speak of the same value, right within one."""
        inner = [part for key in BRANCHES if isinstance(node.get(key), list) for part in node[key]]
        target = find(self.root, node.get("$ref"))
        return inner if target is None else [*inner, target]

    def _all_parts(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        left: list[Any] = [node]
        while left:
            part = left.pop()
            if isinstance(part, dict) and id(part) not in found:
                found[id(part)] = part
                inner = self.parts[id(part)]
                self._count(len(inner))
                left += reversed(inner)
        return list(found.values())


def _joins(node: dict[str, Any]) -> bool:
    """Whether several schemas speak of the same object."""
    several = (
        sum(key in node for key in (*BRANCHES, "$ref")) > 1 or len(node.get("allOf") or ()) > 1
    )
    return several or (
        any(key in node for key in (*BRANCHES, "$ref")) and any(k in node for k in (*DECLARE, *SAY))
    )


def _children(node: dict[str, Any]) -> Iterator[Any]:
    """The schemas of what is within a value."""
    for key in MAPS:
        yield from _map(node, key).values()
    for key in INNER:
        value = node.get(key)
        yield from value if isinstance(value, list) else [value]


def _required(node: dict[str, Any]) -> list[str]:
    value = node.get("required")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _map(node: dict[str, Any], key: str) -> dict[str, Any]:
    value = node.get(key)
    return value if isinstance(value, dict) else {}
