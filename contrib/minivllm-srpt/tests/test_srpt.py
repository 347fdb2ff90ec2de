"""The policy under the kit, and what it is for: short requests do not wait behind long ones."""

from __future__ import annotations

import numpy as np
import pytest
from minivllm_srpt.lengths import Lengths
from minivllm_srpt.options import SrptOptions
from minivllm_srpt.srpt import Srpt

from minivllm import SamplingParams
from minivllm.testing import SchedulerConformance
from minivllm.testing.sim import Clock, answer, request, sim_engine


class TestSrpt(SchedulerConformance):
    plugin = "minivllm-srpt/srpt"


class TestSrptWithoutLearning(SchedulerConformance):
    plugin = "minivllm-srpt/srpt"
    options = {"learn": False, "max_wait": 300.0}


def mean_latency(policy, lengths, tell: bool, rounds: int = 6) -> float:
    """Seconds from arrival to end, in the mean, of the last two rounds; a step takes 20 ms.  ``tell``: the requests say
    how long they will be; else all say 60, and stop earlier by a token that ends them."""
    clock, made = Clock(), []
    kinds = {} if policy is None else {"policy": policy}
    engine = sim_engine(slots=2, blocks=200, max_len=256, **kinds)
    for turn in range(rounds):
        for i, (tenant, length) in enumerate(lengths):
            prompt = [3 + turn, i, 5, 7]
            more = {"max_tokens": length} if tell else stop_after(prompt, length)
            r = request(engine, f"{turn}-{i}", prompt, arrival=clock.now, tenant=tenant, ignore_eos=True, **more)
            if turn >= rounds - 2:
                made.append(r)
        while engine.busy:
            clock.turn(engine)
    return float(np.mean([r.finished - r.arrival for r in made]))


def stop_after(prompt, length):
    """Parameters that say 60 tokens and end after about ``length``: a stop id that comes there first."""
    tokens, _ = answer(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    at = next(i for i in range(length, 60) if tokens[i] not in tokens[:i])
    return {"max_tokens": 60, "stop_token_ids": [tokens[at]]}


MIXED = [("", 60), ("", 60), ("", 5), ("", 5), ("", 30), ("", 5), ("", 5), ("", 5)]


def srpt(**options):
    return lambda none, ctx: Srpt(SrptOptions(**options), ctx)


def test_short_requests_do_not_wait_behind_long_ones():
    first_come, shortest = mean_latency(None, MIXED, True), mean_latency(srpt(), MIXED, True)
    assert shortest < 0.6 * first_come, (shortest, first_come)


def test_it_learns_whose_answers_are_short():
    """All requests say 60 tokens; those of one tenant end after five."""
    kinds = [("talks", 25), ("talks", 25), *[("brief", 2)] * 8]
    blind, learned = (mean_latency(srpt(learn=on, least_seen=4), kinds, False) for on in (False, True))
    assert learned < 0.8 * blind, (learned, blind)


def test_who_has_waited_too_long_goes_first():
    engine, clock = sim_engine(slots=1, blocks=200, policy=srpt(max_wait=2.0)), Clock()
    long = request(engine, "long", [1, 2], arrival=clock.now, max_tokens=60, ignore_eos=True)
    request(engine, "other", [3, 4], arrival=clock.now, max_tokens=40, ignore_eos=True)
    for i in range(400):
        if i % 5 == 0:
            request(engine, f"s{i}", [5, i % 40], arrival=clock.now, max_tokens=4, ignore_eos=True)
        clock.turn(engine)
        if long.done:
            break
    assert long.done and long.finished - long.arrival < 2.0 + 2 * 60 * 0.02 + 1.0


@pytest.mark.parametrize("least", [1, 3])
def test_lengths_are_learned_from_what_is_gone_and_not_from_what_was_preempted(least):
    lengths, one = Lengths(least), np.ones(1, np.int32)
    watch = lambda seq, known: lengths.watch(one * seq, one, one * 8, one * known)  # noqa: E731
    for seq in range(least):
        watch(seq, 28)
    assert lengths.predict(one, one * 8, one * 99)[0] == 99
    watch(50, 9)  # the last of them has ended with 20 tokens
    assert lengths.predict(one, one * 8, one * 99)[0] == 20
    assert lengths.predict(one, one * 8, one * 7)[0] == 7, "never more than what the engine expects"
    assert lengths.predict(one * 2, one * 8, one * 99)[0] == 99, "another tenant"
    lengths.forget(50)
    watch(51, 9)
    assert lengths.predict(one, one * 8, one * 99)[0] == 20, "what was preempted has not ended"
