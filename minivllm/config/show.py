"""Write a configuration with the source of every option, as TOML or JSON.  The TOML can be read again and means the
same."""

from __future__ import annotations

import json
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
    """One option: its path, its value and its source.  The source ``default`` means that the default is used."""

    path: tuple[str, ...]
    value: Any
    origin: str

    @property
    def dotted(self) -> str:
        """Return the path as text."""
        return ".".join(self.path)


def leaves(loaded: Loaded) -> list[ShownValue]:
    """Return every option of a configuration, defaults included, in the order of declaration.  The tables ``server``
    and ``requires`` are included only if the user has set them."""
    values = loaded.engine.model_dump()
    tables = {"sampling": dict(loaded.sampling), "run": loaded.run.model_dump()}
    if any(origin.startswith("server.") for origin in loaded.origins):
        tables["server"] = loaded.server.model_dump()
    if loaded.requires:
        tables["requires"] = {"plugins": list(loaded.requires)}
    shown = _walk({**values, **tables})
    return [ShownValue(path, value, _origin(loaded.origins, path)) for path, value in shown]


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each leaf."""
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
    """Return the table of a chosen plug-in without its empty values."""
    return {key: inner for key, inner in value.items() if inner or key == "name"}


def _flat(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each leaf in a nested table."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*path, str(key)))
    else:
        yield path, value


def _origin(origins: Mapping[str, str], path: tuple[str, ...]) -> str:
    """Return the source (such as "exp.toml:7") of the option at a path.

    If none is recorded, return the source of the innermost table around it, or else of a value inside it."""
    for end in range(len(path), 0, -1):
        dotted = ".".join(path[:end])
        if dotted in origins:
            return origins[dotted]
    inside = ".".join(path) + "."
    return next((source for leaf, source in origins.items() if leaf.startswith(inside)), DEFAULT)


# ---- TOML ------------------------------------------------------------------------------------------------------------


def to_toml(options: list[ShownValue], comment: Any = None) -> str:
    """Return the options as TOML.  ``comment`` is a function from an option to the text after it on its line.

    A value that TOML cannot express, or that no file may contain, becomes a comment.
    """
    from minivllm.config.values import SEVERAL, SHAPE

    lines: list[str] = []
    heading = ""
    # Values of the top level come first, because in TOML a table ends only at the next table.
    for leaf in sorted(options, key=lambda leaf: len(leaf.path) > 1):
        top = leaf.path[0]
        depth = 2 if top in SEVERAL else 1
        table = _joined(leaf.path[:depth]) if len(leaf.path) > 1 else ""
        if table != heading:
            heading = table
            lines += ["", f"[[{top}]]" if depth == 2 else f"[{table}]"]
        name = _joined(leaf.path[depth:] if heading else leaf.path)
        text = toml_value(leaf.value)
        line = f"{name} = {text}"
        if top in SHAPE.not_in_files:
            line = f"# {line} (never from a file)"
        elif leaf.value is None and top not in SHAPE.free:
            line = f"# {name}: not set"
        elif text is None:
            line = f"# {name} = {leaf.value!r} (has no TOML form)"
        remark = comment(leaf) if comment else ""
        lines.append(f"{line:<40} # {remark}" if remark else line)
    return "\n".join(lines) + "\n"


def _joined(path: tuple[str, ...]) -> str:
    """Return a path as a dotted TOML key."""
    return ".".join(map(toml_key, path))


def toml_key(key: Any) -> str:
    """Return a key as TOML, in quotes if necessary."""
    return str(key) if _BARE.fullmatch(str(key)) else _text(str(key))


def toml_value(value: Any) -> str | None:
    """Return a value as TOML, or None if TOML cannot express it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (int, float)):
        return repr(value)  # ``repr`` also gives valid TOML for nan, inf and -inf
    if isinstance(value, (list, tuple)):
        parts = [toml_value(inner) for inner in value]
        return None if None in parts else f"[{', '.join(filter(None, parts))}]"
    if isinstance(value, Mapping):
        pairs = {toml_key(key): toml_value(inner) for key, inner in value.items()}
        if None in pairs.values():
            return None
        inside = ", ".join(f"{key} = {text}" for key, text in pairs.items())
        return f"{{ {inside} }}" if inside else "{}"
    return None


def _text(value: str) -> str:
    """Return a text as a TOML string."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def to_json(loaded: Loaded, plugin_of: Any = None) -> str:
    """Return the configuration as JSON.

    By default, the values are nested.  With ``plugin_of``, a function from a leaf to the plug-in that it names, the
    result is an object for each option, by its dotted name, with its source.
    """
    if plugin_of is None:
        return json.dumps(plain(loaded), indent=2, ensure_ascii=False, default=repr)
    rows = {}
    for leaf in leaves(loaded):
        row = {"value": leaf.value, "origin": leaf.origin}
        plugin = plugin_of(leaf)
        if isinstance(plugin, str):  # the reason why the plug-in was not found
            row["plugin"] = {"missing": plugin}
        elif plugin is not None:
            row["plugin"] = {"dist": plugin.dist, "version": plugin.version}
        rows[leaf.dotted] = row
    return json.dumps(rows, indent=2, ensure_ascii=False, default=repr)


def plain(loaded: Loaded) -> dict[str, Any]:
    """Return the whole configuration as nested plain values."""
    tables = {"sampling": dict(loaded.sampling), "run": loaded.run.model_dump(), "server": loaded.server.model_dump()}
    return {**loaded.engine.model_dump(), **tables, "requires": {"plugins": list(loaded.requires)}}
