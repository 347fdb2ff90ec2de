"""The stop rules of a request are the same on the host and on the device, for all parameters."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from minivllm.core.engine.stops import StopRule
from minivllm.core.interfaces.finish import FINISH_REASONS, Finish, eos_within, finish_of
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import EOS, LENGTH, STOP_IDS
from minivllm.device.worker.sampling import stop_flags, suppress_stops

VOCAB = 12


@pytest.mark.parametrize("grammar", [False, True])
def test_the_host_ends_a_sequence_where_the_device_does(grammar):
    rng, seen = random.Random(3), Counter()
    for _ in range(300):
        prompt, low = rng.randint(1, 5), rng.randint(0, 4)
        stops = [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
        params = SamplingParams(max_tokens=8, min_tokens=low, stop_token_ids=stops, ignore_eos=bool(rng.randrange(2)))
        end = prompt + 8
        rule = StopRule.of(params, (3, 7), prompt, end, grammar)
        ids = torch.tensor([[*rule.ids, *[-1] * (STOP_IDS - len(rule.ids))]])
        column = lambda value: torch.tensor([value])  # noqa: E731
        for token in range(VOCAB):
            known = rng.randint(prompt + 1, end)
            flags = int(
                stop_flags(column(token), column(known - 1), ids, column(rule.n_eos), column(rule.min_end), column(end))
            )
            got = rule.finish(token, known)
            assert got == finish_of(flags, token)
            seen[got and (got.reason, type(got.stop))] += 1
            if got is not None and got.reason == "stop":
                assert (got.stop is None) == (token in (3, 7) and (grammar or not params.ignore_eos))
                assert got.by_token
    assert set(seen) == {None, ("stop", int), ("stop", type(None)), ("length", type(None))} and min(seen.values()) > 50


def test_what_a_search_may_go_on_with_is_what_the_device_leaves_to_draw():
    params = SamplingParams(max_tokens=8, min_tokens=2, stop_token_ids=[5])
    rule = StopRule.of(params, (3, 7), 4, 12, False)
    tokens = np.arange(VOCAB)
    for known in range(4, 9):
        logits = torch.zeros(1, VOCAB)
        ids = torch.tensor([[*rule.ids, *[-1] * (STOP_IDS - len(rule.ids))]])
        suppress_stops(logits, torch.tensor([known]), torch.tensor([rule.min_end]), ids)
        assert rule.allowed(tokens, known).tolist() == torch.isfinite(logits[0]).tolist()
    assert not rule.allowed(tokens, 5)[[3, 5, 7]].any() and rule.allowed(tokens, 6).all()


def test_an_end_of_sequence_goes_before_a_stop_id_and_both_before_the_length():
    assert finish_of(EOS | LENGTH, 4) == Finish("stop") and finish_of(LENGTH, 4) == Finish("length")
    assert finish_of(0, 4) is None
    assert Finish("stop", 4).by_token and Finish("stop").by_token
    assert not any(f.by_token for f in (Finish("stop", "\n"), *map(Finish, FINISH_REASONS[1:])))


def test_end_of_sequence_ids_beyond_the_vocabulary_and_twice_are_left_out():
    assert eos_within([7, 99, 7, 3], 50) == (7, 3)


def test_a_least_length_beyond_the_end_is_the_end():
    """The device stores it as an int32."""
    for least in (2**31 - 4, 2**40, 10**30):
        rule = StopRule.of(SamplingParams(max_tokens=None, min_tokens=least), (3,), 4, 12, False)
        assert rule.min_end == rule.min_length == rule.end == 12
