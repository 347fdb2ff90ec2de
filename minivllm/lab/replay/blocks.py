"""Run an evictor on the cache alone: requests are served one after another, and each is a chain of blocks.

A request hits the cached blocks at the beginning of its chain.  There is no planner, no device and no time, so only the
order of eviction matters.  Published hit rates of block traces are measured in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo, Evictor, EvictorContext
from minivllm.errors import PluginError

from .optimum import Optimum, uses_of


@dataclass(frozen=True)
class CacheRun:
    """The hits and evictions of one evictor."""

    hits: np.ndarray  # i32 [n] cached blocks at the start of each request
    requested: np.ndarray  # i32 [n] blocks of each request
    evictions: int
    seconds: float  # CPU seconds in the evictor

    @property
    def rate(self) -> float:
        """Return the share of all blocks that were hit."""
        return float(self.hits.sum() / max(1, self.requested.sum()))


def run_cache(
    chains: Sequence[Sequence[int]], capacity: int, block: int, make: Callable[[EvictorContext], Evictor]
) -> CacheRun:
    """Serve chains of block keys, parents first, with a cache of ``capacity`` blocks of ``block`` tokens.

    ``make`` constructs the evictor.  A chain longer than the cache is cached up to its capacity.  Raise PluginError if
    the evictor breaks its contract.
    """
    evictor = make(EvictorContext(capacity=capacity, block=block, tier="device"))
    cached: dict[int, int] = {}  # key -> number of cached children
    parents: dict[int, int] = {}
    hits = np.zeros(len(chains), np.int32)
    evictions = 0
    seconds = 0.0
    for i, chain in enumerate(chains):
        n = 0
        while n < len(chain) and chain[n] in cached:
            n += 1
        hits[i] = n
        keys = np.array(chain[:capacity], np.uint64)
        new = len(keys) - n
        over = len(cached) + new - capacity
        start = process_time()
        if n:
            evictor.hit(keys[:n])
            evictor.hold(keys[:n])
        victims: list[int] = evictor.victims(over).tolist() if over > 0 else []
        if new:
            evictor.add(keys[n:], _info(chain, n, len(keys), block))
        seconds += process_time() - start
        _remove_victims(evictor, victims, over, cached, parents, set(chain[:n]))
        evictions += len(victims)
        for depth in range(n, len(keys)):
            key = chain[depth]
            cached[key] = 0
            parents[key] = 0
            if depth:
                parents[key] = chain[depth - 1]
                cached[chain[depth - 1]] += 1
        start = process_time()
        evictor.free(keys)
        seconds += process_time() - start
    lengths = np.array([len(chain) for chain in chains], np.int32)
    return CacheRun(hits, lengths, evictions, seconds)


def run_optimum(chains: Sequence[Sequence[int]], capacity: int, block: int) -> CacheRun:
    """Serve the chains with Belady's optimum, which no evictor can beat.

    Blocks are ranked when a request has been served, by the next request that uses them.
    """
    served = [0]
    future = uses_of(chains)
    counting = _CountingChains(chains, served)
    return run_cache(counting, capacity, block, lambda ctx: Optimum(ctx, future, lambda: served[0]))


@dataclass(frozen=True)
class _CountingChains(Sequence[Sequence[int]]):
    """A sequence of chains; reading the chain with index i sets ``served[0]`` to i + 1, the index of the next chain."""

    chains: Sequence[Sequence[int]]
    served: list[int]

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, i: Any) -> Any:
        self.served[0] = i + 1
        return self.chains[i]


def _info(chain: Sequence[int], start: int, stop: int, block: int) -> BlockInfo:
    """Return the evictor's data of blocks [start, stop) of a chain; a root's parent is 0."""
    n = stop - start
    depth = np.arange(start, stop, dtype=np.int32)
    parents = chain[start - 1 : stop - 1] if start else [0, *chain[: stop - 1]]
    return BlockInfo(
        parent=np.array(parents, np.uint64),
        depth=depth,
        bytes=np.full(n, block, np.int64),
        cost=(depth + 1.0) * block,
        tenant=np.zeros(n, np.int32),
    )


def _remove_victims(
    evictor: Evictor, victims: list[int], over: int, cached: dict[int, int], parents: dict[int, int], held: set[int]
) -> None:
    """Remove the victims from ``cached``; ``over`` is the number of blocks that must leave.

    Raise PluginError for a wrong number of victims, or a victim that is not cached, in use, or the parent of a cached
    block.
    """
    name = type(evictor).__name__
    if len(victims) != max(0, over):
        raise PluginError(f"evictor {name} returned {len(victims)} victims, expected {over}: it loses keys")
    for key in victims:
        if key in held or cached.get(key, 1):
            problem = "the parent of a cached block"
            if key not in cached:
                problem = "unknown"
            elif key in held:
                problem = "in use"
            raise PluginError(f"evictor {name} evicted a block that is {problem}")
        del cached[key]
        parent = parents.pop(key)
        if parent:
            cached[parent] -= 1
