"""Patterns for the names of modules, in the options ``skip`` and ``bits`` of quantizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import OptionError, shown

REGEX = "re:"  # prefix of a pattern that is a regular expression, as in configurations of compressed-tensors


class NamePatterns:
    """The patterns of an option, and the patterns among them that have matched no module so far.

    A pattern is a shell pattern, or "re:" and a regular expression for a whole name.  OptionError for an invalid
    regular expression.
    """

    def __init__(self, option: str, patterns: Iterable[str]) -> None:
        self.option = option
        self.patterns = tuple(patterns)
        self.unused = set(self.patterns)
        self._fits = {pattern: self._matcher(pattern) for pattern in self.patterns}

    def _matcher(self, pattern: str) -> Callable[[str], bool]:
        if not pattern.startswith(REGEX):
            return lambda name: fnmatchcase(name, pattern)
        try:
            expression = re.compile(pattern.removeprefix(REGEX))
        except re.error as e:
            raise OptionError(
                f"{self.option}: {shown(pattern)}: {e}: expected a regular expression behind {REGEX!r}, or a shell "
                "pattern"
            ) from None
        return lambda name: expression.fullmatch(name) is not None

    def naming(self, *names: str) -> list[str]:
        """Return the patterns that match one of the names of a module or part, in their order."""
        found = [pattern for pattern in self.patterns if any(map(self._fits[pattern], names))]
        self.unused -= set(found)
        return found

    def refuse_unused(self, quantizer: str, what: str = "module") -> None:
        """Raise OptionError if a pattern matched none of the modules."""
        if self.unused:
            raise OptionError(
                f"{quantizer}: {self.option}={sorted(self.unused)} names no {what}; names look like "
                "'layers.0.attn.qkv' or, as the checkpoint has them, 'model.layers.0.self_attn.q_proj'"
            )


def names_of(m: ModuleInfo, part: str) -> list[str]:
    """Return the names of a part, which are the module, the part, and if known the weight in the checkpoint."""
    names = [m.name, f"{m.name}.{part}"] if part else [m.name]
    return [*names, m.names[part]] if part in m.names else names
