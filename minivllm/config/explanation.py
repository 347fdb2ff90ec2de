"""The reasons for the chosen plug-ins of a configuration, as text and as JSON."""

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

    ``notes`` are pairs (name, sentence) for values that are not plug-ins, such as device, dtype and block size.
    ``error`` is the error that stopped the choice: no suitable plug-in for the last selection, or an implementation
    that cannot be imported.
    """

    selections: tuple[Selection, ...]
    notes: tuple[tuple[str, str], ...]
    catalog: Catalog
    error: PluginError | None = None

    def of(self, seam: str | None = None) -> tuple[Selection, ...]:
        """Return the selections of a seam (kind of plug-in), by its name or its option's name.

        Processors and strategies have several."""
        kind = check_seam(seam)
        return tuple(s for s in self.selections if kind in (None, s.kind))

    def text(self, seam: str | None = None, all: bool = False) -> str:
        """Return the output of ``minivllm explain``.  ``seam`` restricts it to one kind of plug-in.  ``all`` adds the
        plug-ins that were not considered."""
        names = [name for name, _ in self.notes]
        width = max(map(len, names), default=0)
        lines = [f"{name:{width}}  {sentence}" for name, sentence in self._notes(seam)]
        lines += [selection.explain() for selection in self._selections(seam, all)]
        return "\n".join(lines)

    def as_dict(self, seam: str | None = None, all: bool = False) -> dict[str, Any]:
        """Return the explanation as JSON values.  The arguments are those of ``text``."""
        error = None if self.error is None else str(self.error)
        selections = [selection.as_dict() for selection in self._selections(seam, all)]
        return {"notes": dict(self.notes), "selections": selections, "error": error}

    def _notes(self, seam: str | None) -> Sequence[tuple[str, str]]:
        """Return all notes, or for a seam (kind of plug-in) its notes that its selections do not show already."""
        kind = check_seam(seam)
        if not kind:
            return self.notes
        # the selections already show skipped names of ``prefer``
        notes = []
        for name, sentence in self.notes:
            if name.startswith(f"{kind}.") and not name.endswith(".prefer"):
                notes.append((name, sentence))
        return notes

    def _selections(self, seam: str | None, all: bool) -> Sequence[Selection]:
        """Return the selections (each a choice with its candidates) of one seam (kind of plug-in), or of all if it is
        None.  ``all`` adds the plug-ins that were not considered."""
        selections = self.of(seam)
        if not all:
            return selections
        return [s.widen(self.catalog[s.kind]) for s in selections]

    def __str__(self) -> str:
        return self.text()
