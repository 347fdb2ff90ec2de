"""The arguments of calls as grammars, for each syntax of arguments.

A syntax without quotes has limits, which ``Inexpressible`` reports.  It cannot spell all names of arguments, and with
some schemas a string looks like another value.  A string of such a syntax is any text without its closing tag.
"""

from __future__ import annotations

import json
import keyword
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.json_schema.references import find

from .description import JSON, OBJECT, PAIRS, PYTHON, Calls
from .elements import KEY
from .grammar_rules import Inexpressible, Rules, either, first_tag, joined, piece, quoted
from .values import MOST_LEVELS, TYPES, typed, types_of

NOTES = frozenset((
    "title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$defs", "definitions", "strict",
))  # fmt: skip
OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
OF_ARRAY = frozenset(("type", "items", "minItems", "maxItems"))
OF_STRING = frozenset(("type", "minLength", "maxLength", "pattern", "format"))
PYTHON_NAME = re.compile(r"[A-Za-z_]\w{0,63}")
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.$-]{0,127}")
# type -> texts that are excluded, because the parser would convert them to a value of this type
CONVERTED = {
    "null": 'BLANK ("null" | "None") BLANK',
    "boolean": 'BLANK ("true" | "false" | "True" | "False") BLANK',
    "integer": "BLANK NUMBER BLANK",
    "number": "BLANK NUMBER BLANK",
    "object": 'BLANK "{" ANY',
    "array": 'BLANK "[" ANY',
}
SCALARS = {"null": '"null"', "boolean": '"true" | "false"', "integer": "INTEGER", "number": "NUMBER"}
ANYTHING = {"type": "object"}
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# the conditions of each type, where a schema allows several types
CONDITIONS = {
    "integer": NUMERIC,
    "number": NUMERIC,
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
}


@dataclass
class Choices:
    """The values that a schema allows, divided by their spelling.

    ``texts`` are schemas of strings, ``words`` the listed strings, ``scalars`` terminals of other values without
    brackets, and ``schemas`` all values that are no strings, as schemas.  ``free`` means that any value fits."""

    texts: list[Mapping[str, Any]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    schemas: list[Any] = field(default_factory=list)
    free: bool = False


class Arguments:
    """Writes the Lark expressions for the arguments of functions in the syntax of one spelling."""

    def __init__(self, rules: Rules, calls: Calls) -> None:
        self._rules, self._calls = rules, calls
        self._root: Any = None
        self._values: dict[str, str] = {}  # schema -> rule of its quoted values

    def of(self, schema: Mapping[str, Any]) -> str:
        """Return the Lark sequence for the arguments that fit the schema of a function, without the tail of the call.

        Inexpressible if the syntax cannot spell all arguments that the schema requires.
        """
        syntax = self._calls.arguments
        if syntax in (JSON, OBJECT):
            return self._rules.json(schema)
        self._root, self._values = schema, {}
        if syntax not in (PAIRS, PYTHON):
            return self._value(schema)
        members = list(self._members(schema))
        if syntax == PAIRS:
            return joined(*(body if required else f"({body})?" for body, required in members))
        return self._rules.chain(members, ", ")

    def open(self) -> str:
        """Return the Lark sequence for any arguments, for a function whose calls need not fit a schema."""
        syntax = self._calls.arguments
        if syntax == PAIRS:
            pairs = self._calls.pairs
            assert pairs is not None
            before, _, after = pairs.before.partition("{key}")
            name = self._rules.terminal(r"/[^<>\s\x00-\x1f\x7f]{1,64}/")
            pair = joined(*self._rules.items(before), name, *self._rules.items(after), self._pair_value({}))
            return f"({pair})*"
        if syntax != PYTHON:
            return self._rules.json(ANYTHING)
        words = " | ".join(map(quoted, keyword.kwlist))
        name = self._rules.terminal(f"/[a-z][a-z0-9_]{{0,63}}/ & ~({words})")
        pair = self._rules.rule(joined(name, '"="', self._rules.json({})))
        return f'({pair} (", " {pair})*)?'

    def _members(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        """Yield (Lark sequence, whether it is required) for each argument."""
        declared, required = _declared(schema)
        for key, inner in declared.items():
            if inner is False and key not in required:
                continue
            yield self._member(key, inner), key in required

    def _member(self, key: str, schema: Any) -> str:
        """Return the Lark sequence for an argument with its name.  Inexpressible if the name cannot be written
        there."""
        if self._calls.arguments == PYTHON:
            normal = unicodedata.normalize("NFKC", key)
            name = PYTHON_NAME.fullmatch(key) and key.isidentifier() and normal == key and key != "__debug__"
            if not name or keyword.iskeyword(key):
                raise Inexpressible(f"the argument {key[:64]!r}, whose name is not a name in Python")
            return joined(quoted(f"{key}="), self._python_value(schema))
        if not KEY.pattern.fullmatch(key) or key != key.strip() or not key.isprintable():
            raise Inexpressible(f"the argument {key[:64]!r}, whose name cannot stand within tags")
        pairs = self._calls.pairs
        assert pairs is not None
        if any(tag in key for tag in self._rules.form.tags):
            raise Inexpressible(f"the argument {key[:64]!r}, whose name contains a tag of the format")
        return joined(*self._rules.items(pairs.before, key=key), self._pair_value(schema))

    # ---- Python ------------------------------------------------------------------------------------------------------

    def _python_value(self, schema: Any) -> str:
        """Return the Lark expression for a value in Python.  JSON is read as Python, with its words for true and
        null."""
        words = {"boolean": '("True" | "False")', "null": '"None"'}
        types = certain_types(schema, self._root)
        if types and types <= words.keys() and _own(schema).keys() <= {"type"}:
            return either(words[name] for name in sorted(types))
        return self._rules.json(piece(schema, self._root))

    # ---- text between tags -------------------------------------------------------------------------------------------

    def _pair_value(self, schema: Any) -> str:
        """Return the Lark expression for a value between tags, including the closing tag.  Inexpressible if no listed
        value can be written there."""
        pairs = self._calls.pairs
        assert pairs is not None
        after = self._rules.items(pairs.after)
        closer = first_tag(self._rules.form, pairs.after) or pairs.after
        choices = self._choices(schema)
        if not (choices.free or choices.texts or choices.words):
            return joined(self._rules.json(piece(schema, self._root)), *after)
        types = types_of(schema, self._root)
        kinds = [] if choices.free or types == {"string"} else sorted(types or SCALARS.keys() | {"object", "array"})
        texts = [{}] if choices.free else choices.texts
        bodies = [self._text(text, [closer], kinds) for text in texts]
        bodies += [quoted(word) for word in choices.words if self._is_kept(word, schema, closer)]
        pieces: list[str] = []
        for inner in choices.schemas:
            self._add_other(inner, bodies, pieces)
        if not bodies and not pieces:
            raise Inexpressible("listed strings, none of which can stand between the tags of an argument")
        found = [joined(name, *after) for name in pieces]
        if bodies:
            found.append(self._ended(either(bodies), after))
        return either(found)

    def _ended(self, body: str, after: list[str]) -> str:
        """Return the Lark expression for a text followed by items.  A literal text before the first token is part of
        the same lexeme."""
        if not after[0].startswith('"'):
            return joined(self._rules.terminal(body), *after)
        return joined(self._rules.terminal(f"{body} {after[0]}"), *after[1:])

    def _add_other(self, schema: Any, bodies: list[str], pieces: list[str]) -> None:
        """Add the values that ``schema`` allows in place of a text: scalars to ``bodies``, objects and arrays as JSON
        to ``pieces``.  Raise Inexpressible if its scalars have bounds, or if it allows scalars and objects or arrays.
        """
        types = certain_types(schema, self._root) or set()
        brackets = types & {"object", "array"}
        if brackets and brackets == types:
            pieces.append(self._rules.json(piece(schema, self._root)))
            return
        own = _own(schema)
        listed = own.get("enum", [own["const"]] if "const" in own else None)
        if listed is not None:
            bodies += [quoted(json.dumps(value)) for value in listed if not isinstance(value, (dict, list))]
            rest = [value for value in listed if isinstance(value, (dict, list))]
            pieces += [self._rules.json({"enum": rest})] if rest else []
            return
        if brackets or not types or own.keys() > {"type"}:
            raise Inexpressible(
                "a value that is either a string or a bounded number, because it writes neither in quotes"
            )
        bodies += [SCALARS[name] for name in sorted(types)]

    def _is_kept(self, word: str, schema: Any, closer: str) -> bool:
        """Return whether the parser of replies returns this string of an ``enum`` unchanged."""
        if closer in word or (not word.isprintable() and any(char < " " and char not in "\t\n\r" for char in word)):
            return False
        return bool(json.loads(typed(word, schema, self._root)) == word)

    def _text(self, schema: Mapping[str, Any], without: list[str], kinds: list[str] | None = None) -> str:
        """Return the name of a terminal for the texts that fit the schema of a string.

        ``without`` are texts that it must not contain.  ``kinds`` are types (such as "number") whose values it must not
        look like.  Inexpressible if a length in the schema is not a whole number."""
        least, most = schema.get("minLength"), schema.get("maxLength")
        body = "TEXT"
        if least or most is not None:
            for bound in (least, most):
                if bound is not None and (type(bound) is not int or bound < 0):
                    raise Inexpressible(f"a minLength or maxLength of {bound!r:.20}, which is not a whole number >= 0")
            high = "" if most is None else most
            body = rf"/[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]{{{least or 0},{high}}}/"
        parts = [body]
        for key in ("pattern", "format"):
            if key in schema:
                parts.append(self._rules.pattern(key, str(schema[key])))
        parts += [f"~(ANY {quoted(text)} ANY)" for text in without]
        parts += dict.fromkeys(f"~({CONVERTED[kind]})" for kind in kinds or () if kind in CONVERTED)
        return self._rules.terminal(" & ".join(parts))

    def _choices(self, schema: Any) -> Choices:
        """Return the values of a schema, divided into strings and others."""
        choices = Choices()
        self._divide(schema, choices, 0)
        return choices

    def _divide(self, schema: Any, choices: Choices, level: int) -> None:
        """Add the values of a schema to the choices.  Inexpressible for a schema that a grammar cannot express."""
        if level > MOST_LEVELS:
            raise Inexpressible(f"references and alternatives that are nested deeper than {MOST_LEVELS} levels")
        own = _own(schema)
        if schema is False:
            raise Inexpressible("a required argument whose schema accepts no value")
        if not own:
            choices.free = True
            return
        inner = self._inner(own)
        if inner is not None:
            for part in inner:
                self._divide(part, choices, level + 1)
            return
        types = certain_types(own, self._root)
        if types is not None and "string" not in types:
            choices.schemas.append(own)
            return
        if "enum" in own or "const" in own:
            self._divide_listed(own, choices)
            return
        names = own.get("type")
        listed = [names] if isinstance(names, str) else names
        rest = [name for name in listed or () if name != "string"]
        expressible = {key for name in rest for key in CONDITIONS.get(name, ())} | OF_STRING
        others = own.keys() - expressible
        if not listed or others or not all(isinstance(name, str) for name in listed):
            raise Inexpressible(f"strings with the schema keywords {', '.join(sorted(others)) or 'other values'}")
        choices.texts.append({key: value for key, value in own.items() if key in OF_STRING})
        for name in rest:
            conditions = {key: own[key] for key in CONDITIONS.get(name, ()) if key in own}
            choices.schemas.append({"type": name, **conditions})

    def _divide_listed(self, own: dict[str, Any], choices: Choices) -> None:
        """Add the values of an ``enum`` or ``const`` to the choices.  Inexpressible if the schema has further
        conditions."""
        if own.keys() - {"type", "enum", "const"}:
            raise Inexpressible("an enum or const with further conditions")
        values = own["enum"] if "enum" in own else [own["const"]]
        types = types_of({"type": own["type"]}) if "type" in own else None
        fitting = [value for value in values if types is None or _is_of(value, types)]
        choices.words += [value for value in fitting if isinstance(value, str)]
        others = [value for value in fitting if not isinstance(value, str)]
        if others:
            choices.schemas.append({"enum": others})

    def _inner(self, own: dict[str, Any]) -> list[Any] | None:
        """Return the alternatives of a schema that is a reference, ``anyOf`` or ``allOf`` with one member; None for
        others.  Inexpressible if the reference has no target."""
        if own.keys() == {"$ref"}:
            target = find(self._root, own["$ref"])
            if target is None:
                raise Inexpressible(f"the reference {str(own['$ref'])[:64]!r}")
            return [target]
        alone = own.keys() == {"anyOf"} or (own.keys() == {"allOf"} and len(own["allOf"]) == 1)
        return list(next(iter(own.values()))) if alone else None

    # ---- quoted objects ----------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> str:
        """Return the name of a rule for a value whose strings are enclosed in the tags ``quote``."""
        key = json.dumps(schema, sort_keys=True)
        rule = self._values.get(key)
        if rule is None:
            rule = self._values[key] = self._rules.later()
            self._rules.define(rule, self._quoted_value(schema))
        return rule

    def _quoted_value(self, schema: Any) -> str:
        """Return the Lark expression for a value in this syntax or in JSON, which the parser reads as well."""
        own = _own(schema)
        inner = self._inner(own) if own else None
        if inner is not None:
            return either(map(self._value, inner))
        words = [value for value in own.get("enum", ()) if isinstance(value, str)]
        kept = [word for word in words if self._calls.quote not in word and word.isprintable()]
        if kept and kept == own["enum"] and own.keys() <= {"type", "enum"} and own.get("type", "string") == "string":
            return either(self._between(quoted(word)) for word in kept)
        kind = own.get("type")
        if kind == "string" and own.keys() <= OF_STRING:
            return self._between(self._text(own, [self._calls.quote]))
        if kind == "array" and own.keys() <= OF_ARRAY and "items" in own:
            return self._list(own)
        if kind == "object" and own.keys() <= OF_OBJECT and own.get("additionalProperties") is False:
            members = self._quoted_members(own)
            return joined('"{"', self._rules.chain(members, ","), '"}"')
        return self._rules.json(piece(schema, self._root))

    def _quoted_members(self, own: dict[str, Any]) -> list[tuple[str, bool]]:
        """Return (Lark sequence, whether it is required) for each declared member of an object; members that no value
        fits are left out."""
        declared, required = _declared(own)
        members = []
        for key, inner in declared.items():
            if inner is False and key not in required:
                continue
            name = key if PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
            members.append((joined(quoted(f"{name}:"), self._value(inner)), key in required))
        return members

    def _list(self, own: dict[str, Any]) -> str:
        """Return the Lark expression for a list with the schema's item schema and bounds.  Wrong bounds make it a plain
        JSON value."""
        least, most = own.get("minItems", 0), own.get("maxItems")
        bounds = [bound for bound in (least, most) if bound is not None]
        if any(type(bound) is not int or bound < 0 for bound in bounds) or (most is not None and most < max(least, 1)):
            return self._rules.json(piece(own, self._root))
        inner = self._value(own["items"])
        high = "" if most is None else most - 1
        more = f'("," {inner}){{{max(least - 1, 0)},{high}}}' if most != 1 else ""
        listed = joined(inner, more)
        return joined('"["', listed if least else f"({listed})?", '"]"')

    def _between(self, body: str) -> str:
        """Return the Lark sequence for a text, which the rule ``body`` describes, between the tags ``quote``."""
        quote = self._rules.items(self._calls.quote)
        return joined(*quote, self._ended(body, quote))


def certain_types(schema: Any, root: Any, level: int = 0) -> set[str] | None:
    """Return the types that a schema allows, or None if it may allow values of any type."""
    if not isinstance(schema, Mapping) or level > MOST_LEVELS:
        return None
    if "type" in schema or "enum" in schema or "const" in schema:
        return set(types_of({key: schema[key] for key in ("type", "enum", "const") if key in schema})) or None
    if "$ref" in schema:
        return certain_types(find(root, schema["$ref"]), root, level + 1)
    found: set[str] = set()
    for part in schema.get("anyOf") or schema.get("oneOf") or ():
        types = certain_types(part, root, level + 1)
        if types is None:
            return None
        found |= types
    return found or None


def _own(schema: Any) -> dict[str, Any]:
    """Return a schema without its annotations and definitions."""
    if not isinstance(schema, Mapping):
        return {}
    return {key: value for key, value in schema.items() if key not in NOTES}


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value has one of some types."""
    kind = TYPES[type(value)]
    return kind in types or (kind == "integer" and "number" in types)


def _declared(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
    """Return the properties that an object declares, and the names of the required ones.

    Inexpressible for objects with undeclared members.
    """
    own = _own(schema)
    declared, required = own.get("properties", {}), own.get("required", [])
    shaped = isinstance(declared, Mapping) and isinstance(required, list)
    if not shaped or own.keys() - OF_OBJECT or own.get("type") != "object":
        further = ", ".join(sorted(map(str, own.keys() - OF_OBJECT)))
        raise Inexpressible(f"an object with {further or 'members of another shape'}")
    if not declared and own.get("additionalProperties") is not False:
        raise Inexpressible("an object that does not declare its members")
    missing = [name for name in required if name not in declared]
    if missing:
        raise Inexpressible(f"the required argument {str(missing[0])[:64]!r}, which is not declared")
    return declared, set(required)
