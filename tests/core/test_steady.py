"""Steps that are made from the previous step equal the steps that would be planned."""

import itertools
import random

import numpy as np
import pytest

from minivllm.core.interfaces.codec import encode_plan
from minivllm.testing.sim import Fcfs, at_rest, outputs, request, run, sim_engine

SETUPS = {
    "plain": dict(),
    "one ahead": dict(depth=1),
    "few blocks": dict(depth=1, blocks=26),
    "a window": dict(windows=(None, 8), blocks=[60, 24]),
    "no prefix cache": dict(prefix=False, depth=2),
    "small steps": dict(budget=6, depth=1),
    "whole blocks": dict(block=1, blocks=200),
    "speculation is off": dict(drafts=2, depth=1),
}


def noted(engine) -> list:
    """Return the list of plans that the executor receives."""
    plans, submit = [], engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(plan), submit(plan))
    return plans


def chosen(logits, ids):
    return int(np.argmax(logits))


def add_one(engine, rng: random.Random, name: str):
    prompt = [rng.randrange(45) for _ in range(rng.choice((1, 2, 9, 20)))]
    params = dict(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.7)
    kind = rng.randrange(8)
    if kind == 0:
        params["n"] = 2
    if kind == 1:
        params["choose_fn"] = chosen
    if kind == 2:
        params["logprobs"] = 2
    if kind == 3:
        params["prompt_logprobs"] = 1
    if kind == 4:
        params["tpot_ms"] = 100.0
    return request(engine, name, prompt, **params)


def run_step(engine, rng: random.Random, made: list, aborts: float, forgotten: tuple[str, ...]) -> None:
    """Run a step, before which a request may be aborted and the planner's attributes ``forgotten`` are cleared."""
    if rng.random() < aborts and made:
        engine.abort(rng.choice(made).id)
    for name in forgotten:
        assert hasattr(engine.planner, name)
        setattr(engine.planner, name, None)
    engine.step()
    engine.cache.check()


def drive(engine, seed: int, anew: bool) -> list:
    """Add and remove requests at steps that depend on the seed.  With ``anew``, every step is planned."""
    rng, made, step = random.Random(seed), [], 0
    while engine.busy or len(made) < 25:
        if len(made) < 25 and rng.random() < 0.15:
            made.append(add_one(engine, rng, f"r{len(made)}"))
        run_step(engine, rng, made, 0.02, ("steady", "drafted") if anew else ())
        step += 1
        assert step < 5000
    at_rest(engine)
    return [outputs(r) for r in made]


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_made_from_the_last_one_is_the_one_that_would_be_planned(setup, seed):
    one, other = sim_engine(**setup), sim_engine(**setup)
    for engine in (one, other) if setup.get("drafts") else ():
        engine.speculation.failed = "the drafter failed"
    plans, wanted = noted(one), noted(other)
    assert drive(one, seed, False) == drive(other, seed, True)
    assert all(b"".join(encode_plan(a)) == b"".join(encode_plan(b)) for a, b in zip(plans, wanted, strict=True))
    made = sum(b.slots is a.slots for a, b in itertools.pairwise(plans))
    assert made > 10, "the test has no power"
    assert not any(b.slots is a.slots for a, b in itertools.pairwise(wanted))


DRAFTED = {
    "drafts": dict(drafts=3),
    "few blocks": dict(drafts=2, blocks=30),
    "whole blocks, no prefix cache": dict(drafts=3, block=1, blocks=200, prefix=False),
    "small steps": dict(drafts=4, budget=12, slots=2),
    "one ahead": dict(drafts=3, depth=1),
}


def drive_drafts(engine, seed: int, anew: bool) -> list:
    """Run requests of several lengths, some of whose tokens the host influences, and end some early.  With ``anew``,
    every step is planned."""
    rng, made, step = random.Random(seed), [], 0
    engine.executor.options.drafts_accepted = 0.6
    while engine.busy or len(made) < 12:
        if len(made) < 12 and rng.random() < 0.08:
            prompt = [rng.randrange(45) for _ in range(rng.choice((1, 2, 9, 20)))]
            more = {"logprobs": 2} if rng.random() < 0.15 else {}
            made.append(
                request(engine, f"r{len(made)}", prompt, max_tokens=rng.randint(1, 60), ignore_eos=True, **more)
            )
        run_step(engine, rng, made, 0.01, ("drafted",) if anew else ())
        step += 1
        assert step < 5000
    at_rest(engine)
    return [outputs(r) for r in made]


@pytest.mark.parametrize("setup", DRAFTED.values(), ids=DRAFTED)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_with_drafts_made_from_the_last_one_is_the_one_that_would_be_planned(setup, seed):
    one, other = sim_engine(**setup), sim_engine(**setup)
    plans, wanted = noted(one), noted(other)
    assert drive_drafts(one, seed, False) == drive_drafts(other, seed, True)
    assert all(b"".join(encode_plan(a)) == b"".join(encode_plan(b)) for a, b in zip(plans, wanted, strict=True))
    made = [b for a, b in itertools.pairwise(plans) if b.slots is a.slots and len(b.draft)]
    assert len(made) > 10 or setup.get("depth"), "the test has no power"
    assert not any(b.slots is a.slots and len(b.draft) for a, b in itertools.pairwise(wanted))
    if not setup.get("depth"):
        assert any(len(b.delta.table) for b in made) and len({len(b.slots) for b in made}) > 1


def test_a_policy_that_shapes_steps_is_asked_in_each():
    class Shapes(Fcfs):
        requested = 0

        def shape(self, load, now):
            type(self).requested += 1
            return super().shape(load, now)

    engine = sim_engine(policy=Shapes)
    request(engine, "a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    assert run(engine) == Shapes.requested == 20


def test_a_sequence_that_ends_in_the_queue_is_told_in_the_next_step():
    """The sequence was preempted, so the device keeps its columns.  The running rows continue unchanged."""
    engine = sim_engine(blocks=14, slots=2, budget=64)
    plans = noted(engine)
    first = request(engine, "first", range(8), max_tokens=40, ignore_eos=True)
    second = request(engine, "second", range(8, 16), max_tokens=40, ignore_eos=True)
    while not second.sequences[0].queued or not engine.planner.preemptions:
        engine.step()
    while engine.planner.steady is None:
        engine.step()
    engine.abort("second")
    engine.step()
    assert plans[-1].delta.forget.tolist() == [second.sequences[0].id]
    run(engine)
    assert len(outputs(first)[0][0]) == 40
