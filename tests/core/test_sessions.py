"""Facts of sessions: their checks, their way to schedulers, evictors and tiers, and the feedback about evicted
blocks.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_helpers import Bench

from minivllm import RequestError, SamplingParams, Session
from minivllm.core.engine.sessions import number_of
from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.session import SPAN_KINDS
from minivllm.frontend.record.replay import _params
from minivllm.frontend.record.tally import plain_params
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.kvstore.spec import CPU
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.sim import Clock, answer, outputs, request, run, sim_engine

BLOCK = 4
FACTS = {
    "id": "agent-7", "turn": "t2", "parent": "t1", "next_s": 2.5, "deadline_s": 30, "budget": 64,
    "spans": [{"kind": "system", "tokens": 6}, {"kind": "tool", "tokens": 4}],
}  # fmt: skip
WRONG = [
    (3, "has the type int; expected Session or a mapping"),
    ({}, "the id is missing"),
    ({"id": ""}, "id=''.*1 to 256 printable"),
    ({"id": "x" * 257}, "1 to 256 printable"),
    ({"id": 7}, "id=7"),
    ({"id": "a", "budgt": 1}, "unknown field 'budgt'.*Did you mean 'budget'"),
    ({"id": "a", "turn": "\n"}, "turn=.*printable"),
    ({"id": "a", "parent": ""}, "parent="),
    ({"id": "a", "next_s": 0}, "next_s=0: expected a positive number of seconds"),
    ({"id": "a", "next_s": True}, "next_s=True"),
    ({"id": "a", "deadline_s": float("nan")}, "deadline_s=nan"),
    ({"id": "a", "budget": -1}, "budget=-1: expected a whole number of tokens"),
    ({"id": "a", "budget": 1.5}, "budget=1.5"),
    ({"id": "a", "spans": "system"}, "spans='system': expected a list"),
    ({"id": "a", "spans": [["system", 0]]}, "1 or more tokens"),
    ({"id": "a", "spans": [["sytem", 4]]}, "one of system, tool, thought, user, other"),
    ({"id": "a", "spans": [{"kind": "user"}]}, "spans="),
    ({"id": "a", "spans": [["user", 1]] * 4097}, "at most 4096"),
]


class Seen(Lru):
    """An evictor that stores its calls."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.calls, self.session, self.kind, self.evicted = [], {}, {}, {}

    def add(self, keys, info):
        super().add(keys, info)
        for name in ("session", "kind", "evicted"):
            getattr(self, name).update(zip(keys.tolist(), getattr(info, name).tolist(), strict=True))

    def began(self, keys, turn):
        self.calls.append(("began", keys.tolist(), turn, self.ctx.now()))

    def ended(self, keys, turn):
        self.calls.append(("ended", keys.tolist(), turn, self.ctx.now()))


def seen_of(engine):
    return engine.cache.pools[0].evictor


@pytest.mark.parametrize(("value", "problem"), WRONG)
def test_a_wrong_fact_is_refused_with_the_accepted_values(value, problem):
    with pytest.raises(RequestError, match=f"session.*{problem}"):
        SamplingParams(session=value)


def test_facts_are_the_same_from_a_mapping_an_object_a_record_and_over_http():
    params = SamplingParams(session=FACTS)
    assert params.session == Session(**FACTS) == SamplingParams(session=Session(**FACTS)).session
    assert params.session.spans == (("system", 6), ("tool", 4))
    recorded = plain_params(params)  # records and the link to the engine's process use this form
    assert SamplingParams(**_params(recorded)) == params
    assert recorded["session"]["spans"] == [["system", 6], ["tool", 4]]


@given(spans=st.lists(st.tuples(st.sampled_from(SPAN_KINDS), st.integers(1, 9)), max_size=6), n=st.integers(1, 40))
def test_the_kind_of_a_block_is_that_of_its_first_token(spans, n):
    of_tokens = [SPAN_KINDS.index(kind) + 1 for kind, tokens in spans for _ in range(tokens)] + [0] * n
    assert Session("a", spans=spans).kinds(n, BLOCK).tolist() == of_tokens[:n:BLOCK]


def test_an_evictor_sees_the_turns_of_a_session_and_the_kinds_of_its_blocks():
    clock = Clock()
    with clock:
        engine = sim_engine(block=BLOCK, evictor=Seen, now=lambda: clock.now)
    first = request(engine, "one", range(12), max_tokens=4, ignore_eos=True, session=FACTS)
    with clock:
        run(engine)
    clock.now += 2
    longer = [*range(12), *first.answer[0].tokens[12:].tolist(), 5, 6, 7]
    request(engine, "two", longer, max_tokens=2, ignore_eos=True, session={"id": "agent-7"})
    request(engine, "other", range(20, 30), max_tokens=2, ignore_eos=True)
    with clock:
        run(engine)
    evictor = seen_of(engine)
    session = number_of(("", ""), "agent-7")
    found = [(event, turn.session, turn.tokens) for event, _, turn, _ in evictor.calls]
    assert found[:2] == [("began", session, 12), ("ended", session, 16)]
    assert found[2:] == [("began", session, 19), ("ended", session, 21)]
    (_, none, turn, begun), (_, keys, _, _), (_, hit, bare, later), (_, all_keys, *_) = evictor.calls
    assert (turn.turn, turn.parent) == tuple(number_of(("", ""), name) for name in ("t2", "t1"))
    assert (turn.next_s, turn.budget, turn.deadline) == (2.5, 64, first.arrival + 30)
    assert (bare.next_s, bare.budget, bare.deadline, bare.turn) == (np.inf, -1, np.inf, 0)
    assert later - begun >= 2
    assert none == [] and len(keys) == 4 and hit == keys[:3] and all_keys[:3] == hit
    assert [evictor.kind[key] for key in keys[:3]] == [1, 1, 2]
    assert all(evictor.session[key] == session for key in all_keys)
    assert sum(one == 0 for one in evictor.session.values()) == len(evictor.session) - len({*keys, *all_keys}) > 0


def test_tenants_have_sessions_of_their_own_with_equal_names():
    engine = sim_engine(evictor=Seen)
    for n, who in enumerate([{"tenant": "a"}, {"tenant": "b"}, {"tenant": "a"}, {"tenant": "a", "cache_salt": "s"}]):
        request(engine, f"r{n}", range(9), max_tokens=2, session={"id": "s", "turn": "t", "parent": "t"}, **who)
        run(engine)
    turns = [turn for event, _, turn, _ in seen_of(engine).calls if event == "ended"]
    assert turns[0].session == turns[2].session and turns[0].parent == turns[0].turn
    assert len({turn.session for turn in turns}) == 3 and len({turn.turn for turn in turns}) == 3


def test_a_scheduler_sees_the_facts_of_waiting_and_of_running_requests():
    found = {}

    class Reads(Fcfs):
        def key(self, new):
            found["new"] = {name: getattr(new, name).tolist() for name in ("session", "next_s", "deadline", "budget")}
            return new.arrival

        def order(self, head, running, now):
            if len(running) == 2:
                found["running"] = running.session.tolist(), running.budget.tolist(), running.parent.dtype
            return np.arange(len(head))

        def shape(self, load, now):
            found["needed"] = load.evicted_needed
            return super().shape(load, now)

    engine = sim_engine(policy=Reads, slots=3)
    one = request(engine, "one", range(5), max_tokens=9, ignore_eos=True, session=FACTS)
    number = number_of(("", ""), "agent-7")
    late = [one.arrival + 30]
    assert found["new"] == {"session": [number], "next_s": [2.5], "deadline": late, "budget": [64]}
    request(engine, "two", range(7), max_tokens=9, ignore_eos=True)
    assert found["new"] == {"session": [0], "next_s": [np.inf], "deadline": [np.inf], "budget": [-1]}
    engine.step()
    request(engine, "three", range(3), max_tokens=2, ignore_eos=True)
    engine.step()
    assert found["running"] == ([number, 0], [64, -1], np.int64) and found["needed"] == 0
    run(engine)


def test_a_request_that_ends_while_it_waits_has_no_blocks():
    engine = sim_engine(evictor=Seen, slots=1)
    request(engine, "busy", range(9), max_tokens=20, ignore_eos=True)
    request(engine, "waits", range(9), max_tokens=2, session={"id": "s"})
    engine.step()
    engine.abort("waits")
    run(engine)
    assert [(event, keys, turn.tokens) for event, keys, turn, _ in seen_of(engine).calls] == [("ended", [], 9)]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(12, 24))
def test_a_block_is_evicted_and_needed_if_it_was_among_the_last_evicted_keys(seed, blocks):
    rng, last, wrong = random.Random(seed), deque(maxlen=blocks), []

    class Feedback(Seen):
        def add(self, keys, info):
            super().add(keys, info)
            for key, evicted in zip(keys.tolist(), info.evicted.tolist(), strict=True):
                wrong.extend([key] * (evicted != (key in last)))
                if evicted:
                    engine.needed += 1
                last.extend([None if one == key else one for one in last])

        def victims(self, n):
            found = super().victims(n)
            last.extend(found.tolist())
            return found

    engine = sim_engine(block=BLOCK, blocks=blocks, evictor=Feedback, depth=rng.randint(0, 1), partial=False)
    engine.needed = 0
    made = []
    for n in range(20):
        prompt = [rng.randrange(4)] * 8 + [rng.randrange(6)] * rng.randint(1, 12)
        facts = {"id": f"s{rng.randrange(4)}"} if rng.random() < 0.7 else None
        made.append(request(engine, f"r{n}", prompt, max_tokens=rng.randint(1, 8), ignore_eos=True, session=facts))
        run(engine)
    assert not wrong and engine.stats()["evicted_needed"] == engine.needed
    for r in made:  # facts change no token
        assert outputs(r) == [answer(r.prompt, r.params)]
    began, ended = ([c for c in seen_of(engine).calls if c[0] == event] for event in ("began", "ended"))
    assert len(began) == len(ended) == sum(r.params.session is not None for r in made)


def test_blocks_that_come_back_are_counted():
    engine = sim_engine(block=BLOCK, blocks=8, evictor=Seen, partial=False)
    for n in range(6):
        request(engine, f"r{n}", [n % 2] * 17, max_tokens=2, ignore_eos=True)
        run(engine)
    assert engine.stats()["evicted_needed"] > 4
    assert sum(seen_of(engine).evicted.values()) > 0


def test_tiers_see_the_sessions_of_their_pages():
    part = Part("minivllm/cpu", CPU.impl, {"bytes": 1 << 20}, CPU.options)
    engine = sim_engine(block=BLOCK, blocks=12, evictor=Seen, stores=(part,))
    for n in range(4):
        session = {"id": f"s{n}", "spans": [["tool", 8], ["user", 100]]}
        request(engine, f"r{n}", [n] * 17, max_tokens=4, ignore_eos=True, session=session)
        run(engine)
    tier = engine.cache.tiers.tiers[0].evictor
    numbers = {number_of(("", ""), f"s{n}") for n in range(4)}
    assert tier.ctx.tier == "cpu" and {turn.session for _, _, turn, _ in tier.calls} == numbers
    assert set(tier.session.values()) <= numbers and len(set(tier.session.values())) > 1
    assert {SPAN_KINDS.index("tool") + 1, SPAN_KINDS.index("user") + 1} <= set(tier.kind.values())


def test_the_deadline_of_an_answer_comes_before_the_default_target():
    bench = Bench("deadline", sim={"slots": 1, "blocks": 200}, decode_rate=10.0)
    bench.add("busy", [1], max_tokens=20)
    bench.turn()
    bench.add("usual", [2], max_tokens=20)
    bench.add("long", [3], max_tokens=80, session={"id": "a", "deadline_s": 12})  # it must start within 4 seconds
    bench.add("brief", [4], max_tokens=20, session={"id": "a", "deadline_s": 9})  # within 7 seconds
    bench.add("far", [5], max_tokens=20, session={"id": "a", "deadline_s": 90})
    bench.run()
    assert bench.order() == ["busy", "long", "brief", "usual", "far"]
