"""Which modules a quantizer takes: what the options ``skip``, ``lm_head`` and ``bits`` mean, for all that have them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import PluginError


class NamePatterns:
    """The shell patterns of an option, and those of them that have named no module so far."""

    def __init__(self, option: str, patterns: Iterable[str]) -> None:
        self.option, self.patterns = option, tuple(patterns)
        self.unused = set(self.patterns)

    def naming(self, name: str) -> list[str]:
        """Those that name the module, in their order."""
        found = [pattern for pattern in self.patterns if fnmatchcase(name, pattern)]
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
