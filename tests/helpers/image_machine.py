"""A state machine of the engine without a model, with every order of events, whose requests have images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from minivllm.core.engine.request import Request
from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import PlacedImage, PreparedImage, digest_of
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError
from minivllm.testing.base import Seen
from minivllm.testing.policy_watch import PolicyWatch
from minivllm.testing.scheduler import EngineMachine
from minivllm.testing.sim import VOCAB, Clock, SimExecutor, sim_engine

BYTES = 8  # of the features of a token
TOKEN = 3  # that stands for a part of an image
PICTURES = 6
STANDS = 1000  # the history of the device has this number and that of the picture in place of the token
SEEN = ("encoded", "reused", "dropped", "failed", "preempted", "hit", "copied", "forked", "aborted", "waited")


def tokens_of(picture):
    """Return the number of tokens of a picture."""
    return 1 + picture % 4


def prepared(picture):
    """Return the prepared image of a picture, whose only value is its number."""
    values, shape = np.array([picture], np.float32), (1, 1, tokens_of(picture))
    return PreparedImage(values, shape, tokens_of(picture), digest_of(values, shape))


class ImageDevice(SimExecutor):
    """A simulated device that checks the features of images.

    A row that computes a part of an image needs the features of this picture.  They are complete if other rows decode
    in the step.  No features are computed twice without being freed, and all of them together keep the limit.
    Histories have the picture in place of its tokens, so that the check of the KV cache fails where two pictures share
    a block."""

    undivided = False
    limit = 0

    def start(self, wiring):
        """Return the capacity of a device that reads images."""
        self.features, self.spans = {}, {}
        self.due = {}  # number of an image -> id of the first step that finds its features complete
        self.prompt_of, self.now, self.beside = {}, 0, False
        self.undivided = wiring.images.facts.span > 0
        return replace(super().start(wiring), image_bytes=BYTES)

    def _delta(self, d):
        at = 0
        for number, size, each, *shape, steps in d.image.tolist():
            assert (steps > 0) == (size > 0), f"{steps} steps compute the features of {size} bytes"
            if not size:
                self.features.pop(number, None)
                continue
            assert number not in self.features, f"the features of image {number} are computed twice"
            picture = int(d.pixels[at : at + size].view(np.float32)[0])
            assert size == each == 4 and tuple(shape) == prepared(picture).shape
            self.features[number] = picture
            at += size
        size = sum(map(tokens_of, self.features.values())) * BYTES
        assert size <= self.limit, f"features of {size} bytes: expected {self.limit} at most"
        super()._delta(d)
        for source, slot, _ in d.fork.tolist():
            self.spans[slot] = self.spans.get(source, [])
            self.prompt_of[slot] = self.prompt_of[source]

    def _run(self, plan, late, ms):
        delta, self.now = plan.delta, plan.id
        self.due |= {row[0]: plan.id + row[-1] for row in delta.image.tolist() if row[1]}
        new = [*delta.fork[:, 1].tolist(), *([] if delta.join is None else delta.join.slot.tolist())]
        drawn = zip(plan.slots.tolist(), plan.q_len.tolist(), plan.computed.tolist(), strict=True)
        rows = [one for i, one in enumerate(drawn) if i in plan.samples]
        decodes = [slot for slot, q, at in rows if q == 1 and slot not in new and at >= self.prompt_of[slot]]
        self.beside = len(decodes) > 0
        return super()._run(plan, late, ms)

    def _join(self, j):
        tokens, starts = j.tokens.copy(), np.cumsum(j.known) - j.known
        for slot, prompt in zip(j.slot.tolist(), j.prompt.tolist(), strict=True):
            self.spans[slot] = []
            self.prompt_of[slot] = prompt
        for i, number, position, count, *_ in j.image.tolist():
            picture = self.picture_of[number]
            assert count == tokens_of(picture)
            at = int(starts[i]) + position
            assert (tokens[at : at + count] == TOKEN).all(), "a part of an image has another token"
            tokens[at : at + count] = STANDS + picture
            self.spans[int(j.slot[i])].append((number, position, position + count))
        super()._join(replace(j, tokens=tokens))

    def _read_and_write(self, slot, q, computed):
        for number, first, end in self.spans.get(slot, ()):
            if first < computed + q and end > computed:
                found = self.features.get(number)
                assert found == self.picture_of[number], f"image {number} has the features of {found}"
                rest = self.beside and self.due[number] > self.now
                assert not rest, f"rows wait for the rest of image {number}, which they do not read"
            inside = self.undivided and first < computed + q < end
            assert not inside, f"a chunk of slot {slot} ends inside an image"
        super()._read_and_write(slot, q, computed)


class ImageMachine(EngineMachine):
    """Add requests with images to all events of ``EngineMachine``."""

    @initialize(
        data=st.data(),
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None,), (None, 5)]),
        blocks=st.integers(14, 44),
        budget=st.integers(5, 40),
        prefix=st.sampled_from([True, True, False]),
        room=st.integers(4, 24),
        undivided=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
        steps=st.sampled_from([1, 1, 2, 5]),
    )
    def start(self, data, depth, windows, blocks, budget, prefix, room, undivided, drafts, steps):
        self.clock, self.budget = Clock(), budget + 3 * undivided
        facts = ImageFacts(TOKEN, after=(2,), span=4) if undivided else ImageFacts(TOKEN)
        self.engine = sim_engine(
            slots=5,
            max_len=40,
            blocks=blocks,
            windows=windows,
            depth=depth,
            budget=budget,
            prefix=prefix,
            drafts=drafts,
            policy=data.draw(st.sampled_from(self.policies)),
            images=ImageWiring(max_images=4, cache_mb=1, facts=facts),
            device=ImageDevice,
        )
        self.device = self.engine.executor
        self.engine.planner._steps_of = lambda rows, tokens: min(tokens, steps)  # of the features of an image
        self.engine.images.limit = self.device.limit = room * BYTES
        self.device.picture_of = {}
        self.owner_of = {}
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made, self.gone, self.history = [], set(), {}
        self.n = self.failed = 0

    go_on = None  # replaced by ``next_turn``

    @rule(
        parts=st.lists(st.one_of(st.integers(0, PICTURES - 1), st.just("text")), min_size=1, max_size=5),
        first=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        out=st.integers(1, 12),
        owner=st.sampled_from([("", None), ("", None), ("", None), ("", "x"), ("a", None)]),
    )
    def add_images(self, parts, first, n, out, owner):
        """Add a request whose prompt has pictures, with a token behind each, and pieces of text."""
        ids, placed, keyed = [first], [], [first]
        for part in parts:
            if part == "text":
                ids += [5, 6, 7, 8, 9]
                keyed += [5, 6, 7, 8, 9]
                continue
            placed.append(PlacedImage(prepared(part), len(ids)))
            ids += [TOKEN] * tokens_of(part) + [2]
            keyed += [STANDS + part] * tokens_of(part) + [2]
        self.ask(ids, tuple(placed), keyed, n, out, owner)

    def ask(self, ids, placed, keyed, n, out, owner):
        """Add a request, which is refused if it has too many images or no room."""
        self.n += 1
        params = SamplingParams.make(n=n, max_tokens=out, ignore_eos=True, tenant=owner[0], cache_salt=owner[1])
        made = Request(f"r{self.n}", np.array(ids, np.int32), params, arrival=self.clock.now, images=placed)
        try:
            self.engine.add(made)
        except RequestError:
            self.seen["refused"] += 1
            return
        for one, content in zip(made.images, made.contents, strict=True):
            picture = int(one.image.values[0])
            known = self.device.picture_of.setdefault(content.number, picture)
            assert known == picture, f"the number {content.number} stands for two pictures"
            assert self.owner_of.setdefault(content.number, owner) == owner, "two owners share a picture"
        self.made.append(made)
        self.history[made.id] = keyed
        self.seen["forked"] += n > 1

    @precondition(lambda self: self.history)
    @rule(data=st.data(), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), out=st.integers(1, 8))
    def next_turn(self, data, own, out):
        """Continue an earlier prompt with its images."""
        r = data.draw(st.sampled_from([r for r in self.made if r.id in self.history]))
        owner = r.params.tenant, r.params.cache_salt
        self.ask(r.prompt.tolist() + own, r.images, self.history[r.id] + own, 1, out, owner)

    def check_answer(self, r, s, got, reason):
        """Compare tokens with those of a history that has the pictures in place of their tokens."""
        if r.id in self.history:
            r.prompt = np.array(self.history[r.id], np.int32)
        super().check_answer(r, s, got, reason)

    def teardown(self):
        """Check that nothing holds features at the end, and that the device has those that the engine counts."""
        if not hasattr(self, "engine"):
            return
        super().teardown()
        if self.watch.faults or self.engine.dead:
            return
        images = self.engine.images
        assert not images.held, "features are held although nothing runs"
        assert not any(one.requests or one.rows for one in images.contents.values()), "contents have requests"
        encoded = {one.number for one in images.contents.values() if one.encoded}
        assert set(self.device.features) - set(images.frees) == encoded, "the engine counts other features"
        self.seen["encoded"] += images.encoded
        self.seen["reused"] += images.reused
        self.seen["dropped"] += images.evicted
        if self.engine.speculation is not None:
            self.seen["drafted"] += int(self.engine.speculation.proposed.sum())
        self.seen["divided"] += images.divided is not None
        self.seen["waited"] += self.engine.images.used > 0


def drive(machine, examples=60, steps=30):
    """Run a machine; an assertion fails for the first fault."""
    phases = [Phase.generate]
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=phases,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=how)


def machine_of(policies):
    """Return the class of a machine with some policies and fresh counts."""
    return type("Machine", (ImageMachine,), {"policies": policies, "seen": Seen()})
