"""A state machine of the engine without a model, with every order of events, while its rows are compressed."""

from __future__ import annotations

from cache_machine import CacheMachine
from cache_machine import drive as drive_cache
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from minivllm.testing.base import Seen
from minivllm.testing.policy_watch import PolicyWatch
from minivllm.testing.sim import Clock, SimExecutor, request, sim_engine


class Device(SimExecutor):
    """A simulated device that checks at which number of tokens rows are compressed."""

    def _compact(self, d):
        engine = self.engine()
        every = engine.compression.every
        for _, slot, stored, kept, computed in d.compact.tolist():
            seq = engine.slots.at(slot)
            behind = computed - len(seq.request.prompt)
            assert behind == 0 or (every and behind % every == 0), f"slot {slot} is compressed at {behind} tokens"
            assert kept == seq.request.keep < stored
        super()._compact(d)


class CompressionMachine(CacheMachine):
    """Compress rows at the end of their prompt and while they generate, in addition to all events of ``CacheMachine``.

    The device keeps random tokens of a compressed row.  It checks that the row's blocks hold these tokens and no
    others, and that a compression reads only tokens of its own row.
    """

    @initialize(
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None,), (None, 5)]),
        blocks=st.integers(16, 44),
        step=st.integers(5, 40),
        keep=st.sampled_from([2, 3, 4, 7, 0.5]),
        every=st.sampled_from([0, 1, 2, 5]),
        observed=st.sampled_from([0, 0, 1, 4]),
        prefix=st.sampled_from([True, True, False]),
    )
    def start(self, depth, windows, blocks, step, keep, every, observed, prefix):
        self.clock, self.budget, self.keep = Clock(), step, keep
        self.engine = sim_engine(
            slots=5,
            max_len=40,
            blocks=blocks,
            windows=windows,
            depth=depth,
            budget=step,
            prefix=prefix,
            reads=("temperature", "kv_budget"),
            compress=(0, every),
            device=lambda *args: self._device(observed, *args),
        )
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made, self.gone = [], set()
        self.n = self.failed = 0

    def _device(self, observed, *args):
        device = Device(*args)
        device.observed = observed
        device.engine = lambda: self.engine
        return device

    def ask(self, parts, n, out, owner):
        self.n += 1
        prompt = [t for part in parts for t in part]
        budget = self.keep if self.n % 4 else 0
        if n * (len(prompt) + out) > 40 or not self._fits(len(prompt), out, n):
            return
        params = dict(n=n, max_tokens=out, ignore_eos=True, tenant=owner[0], cache_salt=owner[1], kv_budget=budget)
        before = self.engine.compression.compressions
        self.made.append(request(self.engine, f"r{self.n}", prompt, arrival=self.clock.now, **params))
        self.seen["forked"] += n > 1
        self.seen["compressed"] += before > 0

    def _fits(self, prompt, out, n):
        """Return whether a request fits alone with room for the blocks of a compression."""
        most = prompt + out + 3 * self.engine.wiring.block + 8
        return self.engine.cache.fits_alone(prompt, most, n)


def drive(examples: int, steps: int = 30, shrink: bool = True) -> Seen:
    """Run the machine on the same examples every time, and return what it saw."""
    return drive_cache(examples, steps, shrink, CompressionMachine)
