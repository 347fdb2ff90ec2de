"""The modules that a folder of PEFT adapts by its adapter_config.json.  No torch.

PEFT ignores tensors of other modules with a warning.  Here they are refused, because nothing says which of the two is
meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.core.interfaces.adapter import adapter_refusal
from minivllm.errors import shown

ALL = "all-linear"
# regular expressions whose matching takes a time that is at most quadratic in the length of a name; others are not read
MOST_PATTERN = 256  # characters
PLAIN = re.compile(r"[\w.|()\\$^-]*(\.\*[\w.|()\\$^-]*){0,2}", re.ASCII)
LAYER = re.compile(
    r".*?\.[^.]*\.([0-9]{1,9})\."
)  # the first number in a name, as in PEFT 0.21; older versions take the last one
DROP = "PEFT would ignore them; remove them from the file, or correct adapter_config.json"
NAMES = ("target_modules", "exclude_modules")


@dataclass(frozen=True)
class Targets:
    """The fields that choose modules.  None and () mean that a field chooses nothing.

    ``targets`` and ``excluded`` are names of modules or ends of names, or a regular expression for whole names.
    ``layers`` are numbers of layers, and ``patterns`` names of the list of layers."""

    targets: tuple[str, ...] | str | None = None
    excluded: tuple[str, ...] | str | None = None
    layers: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()

    def refusal(self, module: str) -> str:
        """Return why PEFT does not adapt a module of the base model, "" if it does."""
        if self.excluded is not None and _matches(self.excluded, module):
            return "exclude_modules excludes it"
        if self.targets is None:
            return ""
        if not _matches(self.targets, module):
            return "target_modules does not have it"
        named = isinstance(self.targets, tuple) and module not in self.targets
        if named and self.layers and self._layer(module) not in self.layers:
            return "layers_to_transform does not have its layer"
        return ""

    def _layer(self, module: str) -> int | None:
        """Return the number of a module's layer, None for a module outside of the layers."""
        if not self.patterns:
            found = LAYER.match(module)
        else:
            numbers = (re.match(rf"(?:^|.*?\.){re.escape(name)}\.([0-9]{{1,9}})\.", module) for name in self.patterns)
            found = next((number for number in numbers if number is not None), None)
        return None if found is None else int(found[1])


def read_targets(folder: str, config: Mapping[str, Any]) -> Targets:
    """Read the fields of adapter_config.json.  RequestError for a value of another type."""
    targets, excluded = (_names(folder, name, config.get(name)) for name in NAMES)
    layers = config.get("layers_to_transform")
    numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(number) is int for number in numbers):
        what = f"layers_to_transform={shown(layers)}: expected a number of a layer, or a list of numbers"
        raise adapter_refusal(folder, what)
    patterns = config.get("layers_pattern")
    words = patterns if isinstance(patterns, list) else [patterns] if patterns else []
    if not all(isinstance(word, str) for word in words):
        raise adapter_refusal(folder, f"layers_pattern={shown(patterns)}: expected a name, or a list of names")
    return Targets(targets, excluded, tuple(numbers), tuple(words))


def _names(folder: str, name: str, value: Any) -> tuple[str, ...] | str | None:
    """Return the value of a field with names of modules; None if it has no effect, or is not read."""
    if value is None or value == [] or value == "" or value == ALL:
        return None
    if isinstance(value, str):
        return value if _is_plain(value) else None
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    what = f"{name}={shown(value)}: expected a list of names of modules, or a regular expression"
    raise adapter_refusal(folder, what)


def _is_plain(pattern: str) -> bool:
    """Return whether a text is a regular expression that is matched in a bounded time."""
    if len(pattern) > MOST_PATTERN or PLAIN.fullmatch(pattern) is None:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _matches(names: tuple[str, ...] | str, module: str) -> bool:
    """Return whether a list of names, or a regular expression, chooses a module.

    A name may be longer than that of the module, because a file may name modules from a part of the model on."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(
        module == name or module.endswith(f".{name}") or ("." in module and name.endswith(f".{module}"))
        for name in names
    )
