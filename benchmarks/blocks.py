"""Measure the block manager alone, in blocks taken and released per second, by calls of 64 on one thread.

    python benchmarks/blocks.py

In ``private`` blocks are never published, and return to the free list.  In ``cached`` blocks of the prefix cache are
shared and released, which calls the evictor.  In ``evicted`` every block that is taken is evicted first, and published
again.  Each case runs twice: once without the clock and with the full check of all tables after every call (``--walk``
calls), once with the clock and the counters that are always on (``audit``) after every call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from minivllm.core.engine.blocks import BlockPool
from minivllm.core.engine.cache_walk import walk_pool
from minivllm.core.engine.events import EngineEvents
from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.core.timing import SeamTimes
from minivllm.plugins.evictor.lru import Lru

BLOCK = 16


def pool(total: int) -> BlockPool:
    evictor = Lru(None, EvictorContext(total - 1, BLOCK, "device"))
    return BlockPool(total, BLOCK, evictor, 4096, SeamTimes(), EngineEvents())


class Case:
    """A case.  ``call`` takes and releases ``n`` blocks, and ``tables`` are the blocks that are held between calls."""

    def __init__(self, total: int, n: int) -> None:
        self.pool, self.n = pool(total), n
        self.tables: list[np.ndarray] = []

    def call(self) -> None:
        raise NotImplementedError


class Private(Case):
    """Sixteen sequences hold private blocks; the oldest is released when a new one arrives."""

    def __init__(self, total: int, n: int) -> None:
        super().__init__(total, n)
        self.tables = [self.pool.take(n) for _ in range(16)]

    def call(self) -> None:
        self.tables.append(self.pool.take(self.n))
        self.pool.release(self.tables.pop(0))


class Cached(Case):
    """One prefix of n cached blocks, which is taken and released again."""

    def __init__(self, total: int, n: int) -> None:
        super().__init__(total, n)
        self.path = publish(self.pool, n, 0)
        self.pool.release(self.path)

    def call(self) -> None:
        self.pool.hit(self.path, self.n * BLOCK)
        self.pool.share(self.path)
        self.pool.release(self.path)


class Evicted(Case):
    """New prefixes only, in a pool full of cached blocks."""

    def __init__(self, total: int, n: int) -> None:
        super().__init__(total, n)
        self.seed = 0
        while self.pool.free >= n:
            self.call()

    def call(self) -> None:
        self.seed += 1
        self.pool.release(publish(self.pool, self.n, self.seed))


def publish(p: BlockPool, n: int, seed: int) -> np.ndarray:
    """Take n blocks and publish them as a chain."""
    blocks = p.take(n)
    tokens = np.full((n, BLOCK), seed, np.int32)
    keys = p.keys_of(tokens.reshape(-1), ("", ""), [])
    parent = p.root(("", ""))[0]
    for i, block in enumerate(blocks.tolist()):
        parent = p.publish(block, parent, keys[i], tokens[i], i)
    p.announce()
    return blocks


def timed(call: Callable[[], None], audit: Callable[[bool], None], seconds: float) -> float:
    """Return the calls per second of CPU time, the best of five rounds."""
    best = 0.0
    for _ in range(5):
        n, start = 0, time.thread_time()
        while time.thread_time() - start < seconds / 5:
            for _ in range(20):
                call()
                audit(False)
            n += 20
        best = max(best, n / (time.thread_time() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=65_536, help="blocks in the pool")
    parser.add_argument("--blocks", type=int, default=64, help="blocks in a call")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    parser.add_argument("--walk", type=int, default=200, help="calls of each case with the full walk after each")
    args = parser.parse_args()
    print(f"{'case':>8} {'blocks/s':>12} {'us a call':>10}  consistent after each of")
    for kind in (Private, Cached, Evicted):
        small = kind(4096, args.blocks)
        for _ in range(args.walk):
            small.call()
            walk_pool(small.pool, small.tables)
        case = kind(args.total, args.blocks)
        rate = timed(case.call, case.pool.audit, args.seconds)
        walk_pool(case.pool, case.tables)
        name = kind.__name__.lower()
        print(f"{name:>8} {rate * args.blocks:>12,.0f} {1e6 / rate:>10.1f}  {args.walk} calls", flush=True)


if __name__ == "__main__":
    main()
