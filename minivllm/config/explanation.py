"""Why the parts are those they are: the selections of a configuration as text, as data and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import PluginError
from minivllm.registration.spec import check_seam
from minivllm.registry import Catalog, Selection


@dataclass(frozen=True)
class Explanation:
    """One selection for each choice, in the order in which they were made.

    ``notes`` are (what, sentence) for what is not a plug-in: device, dtype, block size ...  ``error`` is what ended the
    choosing, the last selection being the one that failed, or an implementation that cannot be imported.
    """

    selections: tuple[Selection, ...]
    notes: tuple[tuple[str, str], ...]
    catalog: Catalog
    error: PluginError | None = None

    def of(self, seam: str | None = None) -> tuple[Selection, ...]:
        """The selections of a seam (several for processors and strategies), by its name or its option's."""
        kind = check_seam(seam)
        return tuple(s for s in self.selections if kind in (None, s.kind))

    def text(self, seam: str | None = None, all: bool = False) -> str:
        """What ``minivllm explain`` prints; ``all`` asks the plug-ins too that were not looked at."""
        width = max([len(what) for what, _ in self.notes] + [0])
        lines = [f"{what:{width}}  {sentence}" for what, sentence in self._notes(seam)]
        return "\n".join([*lines, *(s.explain() for s in self._asked(seam, all))])

    def as_dict(self, seam: str | None = None, all: bool = False) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "notes": dict(self.notes),
            "selections": [s.as_dict() for s in self._asked(seam, all)],
            "error": str(self.error) if self.error is not None else None,
        }

    def _notes(self, seam: str | None) -> Sequence[tuple[str, str]]:
        """All, or what a seam has to say beside its choice."""
        kind = check_seam(seam)
        # names to prefer that were passed over are among the candidates
        return [n for n in self.notes if not kind or (n[0].startswith(f"{kind}.") and not n[0].endswith(".prefer"))]

    def _asked(self, seam: str | None, all: bool) -> Sequence[Selection]:
        return [s.widen(self.catalog[s.kind]) if all else s for s in self.of(seam)]

    def __str__(self) -> str:
        return self.text()
