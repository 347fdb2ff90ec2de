"""Long runs of an evictor: many rounds of calls that leave the same keys cached, after which no key may be lost.

An evictor cleans up some of its data only from time to time, such as stale heap entries, tombstones and counters of a
few bits.  A fault in that shows only after a certain number of rounds, so the runs have many lengths: every length up
to 30, then longer and longer ones.  Some keys are *cold*: they are freed once and never used again, so that no later
call replaces an entry that the evictor has lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from minivllm.core.interfaces.evictor import Evictor

from .evictor_tree import Tree, key_of, keys

COLD = 5  # number of sequences that are never used again
HOT = 6  # number of sequences that are used again
LENGTH = 4  # blocks of a sequence
LENGTHS = (*range(1, 31), 36, 45, 50, 64, 65, 80, 100, 129, 200, 300)  # numbers of rounds of the runs
LONGEST = 1000  # number of rounds of the longest run; it is five times as large for the runs that repeat one prompt
HITS = 40_000  # number of lookups of one key; another key has twice as many, which exceeds a 16-bit counter


class EvictorLife:
    """An evictor that runs together with its reference model, the tree of cached keys.

    ``check`` checks the keys that a call of ``victims`` returned.  They must also equal the keys in the reference
    ``order``, if it is not empty.
    """

    def __init__(self, tree: Tree, evictor: Evictor, order: str, check: Callable[[Tree, list[int], int], None]) -> None:
        self.tree = tree
        self.evictor = evictor
        self.order = order
        self.check = check
        self.random = random.Random(5)
        self.fresh = 1000  # a number that differs for each new sequence, and decides the content of its blocks
        for i in range(COLD):
            self.free(self.cached(i))
        self.hot = [self.cached(COLD + i) for i in range(HOT)]
        for path in self.hot:
            self.free(path)

    def cached(self, number: int, n: int = LENGTH) -> list[int]:
        """Cache n blocks of a new sequence, which then runs, and return their keys."""
        path: list[int] = []
        for i in range(n):
            parent = path[-1] if path else 0
            key = key_of(parent, 0 if i else number)
            info = self.tree.add(key, parent)
            self.evictor.add(keys([key]), info)
            path.append(key)
        return path

    def free(self, path: list[int]) -> None:
        """End a sequence, and free those of its keys that no other running sequence uses."""
        if freed := self.tree.give(path):
            self.evictor.free(keys(freed))

    def look_up(self, path: list[int]) -> None:
        """Start a sequence on the cached prefix ``path``."""
        self.evictor.hit(keys(path))
        for key in path:
            self.tree.hits[key] += 1
        if woken := self.tree.take(path):
            self.evictor.hold(keys(woken))

    def drop(self, path: list[int]) -> None:
        """Drop the free keys of a path, as at a reset of the cache."""
        self.evictor.drop(keys(path))
        for key in reversed(path):
            self.tree.remove(key)

    def give_up(self, n: int) -> None:
        """Evict n keys, and check that the evictor chose the right ones."""
        if self.order:
            expected = self.tree.expected(self.order, n)
        else:
            expected = None
        victims = [int(key) for key in self.evictor.victims(n)]
        self.check(self.tree, victims, n)
        if expected is not None:
            check_order(self.order, victims, expected)
        for key in victims:
            self.tree.remove(key)

    def give_up_all(self) -> None:
        """Evict all free keys, and check that the evictor returns no more key afterwards."""
        self.give_up(len(self.tree.free))
        assert len(self.evictor.victims(1)) == 0, "victims(1) returns a key although no key is cached"

    def look_up_often(self, times: Sequence[tuple[int, int]]) -> None:
        """Look up the first block of some hot sequences often; ``times`` has (index in ``hot``, lookups) of each."""
        for which, n in times:
            path = self.hot[which]
            self.look_up(path)
            for _ in range(n):
                self.evictor.hit(keys(path[:1]))
            self.tree.hits[path[0]] += n
            self.free(path)

    # ---- a round of each kind ------------------------------------------------------------------------------------

    def again(self) -> None:
        """Run a sequence on a part of a hot prompt."""
        path = self.random.choice(self.hot)
        path = path[: self.random.randint(1, len(path))]
        self.look_up(path)
        self.free(path)

    def the_same_again(self) -> None:
        """Run a sequence on the same hot prompt each time."""
        self.look_up(self.hot[0])
        self.free(self.hot[0])

    def in_vain(self) -> None:
        """Run a sequence on a hot prompt and call ``victims(0)``, as an engine does that needs no block."""
        self.again()
        assert len(self.evictor.victims(0)) == 0, "victims(0) returned keys"

    def come_and_dropped(self) -> None:
        """Cache, free and drop a sequence, as at a reset."""
        path = self.cached(self.fresh, 2)
        self.fresh += 1
        self.free(path)
        self.drop(path)

    def for_another(self) -> None:
        """Evict some keys and cache a new sequence of as many, as in a full cache; sometimes use a hot prompt."""
        n = self.random.randint(1, 3)
        self.give_up(n)
        cached = [[key for key in path if key in self.tree.refs] for path in self.hot]
        self.hot = [path for path in cached if path]
        path = self.cached(self.fresh, n)
        self.fresh += 1
        self.hot.append(path)
        self.free(path)
        if self.random.random() < 0.5:
            self.again()


KINDS: dict[str, Callable[[EvictorLife], None]] = {
    "a prompt that comes again": EvictorLife.again, "the same prompt again": EvictorLife.the_same_again,
    "a prompt that comes again, and victims(0)": EvictorLife.in_vain,
    "a sequence that is dropped": EvictorLife.come_and_dropped,
    "a sequence in the place of others": EvictorLife.for_another,
}  # fmt: skip


def lives() -> Iterator[tuple[str, Callable[[EvictorLife], None], int]]:
    """Yield (name of a kind of round, method that runs a round, number of rounds) of each run."""
    for name, run_round in KINDS.items():
        longest = 5 * LONGEST if run_round is EvictorLife.the_same_again else LONGEST
        for n in (*LENGTHS, longest):
            yield name, run_round, n


def check_order(order: str, victims: list[int], expected: list[int]) -> None:
    """Fail unless the victims are the expected ones, in the same order."""
    assert victims == expected, f"order={order!r}: victims returned {victims}, the reference order gives {expected}"
