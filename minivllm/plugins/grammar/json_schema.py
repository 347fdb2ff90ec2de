"""A JSON schema of Draft 2020-12 in a form that all libraries interpret alike.

Regular expressions and formats become ``pattern``s of literals, ranges and repetitions (``ecma_regex``, ``formats``).
Keywords that a library supports only in part are refused by name, and so is a schema without a finite answer.

Each string, including names of properties, has a single spelling, with escapes only where JSON requires them.  So an
undeclared name cannot be another spelling of a declared one.  Control characters without an escape letter (all but
``\\b \\t \\n \\f \\r``) are therefore not allowed in values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from minivllm.core.json_schema.references import find
from minivllm.errors import brief

from .ecma_regex import WRITABLE, Node, search, whole, within
from .formats import ANNOTATIONS, FORMATS, unknown_format

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ONES = ("items", "additionalProperties", "additionalItems")
# Keywords of any draft; a library may treat them as annotations under the draft that a schema names.
NOT_HELD = frozenset((
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
    "$recursiveRef", "divisibleBy", "disallow", "extends",
))  # fmt: skip
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS, JOINED = frozenset((*LOWER, *UPPER)), frozenset(("anyOf", "oneOf", "$ref"))
LARGEST = 1 << 53  # the largest number that a library may keep exactly as a double
SMALLEST = 1e-30  # the minimum that is written for numbers that must be larger than 0
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "number": lambda v: _number(v),
    "integer": lambda v: _number(v) and v == int(v),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
# keyword -> accepted types of its value; later checks rely on them, and a library may fail on other types or ignore
# them
SHAPES: dict[str, tuple[type, ...]] = {
    "type": (str, list), "enum": (list,), "allOf": (list,), "anyOf": (list,), "oneOf": (list,), "prefixItems": (list,),
    "required": (list,), "properties": (dict,), "patternProperties": (dict,), "pattern": (str,), "format": (str,),
    "$ref": (str,),
}  # fmt: skip
SPOKEN: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}

Schema = dict[str, Any]  # an object of a JSON schema, with its keywords
Formats = Mapping[str, tuple[str, ...]]


def prepare(schema: Any, write: Callable[[Node], str], formats: Formats = FORMATS) -> Any:
    """Change a schema in place to one that libraries enforce exactly, and return it.

    ``write`` returns a ``pattern`` in the syntax of the library.  ``formats`` are the formats that the library
    enforces.  Raise ValueError if the schema is refused or no value fits it.
    """
    if schema is False:
        raise ValueError("nothing fits the schema false")
    if schema is True:
        return {}
    nodes = Nodes(schema)
    if not nodes.ends(schema):
        cycle = any("$ref" in node for node in nodes.all)
        cause = "its references form a cycle" if cycle else "it requires a property or an item that it excludes"
        raise ValueError(f"no finite value fits the schema, because {cause}")
    endless = [node for node in nodes.all if "$ref" in node and not nodes.ends(node)]
    for node in nodes.all:
        node.pop("$schema", None)
        _refuse_misshapen(node)
        _refuse_unheld(node)
    merged = any("allOf" in node or (BOUNDS & set(node) and JOINED & set(node)) for node in nodes.all)
    for node in nodes.all:
        _hold_values(node)
        _hold_numbers(node, merged)
        _hold_strings(node, write, formats)
        _hold_names(node, write)
    for node in endless:
        node.clear()
        node["allOf"] = [False]
    return schema


# ---- where the schemas are -------------------------------------------------------------------------------------------


def children(node: Schema) -> Iterator[Any]:
    """Yield the schemas directly inside a schema."""
    for key in MAPS:
        if isinstance(node.get(key), dict):
            yield from node[key].values()
    for key in LISTS:
        if isinstance(node.get(key), list):
            yield from node[key]
    for key in ONES:
        if not isinstance(node.get(key), list):
            yield node.get(key)


class Nodes:
    """All object schemas within a schema, including those that only a reference reaches, and the nodes that finite
    values can fit."""

    def __init__(self, schema: Schema) -> None:
        self.root, self.all = schema, []
        self._targets: Schema = {}
        self._ending: set[int] = set()
        seen: set[int] = set()
        left: list[Any] = [schema]
        while left:
            node = left.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            if seen and ("$id" in node or "id" in node):
                raise ValueError("$id within a schema: expected it at its top only")
            seen.add(id(node))
            self.all.append(node)
            left += children(node)
            if (target := self._find(node.get("$ref"))) is not None:
                left.append(target)
        before = -1
        while before < len(self._ending):
            before = len(self._ending)
            for node in reversed(self.all):  # reversed, because nested schemas and references come later in the list
                if id(node) not in self._ending and self.ends(node):
                    self._ending.add(id(node))

    def _find(self, reference: Any) -> Any:
        """Return the target of a reference within the schema at its first occurrence, None for other references."""
        if not isinstance(reference, str) or reference in self._targets:
            return None
        found = find(self.root, reference)
        if found is not None:
            self._targets[reference] = found
        return found

    def ends(self, node: Any) -> bool:
        """Return whether a finite value is known to fit a node.

        Another visit of all nodes may find more such nodes.
        """
        if not isinstance(node, dict):
            return node is not False
        if id(node) in self._ending:
            return True
        if isinstance(node.get("$ref"), str):
            target = self._targets.get(node["$ref"])
            if isinstance(target, dict) and id(target) not in self._ending:
                return False
        if not all(map(self.ends, _list(node, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list) and not any(map(self.ends, node[key])):
                return False
        types = node.get("type")
        names = types if isinstance(types, list) else [types]
        return any(getattr(self, f"_{name}_ends", _yes)(node) for name in names)

    def _array_ends(self, node: Schema) -> bool:
        least = node.get("minItems")
        if not isinstance(least, int) or least < 1:
            return True
        required = (_list(node, "prefixItems") or _list(node, "items"))[:least]
        other = node.get("items")
        if len(required) < least and not isinstance(other, list):
            required = [*required, other]
        return all(map(self.ends, required))

    def _object_ends(self, node: Schema) -> bool:
        listed = node.get("properties")
        if not isinstance(listed, dict):
            listed = {}
        other: Any = True
        if not node.get("patternProperties"):
            other = node.get("additionalProperties")
        return all(self.ends(listed.get(name, other)) for name in _required(node))


def _required(node: Schema) -> list[str]:
    return [name for name in _list(node, "required") if isinstance(name, str)]


def _yes(node: Schema) -> bool:
    return True


def _list(node: Schema, key: str) -> list[Any]:
    return node[key] if isinstance(node.get(key), list) else []


# ---- what they say ---------------------------------------------------------------------------------------------------


def _refuse_misshapen(node: Schema) -> None:
    for key, kinds in SHAPES.items():
        value = node.get(key)
        if key in node and not isinstance(value, kinds):
            raise ValueError(f"{key}={value!r:.30}: expected {' or '.join(SPOKEN[kind] for kind in kinds)}")
    for key in ("type", "required"):
        if not all(isinstance(name, str) for name in _list(node, key)):
            raise ValueError(f"{key}={node[key]!r:.30}: expected a list of texts")


def _refuse_unheld(node: Schema) -> None:
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if missing := sorted(NOT_HELD & set(node)):
        raise ValueError(
            f"answers cannot be restricted by {', '.join(missing)}: leave it out, and say it in the prompt"
        )
    least = node.get("minProperties")
    if not isinstance(least, int) or least <= len(set(_required(node))) + 1:
        return
    # a text may contain an undeclared name twice, which then counts as one property
    if node.get("additionalProperties") is not False or node.get("patternProperties"):
        raise ValueError(
            f"minProperties={least!r:.30}, where other names are allowed: expected at most one more than required names"
        )


def _hold_values(node: Schema) -> None:
    """Keep only the values of ``const`` and ``enum`` that have the required type.

    Raise ValueError if there are none, or if a value contains a character that answers cannot contain.
    """
    types = _list(node, "type") or [node.get("type")]
    tests = [TYPES[name] for name in types if isinstance(name, str) and name in TYPES]

    def fits(value: Any) -> bool:
        return not tests or any(test(value) for test in tests)

    for key in ("const", "enum"):
        if key not in node:
            continue
        values = [node[key]]
        if key == "enum":
            values = node[key]
            if not isinstance(values, list):
                continue
        fitting = [value for value in values if fits(value)]
        if values and not fitting:
            raise ValueError(f"no value of {key} is of the type that the schema requires")
        for value in fitting:
            _refuse_unwritable(key, value)
        if key == "enum":
            node[key] = fitting


def unwritable(character: str) -> bool:
    """Return whether values cannot contain a character, because it is a control character without an escape."""
    return (character < " " and character not in "\b\t\n\f\r") or character == "\x7f"


def _refuse_unwritable(key: str, value: Any) -> None:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str) and any(unwritable(c) for c in one):
            raise ValueError(f"{key} has a control character: expected none except \\b, \\t, \\n, \\f and \\r")
        if _number(one) and not exactly_read(one):
            raise ValueError(f"{key} has the number {one!r:.30}: expected numbers up to 2 ** 53 of at most 15 digits")
        if isinstance(one, (list, dict)):
            left += one
        if isinstance(one, dict):
            left += one.values()


def exactly_read(number: float) -> bool:
    """Return whether every parser reads a number as the same double, since it has few digits close to the point."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if abs(number) > LARGEST or not isinstance(exponent, int) or abs(exponent) > 22:
        return False
    return len(digits) <= 15 or int("".join(map(str, digits))) <= LARGEST


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _hold_numbers(node: Schema, merged: bool) -> None:
    """Replace bounds by close bounds that libraries enforce exactly, so that answers satisfy the original bounds too.

    ``merged`` means that a node may also get the bounds of another node.
    """
    if _number(factor := node.get("multipleOf")) and not exactly_read(factor):
        raise ValueError(f"multipleOf={factor!r:.30}: expected a factor of at most 15 digits")
    for keys, sign in ((LOWER, 1), (UPPER, -1)):
        for key in keys:
            bound = node.get(key)
            if not _number(bound) or exactly_read(bound):
                continue
            if bound * sign > LARGEST:
                raise ValueError(f"{key}={bound!r:.30}: expected a number up to 2 ** 53")
            if abs(bound) > LARGEST:
                node[key] = -LARGEST * sign
            else:
                node[key] = bound + sign * 2 * math.ulp(bound)
    if node.get("type") == "integer":
        return
    for (inclusive, exclusive), others, sign in ((LOWER, UPPER, 1), (UPPER, LOWER, -1)):
        bound = node.get(exclusive)
        if not _number(bound):
            continue
        is_close = any(_number(node.get(key)) and abs(node[key] - bound) < 1 for key in others)
        if merged or is_close:
            # libraries accept the exclusive bound itself if the other bound has the same digits before the decimal
            # point
            gap = 8 * math.ulp(bound) if bound else SMALLEST
            least = bound + sign * gap
            del node[exclusive]
            tighter = max(sign * least, sign * node.get(inclusive, least))
            node[inclusive] = sign * tighter


def _hold_strings(node: Schema, write: Callable[[Node], str], formats: Formats) -> None:
    """Write ``pattern`` and ``format`` as patterns of the library, all but one of them in ``allOf``.

    ValueError for a format that is not supported."""
    held = []
    if isinstance(node.get("pattern"), str):
        held.append(_written("pattern", search(node["pattern"]), write))
    if isinstance(name := node.get("format"), str):
        types = node.get("type", "string")
        if types == "string" or "string" in types:
            if name not in formats and name not in ANNOTATIONS:
                raise unknown_format(name, formats)
            held += [_written("format", whole(pattern), write) for pattern in formats.get(name, ())]
        del node["format"]
    if held:
        node["pattern"] = held[0]
    if held[1:]:
        node["allOf"] = [*_list(node, "allOf"), *({"pattern": more} for more in held[1:])]


def _hold_names(node: Schema, write: Callable[[Node], str]) -> None:
    given = node.get("patternProperties")
    if not isinstance(given, dict):
        return
    closed = node.get("additionalProperties") is False
    made: Schema = {}
    for pattern, inner in given.items():
        names = search(pattern)
        # all other names are the names without a match, so the meaning of the pattern must be exact
        if not closed and names != search(pattern, exact=True):
            raise ValueError(
                f"patternProperties: {brief(pattern)!r} is read in several ways (\\s, \\S, \\D, \\W): list the "
                "characters, or give additionalProperties false"
            )
        text = _written("patternProperties", names, write)
        if text in made:
            raise ValueError(f"patternProperties: {brief(pattern)!r} matches the same names as another")
        made[text] = inner
    node["patternProperties"] = made


def _written(key: str, node: Node, write: Callable[[Node], str]) -> str:
    kept = within(node, WRITABLE)
    if kept is None:
        raise ValueError(
            f"{key} matches only texts with control characters: expected none except \\b, \\t, \\n, \\f and \\r"
        )
    return write(kept)
