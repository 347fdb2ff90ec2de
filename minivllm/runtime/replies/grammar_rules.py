"""The rules of a grammar in the Lark syntax of llguidance, collected while a description is written as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minivllm.core.json_schema.depth import MOST_BYTES

from .description import Calls, ReplyFormat
from .elements import PLACEHOLDER, Templates

BEHIND = '{"behind": true'  # start of the source of a grammar that follows the reasoning
DEFINED = re.compile(r"#/(\$defs|definitions)/([^/]+)(?:/.*)?")
# terminals that each grammar has; control characters are not written
BASE = {
    "ANY": r"/(?s:.*)/",
    "TEXT": r"/[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*/",
    "BLANK": r"/[\s\x1c-\x1f]*/",
    "ID": "/[a-zA-Z0-9]{9}/",
    "NUMBER": r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?/",
    "INTEGER": "/-?(?:0|[1-9][0-9]*)/",
}


class Inexpressible(ValueError):
    """Error about a schema for which a format of calls has no spelling."""


def quoted(text: str) -> str:
    """Return a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def joined(*parts: str) -> str:
    """Return a Lark sequence: the parts that are not empty, with spaces between."""
    return " ".join(part for part in parts if part)


def either(parts: Iterable[str]) -> str:
    """Return a Lark alternative of some parts in parentheses, or the only part."""
    listed = list(dict.fromkeys(parts))
    return listed[0] if len(listed) == 1 else f"({' | '.join(listed)})"


def first_tag(form: ReplyFormat, template: str) -> str | None:
    """Return the tag with which a template begins, or None."""
    tags = sorted(form.tags, key=len, reverse=True)
    begin = template.strip()
    return next((tag for tag in tags if begin.startswith(tag)), None)


def strict_spellings(form: ReplyFormat, tokens: Iterable[str]) -> list[Calls]:
    """Return the spellings of calls that a grammar writes: the first one, and the spellings whose tags are all tokens.

    A parser of constrained answers reads only these.  ``tokens`` has the tags that are tokens.
    """
    tags = set(tokens)
    return [calls for number, calls in enumerate(form.calls) if number == 0 or _tags(form, calls) <= tags]


def _tags(form: ReplyFormat, calls: Calls) -> set[str]:
    """Return the tags in the templates of a spelling."""
    parts = [calls.begin, calls.open, calls.head, calls.tail, calls.close, calls.between, calls.end, calls.quote]
    if calls.pairs is not None:
        parts += [calls.pairs.before, calls.pairs.after]
    text = "\n".join(parts)
    return {tag for tag in form.tags if tag in text}


class Rules:
    """The rules, terminals and schemas of one grammar.

    ``tokens`` has the id of each tag that is a token.  Equal bodies share a name."""

    def __init__(self, form: ReplyFormat, tokens: Mapping[str, int]) -> None:
        self.form, self.tokens = form, tokens
        self._templates = Templates({tag: (tag,) for tag in form.tags})
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._used: dict[str, Any] = {}
        self._patterns: dict[str, tuple[str, str]] = {}
        self._free: dict[str, list[int]] = {}
        self._size = 0

    def source(self, start: str, behind: bool = False) -> str:
        """Return the source of the grammar for a plug-in (``GrammarSource`` of kind ``reply``).

        ``behind`` means that the grammar applies after reasoning, which is not part of the grammar.
        """
        base = [f"{name}: {body}" for name, body in BASE.items()]
        parts = {
            "behind": behind,
            "lark": "\n".join([f"start: {start}", *self._lines, *base]),
            "schemas": self._used,
            "patterns": self._patterns,
            "free": self._free,
        }
        text = json.dumps(parts, ensure_ascii=False)
        self._measure(len(text.encode(errors="surrogatepass")) - self._size)
        return text

    def rule(self, body: str, options: str = "") -> str:
        """Return the name of the rule with this body, which is added if it is new.  ``options`` follow the name."""
        return self._named("r", body, options)

    def terminal(self, body: str) -> str:
        """Return the name of the terminal (one lexeme) with this body, which is added if it is new."""
        return self._named("T", body)

    def later(self) -> str:
        """Return a new name of a rule that ``define`` defines, so that the rule can refer to itself."""
        name = f"r{len(self._names)}"
        self._names[f"later {name}"] = name
        return name

    def define(self, name: str, body: str) -> None:
        """Define a rule."""
        line = f"{name}: {body}"
        self._measure(len(line))
        self._lines.append(line)

    def json(self, schema: Any) -> str:
        """Return the name of a rule for a JSON value that fits a schema."""
        text = json.dumps(schema, ensure_ascii=False)
        name = self._names.get(text)
        if name is None:
            self._measure(len(text.encode(errors="surrogatepass")))
            name = self._names[text] = f"j{len(self._used)}"
            self._used[name] = schema
        return name

    def pattern(self, kind: str, text: str) -> str:
        """Return the name of a terminal for a ``pattern`` or a ``format`` of JSON Schema."""
        name = f"P{len(self._patterns)}"
        self._patterns[name] = (kind, text)
        return name

    def free(self, tags: Iterable[str]) -> str:
        """Return the name of a rule for any token that is none of some tags and does not end the answer."""
        ids = sorted({self.tokens[tag] for tag in tags})
        name = f"free{len(self._free)}"
        self._free[name] = ids
        return name

    def items(self, template: str, name: str = "", key: str = "") -> list[str]:
        """Return the items of a template: tokens of tags, and text.  ``name`` and ``key`` are filled in."""
        found: list[str] = []
        text = ""
        for piece in self._templates.split(template):
            token = self.tokens.get(piece)
            placeholder = PLACEHOLDER.fullmatch(piece) is not None
            if token is None and piece != "{id}":
                filled = {"{name}": name, "{key}": key}.get(piece, piece) if placeholder else piece
                text += filled
                continue
            if text:
                found.append(quoted(text))
            text = ""
            found.append("ID" if token is None else f"<[{token}]>")
        return [*found, quoted(text)] if text else found

    def sequence(self, template: str, name: str = "") -> str:
        """Return the Lark sequence for a template."""
        return joined(*self.items(template, name))

    def chain(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the Lark expression for members in their order, with separators between.  A member is a pair (Lark
        sequence, whether it is required).

        "" means that there are no members.
        """
        rest = ""  # rule for the members after the first written one
        whole = ""
        for body, required in reversed(members):
            first = joined(body, rest)
            if required:
                whole = first
            else:
                whole = f"({first} | {whole})" if whole else f"({first})?"
            whole = self.rule(whole)
            more = joined(quoted(separator), body)
            rest = self.rule(joined(more if required else f"({more})?", rest))
        return whole

    def _named(self, prefix: str, body: str, options: str = "") -> str:
        """Return the name of the rule or terminal with a body.  It gets a name that begins with ``prefix`` if it is
        new."""
        key = f"{prefix}{options} {body}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{prefix}{len(self._names)}"
            line = f"{name}{options}: {body}"
            self._measure(len(line.encode(errors="surrogatepass")))
            self._lines.append(line)
        return name

    def _measure(self, size: int) -> None:
        """Add ``size`` bytes to the size of the grammar.  Inexpressible if the grammar becomes too large."""
        self._size += size
        if self._size > MOST_BYTES:
            raise Inexpressible(f"a grammar of more than {MOST_BYTES} bytes")


def piece(schema: Any, root: Any) -> Any:
    """Return a part of a schema as an independent schema, with the definitions of the whole schema that it refers to.

    Inexpressible for references to other places.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, dict[str, Any]] = {}
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        pending += part.values() if isinstance(part, Mapping) else ()
        pending += part if isinstance(part, list) else ()
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if not isinstance(reference, str):
            continue
        match = DEFINED.fullmatch(reference)
        place, name = (match[1], match[2].replace("~1", "/").replace("~0", "~")) if match else ("", "")
        definitions = root.get(place) if isinstance(root, Mapping) else None
        if not isinstance(definitions, Mapping) or name not in definitions:
            raise Inexpressible(f"the reference {reference[:64]!r}, which names no definition of the schema")
        moved = found.setdefault(place, {})
        if name not in moved:
            moved[name] = definitions[name]
            pending.append(definitions[name])
    return {**schema, **found} if found else schema
