"""Forbid undeclared properties in a JSON schema, except where the schema allows them.

OpenAI's strict mode and XGrammar do the same.  A model that may invent property names may continue forever.
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
# Largest number of parts and names that are visited. An object with shared parts visits them
# repeatedly.
MOST_STEPS = 20_000
MOST_ADDED = 256 << 10  # largest number of characters of all names that are added


def closed(schema: Any) -> Any:
    """Return a copy in which ``additionalProperties`` is false for each object that declares properties.

    Objects that already have a rule for other properties are not changed.  Several schemas may describe the same object
    (``allOf``, or ``$ref`` and ``anyOf`` next to ``properties``).  Then the outermost one is closed, and allows the
    names that any of them declares.  ValueError if there are too many of these names.
    """
    result = copy.deepcopy(schema)
    _Closing(result).close()
    return result


def schemas(root: Any) -> list[dict[str, Any]]:
    """Return all object schemas within a schema, including those that only a reference reaches, each once."""
    return list(_Closing(root).nodes.values())


class _Closing:
    """The object schemas inside a schema (nodes), by the ``id`` of their dicts.

    The parts of a node are the schemas directly inside it that describe the same value.  A node *joins* its parts if
    they describe one object together, as in ``allOf``.  Several joining nodes may have a part in common."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.nodes: dict[int, dict[str, Any]] = {}
        self.parts: dict[int, list[Any]] = {}
        self.steps = 0
        pending = [root]
        while pending:
            node = pending.pop()
            if isinstance(node, dict) and id(node) not in self.nodes:
                self.nodes[id(node)] = node
                self.parts[id(node)] = self._parts(node)
                pending += [*self.parts[id(node)], *_children(node)]
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
                    # A shared part describes one object for all nodes that use it, so all of them
                    # must be closed.
                    joining += [part, *users[id(part)]]

    def close(self) -> None:
        """Set ``additionalProperties`` to false in each outermost joining node, and declare the property names of its
        parts there."""
        added = 0
        changes: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
        for node in self.nodes.values():
            if id(node) in self.shared:
                continue
            parts = self._all_parts(node) if id(node) in self.joining else [node]
            decided = any(key in part for part in parts for key in SAY)
            if decided or not any(key in part for part in parts for key in DECLARE):
                continue
            missing = self._missing(node, parts)
            added += sum(len(name) for names in missing.values() for name in names)
            if added > MOST_ADDED:
                raise ValueError("too many of its objects have too many names in common")
            changes.append((node, missing))
        for node, missing in changes:
            for key, names in missing.items():
                if names:
                    node[key] = {**_map(node, key), **names}
            node["additionalProperties"] = False

    def _missing(self, node: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, dict]:
        """Return the property names that the parts of a node declare and the node itself does not, by keyword of JSON
        Schema."""
        missing: dict[str, dict[str, Any]] = {key: {} for key in DECLARE}
        for part in parts:
            required = _required(part)
            names = {key: list(_map(part, key)) for key in DECLARE}
            names["properties"] += required
            self._count(0 if part is node else sum(map(len, names.values())))
            for key in DECLARE:
                declared = _map(node, key)
                missing[key].update((name, True) for name in names[key] if name not in declared)
        return missing

    def _count(self, steps: int) -> None:
        """Count visited parts and names.  ValueError if there are too many."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise ValueError("too many of its objects have too many parts or names in common")

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        """Return the schemas directly inside a node that describe the same value."""
        inner = [part for key in BRANCHES if isinstance(node.get(key), list) for part in node[key]]
        target = find(self.root, node.get("$ref"))
        return inner if target is None else [*inner, target]

    def _all_parts(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a node and all schemas that describe the same value, at any depth."""
        found: dict[int, dict[str, Any]] = {}
        pending: list[Any] = [node]
        while pending:
            part = pending.pop()
            if isinstance(part, dict) and id(part) not in found:
                found[id(part)] = part
                inner = self.parts[id(part)]
                self._count(len(inner))
                pending += reversed(inner)
        return list(found.values())


def _joins(node: dict[str, Any]) -> bool:
    """Return whether several schemas in a node describe the same object."""
    keywords = sum(key in node for key in (*BRANCHES, "$ref"))
    if keywords > 1 or len(node.get("allOf") or ()) > 1:
        return True
    return keywords > 0 and any(key in node for key in (*DECLARE, *SAY))


def _children(node: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the properties and of the elements of the value that a node describes."""
    for key in MAPS:
        yield from _map(node, key).values()
    for key in INNER:
        value = node.get(key)
        yield from value if isinstance(value, list) else [value]


def _required(node: dict[str, Any]) -> list[str]:
    """Return the names of the required properties."""
    value = node.get("required")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _map(node: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping at a key, or {} if there is none."""
    value = node.get(key)
    return value if isinstance(value, dict) else {}
