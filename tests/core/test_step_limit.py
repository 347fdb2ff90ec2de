"""The limit of a step's tokens holds while all requests can run in captures, and changes no token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minivllm.core.engine.step_limit import StepLimit, runs_launched
from minivllm.testing.sim import at_rest, outputs, request, run, sim_engine

PROMPTS = [[(7 * i + j) % 49 for j in range(n)] for i, n in enumerate((150, 3, 40, 90, 1))]


def serve(tokens, **params):
    """Serve the prompts with a limit of ``tokens``; return the answers and the number of tokens of each step."""
    engine = sim_engine(budget=64, blocks=400)
    engine.planner.limit = StepLimit(tokens)
    made = [request(engine, str(i), p, max_tokens=12, ignore_eos=True, **params) for i, p in enumerate(PROMPTS)]
    run(engine, check=True)
    at_rest(engine)
    assert not engine.planner.limit._launched
    return [outputs(r)[0][0] for r in made], [sum(q_len) for _, q_len in engine.executor.trail]


def test_a_limit_changes_no_token_and_bounds_every_step():
    want, long = serve(0)
    got, short = serve(24)
    assert got == want
    assert max(long) == 64 and max(short) == 24


def test_a_limit_ends_while_a_request_needs_separate_launches():
    want, _ = serve(0, prompt_logprobs=1)
    got, sizes = serve(24, prompt_logprobs=1)
    assert got == want and max(sizes) == 64


def test_the_limit_of_an_executor_has_room_for_every_row():
    assert StepLimit.of(SimpleNamespace(step_tokens=8192), 512).tokens == 8192
    assert StepLimit.of(SimpleNamespace(step_tokens=8192), 9000).tokens == 9000
    assert StepLimit.of(SimpleNamespace(step_tokens=0), 512).most(5, 64) == 64


def test_a_prompt_gets_a_token_beside_any_number_of_decodes():
    assert StepLimit(8).most(8, 64) == 1


PLAIN = dict(
    tapped=None, pooling=None, observed=0, adapter=None, images=(), params=SimpleNamespace(prompt_logprobs=None)
)


@pytest.mark.parametrize(
    "own, launched",
    [
        ({}, False),
        ({"tapped": SimpleNamespace(read={})}, False),
        ({"tapped": SimpleNamespace(read={1: ("hidden", 8)})}, True),
        ({"pooling": object()}, True),
        ({"observed": 4}, True),
        ({"adapter": object()}, True),
        ({"images": (object(),)}, True),
        ({"params": SimpleNamespace(prompt_logprobs=0)}, True),
    ],
)
def test_requests_that_no_capture_serves_run_as_separate_launches(own, launched):
    assert runs_launched(SimpleNamespace(**{**PLAIN, **own})) is launched
