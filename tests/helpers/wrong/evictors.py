"""Wrong evictors: ``Lru`` with one fault each."""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.evictor import Evictor
from minivllm.plugins.evictor.lru import Lru
from minivllm.registration.spec import Spec

SEAM = "evictor"
ENGINE = "test_the_engine_runs_on_it"
VICTIMS = "test_victims_are_free_keys_in_order_whatever_happened_before"
FAULTS = {
    "EvictsHeld": (VICTIMS, "test_a_key_that_is_held_again_is_not_given_up"),
    "ForgetsToHold": (VICTIMS, "test_a_key_that_is_held_again_is_not_given_up"),
    "RemembersTheDropped": (VICTIMS,),
    "OneTooFew": (VICTIMS,),
    "ParentsFirst": (VICTIMS,),
    "MostRecentFirst": (VICTIMS,),
    "GivesTwice": (VICTIMS,),
    "SharedQueue": ("test_two_instances_share_no_state",),
    "ScansAll": ("test_a_call_costs_log_n_at_most",),
    "Tombstones": (VICTIMS, ENGINE),
    "ChainsOnly": (VICTIMS, ENGINE),
    "DepthOfTheParent": (VICTIMS, ENGINE),
    "FreesAtTheEndOfATurn": (VICTIMS,),
    "EvictsAnEndedTurn": (VICTIMS,),
    "FiguresBeforeTheFirstKey": ("test_its_figures_are_numbers_by_name_and_asking_changes_nothing",),
}
RIGHT = ("Fifo", "FixedArrays")


def spec(name: str, order: str = "") -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", traits={"order": order} if order else {})


class FiguresBeforeTheFirstKey(Lru):
    """A mean over no keys."""

    spec = Spec(f"{__name__}:FiguresBeforeTheFirstKey", (1, 1), "a planted fault")
    hits, keys = 0, 0

    def add(self, keys, info):
        super().add(keys, info)
        self.keys += len(keys)

    def hit(self, keys):
        super().hit(keys)
        self.hits += len(keys)

    def figures(self):
        return {"hits_a_key": np.float64(self.hits) / np.float64(self.keys)}


class FreesAtTheEndOfATurn(Lru):
    """Frees the blocks of a turn that ends, which other requests may share."""

    spec = Spec(f"{__name__}:FreesAtTheEndOfATurn", (1, 2), "a planted fault")

    def ended(self, keys, turn):
        self.free(keys)


class EvictsAnEndedTurn(Lru):
    """Drops the free blocks of a session whose next turn is late, as if they had been evicted."""

    spec = Spec(f"{__name__}:EvictsAnEndedTurn", (1, 2), "a planted fault")

    def ended(self, keys, turn):
        if turn.next_s > 1e3:
            for key in keys.tolist():
                self.queue.pop(key, None)


class EvictsHeld(Lru):
    """Gives a held block when the free ones run out."""

    spec = spec("EvictsHeld")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.known = {}

    def add(self, keys, info):
        self.known.update(dict.fromkeys(keys.tolist()))

    def drop(self, keys):
        super().drop(keys)
        for key in keys.tolist():
            self.known.pop(key, None)

    def victims(self, n):
        out = super().victims(n).tolist()
        held = [k for k in self.known if k not in self.queue and k not in out]
        out += held[: n - len(out)]
        for key in out:
            self.known.pop(key, None)
        return np.array(out, np.uint64)


class ForgetsToHold(Lru):
    """A prefix that was hit again stays in the queue."""

    spec = spec("ForgetsToHold")

    def hold(self, keys):
        pass

    def drop(self, keys):
        super().hold(keys)


class RemembersTheDropped(Lru):
    spec = spec("RemembersTheDropped")

    def drop(self, keys):
        pass


class OneTooFew(Lru):
    """Keeps the last free key for itself."""

    spec = spec("OneTooFew")

    def victims(self, n):
        return super().victims(min(n, len(self.queue) - 1) if len(self.queue) > 1 else 0)


class ParentsFirst(Lru):
    """Queues the keys of one sequence as they come: the start of the sequence goes first."""

    spec = spec("ParentsFirst")

    def free(self, keys):
        for key in keys.tolist():
            self.queue[key] = None


class MostRecentFirst(Lru):
    """Claims to be lru, but evicts the sequence that was freed last."""

    spec = spec("MostRecentFirst", "lru")

    def free(self, keys):
        new = dict.fromkeys(reversed(keys.tolist()))
        self.queue = {**new, **self.queue}


class GivesTwice(Lru):
    """Returns the same victim twice."""

    spec = spec("GivesTwice")

    def victims(self, n):
        return np.array(list(self.queue)[:n], np.uint64)


class SharedQueue(Lru):
    """The queue belongs to the class: two KV groups evict each other's blocks."""

    spec = spec("SharedQueue")
    shared: dict = {}

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.queue = self.shared


class ScansAll(Lru):
    """Looks at every key for each victim."""

    spec = spec("ScansAll")

    def victims(self, n):
        age = {key: i for i, key in enumerate(self.queue)}
        best = sorted(self.queue, key=lambda k: age[k])[:n]
        for key in best:
            del self.queue[key]
        return np.array(best, np.uint64)


class Tombstones(Lru):
    """Deletes lazily, so that an evicted key is skipped for ever, even after it is cached again."""

    spec = spec("Tombstones", "lru")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.gone = set()

    def free(self, keys):
        super().free(np.array([k for k in keys.tolist() if k not in self.gone], np.uint64))

    def victims(self, n):
        out = super().victims(n)
        self.gone.update(out.tolist())
        return out


class ChainsOnly(Lru):
    """Takes a block without a parent for the first of a sequence."""

    spec = spec("ChainsOnly", "lru")

    def add(self, keys, info):
        first = info.parent == 0
        assert (info.depth[first] == 0).all(), "a block in the middle of nothing"


class DepthOfTheParent(Lru):
    """Counts the depth itself, and compares."""

    spec = spec("DepthOfTheParent", "lru")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.depth = {0: -1}

    def add(self, keys, info):
        for key, parent, depth in zip(keys.tolist(), info.parent.tolist(), info.depth.tolist(), strict=True):
            self.depth[key] = self.depth[parent] + 1
            assert self.depth[key] == depth


class FixedArrays(Lru):
    """Right.  It has memory for exactly the number of keys in the context."""

    spec = spec("FixedArrays", "lru")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.places, self.place = list(range(ctx.capacity)), {}

    def _leave(self, keys):
        self.places += [self.place.pop(key) for key in keys.tolist()]
        return keys

    def add(self, keys, info):
        self.place.update({key: self.places.pop() for key in keys.tolist()})

    def drop(self, keys):
        super().drop(self._leave(keys))

    def victims(self, n):
        return self._leave(super().victims(n))


class Fifo(Evictor):
    """Right.  It evicts the block that was cached first and has no cached child."""

    spec = spec("Fifo", "fifo")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.parent, self.children, self.free_ = {}, {}, set()

    def add(self, keys, info):
        for key, parent in zip(keys.tolist(), info.parent.tolist(), strict=True):
            self.parent[key], self.children[key] = parent, 0
            if parent:
                self.children[parent] += 1

    def hold(self, keys):
        self.free_ -= set(keys.tolist())

    def free(self, keys):
        self.free_ |= set(keys.tolist())

    def drop(self, keys):
        for key in keys.tolist():
            self.free_.discard(key)
            parent = self.parent.pop(key)
            del self.children[key]
            if parent in self.children:
                self.children[parent] -= 1

    def victims(self, n):
        out = []
        while len(out) < n:
            key = next((k for k in self.parent if k in self.free_ and not self.children[k]), None)
            if key is None:
                break
            out.append(key)
            self.drop(np.array([key], np.uint64))
        return np.array(out, np.uint64)
