"""The parts of a JSON schema that XGrammar enforces, and corrections of its grammar.

It ignores keywords that it does not support.  ``unheld`` finds these, so that they are refused.  The lists were tested
with ``tests/helpers/schemas``.  The grammar of a schema is text, which is then corrected.  Its regular expressions are
replaced, and each character of a string is restricted to one spelling (``Patterns``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from . import ecma_regex
from .code_points import Ranges
from .ecma_regex import Alternatives, Chars, Node, Repeat
from .json_schema import unwritable

NOTES = frozenset((
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
    "$defs", "definitions",
))  # fmt: skip
HELD = frozenset((
    "type", "enum", "const", "anyOf", "allOf", "$ref", "properties", "required", "additionalProperties",
    "patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format",
))  # fmt: skip
ANY_TYPE = frozenset(("type", "enum", "const", "anyOf", "allOf", "$ref"))
ALONE = ("anyOf", "allOf", "$ref", "enum", "const")  # keywords next to which XGrammar ignores all other keywords
NAMED = ("properties", "patternProperties", "$defs", "definitions")


def unheld(schema: Any) -> Iterator[str]:
    """Yield names of keywords of a schema that XGrammar would ignore, so that an answer could violate them."""
    if not isinstance(schema, dict):
        return
    own = set(schema) - NOTES
    yield from sorted(own - HELD)
    for key in ALONE:
        beside = sorted(own - {key} - ({"type"} if key in ("enum", "const") else set()))
        if key in schema and beside:
            yield f"{', '.join(beside)} beside {key}"
            break
    if len(schema.get("allOf", ())) > 1:
        yield "allOf of several"
    if "type" not in own and (untyped := sorted(own & HELD - ANY_TYPE)):
        yield f"{', '.join(untyped)} without type"
    names = schema.get("properties")
    names = names if isinstance(names, dict) else {}
    if any(unwritable(c) for name in names for c in name):
        yield "control characters in the names of properties"
    if missing := [name for name in schema.get("required", ()) if name not in names]:
        yield f"required properties that are not declared ({', '.join(map(repr, missing[:3]))})"
    by_pattern = schema.get("patternProperties", {})
    if by_pattern and (names or len(by_pattern) > 1 or schema.get("additionalProperties") is not False):
        yield "patternProperties beside other properties"
    if own & {"pattern", "format"} and own & {"minLength", "maxLength"}:
        yield "minLength and maxLength beside pattern or format"
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            inner = list(value.values())
        elif key in ("anyOf", "allOf", "prefixItems") and isinstance(value, list):
            inner = value
        else:
            inner = [value] if key in ("items", "additionalProperties") else []
        for part in inner:
            yield from unheld(part)


class Patterns:
    """The regular expressions of one schema, by the names with which the schema refers to them; they become rules of
    its grammar.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def name(self, node: Node) -> str:
        self._nodes.append(node)
        return f"^p{len(self._nodes) - 1}p$"

    def exactly(self, ebnf: str) -> str:
        """Return the library's grammar of the schema with the exact expressions.  Raise ValueError for an unexpected
        grammar.
        """
        ebnf = NAMED_PATTERN.sub(lambda m: f"({rule(ecma_regex.spelled(self._nodes[int(m[1])]))})", ebnf)
        ebnf = HEXADECIMAL.sub(lambda m: rf"\u00{m[1]}" if m[1] else m[0], ebnf)
        ebnf = ESCAPES.sub(r'basic_escape ::= (["\\\\bfnrt])', ebnf)
        if "Regex(" in ebnf or '"u" [' in ebnf:
            raise ValueError("this version of xgrammar writes its grammars in another way: choose grammar=llguidance")
        return ebnf


NAMED_PATTERN = re.compile(r'Regex\("\^p(\d+)p\$"(?:, json_string=true)?\)')
# The library writes two digits after \\x, and reads as many as there are.
HEXADECIMAL = re.compile(r"\\\\|\\x([0-9a-fA-F]{2})")
ESCAPES = re.compile(r"(?m)^basic_escape ::= .*$")


def rule(node: Node) -> str:
    """Return an expression in the notation of the library's grammars."""
    if isinstance(node, Chars):
        return _class(node.ranges)
    if isinstance(node, Alternatives):
        return "(" + " | ".join(map(rule, node.parts)) + ")"
    if isinstance(node, Repeat):
        return f"({rule(node.part)}){ecma_regex.quantifier(node)}"
    assert isinstance(node, ecma_regex.Sequence)
    return " ".join(map(rule, node.parts)) or '""'


def _class(ranges: Ranges) -> str:
    return "[" + "".join(f"\\U{low:08x}" + f"-\\U{high:08x}" * (high > low) for low, high in ranges) + "]"
