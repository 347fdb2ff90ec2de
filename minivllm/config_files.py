"""Read configuration files: TOML or YAML, by suffix, with errors that name file, line and column."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a file; ConfigError if it is missing, not UTF-8, not well-formed, or not a table."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"{path}: want a file that ends in .toml, .yaml or .yml")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 (byte {exc.start}); save it as UTF-8") from None
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from None
    values = _toml(text, path) if suffix == ".toml" else _yaml(text, path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a table of options at the top, got a {type(values).__name__}")
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key!r} is a {type(key).__name__}: put it in quotes")
    return values


def _toml(text: str, path: Any) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        message, _, place = str(exc).rpartition(" (at ")
        numbers = "".join(c if c.isdigit() else " " for c in place).split()
        if len(numbers) != 2:  # "at end of document"
            numbers = [str(text.count("\n") + 1), str(len(text) - text.rfind("\n"))]
        raise ConfigError(f"{path}:{numbers[0]}:{numbers[1]}: {message or exc}") from None


def _yaml(text: str, path: Any) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe, and a key that is there twice is an error instead of a silent winner."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen and key.value != "<<":
                        problem = f"the key {key.value!r} is there twice"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # a SafeLoader: it makes no objects but plain values
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {exc.problem or exc.context}") from None
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {str(exc).splitlines()[0]}") from None


def parse_value(text: str) -> Any:
    """A value as TOML writes it (``8``, ``true``, ``[1, 2]``, ``"x"``); anything else is the text itself."""
    text = text.strip()
    if "\n" in text:
        return text
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if list(found) == ["value"] else text
