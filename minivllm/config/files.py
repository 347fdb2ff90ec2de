"""Read configuration files in TOML, YAML or JSON, depending on the suffix.  Errors name the file and the line of the
value.

A file may contain ``extends = "base.toml"``.  Options that it does not set are then taken from that file.  YAML is read
as YAML 1.2: only ``true`` and ``false`` are booleans, so ``graph: off`` is a word, and numbers with a leading zero are
decimal.
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
from minivllm.validation import DEEPEST, DIGITS, flaw

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TWICE = "the key of this value is there twice"
LONGEST_CHAIN = 64  # largest number of files in a chain of ``extends``
_LONG_KEY = re.compile(
    rf"""(?:^|[\[{{,])[ \t]*(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""", re.M
)
_MANY_VALUES = 1_000_000  # largest number of values in a YAML file; aliases can expand a short file enormously


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a file.  ``lines`` maps the path of each value to its line."""

    name: str
    values: dict[str, Any]
    lines: Mapping[Place, int] = field(default_factory=dict)

    def where(self, path: tuple[Any, ...]) -> str:
        """Return ``exp.toml:7``, the line of the value at a path, or of the nearest table around it; only the file's
        name if neither has a line."""
        for end in range(len(path), 0, -1):
            line = self.lines.get(path[:end])
            if line is not None:
                return f"{self.name}:{line}"
        return self.name


Other = Callable[[str], Mapping[str, Any] | None]  # reads a file of another format, or returns None


def read_chain(path: str | os.PathLike[str], other: Other | None = None) -> list[ConfigFile]:
    """Return a file and the files that it extends, in ascending precedence.

    Each file is read once.  If several files extend the same base, the base precedes all of them.  If a file extends
    several bases, a later base takes precedence over an earlier one.  ConfigError if a file extends itself indirectly.
    """
    found: dict[str, ConfigFile] = {}
    _extend(path, (), found, other)
    return list(reversed(found.values()))


def _extend(path: str | os.PathLike[str], inside: tuple[str, ...], found: dict[str, ConfigFile], other: Any) -> None:
    """Add a file to ``found``, then the files that it extends, the last one first.

    ``inside`` are the files that led to this one by their ``extends``.  ConfigError for a file that extends itself, for
    a chain of more than ``LONGEST_CHAIN`` files, and for a file that cannot be read.
    """
    name = files.real(path)
    if name in inside:
        names = [os.path.basename(p) for p in (*inside[inside.index(name) :], name)]
        chain = " -> ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-4:]])
        raise ConfigError(f"{path}: a file cannot extend itself: {brief(chain, 400)}")
    if name in found:
        return
    if len(inside) >= LONGEST_CHAIN:
        raise ConfigError(f"{path}: more than {LONGEST_CHAIN} files in a chain of extends; merge some of them")
    file = found[name] = read_file(path, other)
    bases = file.values.pop("extends", [])
    at = f"{file.where(('extends',))}: extends"
    if isinstance(bases, str):
        bases = [bases]
    elif not isinstance(bases, list):
        bases = [None]
    for base in reversed(bases):
        if not isinstance(base, str) or not base:
            raise ConfigError(f"{at}: expected a file, or a list of files")
        target = os.path.normpath(os.path.join(os.path.dirname(file.name), base))
        if not os.path.exists(target):
            raise ConfigError(f"{at} {shown(base)}: the file {brief(target, 300)} does not exist")
        _extend(target, (*inside, name), found, other)


def read_file(path: str | os.PathLike[str], other: Other | None = None) -> ConfigFile:
    """Return the table in a file.  ConfigError if it is missing, not UTF-8, malformed, or not a table.

    ``other`` reads files that are neither TOML nor YAML.  It is tried before JSON, because a hook may define a format
    that ends in .json.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        files.check(path, files.LARGE)  # checked first, because a hook may open the file
        found: Mapping[str, Any] | None = _record(path) if suffix == ".json" else None
        if found is None and other is not None:
            found = other(os.fspath(path))
        if found is None and suffix == ".json":
            return _json_file(path)
        if found is None:
            at = brief(os.fspath(path), 300)
            raise ConfigError(f"{at}: expected a file that ends in .toml, .yaml, .yml or .json")
        return _file(path, dict(found), {})
    text = files.read_text(path)
    values, lines = _toml(text, path) if suffix == ".toml" else _yaml(text, path)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a table of options at the top, got a {type(values).__name__}")
    return _file(path, values, lines)


def _json_file(path: str | os.PathLike[str]) -> ConfigFile:
    """Return the contents of a file with a JSON object of options.  ConfigError if the file holds anything else."""
    text = files.read_text(path)
    values = files.parse_json(text, os.fspath(path), unique=True)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object of options at the top, got a {type(values).__name__}")
    try:  # JSON is also YAML, and the YAML reader returns the line of each value
        lines = _yaml(text.replace("\t", " "), path)[1]
    except ConfigError:
        lines = {}
    return _file(path, values, lines)


def _record(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the configuration in the record of a run, or None if the file is not a record."""
    from minivllm.frontend.record import bill, replay

    return replay.as_config(bill.read(path)) if bill.is_record(path) else None


def _file(path: str | os.PathLike[str], values: dict[str, Any], lines: Mapping[Place, int]) -> ConfigFile:
    """Return a checked file.  ConfigError for malformed text, numbers, nesting or keys."""
    problem = flaw(values)
    if problem:
        raise ConfigError(f"{path}: {problem}")
    file = ConfigFile(os.fspath(path), values, lines)
    _check_keys(file, values, ())
    return file


def _check_keys(file: ConfigFile, values: Mapping[Any, Any], path: tuple[Any, ...]) -> None:
    """Check that all keys are texts, which YAML does not guarantee.  Sampling parameters may have token ids as keys."""
    for key, value in values.items():
        if not isinstance(key, str) and not (path[:1] == ("sampling",) and type(key) is int):
            raise ConfigError(
                f"{file.where((*path, key))}: the key {shown(key)} is no text ({type(key).__name__}): put it in quotes"
            )
        if isinstance(value, Mapping):
            _check_keys(file, value, (*path, key))


def _toml(text: str, path: Any) -> tuple[Any, dict[Place, int]]:
    """Return the values of a TOML text, and the line of each.  ConfigError if it is malformed."""
    try:
        values = _loads(text)
        return values, {} if flaw(values) else toml_lines(text)  # the caller refuses values with a flaw
    except tomllib.TOMLDecodeError as exc:
        message, _, place = str(exc).rpartition(" (at ")
        numbers = "".join(c if c.isdigit() else " " for c in place).split()
        if len(numbers) != 2:  # a message without a line and column, such as "at end of document"
            numbers = [str(text.count("\n") + 1), str(len(text) - text.rfind("\n"))]
        reason = TWICE if message == "Cannot overwrite a value" else message or exc
        raise ConfigError(f"{path}:{numbers[0]}:{numbers[1]}: {reason}") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: lists or tables are nested deeper than Python can parse; use fewer levels"
        ) from None
    except ValueError as exc:  # a whole number with too many digits for Python
        raise ConfigError(f"{path}: {_digits(exc)}") from None


def _loads(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.  ValueError for a key of many parts, on which ``tomllib`` takes quadratic
    time."""
    found = _LONG_KEY.search(text)
    if found:
        raise ValueError(f"the key {brief(found[0].strip(), 40)} has more than {DEEPEST} parts; use fewer")
    return tomllib.loads(text)


def _digits(exc: ValueError) -> str:
    """Return the message for a ValueError of a parser: about a whole number with too many digits, or the error's own
    text."""
    if "integer string conversion" in str(exc):
        return f"a whole number has thousands of digits; expected at most {DIGITS}"
    return brief(str(exc), 200)


def _yaml(text: str, path: Any) -> tuple[Any, dict[Place, int]]:
    """Return the value of a YAML text, and the line of each value in it.  ConfigError if it is malformed."""
    import yaml

    try:
        loader = _loader_class()(text)
    except yaml.YAMLError as exc:  # a character that YAML does not allow
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
        raise ConfigError(
            f"{path}: lists or tables are nested deeper than Python can parse; use fewer levels"
        ) from None
    except ConfigError:
        raise
    except ValueError as exc:
        raise ConfigError(f"{path}: {_digits(exc)}") from None
    finally:
        loader.dispose()


def _count(top: Any, path: Any) -> None:
    """Refuse an alias inside its own value, and aliases of aliases that would expand to millions of values."""
    sizes: dict[int, int] = {}  # node -> number of values in it; 0 while they are being counted

    def size(node: Any) -> int:
        """Return the number of values in a YAML node, with aliases expanded.  ConfigError for an alias inside the value
        that it stands for."""
        if not isinstance(node.value, list):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0
            inner = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(size(part) for part in inner)
        elif not sizes[id(node)]:
            raise ConfigError(
                f"{path}:{node.start_mark.line + 1}: an alias (*NAME) is inside the value that it stands for; "
                "remove the alias"
            )
        return sizes[id(node)]

    if size(top) > _MANY_VALUES:
        raise ConfigError(f"{path}: its aliases expand to more than {_MANY_VALUES} values; write fewer values")


def _yaml_lines(node: Any, path: Place, lines: dict[Place, int], loader: Any) -> None:
    """Store the line of each value below a YAML node in ``lines``."""
    if not isinstance(node.value, list):
        return
    for i, part in enumerate(node.value):
        if isinstance(part, tuple):
            key, value = part
            name = loader.construct_object(key)
        else:
            key = value = part
            name = i
        inner = (*path, name)
        lines[inner] = key.start_mark.line + 1
        _yaml_lines(value, inner, lines, loader)


def _loader_class() -> Any:
    """Return PyYAML's safe loader with the words and numbers of YAML 1.2's core schema.

    See https://yaml.org/spec/1.2.2/#103-core-schema.  The loader creates plain values only, and refuses duplicate keys.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Return the dict of a YAML mapping.  ConstructorError if a key is there twice."""
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    name = self.construct_object(key)  # different spellings of a number are equal
                    if name in seen and id(node) not in self.merged:
                        problem = f"the key {shown(key.value)} is there twice"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    seen.add(name)
            self.merged.add(id(node))  # super() adds the keys of merges, which may repeat
            return super().construct_mapping(node, deep)

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.merged: set[int] = set()

        def construct_int(self, node: Any) -> int:
            """Return the whole number of a YAML scalar, which is decimal, hexadecimal (0x) or octal (0o)."""
            text = self.construct_scalar(node)
            if "x" in text:
                return int(text, 16)
            return int(text, 8 if "o" in text else 10)

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
    """Return the value of a TOML literal (``8``, ``true``, ``[1, 2]``, ``"x"``).  Any other text is returned unchanged.

    ConfigError for numbers with too many digits, and for values that are nested too deeply."""
    text = text.strip()
    if "\n" in text:
        return text
    try:
        found = _loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise ConfigError(
            f"{shown(text)}: lists or tables are nested deeper than Python can parse; use fewer levels"
        ) from None
    except ValueError as exc:
        raise ConfigError(f"{shown(text)}: {_digits(exc)}") from None
    return found["value"] if list(found) == ["value"] else text
