"""Merge the sources of options into one tree, and record the source that set each leaf last.

A leaf is a value that is not a table.  The elements of plug-in lists are leaves too, so ``processors.0.options.x`` has
a source; any other list is one leaf.  A source is a text such as ``exp.toml:7``, ``MINIVLLM__SEED`` or ``--set``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.config.other_names import neutral_note, option_hint
from minivllm.errors import ConfigError, brief, shown, suggest
from minivllm.validation import DEEPEST, begins, flaw

Path = Sequence[str]
# function from the path of an option to the source of its value, such as "exp.toml:7" or "--set"
Where = Callable[[tuple[Any, ...]], str]


@dataclass(frozen=True)
class ConfigShape:
    """The names that a configuration may have.

    ``top`` are all keys of the top level, and ``tables`` are its TOML tables with their keys (None means that other
    code checks them).  ``seams`` are keys that name one plug-in, and ``several`` are keys that list plug-ins.
    ``aliases`` maps other names of keys to these keys."""

    top: Sequence[str]
    tables: Mapping[str, Iterable[str] | None]
    seams: Sequence[str]
    several: Sequence[str]
    choice: Sequence[str]  # keys of a table that chooses a plug-in, such as "name" and "options"
    aliases: Mapping[str, str]
    version: int
    free: Sequence[str] = ()  # options that are tables with arbitrary keys
    not_in_files: Sequence[str] = ("allow_targets",)
    # keys of ``several`` whose value may also be a single plug-in, without a list
    alone: Sequence[str] = ()


@dataclass
class Layers:
    """The merged options so far.  ``origins`` maps dotted paths of leaves to their sources."""

    shape: ConfigShape
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, values: Mapping[str, Any], where: Where, trusted: bool = False) -> None:
        """Merge ``values`` over the existing options.  ``where`` returns the source of a path.

        ``trusted`` values come from the command line or from Python; they may set options that a file may not set.
        """
        unalias(values, self.shape.aliases, lambda key: where((key,)))
        for key, value in values.items():
            self.put([key], value, where, trusted)

    def assign(self, pairs: Sequence[tuple[Path, Any]], source: str, trusted: bool = False) -> None:
        """Merge single values over the existing options.

        Names of plug-ins are set first, because a new name removes the options of the old plug-in.  The options in
        ``pairs`` are kept.
        """

        def is_name(path: Path) -> bool:
            return len(path) == 1 or path[-1] == "name"

        for path, value in sorted(pairs, key=lambda pair: not is_name(pair[0])):
            self.put(path, value, lambda _: source, trusted)

    def put(self, path: Path, value: Any, where: Where, trusted: bool = False) -> None:
        """Merge one value over the existing options.  ConfigError if its path or the value is malformed or unknown."""
        source = begins(brief(where(tuple(path)), 300))
        if len(path) > DEEPEST:
            raise ConfigError(f"{source}the key {_dotted(path)} has {len(path)} parts; expected at most {DEEPEST}")
        problem = flaw(list(path)) or flaw(value)
        if problem:
            raise ConfigError(f"{source}{_dotted(path)}: {problem}")
        self._put(path, value, where, trusted)

    def _put(self, path: Path, value: Any, where: Where, trusted: bool) -> None:
        """Merge one value over the existing options.  Its text, numbers and nesting are already checked."""
        written = tuple(path)
        source = where(written)
        top = self.shape.aliases.get(path[0], path[0])
        path = [top, *path[1:]]
        if len(path) == 1:
            note = "" if top in self.shape.top else neutral_note(top, value)
            if note:
                self.notes.append(f"{begins(source)}{note}")
                return
            if top in self.shape.tables and value is None:
                value = {}  # in YAML, a table that contains only comments is null
            if top in self.shape.alone and isinstance(value, (str, Mapping)):
                value = [value]
        self._check_key(path, value, source, trusted)
        if len(path) == 1 and top in self.shape.seams and (value is None or isinstance(value, str)):
            path = [top, "name"]
            value = "auto" if value is None else value
        if path[:2] == ["requires", "plugins"] and isinstance(value, list):
            self._require(value, source)
        elif isinstance(value, Mapping) and self._merges(path, value):
            for key in sorted(value, key=lambda key: key != "name"):
                self._put([*written, str(key)], value[key], where, trusted)
        else:
            self._write(path, value, source, lambda inner: where((*written, *inner)))

    def _merges(self, path: Path, value: Mapping[str, Any]) -> bool:
        """Return whether a table is merged key by key with the existing one.

        A sampling parameter that is a table replaces the old value, and so does an empty table of options.
        """
        if len(path) == 1:
            return bool(value) or path[0] in self.shape.seams or path[0] in self.shape.tables
        return bool(value) and path[0] != "sampling"

    def _write(self, path: Path, value: Any, source: str, where: Where) -> None:
        """Set a value in the tree and record its source.  ``where`` returns the source of a path inside the value.

        A new name of a plug-in removes the options of the old one.  ConfigError if the path leads through a value that
        is not a table."""
        if len(path) == 2 and path[0] in self.shape.seams and path[1] == "name":
            self._drop_options(path[0], value, source)
        node = self.tree
        for i, key in enumerate(path[:-1]):
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                dotted = ".".join(path[: i + 1])
                at = self.origins.get(dotted, "elsewhere")
                raise ConfigError(
                    f"{begins(source)}{_dotted(path)}: {dotted} is {shown(inner)} from {at}, not a table; remove "
                    "one of the two"
                )
            node = inner
        node[path[-1]] = value
        dotted = ".".join(path)
        self._forget(dotted)
        self.origins[dotted] = source
        if path[0] in self.shape.several and isinstance(value, list):
            self._places(dotted, value, (), where)

    def _places(self, dotted: str, value: Any, inside: tuple[Any, ...], where: Where) -> None:
        """Record the sources of the values in a list of plug-ins."""
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            path = f"{dotted}.{key}"
            place = (*inside, key)
            if isinstance(inner, Mapping) and inner:
                self._places(path, inner, place, where)
            else:
                self.origins[path] = where(place)

    def _forget(self, dotted: str) -> None:
        """Remove the recorded sources of a path and of all paths below it."""
        for leaf in list(self.origins):
            if leaf == dotted or leaf.startswith(dotted + "."):
                del self.origins[leaf]

    def _drop_options(self, seam: str, name: Any, source: str) -> None:
        """Drop the options that were set for a seam (kind of plug-in) before, if ``name`` is another plug-in than the
        one that they were set for."""
        table = self.tree.get(seam)
        if not isinstance(table, dict):
            return
        old_name = table.get("name", "auto")
        if old_name == name:
            return
        # options that were set without a name belong to the name that is set now, so they are kept
        candidates = ("options", "prefer") if "name" in table else ("prefer",)
        dropped = [key for key in candidates if table.get(key)]
        for key in dropped:
            del table[key]
            self._forget(f"{seam}.{key}")
        if dropped:
            keys = " and ".join(dropped)
            self.notes.append(f"{begins(source)}{seam} is now {shown(name)}; {keys} of {shown(old_name)} dropped")

    def _require(self, names: list[Any], source: str) -> None:
        """Add the required packages of one source to the packages that other sources require."""
        table = self.tree.setdefault("requires", {})
        for name in names:
            if name not in (listed := table.setdefault("plugins", [])):
                self.origins[f"requires.plugins.{len(listed)}"] = source
                listed.append(name)

    def _check_key(self, path: Path, value: Any, source: str, trusted: bool) -> None:
        """Raise ConfigError for an unknown or misplaced name, and for a value where a table is expected.  The message
        names its source."""
        shape, top, at = self.shape, path[0], begins(source)
        if top == "extends":
            raise ConfigError(f"{at}extends is for files only; here, pass both files with --config")
        if top not in shape.top and top not in shape.tables:
            hint = option_hint(top) or suggest(top, [*shape.top, *shape.tables, *shape.aliases])
            raise ConfigError(f"{at}unknown option {shown(top)}.{hint}")
        if top in shape.several and len(path) > 1:
            raise ConfigError(f"{at}{_dotted(path)}: {top!r} is a list: set the whole list")
        inner = shape.choice if top in shape.seams else shape.tables.get(top)
        if len(path) > 1 and inner is None and top not in shape.tables and top not in shape.free:
            raise ConfigError(f"{at}{_dotted(path)}: {top!r} is a value, not a table: expected {top} = VALUE")
        if len(path) > 1 and inner is not None and path[1] not in inner:
            near = suggest(path[1], inner) or f" There are: {', '.join(inner)}."
            raise ConfigError(f"{at}unknown option {shown(_dotted(path[:2]))}.{near}")
        if top in shape.tables and len(path) == 1 and not isinstance(value, Mapping):
            raise ConfigError(f"{at}{top}={shown(value)}: expected a table")
        if top == "config_version" and (type(value) is not int or value != shape.version):
            newer = type(value) is int and value > shape.version
            advice = "it was written for a newer one: upgrade minivllm" if newer else f"expected {shape.version}"
            problem = f"{at}config_version={shown(value)}: this minivllm reads version {shape.version}"
            raise ConfigError(f"{problem}; {advice}")
        if top in shape.not_in_files and not trusted:
            raise ConfigError(
                f"{at}{top} may come from the command line (--allow-target) or from Python only: "
                "a file that names code must not allow it"
            )


def _dotted(path: Path) -> str:
    """Return a path as text."""
    return brief(".".join(map(str, path)))


def unalias(values: Mapping[str, Any], aliases: Mapping[str, str], where: Callable[[str], str]) -> dict[str, Any]:
    """Return options with the names of other engines replaced by the names of this engine (``aliases``).

    ConfigError if an option is given under both names."""
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name in found:
            raise ConfigError(
                f"{begins(where(key))}{name} is given twice, as {shown(keys[name])} and as {shown(key)}; remove "
                "one of them"
            )
        found[name], keys[name] = value, key
    return found
