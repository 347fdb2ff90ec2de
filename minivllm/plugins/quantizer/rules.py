"""Which modules a quantizer takes: what the options ``skip``, ``lm_head`` and ``bits`` mean, for all that have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import PluginError, shown

REGEX = "re:"  # begins a pattern that is a regular expression, as in configurations of compressed-tensors


class NamePatterns:
    """The patterns of an option, shell patterns or regular expressions for a whole name ("re:..."), and those of them
    that have named no module so far.  PluginError for a regular expression that is none."""

    def __init__(self, option: str, patterns: Iterable[str]) -> None:
        self.option, self.patterns = option, tuple(patterns)
        self.unused = set(self.patterns)
        self._fits = {pattern: self._matcher(pattern) for pattern in self.patterns}

    def _matcher(self, pattern: str) -> Callable[[str], bool]:
        if not pattern.startswith(REGEX):
            return lambda name: fnmatchcase(name, pattern)
        try:
            expression = re.compile(pattern.removeprefix(REGEX))
        except re.error as e:
            raise PluginError(
                f"{self.option}: {shown(pattern)}: {e}: want a regular expression behind {REGEX!r}, or a shell pattern"
            ) from None
        return lambda name: expression.fullmatch(name) is not None

    def naming(self, name: str) -> list[str]:
        """Those that name the module, in their order."""
        found = [pattern for pattern in self.patterns if self._fits[pattern](name)]
        self.unused -= set(found)
        return found

    def refuse_unused(self, quantizer: str, what: str = "module") -> None:
        """PluginError if a pattern named none of the modules that were asked about."""
        if self.unused:
            raise PluginError(
                f"{quantizer}: {self.option}={sorted(self.unused)} names no {what}; names look like 'layers.0.attn.qkv'"
            )


def has_weight_to_quantize(m: ModuleInfo, lm_head: bool) -> bool:
    """Linear layers, experts, and the head if asked; routers stay as they are, as few numbers decide much there."""
    return m.kind in ("linear", "experts") or (m.kind == "lm_head" and lm_head)
