"""A state machine of the engine without a model, with every order of events, while its rows are compressed."""

from __future__ import annotations

from cache_machine import CacheMachine
from cache_machine import drive as drive_cache
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from minivllm.testing.base import Seen
from minivllm.testing.policy_watch import PolicyWatch
from minivllm.testing.sim import Clock, SimExecutor, request, sim_engine


class Device(SimExecutor):
    """A simulated device that checks at which number of tokens rows are compressed.

    ``all`` has the compressions of each sequence, and ``stays`` those of its present stay in a slot, as computed tokens
    -> kept tokens."""

    def __init__(self, *args):
        super().__init__(*args)
        self.all, self.stays = {}, {}
        self.summed = {}  # prompt tokens of each stay whose attention was added up

    def submit(self, plan):
        for row in plan.sums.tolist():
            seq = self.engine().slots.at(int(plan.slots[row]))
            computed, end = int(plan.computed[row]), int(plan.computed[row] + plan.q_len[row])
            # a branch begins with the sums of its parent
            done = self.summed.setdefault(seq.serial, computed if seq.request.params.width > 1 else 0)
            assert done == computed, f"tokens from {computed} on are added up behind {done}"
            assert end <= len(seq.request.prompt), "attention of a generated token is added up"
            self.summed[seq.serial] = end
            self.seen["summed"] += 1
        super().submit(plan)

    def _compact(self, d):
        engine = self.engine()
        every = engine.compression.every
        for group, slot, stored, kept, computed in d.compact.tolist():
            seq = engine.slots.at(slot)
            behind = computed - len(seq.request.prompt)
            regular = seq.request.keep and (behind == 0 or (every and behind % every == 0))
            pressed = engine.compression.pressure is not None
            assert regular or pressed, f"slot {slot} is compressed at {behind} tokens"
            assert kept < stored
            assert pressed or kept == seq.request.keep
            self.seen["pressed"] += not regular
            if self.sums:
                assert self.summed.get(seq.serial) == len(seq.request.prompt), "a part of the prompt is not added up"
            if group == 0:
                self._note(seq, computed, kept)
        super()._compact(d)

    def _note(self, seq, computed, kept):
        """Check that a sequence that was preempted repeats its earlier compressions."""
        before, stay = self.all.setdefault(seq.id, {}), self.stays.setdefault(seq.serial, {})
        stay[computed] = kept
        self.seen["repeated"] += computed in before
        due = {at: n for at, n in before.items() if at <= computed}
        assert due.items() <= stay.items(), f"compressed at {stay}, and in an earlier stay at {due}"
        assert computed in before or all(at < computed for at in before), f"{computed} is not among {before}"
        before[computed] = kept


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
        sums=st.booleans(),
        prefix=st.sampled_from([True, True, False]),
    )
    def start(self, depth, windows, blocks, step, keep, every, observed, sums, prefix):
        self.begin(depth, windows, blocks, step, keep, every, observed, sums, prefix)

    def begin(self, depth, windows, blocks, step, keep, every, observed, sums, prefix, pressure=0):
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
            pressure=pressure,
            device=lambda *args: self._device(observed, sums, *args),
        )
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made, self.gone = [], set()
        self.n = self.failed = 0

    def _device(self, observed, sums, *args):
        device = Device(*args)
        device.observed, device.sums = observed, sums
        device.seen = self.seen
        device.engine = lambda: self.engine
        return device

    def ask(self, parts, n, out, owner):
        self.n += 1
        prompt = [t for part in parts for t in part]
        # every fourth request is never compressed, and one in four only under pressure
        budget = {0: 0, 1: None}.get(self.n % 4, self.keep)
        if n * (len(prompt) + out) > 40 or not self._fits(len(prompt), out, n):
            return
        params = dict(n=n, max_tokens=out, ignore_eos=True, tenant=owner[0], cache_salt=owner[1], kv_budget=budget)
        if budget is None:
            del params["kv_budget"]
        before = self.engine.compression.compressions
        self.made.append(request(self.engine, f"r{self.n}", prompt, arrival=self.clock.now, **params))
        self.seen["forked"] += n > 1
        self.seen["compressed"] += before > 0

    def _fits(self, prompt, out, n):
        """Return whether a request fits alone with room for the blocks of a compression."""
        most = prompt + out + 3 * self.engine.wiring.block + 8
        return self.engine.cache.fits_alone(prompt, most, n)


class PressureMachine(CompressionMachine):
    """Compress rows beside that when blocks are short, in a cache for two to five long rows."""

    @initialize(
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None,), (None, 5), (None, None)]),
        blocks=st.integers(14, 24),
        step=st.integers(12, 40),
        keep=st.sampled_from([3, 7, 0.5]),
        every=st.sampled_from([0, 0, 5]),
        observed=st.sampled_from([0, 0, 4]),
        sums=st.booleans(),
        prefix=st.booleans(),
        pressure=st.sampled_from([3, 0.3, 0.6]),
    )
    def start(self, depth, windows, blocks, step, keep, every, observed, sums, prefix, pressure):
        self.begin(depth, windows, blocks, step, keep, every, observed, sums, prefix, pressure)

    @rule(first=st.integers(1, 40), length=st.integers(1, 12), out=st.integers(10, 24))
    def long_outputs(self, first, length, out):
        self.ask([[1 + (first * (i + 1)) % 47 for i in range(length)]], 1, out, ("", None))


class SummedMachine(PressureMachine):
    """Add up attention over every prompt, in a cache for two to four long rows, which are often preempted."""

    @initialize(
        depth=st.integers(0, 2),
        blocks=st.integers(14, 20),
        step=st.integers(12, 40),
        keep=st.sampled_from([3, 7, 0.5]),
        every=st.sampled_from([0, 5]),
        observed=st.sampled_from([0, 4]),
        prefix=st.booleans(),
    )
    def start(self, depth, blocks, step, keep, every, observed, prefix):
        self.begin(depth, (None,), blocks, step, keep, every, observed, True, prefix)


def drive(examples: int, steps: int = 30, shrink: bool = True, machine_of: type = CompressionMachine) -> Seen:
    """Run a machine on the same examples every time, and return what it saw."""
    return drive_cache(examples, steps, shrink, machine_of)
