"""The router seam (plug-in interface): choose the replica of the engine that serves a request.

A *replica* is an engine in a process of its own.  All replicas of a server serve the same model, and each has its own
KV cache.  A *block key* is a digest of all tokens up to the end of a block, so equal keys mean equal prefixes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

API = (1, 0)


@dataclass(frozen=True)
class RouterContext:
    """The arguments with which a server constructs a router."""

    replicas: int  # number of replicas; they are numbered 0, 1, ...
    block: int = 16  # number of tokens for which there is one block key
    blocks: int = 1 << 16  # number of blocks in the KV cache of one replica


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of a replica that accepts requests.

    ``tokens`` are the prompt tokens of its requests that have not ended, and ``waiting`` are the prompt tokens of its
    requests without a token yet.
    """

    number: int
    requests: int = 0
    tokens: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class RoutedRequest:
    """A request that needs a replica.

    ``tokens`` is the number of its prompt tokens.  ``session`` is the name of its session, "" for none.
    ``make_keys()`` returns the block keys of the prompt, which ``keys`` computes at the first use.
    """

    tokens: int
    session: str = ""
    make_keys: Callable[[], Sequence[int]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def keys(self) -> Sequence[int]:
        """Return the keys of the whole blocks of the prompt, the first block first."""
        return self.make_keys()


class ReplicaRouter(ABC):
    """Chooses replicas.  One thread makes all calls, and each must take less than a millisecond.

    An exception of a call, or the number of a replica that is not offered, is counted as a fault of the router.  The
    request then goes to the replica with the fewest tokens.
    """

    def __init__(self, options: Any, ctx: RouterContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the number of one of the replicas in ``loads``, which has at least one.

        ``loads`` lacks replicas that are ended, starting or drained.  The call must not change data on which later
        choices depend, except for a counter that takes the replicas in turn."""

    def sent(self, request: RoutedRequest, number: int) -> None:  # noqa: B027  (optional)
        """Note that a request was sent to a replica, after ``choose`` or because another replica has ended."""

    def emptied(self, number: int) -> None:  # noqa: B027  (optional)
        """Note that the cache of a replica is empty, because it was started again or its cache was reset."""


def least_loaded(loads: Sequence[ReplicaLoad]) -> int:
    """Return the number of the replica with the fewest tokens, then the fewest requests."""
    best = min(loads, key=lambda load: (load.tokens, load.requests, load.number))
    return best.number
