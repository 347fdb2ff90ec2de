"""A plug-in that was considered for a seam (kind of plug-in), with the reasons against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.registration.spec import Reason, Spec

from .discovery import Entry


@dataclass(frozen=True)
class Candidate:
    """An entry that was considered.  It is suitable if there are no reasons against it.  ``spec`` None means that the
    spec could not be read."""

    entry: Entry
    spec: Spec | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def suitable(self) -> bool:
        """Return whether the plug-in's spec could be read and no reason speaks against the plug-in."""
        return self.spec is not None and not self.reasons

    def require_spec(self) -> Spec:
        """Return the spec of a suitable candidate."""
        assert self.spec is not None
        return self.spec

    @property
    def priority(self) -> int:
        """Return the priority of the spec, or 0 without a spec."""
        return self.spec.priority if self.spec else 0

    @property
    def rank(self) -> tuple[int, str]:
        """Return a sort key: higher priorities first, then by label."""
        return (-self.priority, self.entry.label)

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate as JSON values."""
        return {
            "name": self.entry.label,
            "dist": self.entry.dist,
            "version": self.entry.version,
            "target": self.entry.target,
            "impl": self.spec.impl if self.spec else None,
            "priority": self.priority,
            "suitable": self.suitable,
            "reasons": [{**vars(reason), "text": str(reason)} for reason in self.reasons],
        }
