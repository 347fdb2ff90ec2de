"""Features of images are computed apart from the steps that read them while other rows decode."""

import numpy as np
import pytest
from image_machine import TOKEN, ImageDevice, prepared, tokens_of

from minivllm.core.engine import images as book
from minivllm.core.engine.image_content import Content
from minivllm.core.engine.images import Images
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import PlacedImage
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import EngineDeadError
from minivllm.testing.sim import run, sim_engine

LIMIT = 64  # bytes of features, with room for eight tokens


class Steps:
    """An engine without a model, with the steps that it has planned."""

    def __init__(self, undivided=False, budget=24, depth=0, steps=1):
        facts = ImageFacts(TOKEN, after=(2,), span=4) if undivided else ImageFacts(TOKEN)
        wiring = ImageWiring(max_images=8, cache_mb=1, facts=facts)
        shape = {"slots": 6, "max_len": 64, "blocks": 120, "budget": budget, "depth": depth}
        self.engine = sim_engine(**shape, images=wiring, device=ImageDevice)
        self.engine.images.limit = self.engine.executor.limit = LIMIT
        self.engine.planner._steps_of = lambda rows, tokens: steps if tokens > 1 else 1
        self.engine.executor.picture_of = self.pictures = {}
        self.plans, planned = [], self.engine.planner.next

        def watch(now):
            plan = planned(now)
            if plan is not None:
                self.plans.append((plan, {int(slot): self.engine.slots.at(int(slot)) for slot in plan.slots}))
            return plan

        self.engine.planner.next = watch

    def add(self, name, *pictures, text=3, out=6):
        ids, placed = [1] * text, []
        for picture in pictures:
            placed.append(PlacedImage(prepared(picture), len(ids)))
            ids += [TOKEN] * tokens_of(picture) + [2]
        params = SamplingParams.make(max_tokens=out, ignore_eos=True)
        made = Request(name, np.array(ids, np.int32), params, 0.0, images=tuple(placed))
        self.engine.add(made)
        for one, content in zip(made.images, made.contents, strict=True):
            self.pictures[content.number] = int(one.image.values[0])
        return made

    def figures(self):
        """Return (decoding rows, numbers of new features, numbers that rows read) of each step."""
        found = []
        for plan, seqs in self.plans:
            new = {row[0] for row in plan.delta.image.tolist() if row[1]}
            read, decodes = set(), 0
            for slot, at, n in zip(plan.slots.tolist(), plan.computed.tolist(), plan.q_len.tolist(), strict=True):
                request = seqs[slot].request
                decodes += at >= len(request.prompt)
                pairs = zip(request.images, request.contents, strict=True)
                read |= {c.number for one, c in pairs if one.position < at + n and one.end > at}
            found.append((decodes, new, read))
        return found


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("undivided", [False, True])
def test_no_step_with_decoding_rows_reads_an_image_that_it_encodes(undivided, depth):
    steps = Steps(undivided, depth=depth)
    steps.add("text", out=40)
    for _ in range(4):
        steps.engine.step()
    requests = [steps.add(f"r{i}", i % 6, (i + 1) % 6, text=i) for i in range(1, 9)]
    run(steps.engine)
    assert all(seq.finish_reason == "length" for r in requests for seq in r.sequences)
    found = steps.figures()
    beside = [(new, read) for decodes, new, read in found if decodes and new]
    assert len(beside) > 3 and not any(new & read for new, read in beside)
    assert steps.engine.images.encoded == sum(len(new) for _, new, _ in found)
    assert not steps.engine.images.held


@pytest.mark.parametrize("depth", [0, 2])
def test_an_image_of_several_steps_is_encoded_alone_and_read_when_it_is_complete(depth):
    """Beside decoding rows no step reads an image before its last share is computed, and none begins another image."""
    steps = Steps(depth=depth, steps=3)
    steps.add("text", out=60)
    for _ in range(4):
        steps.engine.step()
    requests = [steps.add(f"r{i}", i % 6, (i + 1) % 6, text=i) for i in range(1, 7)]
    run(steps.engine)
    assert all(seq.finish_reason == "length" for r in requests for seq in r.sequences)
    complete, divided = {}, 0  # number of an image -> index of the first step that finds it complete
    for index, ((plan, _), (decodes, new, read)) in enumerate(zip(steps.plans, steps.figures(), strict=True)):
        under_way = [number for number, at in complete.items() if at > index]
        assert not (decodes and new and under_way), "an image is begun before the last one is complete"
        for number, size, *_, shares in plan.delta.image.tolist():
            if size:
                complete[number] = index + shares
                divided += shares > 1
                assert shares == 1 or len(new) == 1
        assert not decodes or all(complete[number] <= index for number in read)
    assert divided > 3


def test_shares_of_images_are_counted_for_the_steps_that_compute_them():
    steps = Steps(steps=3)
    steps.add("text", out=30)
    for _ in range(3):
        steps.engine.step()
    noted, changes, images = [], [], steps.engine.images

    def note(plan, ms):
        changes.append(images.changed_by(plan))
        noted.append(images.encoded_by(plan.id))

    steps.engine.planner.note = note
    steps.add("r", 3, 2)
    run(steps.engine)
    four, three = tokens_of(3), tokens_of(2)
    found = [one for one in noted if one]
    assert found == [pytest.approx((four / 3, four))] * 3 + [pytest.approx((three / 3, three))] * 3
    assert not images.work
    freed = [len(plan.delta.image) > 0 for plan, _ in steps.plans[-len(noted) :]]
    assert changes == [one is not None or free for one, free in zip(noted, freed, strict=True)]
    assert sum(changes) >= 6 > sum(freed), "further shares of an image are no change of a plan"


def test_a_step_that_reads_an_incomplete_image_is_counted_with_the_rest_of_its_work():
    """When the last decoding row ends, the next step reads the image, and computes all shares that are left."""
    steps = Steps(steps=40)
    steps.add("text", out=9)
    for _ in range(3):
        steps.engine.step()
    noted = {}
    steps.engine.planner.note = lambda plan, ms: noted.update({plan.id: steps.engine.images.encoded_by(plan.id)})
    steps.add("r", 3)
    run(steps.engine)
    begun, read = (
        next(plan.id for (plan, _), found in zip(steps.plans, steps.figures(), strict=True) if found[column])
        for column in (1, 2)
    )
    tokens = tokens_of(3)
    shares = {step: found for step, found in noted.items() if found}
    assert list(shares) == list(range(begun, read + 1)) and read > begun + 2
    assert shares.pop(read) == pytest.approx((tokens * (40 - read + begun) / 40, tokens))
    assert list(shares.values()) == [pytest.approx((tokens / 40, tokens))] * (read - begun)
    assert not steps.engine.images.work


def test_the_work_of_features_that_are_freed_is_not_counted():
    steps = Steps(steps=30)
    steps.add("text", out=40)
    for _ in range(3):
        steps.engine.step()
    steps.add("r", 3)
    for _ in range(4):
        steps.engine.step()
    images = steps.engine.images
    assert images.dividing and len(images.work) > 20
    number = images.divided.number
    images.lose([number])
    assert not images.dividing and all(step <= images.step for step in images.work)
    run(steps.engine)
    assert not images.work


def test_an_image_alone_is_encoded_and_read_in_one_step():
    steps = Steps()
    steps.add("r", 3, 2)
    run(steps.engine)
    assert steps.figures()[0][1:] == ({0, 1}, {0, 1})


def test_images_that_are_encoded_ahead_count_as_reused_for_later_rows_only():
    steps = Steps()
    steps.add("text", out=30)
    steps.engine.step()
    steps.add("a", 3)
    steps.add("b", 3, text=5)
    run(steps.engine)
    assert (steps.engine.images.encoded, steps.engine.images.reused) == (1, 1)


@pytest.mark.parametrize(
    ("budget", "most", "requests", "bound"), [(7, 100, 5, 6), (24, 6, 3, 6), (24, 3, 5, 6), (99, 2, 9, 8)]
)
def test_encodes_of_a_step_keep_the_budget_of_its_tokens(budget, most, requests, bound, monkeypatch):
    """Half of the waiting requests, four at most, may have ``most`` tokens each."""
    monkeypatch.setattr(book, "MOST_AHEAD", most)
    steps = Steps(budget=budget)
    steps.engine.images.limit = steps.engine.executor.limit = 1000
    steps.add("text", out=40)
    for _ in range(3):
        steps.engine.step()
    for i in range(requests):
        steps.add(f"r{i}", i, text=1)
    run(steps.engine)
    sizes = [sum(tokens_of(steps.pictures[number]) for number in new) for decodes, new, _ in steps.figures() if decodes]
    assert max(sizes) <= bound and sum(sizes) == sum(map(tokens_of, range(requests)))


def test_a_step_that_reads_what_it_encodes_is_found(monkeypatch):
    monkeypatch.setattr(Images, "encoded_tokens", lambda self, seq, first: 1000)
    with pytest.raises((AssertionError, EngineDeadError)):
        test_no_step_with_decoding_rows_reads_an_image_that_it_encodes(False, 0)


def early(monkeypatch):
    monkeypatch.setattr(Content, "ready", lambda self, step: self.encoded)


def together(monkeypatch):
    monkeypatch.setattr(Images, "dividing", False)


@pytest.mark.parametrize("fault", [early, together])
def test_a_fault_of_divided_images_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, EngineDeadError)):
        test_an_image_of_several_steps_is_encoded_alone_and_read_when_it_is_complete(0)
