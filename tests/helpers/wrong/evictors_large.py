"""Wrong evictors that become too slow, too small or too full after a while, and a right one that cleans up rarely."""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.evictor import Evictor
from minivllm.plugins.evictor.lru import Lru
from minivllm.registration.spec import Spec

SEAM = "evictor"
LARGE = "test_a_large_pool_makes_no_call_slow_and_loses_no_key"
KEPT = "test_what_has_ended_leaves_nothing_behind"
FAULTS = {
    "LooksInAList": (LARGE,),
    "GrowsAnArray": (LARGE,),
    "Frees256AtOnce": (LARGE,),
    "Gives1024AtOnce": (LARGE,),
    "Ghosts": (KEPT,),
}
RIGHT = ("GhostsOfAPool",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", traits={"order": "lru"})


class LooksInAList(Evictor):
    """The queue is a list, which is searched for the key that is held again: in C, where no line is counted."""

    spec = spec("LooksInAList")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.queue, self.idle = [], set()

    def add(self, keys, info):
        pass

    def hold(self, keys):
        for key in self.idle.intersection(keys.tolist()):
            self.queue.remove(key)
        self.idle.difference_update(keys.tolist())

    drop = hold

    def free(self, keys):
        self.idle.update(keys.tolist())
        self.queue += reversed(keys.tolist())

    def victims(self, n):
        out = self.queue[:n]
        del self.queue[:n]
        self.idle.difference_update(out)
        return np.array(out, np.uint64)


class GrowsAnArray(Lru):
    """Keeps all cached keys in an array that each call allocates anew."""

    spec = spec("GrowsAnArray")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.keys = np.zeros(0, np.uint64)

    def add(self, keys, info):
        self.keys = np.concatenate([self.keys, keys])

    def drop(self, keys):
        super().drop(keys)
        self.keys = self.keys[~np.isin(self.keys, keys)]

    def victims(self, n):
        out = super().victims(n)
        self.keys = self.keys[~np.isin(self.keys, out)]
        return out


class Frees256AtOnce(Lru):
    spec = spec("Frees256AtOnce")

    def free(self, keys):
        super().free(keys[:256])


class Gives1024AtOnce(Lru):
    spec = spec("Gives1024AtOnce")

    def victims(self, n):
        return super().victims(min(n, 1024))


class Ghosts(Lru):
    """Counts how often each key was cached, also for evicted keys, without a bound."""

    spec = spec("Ghosts")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.count = {}

    def add(self, keys, info):
        for key in keys.tolist():
            self.count[key] = self.count.get(key, 0) + 1


class GhostsOfAPool(Ghosts):
    """Right.  It counts for as many evicted keys as the pool has blocks."""

    spec = spec("GhostsOfAPool")

    def add(self, keys, info):
        super().add(keys, info)
        while len(self.count) > self.ctx.capacity:
            del self.count[next(iter(self.count))]
