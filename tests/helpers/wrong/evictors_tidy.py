"""Wrong evictors that are right until they tidy up, and one that tidies up and is right."""

from __future__ import annotations

from collections import deque

import numpy as np

from minivllm.core.interfaces.evictor import Evictor
from minivllm.plugins.evictor.lru import Lru
from minivllm.registration.spec import Spec

SEAM = "evictor"
ROUNDS = "test_every_key_is_there_after_any_number_of_rounds"
LOOKUPS = "test_lookups_are_counted_beyond_16_bits"
FAULTS = {
    "LosesAfter21Rounds": (ROUNDS,),
    "LosesTheOldHalf": (ROUNDS,),
    "ForgetsEmptyRounds": (ROUNDS,),
    "QueueOf256": (ROUNDS,),
    "StampOfAByte": (ROUNDS,),
    "HitsOfAByte": (LOOKUPS,),
    "HitsOf16Bits": (LOOKUPS,),
    "TenantsForGood": ("test_what_has_ended_leaves_nothing_behind",),
}
RIGHT = ("Queue",)


def spec(name: str, order: str = "") -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", traits={"order": order} if order else {})


class Queue(Evictor):
    """Right.  Least recently used, with entries (stamp, key) of which only the last one of a key counts.

    Outdated entries are removed when there are many.
    """

    spec = spec("Queue", "lru")
    most = 64

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.entries, self.idle, self.clock = deque(), {}, 0

    def add(self, keys, info):
        pass

    def hold(self, keys):
        for key in keys.tolist():
            self.idle.pop(key, None)

    drop = hold

    def free(self, keys):
        for key in reversed(keys.tolist()):
            self.clock = self.stamp(self.clock + 1)
            self.idle[key] = self.clock
            self.entries.append((self.clock, key))
        if len(self.entries) > 2 * len(self.idle) + self.most:
            self.tidy()

    def stamp(self, n):
        return n

    def tidy(self):
        self.entries = deque((stamp, key) for stamp, key in self.entries if self.idle.get(key) == stamp)

    def victims(self, n):
        out = []
        while self.entries and len(out) < n:
            stamp, key = self.entries.popleft()
            if self.idle.get(key) == stamp:
                del self.idle[key]
                out.append(key)
        return np.array(out, np.uint64)


class LosesAfter21Rounds(Queue):
    """Counts the rounds since the last victim, and then keeps the keys that it has read in them."""

    spec = spec("LosesAfter21Rounds", "lru")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.rounds, self.met = 0, set()

    def free(self, keys):
        self.rounds += 1
        self.met |= set(keys.tolist())
        super().free(keys)
        if self.rounds > 21:
            self.entries = deque(e for e in self.entries if e[1] in self.met)
            self.rounds, self.met = 0, set()

    def victims(self, n):
        self.rounds, self.met = 0, set(self.idle)
        return super().victims(n)


class LosesTheOldHalf(Queue):
    """Takes the older half of the entries for stale ones."""

    spec = spec("LosesTheOldHalf")

    def tidy(self):
        for _ in range(len(self.entries) // 2):
            self.entries.popleft()


class ForgetsEmptyRounds(Queue):
    """Also cleans up in ``victims``, and loses the entries that it reads when no victim is requested."""

    spec = spec("ForgetsEmptyRounds", "lru")

    def victims(self, n):
        if not n and len(self.entries) > 100:
            self.entries.popleft()
        return super().victims(n)


class QueueOf256(Queue):
    """Entries that were passed over are pushed out at the other end, and others with them."""

    spec = spec("QueueOf256", "lru")
    most = 1 << 30

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.entries = deque(maxlen=256)


class StampOfAByte(Queue):
    """The stamp of an entry wraps around, and an old one counts as the last."""

    spec = spec("StampOfAByte", "lru")

    def stamp(self, n):
        return n % 256

    def tidy(self):
        pass


class Lfu(Queue):
    """Least frequently used, and among equal counts least recently used.  It scans all keys, which is too slow."""

    spec = spec("Lfu", "lfu")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.hits, self.parent = {}, {}

    def add(self, keys, info):
        self.hits.update(dict.fromkeys(keys.tolist(), 1))
        self.parent.update(zip(keys.tolist(), info.parent.tolist(), strict=True))

    def hit(self, keys):
        for key in keys.tolist():
            self.hits[key] = self.counted(self.hits[key] + 1)

    def counted(self, n):
        return n

    def free(self, keys):
        for key in reversed(keys.tolist()):
            self.clock += 1
            self.idle[key] = self.clock

    def drop(self, keys):
        for key in keys.tolist():
            del self.idle[key], self.hits[key], self.parent[key]

    def victims(self, n):
        out = []
        while self.idle and len(out) < n:
            inner = {self.parent[key] for key in self.parent}
            key = min((k for k in self.idle if k not in inner), key=lambda k: (self.hits[k], self.idle[k]))
            self.drop(np.array([key], np.uint64))
            out.append(key)
        return np.array(out, np.uint64)


class HitsOfAByte(Lfu):
    spec = spec("HitsOfAByte", "lfu")

    def counted(self, n):
        return n % 256


class HitsOf16Bits(Lfu):
    spec = spec("HitsOf16Bits", "lfu")

    def counted(self, n):
        return n % 65536


class TenantsForGood(Lru):
    """Counts the blocks of each tenant that there ever was."""

    spec = spec("TenantsForGood", "lru")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.blocks = {}

    def add(self, keys, info):
        super().add(keys, info)
        for tenant in info.tenant.tolist():
            self.blocks[tenant] = self.blocks.get(tenant, 0) + 1
