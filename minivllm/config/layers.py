"""Lay sources of options over one another: the merged tree, and for each leaf the source that wrote it last.

A leaf is a value that is no table.  The lists of plug-ins are taken apart as well, so that ``processors.0.options.x``
has a line of its own; any other list is one leaf.  Origins are texts: ``exp.toml:7``, ``MINIVLLM__SEED``, ``--set``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.config.other_names import neutral_note, option_hint
from minivllm.errors import ConfigError, brief, shown, suggest
from minivllm.validation import DEEPEST, begins, flaw

Path = Sequence[str]


@dataclass(frozen=True)
class ConfigShape:
    """The names that the layers know: all ``top`` keys, the ``tables`` with their keys (None: checked elsewhere), the
    ``seams`` that one plug-in fills, the lists of ``several``, and ``aliases``."""

    top: Sequence[str]
    tables: Mapping[str, Iterable[str] | None]
    seams: Sequence[str]
    several: Sequence[str]
    choice: Sequence[str]  # the keys of a seam's table
    aliases: Mapping[str, str]
    version: int
    free: Sequence[str] = ()  # options that are tables with keys of their own
    not_in_files: Sequence[str] = ("allow_targets",)


@dataclass
class Layers:
    shape: ConfigShape
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, values: Mapping[str, Any], where: Callable[[tuple[Any, ...]], str], trusted: bool = False) -> None:
        """Lay ``values`` over what is there.  ``where`` tells the source of a path.  ``trusted``: the values come from
        the command line or from Python, which may allow what a file may not."""
        unalias(values, self.shape.aliases, lambda key: where((key,)))
        for key, value in values.items():
            self.put([key], value, where, trusted)

    def assign(self, pairs: Sequence[tuple[Path, Any]], source: str, trusted: bool = False) -> None:
        """Lay single values over what is there, names first: a new name drops the options of the old one, not those
        that come with it."""
        for path, value in sorted(pairs, key=lambda pair: not (pair[0][-1] == "name" or len(pair[0]) == 1)):
            self.put(path, value, lambda _: source, trusted)

    def put(self, path: Path, value: Any, where: Callable[[tuple[Any, ...]], str], trusted: bool = False) -> None:
        source = begins(brief(where(tuple(path)), 300))
        if len(path) > DEEPEST:
            raise ConfigError(f"{source}the key {_dotted(path)} has {len(path)} parts; want at most {DEEPEST}")
        if what := flaw(list(path)) or flaw(value):
            raise ConfigError(f"{source}{_dotted(path)}: {what}")
        self._put(path, value, where, trusted)

    def _put(self, path: Path, value: Any, where: Callable[[tuple[Any, ...]], str], trusted: bool) -> None:
        given = tuple(path)
        path = [self.shape.aliases.get(path[0], path[0]), *path[1:]]
        source = where(given)
        if len(path) == 1 and path[0] not in self.shape.top and (note := neutral_note(path[0], value)):
            self.notes.append(f"{begins(source)}{note}")
            return
        if len(path) == 1 and path[0] in self.shape.tables and value is None:
            value = {}  # in YAML a table that holds comments only is null
        self._check_key(path, value, source, trusted)
        if len(path) == 1 and path[0] in self.shape.seams and (value is None or isinstance(value, str)):
            path, value = [path[0], "name"], value if value is not None else "auto"
        if path[:2] == ["requires", "plugins"] and isinstance(value, list):
            self._require(value, source)
        elif isinstance(value, Mapping) and self._merges(path, value):
            for key in sorted(value, key=lambda key: key != "name"):
                self._put([*given, str(key)], value[key], where, trusted)
        else:
            self._write(path, value, source, lambda inner: where((*given, *inner)))

    def _merges(self, path: Path, value: Mapping[str, Any]) -> bool:
        """Whether a table is laid key by key over the one that is there.  A sampling parameter that is a table is one
        value, and an empty table of options means none."""
        if len(path) == 1:
            return bool(value) or path[0] in self.shape.seams or path[0] in self.shape.tables
        return bool(value) and path[0] != "sampling"

    def _write(self, path: Path, value: Any, source: str, where: Callable[[tuple[Any, ...]], str]) -> None:
        if len(path) == 2 and path[0] in self.shape.seams and path[1] == "name":
            self._drop_options(path[0], value, source)
        node = self.tree
        for i, key in enumerate(path[:-1]):
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                dotted = ".".join(path[: i + 1])
                at = self.origins.get(dotted, "elsewhere")
                raise ConfigError(f"{begins(source)}{_dotted(path)}: {dotted} is {shown(inner)} from {at}, not a table")
            node = inner
        node[path[-1]] = value
        dotted = ".".join(path)
        self._forget(dotted)
        self.origins[dotted] = source
        if path[0] in self.shape.several and isinstance(value, list):
            self._places(dotted, value, (), where)

    def _places(self, dotted: str, value: Any, inside: tuple[Any, ...], where: Callable[..., str]) -> None:
        """The origins of what is in a list of plug-ins."""
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            path, place = f"{dotted}.{key}", (*inside, key)
            if isinstance(inner, Mapping) and inner:
                self._places(path, inner, place, where)
            else:
                self.origins[path] = where(place)

    def _forget(self, dotted: str) -> None:
        for leaf in [o for o in self.origins if o == dotted or o.startswith(dotted + ".")]:
            del self.origins[leaf]

    def _drop_options(self, seam: str, name: Any, source: str) -> None:
        """Another plug-in does not take over the options that were written for the one before."""
        old = self.tree.get(seam)
        if isinstance(old, dict) and (before := old.get("name", "auto")) != name:
            gone = [key for key in ("options", "prefer") if old.get(key) and (key == "prefer" or "name" in old)]
            for key in gone:
                del old[key]
                self._forget(f"{seam}.{key}")
            if gone:
                self.notes.append(
                    f"{begins(source)}{seam} is now {shown(name)}; {' and '.join(gone)} of {shown(before)} dropped"
                )

    def _require(self, names: list[Any], source: str) -> None:
        """What one source requires does not replace what another does: each knows what it is written for."""
        table = self.tree.setdefault("requires", {})
        for name in names:
            if name not in (listed := table.setdefault("plugins", [])):
                self.origins[f"requires.plugins.{len(listed)}"] = source
                listed.append(name)

    def _check_key(self, path: Path, value: Any, source: str, trusted: bool) -> None:
        """Refuse an unknown name here, where the source is known."""
        shape, top, at = self.shape, path[0], begins(source)
        if top == "extends":
            raise ConfigError(f"{at}extends stands in a file and names another; here, give both files with --config")
        if top not in shape.top and top not in shape.tables:
            hint = option_hint(top) or suggest(top, [*shape.top, *shape.tables, *shape.aliases])
            raise ConfigError(f"{at}unknown option {shown(top)}.{hint}")
        if top in shape.several and len(path) > 1:
            raise ConfigError(f"{at}{_dotted(path)}: {top!r} is a list: give it as a whole")
        inner = shape.choice if top in shape.seams else shape.tables.get(top)
        if len(path) > 1 and inner is None and top not in shape.tables and top not in shape.free:
            raise ConfigError(f"{at}{_dotted(path)}: {top!r} is a value, not a table: want {top} = VALUE")
        if len(path) > 1 and inner is not None and path[1] not in inner:
            near = suggest(path[1], inner) or f" There are: {', '.join(inner)}."
            raise ConfigError(f"{at}unknown option {shown(_dotted(path[:2]))}.{near}")
        if top in shape.tables and len(path) == 1 and not isinstance(value, Mapping):
            raise ConfigError(f"{at}{top}={shown(value)}: want a table")
        if top == "config_version" and (type(value) is not int or value != shape.version):
            newer = type(value) is int and value > shape.version
            what = "it was written for a newer one: upgrade minivllm" if newer else f"want {shape.version}"
            raise ConfigError(f"{at}config_version={shown(value)}: this minivllm reads version {shape.version}; {what}")
        if top in shape.not_in_files and not trusted:
            raise ConfigError(
                f"{at}{top} may come from the command line (--allow-target) or from Python only: "
                "what names code must not be what allows it"
            )


def _dotted(path: Path) -> str:
    return brief(".".join(map(str, path)))


def unalias(values: Mapping[str, Any], aliases: Mapping[str, str], where: Callable[[str], str]) -> dict[str, Any]:
    """Other engines' names for the same thing; ConfigError if both are there."""
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name in found:
            raise ConfigError(f"{begins(where(key))}{name} is given twice, as {shown(keys[name])} and as {shown(key)}")
        found[name], keys[name] = value, key
    return found
