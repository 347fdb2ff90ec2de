"""Read configuration files: TOML, YAML or JSON, by suffix.  Errors name the file and the line of the value.

A file may say ``extends = "base.toml"``: what it leaves open is then taken from there.  YAML is read as YAML 1.2 means
it: only ``true`` and ``false`` are truth values, so that ``graph: off`` is the word, and a number is decimal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.config.lines import Place, toml_lines
from minivllm.errors import ConfigError, brief, shown
from minivllm.validation import DEEPEST, flaw

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LONGEST_CHAIN = 64  # of files that extend one another
_LONG_KEY = re.compile(
    rf"""(?:^|[\[{{,])[ \t]*(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""", re.M
)
_MANY_VALUES = 1_000_000  # YAML aliases can make more of a short file


@dataclass(frozen=True)
class ConfigFile:
    """A file as read.  ``lines`` has the line of each value by its path."""

    name: str
    values: dict[str, Any]
    lines: Mapping[Place, int] = field(default_factory=dict)

    def where(self, path: tuple[Any, ...]) -> str:
        """``exp.toml:7``: the place of the value at a path, or of the nearest that holds it."""
        for end in range(len(path), 0, -1):
            if (line := self.lines.get(path[:end])) is not None:
                return f"{self.name}:{line}"
        return self.name


Other = Callable[[str], Mapping[str, Any] | None]  # the table in a file of another format, None: it cannot be read


def read_chain(path: str | os.PathLike[str], other: Other | None = None) -> list[ConfigFile]:
    """The file and those that it extends, the farthest first.  Each is read once: where several extend the same one,
    it stands before the last of them, so that of several bases the later wins with all that it extends.  ConfigError if
    a file extends itself by way of others."""
    found: dict[str, ConfigFile] = {}
    _extend(path, (), found, other)
    return list(reversed(found.values()))


def _extend(path: str | os.PathLike[str], inside: tuple[str, ...], found: dict[str, ConfigFile], other: Any) -> None:
    """Put a file into ``found``, then those that it extends, the last first; ``inside``: the files it is read for."""
    name = files.real(path)
    if name in inside:
        names = [os.path.basename(p) for p in (*inside[inside.index(name) :], name)]
        chain = " -> ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-4:]])
        raise ConfigError(f"{path}: a file cannot extend itself: {brief(chain, 400)}")
    if name in found:
        return
    if len(inside) >= LONGEST_CHAIN:
        raise ConfigError(f"{path}: more than {LONGEST_CHAIN} files extend one another; want fewer")
    file = found[name] = read_file(path, other)
    bases = file.values.pop("extends", [])
    at = f"{file.where(('extends',))}: extends"
    for base in reversed([bases] if isinstance(bases, str) else bases if isinstance(bases, list) else [None]):
        if not isinstance(base, str) or not base:
            raise ConfigError(f"{at}: want a file, or a list of files")
        to = os.path.normpath(os.path.join(os.path.dirname(file.name), base))
        if not os.path.exists(to):
            raise ConfigError(f"{at} {shown(base)}: no such file as {brief(to, 300)}")
        _extend(to, (*inside, name), found, other)


def read_file(path: str | os.PathLike[str], other: Other | None = None) -> ConfigFile:
    """Return the table in a file; ConfigError if it is missing, not UTF-8, not well-formed, or not a table.

    ``other`` reads files that are neither TOML nor YAML.  It comes before JSON: a hook may define a form of JSON.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        files.check(path, files.LARGE)  # before a hook opens it
        found: Mapping[str, Any] | None = _record(path) if suffix == ".json" else None
        if found is None and other is not None:
            found = other(os.fspath(path))
        if found is None and suffix == ".json":
            return _json_file(path)
        if found is None:
            at = brief(os.fspath(path), 300)
            raise ConfigError(f"{at}: want a file that ends in .toml, .yaml, .yml or .json")
        return _file(path, dict(found), {})
    text = files.read_text(path)
    values, lines = _toml(text, path) if suffix == ".toml" else _yaml(text, path)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a table of options at the top, got a {type(values).__name__}")
    return _file(path, values, lines)


def _json_file(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a JSON object of options; ConfigError if the file holds anything else."""
    text = files.read_text(path)
    values = files.parse_json(text, os.fspath(path), unique=True)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a JSON object of options at the top, got a {type(values).__name__}")
    try:  # JSON is YAML as well, whose reader knows the line of each value
        lines = _yaml(text.replace("\t", " "), path)[1]
    except ConfigError:
        lines = {}
    return _file(path, values, lines)


def _record(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the configuration in the record of a run, or None if the file is no record."""
    from minivllm.frontend.record import bill, replay

    return replay.as_config(bill.read(path)) if bill.is_record(path) else None


def _file(path: str | os.PathLike[str], values: dict[str, Any], lines: Mapping[Place, int]) -> ConfigFile:
    if what := flaw(values):
        raise ConfigError(f"{path}: {what}")
    file = ConfigFile(os.fspath(path), values, lines)
    _check_keys(file, values, ())
    return file


def _check_keys(file: ConfigFile, values: Mapping[Any, Any], path: tuple[Any, ...]) -> None:
    """YAML has keys that are no text; only sampling parameters may be keyed by a number (token ids)."""
    for key, value in values.items():
        if not isinstance(key, str) and not (path[:1] == ("sampling",) and type(key) is int):
            raise ConfigError(
                f"{file.where((*path, key))}: the key {shown(key)} is a {type(key).__name__}: put it in quotes"
            )
        if isinstance(value, Mapping):
            _check_keys(file, value, (*path, key))


def _toml(text: str, path: Any) -> tuple[Any, dict[Place, int]]:
    try:
        values = _loads(text)
        return values, {} if flaw(values) else toml_lines(text)  # what is nested too deep is refused by who asks
    except tomllib.TOMLDecodeError as exc:
        message, _, place = str(exc).rpartition(" (at ")
        numbers = "".join(c if c.isdigit() else " " for c in place).split()
        if len(numbers) != 2:  # "at end of document"
            numbers = [str(text.count("\n") + 1), str(len(text) - text.rfind("\n"))]
        raise ConfigError(f"{path}:{numbers[0]}:{numbers[1]}: {message or exc}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists or tables are nested too deeply") from None
    except ValueError as exc:  # a whole number of more digits than Python reads
        raise ConfigError(f"{path}: {_digits(exc)}") from None


def _loads(text: str) -> dict[str, Any]:
    """``tomllib.loads``, which takes the square of the time for a key of many parts, with its errors."""
    if found := _LONG_KEY.search(text):
        raise ValueError(f"the key {brief(found[0].strip(), 40)} has more than {DEEPEST} parts")
    return tomllib.loads(text)


def _digits(exc: ValueError) -> str:
    return brief(str(exc).partition(";")[0], 200)


def _yaml(text: str, path: Any) -> tuple[Any, dict[Place, int]]:
    import yaml

    try:
        loader = _loader_class()(text)
    except yaml.YAMLError as exc:  # a character that no YAML has
        raise ConfigError(f"{path}: {str(exc).splitlines()[0]}") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _count(node, path)
        values = loader.construct_document(node)
        lines: dict[Place, int] = {}
        _yaml_lines(node, (), lines, loader)
        return values, lines
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = exc.problem or exc.context or ""
        if problem.startswith("but "):
            problem = f"{exc.context}, {problem}"
        raise ConfigError(f"{path}{place}: {problem}") from None
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {str(exc).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists or tables are nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as exc:
        raise ConfigError(f"{path}: {_digits(exc)}") from None
    finally:
        loader.dispose()


def _count(top: Any, path: Any) -> None:
    """Refuse an alias within what it stands for, and aliases of aliases that would be millions of values."""
    sizes: dict[int, int] = {}  # of a node with all that is in it; 0 while it is being counted

    def size(node: Any) -> int:
        if not isinstance(node.value, list):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0
            inner = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(size(part) for part in inner)
        elif not sizes[id(node)]:
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: an alias stands within what it stands for")
        return sizes[id(node)]

    if size(top) > _MANY_VALUES:
        raise ConfigError(f"{path}: the aliases stand for more than {_MANY_VALUES} values")


def _yaml_lines(node: Any, path: Place, lines: dict[Place, int], loader: Any) -> None:
    if isinstance(node.value, list):
        for i, part in enumerate(node.value):
            key, value = part if isinstance(part, tuple) else (None, part)
            name = i if key is None else loader.construct_object(key)
            inner = (*path, name)
            lines[inner] = (value if key is None else key).start_mark.line + 1
            _yaml_lines(value, inner, lines, loader)


def _loader_class() -> Any:
    """PyYAML's safe loader, which makes plain values only, with the words and numbers of YAML 1.2's core schema
    (https://yaml.org/spec/1.2.2/#103-core-schema), and in which a key that is there twice is an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    name = self.construct_object(key)  # 0x5 is 5
                    if name in seen and id(node) not in self.merged:
                        problem = f"the key {shown(key.value)} is there twice"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    seen.add(name)
            self.merged.add(id(node))  # from now on it holds the keys of its merges too
            return super().construct_mapping(node, deep)

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.merged: set[int] = set()

        def construct_int(self, node: Any) -> int:
            text = self.construct_scalar(node)
            return int(text, 16 if "x" in text else 8 if "o" in text else 10)

    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
        (
            "float",
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
            "-+.0123456789",
        ),
        ("merge", "<<", "<"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)
    return Loader


def parse_value(text: str) -> Any:
    """A value as TOML writes it (``8``, ``true``, ``[1, 2]``, ``"x"``); anything else is the text itself."""
    text = text.strip()
    if "\n" in text:
        return text
    try:
        found = _loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise ConfigError(f"{shown(text)}: lists or tables are nested too deeply") from None
    except ValueError as exc:
        raise ConfigError(f"{shown(text)}: {_digits(exc)}") from None
    return found["value"] if list(found) == ["value"] else text
