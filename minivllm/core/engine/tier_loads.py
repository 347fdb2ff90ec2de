"""Pages of the KV cache that are transferred between the device and its tiers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stored:
    """A request to store a page."""

    tier: int
    key: bytes
    size: int
    acks: int = 0
    failed: bool = False


@dataclass(eq=False)
class Staged:
    """A page that is being loaded, or is staged in the workers."""

    ticket: int
    tier: int
    key: bytes
    size: int
    users: int = 0  # number of sequences that may still use the page
    acks: int = 0
    failed: bool = False
    done: bool = False
    void: bool = False  # whether the tiers were reset since
    seconds: float = 0.0

    @property
    def usable(self) -> bool:
        return self.done and not self.failed and not self.void


@dataclass(eq=False)
class PageLoad:
    """The pages that a waiting sequence gets, by (KV group, block); the last group are recurrent states."""

    begun: float  # start in seconds of the engine's clock
    patience: float
    wanted: dict[tuple[int, int], tuple[int, bytes]]  # (tier, key)
    # tickets; empty until there is room for the loads
    pages: dict[tuple[int, int], Staged] = field(default_factory=dict)
    ready: bool = False
    predicted: float = 0.0  # expected seconds until all pages are staged
    alone: bool = False  # whether no row ran and no other sequence waited at the start
    busy: float = 0.0  # time of all steps before the load, in seconds


@dataclass(frozen=True)
class Named:
    """A cached block whose page has a key."""

    key: bytes
    depth: int
    tenant: int
    session: int = 0
    kind: int = 0
