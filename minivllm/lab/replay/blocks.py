"""The cache alone: requests one after the other, each a chain of blocks; what of it is cached from the start on is hit.

No planner, no device, no time: only the order of eviction matters.  It is how published hit rates of block traces are
made, and it is fast.
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
    """What one evictor did."""

    hits: np.ndarray  # i32 [n] blocks of each request that were cached, from the first on
    asked: np.ndarray  # i32 [n] blocks of each request
    evictions: int
    seconds: float  # CPU time in the evictor

    @property
    def rate(self) -> float:
        return float(self.hits.sum() / max(1, self.asked.sum()))


def run_cache(
    chains: Sequence[Sequence[int]], capacity: int, block: int, make: Callable[[EvictorContext], Evictor]
) -> CacheRun:
    """Serve ``chains`` (keys, parents first) with a cache of ``capacity`` blocks.  Of a chain that is longer than the
    cache the end is not cached.  PluginError if the evictor breaks its contract."""
    evictor = make(EvictorContext(capacity=capacity, block=block, tier="device"))
    cached: dict[int, int] = {}  # key -> cached children
    parents: dict[int, int] = {}
    hits = np.zeros(len(chains), np.int32)
    evictions, seconds = 0, 0.0
    for i, chain in enumerate(chains):
        n = 0
        while n < len(chain) and chain[n] in cached:
            n += 1
        hits[i] = n
        keys = np.array(chain[:capacity], np.uint64)
        new = len(keys) - n
        start = process_time()
        if n:
            evictor.hit(keys[:n])
            evictor.hold(keys[:n])
        over = len(cached) + new - capacity
        gone: list[int] = evictor.victims(over).tolist() if over > 0 else []
        if new:
            evictor.add(keys[n:], _info(chain, n, len(keys), block))
        seconds += process_time() - start
        _check(evictor, gone, over, cached, parents, set(chain[:n]))
        evictions += len(gone)
        for d in range(n, len(keys)):
            parents[chain[d]] = chain[d - 1] if d else 0
            cached[chain[d]] = 0
            if d:
                cached[chain[d - 1]] += 1
        start = process_time()
        evictor.free(keys)
        seconds += process_time() - start
    return CacheRun(hits, np.array([len(c) for c in chains], np.int32), evictions, seconds)


def run_optimum(chains: Sequence[Sequence[int]], capacity: int, block: int) -> CacheRun:
    """What no evictor can beat.  Blocks are ranked when a request has been served, by the next one that uses them."""
    served = [0]
    future = uses_of(chains)
    watched = _Counted(chains, served)
    return run_cache(watched, capacity, block, lambda ctx: Optimum(ctx, future, lambda: served[0]))


class _Counted(Sequence[Sequence[int]]):
    """Notes which chain was asked for last."""

    def __init__(self, chains: Sequence[Sequence[int]], served: list[int]) -> None:
        self.chains, self.served = chains, served

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, i: Any) -> Any:
        self.served[0] = i + 1
        return self.chains[i]


def _info(chain: Sequence[int], start: int, stop: int, block: int) -> BlockInfo:
    n = stop - start
    depth = np.arange(start, stop, dtype=np.int32)
    before = [chain[start - 1] if start else 0, *chain[start : stop - 1]]
    return BlockInfo(
        parent=np.array(before[:n], np.uint64),
        depth=depth,
        bytes=np.full(n, block, np.int64),
        cost=(depth + 1.0) * block,
        tenant=np.zeros(n, np.int32),
    )


def _check(
    evictor: Evictor, gone: list[int], over: int, cached: dict[int, int], parents: dict[int, int], held: set[int]
) -> None:
    """Take the victims out of ``cached``; each must be there, not held, and without a cached child."""
    name = type(evictor).__name__
    if len(gone) != max(0, over):
        raise PluginError(f"evictor {name} gave {len(gone)} victims of {over} wanted: it loses keys")
    for key in gone:
        if key in held or cached.get(key, 1):
            why = "unknown" if key not in cached else "in use" if key in held else "the parent of a cached block"
            raise PluginError(f"evictor {name} gave up a block that is {why}")
        del cached[key]
        parent = parents.pop(key)
        if parent:
            cached[parent] -= 1
