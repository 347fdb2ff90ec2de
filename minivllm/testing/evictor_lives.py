"""Long lives of an evictor: calls that leave nothing behind, many times, and then every key must still be there.

What an evictor tidies up only now and then (stale entries of a heap, tombstones, counters of a few bits) goes wrong
after some number of rounds and not before, so a life is lived to many lengths: each up to 30 rounds, then longer and
longer ones.  Some keys are *cold*, freed once and never touched again; who loses an entry loses theirs for good.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from minivllm.core.interfaces.evictor import Evictor

from .evictor_tree import Tree, key_of, keys

COLD, HOT, LENGTH = 5, 6, 4  # sequences that rest, sequences that come again, blocks of one
LENGTHS = (*range(1, 31), 36, 45, 50, 64, 65, 80, 100, 129, 200, 300)
LONGEST = 1000  # rounds
HITS = 40_000  # lookups of one key; of another one twice as many, more than a counter of 16 bits holds


class EvictorLife:
    """An evictor and the tree that it must agree with: in the ``order`` of that name, if any, and by ``check``."""

    def __init__(self, tree: Tree, evictor: Evictor, order: str, check: Callable[[Tree, list[int], int], None]) -> None:
        self.tree, self.evictor, self.order, self.check = tree, evictor, order, check
        self.random = random.Random(5)
        self.fresh = 1000  # number of the next sequence that nobody had
        for i in range(COLD):
            self.free(self.cached(i))
        self.hot = [self.cached(COLD + i) for i in range(HOT)]
        for path in self.hot:
            self.free(path)

    def cached(self, number: int, n: int = LENGTH) -> list[int]:
        """The blocks of a new sequence, held."""
        path: list[int] = []
        for i in range(n):
            parent = path[-1] if path else 0
            key = key_of(parent, number if not i else 0)
            self.evictor.add(keys([key]), self.tree.add(key, parent))
            path.append(key)
        return path

    def free(self, path: list[int]) -> None:
        if gone := self.tree.give(path):
            self.evictor.free(keys(gone))

    def look_up(self, path: list[int]) -> None:
        self.evictor.hit(keys(path))
        for key in path:
            self.tree.hits[key] += 1
        if woken := self.tree.take(path):
            self.evictor.hold(keys(woken))

    def drop(self, path: list[int]) -> None:
        self.evictor.drop(keys(path))
        for key in reversed(path):
            self.tree.remove(key)

    def give_up(self, n: int) -> None:
        want = self.tree.expected(self.order, n) if self.order else None
        got = [int(k) for k in self.evictor.victims(n)]
        self.check(self.tree, got, n)
        assert want is None or got == want, f"order={self.order!r}: gave {got}, the reference gives {want}"
        for key in got:
            self.tree.remove(key)

    def give_up_all(self) -> None:
        self.give_up(len(self.tree.free))
        assert len(self.evictor.victims(1)) == 0, "gives a key although every key is gone"

    def look_up_often(self, times: Sequence[tuple[int, int]]) -> None:
        """``times``: (which of the sequences that come again, how often the first of its blocks is looked up)."""
        for which, n in times:
            path = self.hot[which]
            self.look_up(path)
            for _ in range(n):
                self.evictor.hit(keys(path[:1]))
            self.tree.hits[path[0]] += n
            self.free(path)

    # ---- a round of each kind ------------------------------------------------------------------------------------

    def again(self) -> None:
        """A prompt comes again and ends."""
        path = self.random.choice(self.hot)
        path = path[: self.random.randint(1, len(path))]
        self.look_up(path)
        self.free(path)

    def the_same_again(self) -> None:
        """The same prompt each time."""
        self.look_up(self.hot[0])
        self.free(self.hot[0])

    def in_vain(self) -> None:
        """The engine asks for as many victims as it needs, which may be none."""
        self.again()
        assert len(self.evictor.victims(0)) == 0, "victims(0) gave keys"

    def come_and_dropped(self) -> None:
        """A sequence is cached, freed and dropped, as at a reset."""
        path = self.cached(self.fresh, 2)
        self.fresh += 1
        self.free(path)
        self.drop(path)

    def for_another(self) -> None:
        """The cache is full: a newcomer takes the place of as many, a prompt comes again."""
        n = self.random.randint(1, 3)
        self.give_up(n)
        left = [[k for k in path if k in self.tree.refs] for path in self.hot]
        self.hot = [path for path in left if path]
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
    """(what happens in a round, the round, how many of them)."""
    for what, turn in KINDS.items():
        for n in (*LENGTHS, 5 * LONGEST if turn is EvictorLife.the_same_again else LONGEST):
            yield what, turn, n
