"""An entry that a choice has looked at, and what speaks against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.registration.spec import Reason, Spec

from .discovery import Entry


@dataclass(frozen=True)
class Candidate:
    """An entry that was looked at; it can serve if there is no reason against it."""

    entry: Entry
    spec: Spec | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def suitable(self) -> bool:
        return self.spec is not None and not self.reasons

    def require_spec(self) -> Spec:
        """Of one that was chosen."""
        assert self.spec is not None
        return self.spec

    @property
    def rank(self) -> tuple[int, str]:
        return (-(self.spec.priority if self.spec else 0), self.entry.label)

    def as_dict(self) -> dict[str, Any]:
        spec, reasons = self.spec, [{**vars(r), "text": str(r)} for r in self.reasons]
        return {
            "name": self.entry.label,
            "dist": self.entry.dist,
            "version": self.entry.version,
            "target": self.entry.target,
            "impl": spec.impl if spec else None,
            "priority": spec.priority if spec else 0,
            "suitable": self.suitable,
            "reasons": reasons,
        }
