"""A configuration written out: every option with its value and where it came from, as TOML or as JSON.

What is written as TOML can be read again, and means the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.config import Loaded

DEFAULT = "default"
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class ShownValue:
    """One option: its path, its value and the source that set it (``default``: none did)."""

    path: tuple[str, ...]
    value: Any
    origin: str

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def leaves(loaded: Loaded) -> list[ShownValue]:
    """Every option of a configuration, defaults included, in the order in which they are declared."""
    values = loaded.engine.model_dump()
    tables = {"sampling": dict(loaded.sampling), "run": loaded.run.model_dump()}
    if any(origin.startswith("server.") for origin in loaded.origins):
        tables["server"] = loaded.server.model_dump()
    if loaded.requires:
        tables["requires"] = {"plugins": list(loaded.requires)}
    return [ShownValue(path, value, _origin(loaded.origins, path)) for path, value in _walk({**values, **tables})]


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    from minivllm.config import SEAMS, SEVERAL
    from minivllm.config.values import TABLES

    for key, value in values.items():
        if key in SEAMS:
            yield from _flat(_choice(value), (key,))
        elif key in SEVERAL:
            for i, choice in enumerate(value):
                yield from _flat(_choice(choice), (key, str(i)))
            if not value:
                yield (key,), value
        elif isinstance(value, Mapping) and (value or key in TABLES):
            for name, inner in value.items():
                yield (key, name), inner
        else:
            yield (key,), value


def _choice(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner or key == "name"}


def _flat(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*path, str(key)))
    else:
        yield path, value


def _origin(origins: Mapping[str, str], path: tuple[str, ...]) -> str:
    """The source of a leaf: its own, or that of the whole that it came with, or of a part of a list."""
    for end in range(len(path), 0, -1):
        dotted = ".".join(path[:end])
        if dotted in origins:
            return origins[dotted]
    inside = ".".join(path) + "."
    return next((source for leaf, source in origins.items() if leaf.startswith(inside)), DEFAULT)


# ---- TOML ------------------------------------------------------------------------------------------------------------


def to_toml(found: list[ShownValue], comment: Any = None) -> str:
    """The leaves as TOML.  ``comment(leaf)`` is written behind each; a value that TOML has no word for, or that no file
    may hold, becomes a comment."""
    from minivllm.config.values import SEVERAL, SHAPE

    lines, heading = [], ""
    for leaf in sorted(found, key=lambda leaf: len(leaf.path) > 1):  # a table would swallow what stands after it
        depth = 2 if leaf.path[0] in SEVERAL else 1
        table = ".".join(toml_key(part) for part in leaf.path[:depth]) if len(leaf.path) > 1 else ""
        if table != heading:
            heading = table
            lines += ["", f"[[{leaf.path[0]}]]" if depth == 2 else f"[{table}]"]
        name = ".".join(toml_key(part) for part in leaf.path[depth if heading else 0 :])
        text, why = toml_value(leaf.value), ""
        if leaf.path[0] in SHAPE.not_in_files:
            why = "never from a file"
        elif leaf.value is None and leaf.path[0] not in SHAPE.free:
            why = "not set"
        elif text is None:
            text, why = repr(leaf.value), "has no TOML form"
        line = f"{name} = {text}" if not why else f"# {name} = {text} ({why})" if text else f"# {name}: {why}"
        said = comment(leaf) if comment else ""
        lines.append(f"{line:<40} # {said}" if said else line)
    return "\n".join(lines) + "\n"


def toml_key(key: Any) -> str:
    return str(key) if _BARE.fullmatch(str(key)) else _text(str(key))


def toml_value(value: Any) -> str | None:
    """A value as TOML writes it; None if TOML has no form for it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        parts = [toml_value(inner) for inner in value]
        return None if None in parts else f"[{', '.join(filter(None, parts))}]"
    if isinstance(value, Mapping):
        pairs = {toml_key(key): toml_value(inner) for key, inner in value.items()}
        if not pairs:
            return "{}"
        return None if None in pairs.values() else "{ " + ", ".join(f"{k} = {v}" for k, v in pairs.items()) + " }"
    return None


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def to_json(loaded: Loaded, plugin_of: Any = None) -> str:
    """The configuration as JSON: nested values, or, with ``plugin_of`` (from a leaf to the plug-in that it names), an
    object for each option by its dotted name, with its origin."""
    if plugin_of is None:
        return json.dumps(plain(loaded), indent=2, ensure_ascii=False, default=repr)
    rows = {}
    for leaf in leaves(loaded):
        row = {"value": leaf.value, "origin": leaf.origin}
        plugin = plugin_of(leaf)
        if plugin is not None:
            found = isinstance(plugin, str)
            row["plugin"] = {"missing": plugin} if found else {"dist": plugin.dist, "version": plugin.version}
        rows[leaf.dotted] = row
    return json.dumps(rows, indent=2, ensure_ascii=False, default=repr)


def plain(loaded: Loaded) -> dict[str, Any]:
    """The whole configuration as nested plain values."""
    tables = {"sampling": dict(loaded.sampling), "run": loaded.run.model_dump(), "server": loaded.server.model_dump()}
    return {**loaded.engine.model_dump(), **tables, "requires": {"plugins": list(loaded.requires)}}
