"""The decisions of a search as data.  Applied to plain lists of tokens, they give each beam its own history."""

from __future__ import annotations

import random

import numpy as np

from minivllm.core.engine.beams import Beams, unwind
from minivllm.core.engine.request import Request, Seq
from minivllm.core.engine.stops import StopRule
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LogProbs
from minivllm.core.interfaces.strategy import Moves, Pick, Search
from minivllm.testing.base import Seen

WIDTH, CANDIDATES, PROMPT = 4, 5, 3


class Random(Search):
    """A search that continues any beams any number of times."""

    def __init__(self, rng):
        self.rng, self.kept = rng, 0

    def advance(self, grown, ends):
        pairs = [(b, int(t)) for b, g in enumerate(grown) for t in g.tokens if not ends(b, int(t))]
        self.rng.shuffle(pairs)
        most = self.rng.randint(1, WIDTH)
        keep = [Pick(b, t, -1.0) for b, t in pairs[most : most + self.rng.randrange(2)]]
        self.kept += len(keep)
        return Moves([Pick(b, t) for b, t in pairs[:most]], iter(keep), done=False)

    def result(self):
        return range(self.kept)


def made(rng):
    params = SamplingParams(beam_width=WIDTH, n=2, max_tokens=100)
    request = Request("r", np.arange(PROMPT, dtype=np.int32), params, 0.0, topk=CANDIDATES)
    request.stops = StopRule.of(params, (0,), PROMPT, PROMPT + 100, False)
    request.sequences = [Seq(i, request, i, 0) for i in range(WIDTH)]
    return Beams(request, Random(rng))


def give_candidates(beams, rng):
    for n, beam in enumerate(beams.live, 1):
        ids = np.array([rng.sample(range(50), CANDIDATES)], np.int32)
        top = np.sort(np.array([[-rng.random() for _ in range(CANDIDATES)]], np.float32))[:, ::-1]
        complete = beams.take(beam, LogProbs(top[:, 0], np.ones(1, np.int32), ids, top), 0)
        assert complete == (n == len(beams.live))


def applied(step, held):
    """Return the histories after a step, with the same checks as the planner.

    ``held`` maps each live beam to its tokens.
    """
    for beam in step.drop:
        del held[beam]
    for parent, beam in step.fork:
        assert beam not in held and parent in held, "a fork overwrites a live beam, or comes from none"
        held[beam] = list(held[parent])
    assert {beam for beam, _ in step.append} == set(held) and len(step.append) == len(held)
    for beam, node in step.append:
        held[beam].append(node.token)
    return held


def test_a_step_applied_in_its_order_gives_each_beam_the_tokens_of_its_branch():
    rng, seen = random.Random(5), Seen()
    for _ in range(40):
        beams, held = made(rng), {0: []}
        for length in range(1, 8):
            give_candidates(beams, rng)
            tails, live = list(beams.tail), list(beams.live)
            step = beams.advance(lambda beam: [])
            assert beams.pending is step and beams.tail == tails and beams.live == live, "it is applied by nobody yet"
            want = [unwind(node)[0] for _, node in step.append]
            held = applied(step, held)
            seen["forked"] += bool(step.fork)
            seen["dropped"] += bool(step.drop)
            if rng.random() < 0.2:  # preempted before the step was applied
                before = {beam: tokens[:-1] for beam, tokens in held.items()}
                survivors = beams.leave()
                assert [[*before[s.beam], s.token] for s in survivors] == want
                held, seen["preempted"] = dict(enumerate(want)), seen["preempted"] + 1
            else:
                beams.applied()
            assert beams.pending is None and beams.length == length
            assert [held[beam] for beam in beams.live] == [unwind(beams.tail[beam])[0] for beam in beams.live] == want
            if rng.random() < 0.1 and beams.live:
                survivors = beams.leave()
                assert all(s.token is None for s in survivors)
                held = {i: held[s.beam] for i, s in enumerate(survivors)}
                assert [held[beam] for beam in beams.live] == want
    seen.require(forked=50, dropped=50, preempted=20)


def test_a_search_that_is_cut_short_fills_up_with_live_beams_and_what_is_pending_counts():
    rng = random.Random(6)
    beams = made(rng)
    give_candidates(beams, rng)
    step = beams.advance(lambda beam: [])
    cut = Finish("abort")
    outputs = beams.outputs(cut)
    kept = [out.last for out in beams.kept][:2]
    assert [out.last for out in outputs] == [*kept, *[node for _, node in step.append]][:2]
    assert all(out.finish == cut for out in outputs[len(kept) :])
    beams.applied()
    assert [out.last for out in beams.outputs(cut)] == [out.last for out in outputs]
