"""Taps on the host with a simulated device.  A request receives each position once, whatever happens to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm.testing.sim as sim_module
from minivllm import SamplingParams, Tap
from minivllm.core.engine import plan_columns, tap_values
from minivllm.core.engine import taps as engine_taps
from minivllm.core.engine.request import Request
from minivllm.core.engine.tap_values import TapValues
from minivllm.frontend.tap_values import values_of
from minivllm.testing.sim import VOCAB, answer, at_rest, outputs, sim_engine

POINTS = {"place": 2, "stream": 3, "logits": VOCAB}


class TapSim(sim_module.SimExecutor):
    """A simulated device with taps.

    At ``place`` each token has its id and its position as values, and its logits are the number of earlier tokens.
    Vectors to add are kept by slot, so a step names only the points of its rows.
    """

    def start(self, wiring):
        self.steering = {}
        return replace(super().start(wiring), taps=POINTS)

    def _delta(self, d):
        super()._delta(d)
        if d.join is not None:
            self.steering |= {slot: {} for slot in d.join.slot.tolist()}
            at = 0
            for i, number in d.join.steer.tolist():
                width = list(POINTS.values())[number]
                self.steering[int(d.join.slot[i])][number] = d.join.vectors[at : at + width].tolist()
                at += width
            assert at == len(d.join.vectors)
        for source, slot, _ in d.fork.tolist():
            self.steering[slot] = dict(self.steering[source])

    def _run(self, plan, late, ms):
        want = set().union(*(self.steering[slot] for slot in plan.slots.tolist()))
        assert plan.steered.tolist() == sorted(want)
        assert plan.taps.tolist() == sorted(plan.taps.tolist())
        found = [np.empty(0, np.float32)]
        for number, row, first in plan.taps.tolist():
            slot, at = plan.slots[row], np.arange(first, plan.q_len[row]) + plan.computed[row]
            if number == 0:
                found.append(np.stack([self.text.tokens[slot, at], at], 1).astype(np.float32).ravel())
            elif number == 1:
                found.append(np.tile(self.steering[slot].get(1, [0.0] * 3), len(at)).astype(np.float32))
            else:
                assert row in plan.samples and len(at) == 1
                found.append(np.full(VOCAB, plan.computed[row] + plan.q_len[row], np.float32))
        return replace(super()._run(plan, late, ms), taps=np.concatenate(found))


@pytest.fixture(autouse=True, scope="module")
def tapped_sim():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_module, "SimExecutor", TapSim)
        yield


def check(r: Request, add: list[float]) -> None:
    for seq, (ids, _) in zip(r.sequences, outputs(r), strict=True):
        received, known = values_of(seq), [*r.prompt.tolist(), *ids]
        if r.tapped is None or not r.tapped.read:
            assert received is None
            continue
        assert list(received) == [name for name in POINTS if name in {t.point for t in r.taps if t.read}]
        if "place" in received:
            assert received["place"].tolist() == [[token, i] for i, token in enumerate(known[:-1])]
        if "stream" in received:
            assert received["stream"].tolist() == [add] * (len(known) - 1)
        if "logits" in received:
            assert received["logits"][:, 0].tolist() == list(range(len(r.prompt), len(known)))


@st.composite
def asks(draw):
    """Draw (prompt, n, tokens, points that are read, whether a vector is added, turn of arrival, turns until an abort,
    whether the host chooses the tokens).
    """
    prompt = [draw(st.integers(1, 3)), *range(1, draw(st.integers(1, 24)))]
    read = draw(st.lists(st.sampled_from(list(POINTS)), unique=True))
    turn = st.integers(0, 12)
    n, tokens, adds, host = draw(st.integers(1, 3)), draw(st.integers(1, 30)), draw(st.booleans()), draw(st.booleans())
    return prompt, n, tokens, read, adds, draw(turn), draw(turn), host


def play(items, depth, blocks, budget, aborts=False):
    """Run all requests, check the values that each received, and return the number of preemptions."""
    engine = sim_engine(slots=5, max_len=60, blocks=blocks, depth=depth, budget=max(budget, 5), reads=("n",))
    requested, turn = [], 0
    while len(requested) < len(items) or engine.busy:
        for i, (prompt, n, tokens, read, adds, when, after, host) in enumerate(items):
            if when == turn:
                add = [1.0 + i, 0.5, -2.0]
                taps = [Tap(p, read=True) for p in read] + [Tap("stream", add=add)] * adds
                chooses = {"choose_fn": lambda logits, ids: int(np.argmax(logits))} if host else {}
                params = SamplingParams.make(n=n, max_tokens=tokens, seed=0, **chooses)
                r = Request(str(i), np.array(prompt, np.int32), params, float(turn), taps=tuple(taps))
                engine.add(r)
                requested.append((r, add if adds else [0.0] * 3))
            if aborts and when + after == turn and after % 3 == 0:
                engine.abort(str(i))
        engine.step()
        turn += 1
        assert turn < 5000
    for r, add in requested:
        if all(s.finish_reason != "abort" for s in r.sequences):
            assert outputs(r) == [answer(r.prompt.tolist(), r.params, s.sample, 60) for s in r.sequences]
            check(r, add)
    at_rest(engine)
    assert engine.slots.tapping == 0
    return engine.planner.preemptions


@settings(max_examples=100, deadline=None)
@given(
    st.lists(asks(), min_size=1, max_size=8),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([34, 40, 64]),
    st.sampled_from([5, 9, 64]),
    st.booleans(),
)
def test_each_position_is_told_once_and_steps_name_what_is_added_to_their_rows(items, depth, blocks, budget, aborts):
    play(items, depth, blocks, budget, aborts)


@pytest.mark.parametrize("room", [1, 7, tap_values.ROOM])
def test_values_grow_in_memory_of_their_own(room):
    values, want = TapValues(0, 0, room), []
    for step in range(200):
        block = np.arange(256 * 4, dtype=np.float32).reshape(256, 4) + step  # the values of all rows of a step
        values.keep(0, block[step : step + 1 + step % 3])
        want.append(block[step : step + 1 + step % 3].copy())
        block[:] = np.nan  # the device reuses the memory of the step
    assert np.array_equal(values.parts[0].rows, np.concatenate(want)) and len(values.parts[0].memory) <= 4_194_304


@pytest.mark.parametrize("room", [1, 40])
def test_values_that_outgrow_their_memory_are_told_once_too(room, monkeypatch):
    monkeypatch.setattr(tap_values, "FIRST_ROOM", room)
    items = [([i, *range(1, 20)], 1 + i % 2, 30, [*POINTS], i % 2 == 1, i, 0, i % 3 == 0) for i in range(8)]
    assert play(items, 1, 34, 16) > 1


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_computed_again_after_a_preemption_is_not_told_again(depth, host):
    """A row that waits for the host loses its step by a preemption, but its logits were delivered before."""
    items = [([i, *range(1, 20)], 1, 30, [*POINTS], i % 2 == 1, i, 0, host and i % 2 == 0) for i in range(8)]
    assert play(items, depth, 34, 9) > 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_decode_steps_that_read_are_made_from_the_one_before(depth, monkeypatch):
    made = []
    monkeypatch.setattr(plan_columns, "tap_rows", lambda *args: made.append(1) or engine_taps.tap_rows(*args))
    engine = sim_engine(slots=5, max_len=60, blocks=200, depth=depth, budget=64)
    read = tuple(Tap(point, read=True) for point in POINTS)
    params = SamplingParams.make(max_tokens=30, seed=0, ignore_eos=True)
    requested = [Request(str(i), np.array([i, 2, 3], np.int32), params, 0.0, taps=read) for i in range(4)]
    for r in requested:
        engine.add(r)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert len(made) <= 3 + depth and steps >= 30, "each step looked up anew what is read"
    for r in requested:
        check(r, [0.0] * 3)
        found = values_of(r.sequences[0])
        assert r.tap_bytes == sum(values.nbytes for values in found.values())
    assert not engine.publisher.taps.memory, "an engine at rest holds what somebody has read"
