"""KV pages that are being copied between the device and a tier (CPU memory or disk)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stored:
    """A page that is being stored in a tier."""

    tier: int
    key: bytes
    size: int
    acks: int = 0
    failed: bool = False


@dataclass(eq=False)
class Staged:
    """A page that is being loaded from a tier, or that the worker processes have loaded and not yet written to the
    device."""

    ticket: int
    tier: int
    key: bytes
    size: int
    users: int = 0  # count of sequences that may still use the page
    acks: int = 0
    failed: bool = False
    done: bool = False
    void: bool = False  # whether all tiers were emptied since the start of the load
    seconds: float = 0.0

    @property
    def usable(self) -> bool:
        return self.done and not self.failed and not self.void


@dataclass(eq=False)
class PageLoad:
    """The pages that a waiting sequence loads, by (KV group, index of the block); the group behind the last one stands
    for recurrent states."""

    begun: float  # start of the load, in seconds of the engine's clock
    patience: float
    wanted: dict[tuple[int, int], tuple[int, bytes]]  # (tier, key)
    # the running loads of these pages; empty until there is host memory for them
    pages: dict[tuple[int, int], Staged] = field(default_factory=dict)
    ready: bool = False
    predicted: float = 0.0  # expected seconds until all pages are loaded
    alone: bool = False  # at the start, no row ran and no other sequence waited for pages
    busy: float = 0.0  # sum of the seconds of all steps up to the start of the load


@dataclass(frozen=True)
class Named:
    """The key under which a tier stores a cached block, and properties of the block."""

    key: bytes
    depth: int
    tenant: int
    session: int = 0
    kind: int = 0
