"""A state machine of the engine without a model, whose requests have images and whose KV cache has tiers."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from image_machine import STANDS, TOKEN, ImageDevice, ImageMachine, prepared, tokens_of
from tier_machine import EagerStore, SlowTierDevice, TierDevice, TierMachine, WeakStore, part

from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import PlacedImage
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.base import Seen
from minivllm.testing.policy_watch import PolicyWatch
from minivllm.testing.sim import Clock, sim_engine

TWINS = {0: 4, 4: 0, 1: 5, 5: 1}  # pictures with the same number of tokens


class ImageTierDevice(ImageDevice, TierDevice):
    """A simulated device of two ranks that checks features, and whose pages have the pictures in their hashes."""


class SlowImageTierDevice(ImageDevice, SlowTierDevice):
    """The same, whose second rank copies slowly."""


class ImageTierMachine(ImageMachine, TierMachine):
    """Add stores that work, hang and fail to the events of ``ImageMachine``."""

    prompt_of_parts = None  # their requests have no images; ``add`` adds text
    again_when_nothing_runs = None

    @initialize(
        depth=st.integers(0, 2),
        kind=st.sampled_from(["plain", "plain", "window", "states"]),
        blocks=st.integers(14, 30),
        budget=st.integers(5, 40),
        stores=st.sampled_from([(WeakStore,), (EagerStore,), (WeakStore, EagerStore)]),
        device=st.sampled_from([ImageTierDevice, SlowImageTierDevice]),
        room=st.integers(4, 24),
        undivided=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
    )
    def start(self, depth, kind, blocks, budget, stores, device, room, undivided, drafts):
        self.clock, self.budget = Clock(), budget + 3 * undivided
        facts = ImageFacts(TOKEN, after=(2,), span=4) if undivided else ImageFacts(TOKEN)
        self.engine = sim_engine(
            slots=5,
            max_len=40,
            blocks=blocks,
            windows=(None, 5) if kind == "window" else (None,),
            depth=depth,
            budget=budget,
            drafts=drafts,
            checkpoints=4 if kind == "states" else None,
            stores=tuple(part(cls) for cls in stores),
            images=ImageWiring(max_images=4, cache_mb=1, facts=facts),
            device=device,
            now=lambda: self.clock.now,
        )
        self.device = self.engine.executor
        self.engine.images.limit = self.device.limit = room * 8
        self.device.picture_of = {}
        self.owner_of = {}
        self.tiers = self.engine.cache.tiers
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made, self.gone, self.history = [], set(), {}
        self.n = self.failed = 0
        self.kind = kind
        self.stores_work_at_once = False

    @precondition(lambda self: self.history)
    @rule(
        data=st.data(),
        n=st.integers(1, 3),
        branches=st.integers(1, 2),
        works=st.booleans(),
        change=st.sampled_from(["none", "pictures", "pictures", "owner"]),
    )
    def again_after_eviction(self, data, n, branches, works, change):
        """Add a prompt again whose blocks the device has lost, so that the parts of its images come from a tier.

        With another last picture of the same size, or of another owner, it must not find the blocks from there on."""
        for _ in range(300):
            if self.engine.busy:
                self.clock.turn(self.engine)
                self.finish_store_work()
        earlier = data.draw(st.sampled_from([r for r in self.made if r.id in self.history]))
        for pool in self.engine.cache.pools:
            pool.release(pool.take(pool.available))
        self.step(2, 0.001)
        self.finish_store_work()
        if self.engine.dead:
            return  # the invariant reports it
        encoded, loads = self.engine.images.encoded, self.loads()
        owner = earlier.params.tenant, earlier.params.cache_salt
        if change == "owner":
            owner = ("a", "x") if owner[0] != "a" else ("", None)
        placed, keyed = earlier.images, self.history[earlier.id]
        if change == "pictures" and placed:
            numbers = [int(one.image.values[0]) for one in placed]
            numbers[-1] = TWINS.get(numbers[-1], numbers[-1])
            placed = tuple(PlacedImage(prepared(a), one.position) for a, one in zip(numbers, placed, strict=True))
            keyed = list(keyed)
            for number, one in zip(numbers, placed, strict=True):
                keyed[one.position : one.end] = [STANDS + number] * tokens_of(number)
        for ending in ([], [3], [5, 5, 5, 5, 5])[:n]:
            self.ask(earlier.prompt.tolist() + ending, placed, keyed + ending, branches, 3, owner)
        for _ in range(8 if works else n):
            self.clock.turn(self.engine, 0.001)
            if works:
                self.finish_store_work()
        loaded = self.loads() > loads
        self.seen["loaded without an encoder"] += loaded and self.engine.images.encoded == encoded
        self.seen["loaded before another picture"] += loaded and change == "pictures"

    def loads(self):
        """Return the number of pages that were loaded from tiers."""
        return sum(tier.loads for tier in self.tiers.tiers)


def machine_of():
    """Return the class of a machine with fresh counts."""
    return type("Machine", (ImageTierMachine,), {"policies": [Fcfs], "seen": Seen()})
