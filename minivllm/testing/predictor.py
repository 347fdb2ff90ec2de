"""The conformance suite of predictors, which predict the lengths of answers and the times of steps.

Random requests of several clients are predicted, end, and are learned.  Then an engine runs with the predictor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minivllm.core.interfaces.predictor import Predictor, PredictorContext, RequestFacts, StepWork

from .base import same_figures, since
from .kept import Lasting
from .sim import answer, at_rest, outputs, request, sim_engine
from .spec import SpecConformance

MAX_LEN = 4096
CTX = PredictorContext(MAX_LEN, 64, 2048, seed=5)
MS = 1.0  # allowed time of a call in milliseconds
TRIES = 5  # number of attempts, one of which must be fast enough, because another process may slow down the others
WORKS = [StepWork(rows, tokens, 100 * rows + tokens) for rows in (0, 1, 8, 64) for tokens in (0, 1, 512, 2048)][1:]
EDGES = (1, 2, 7, MAX_LEN - 1)  # lengths of prompts


def cost_ms(work: StepWork) -> float:
    """Return the milliseconds that a step takes on a made-up device with linear costs."""
    return 5.0 + 0.05 * work.decode_rows + 0.02 * work.prompt_tokens


def facts(number: int, length: int, **changes: Any) -> RequestFacts:
    """Return the facts of a request with a random prompt of ``length`` tokens; ``changes`` replace other fields."""
    prompt = np.random.default_rng(number).integers(0, 1000, length).astype(np.int32)
    prompt.flags.writeable = False
    fields: dict[str, Any] = {
        "max_out": MAX_LEN - length,
        "client": number % 5,
        "number": number,
        "arrival": number / 7,
    }
    return RequestFacts(prompt, **{**fields, **changes})


def requests(count: int) -> Iterator[tuple[RequestFacts, int]]:
    """Yield (request, number of tokens of its answer): many sizes, with and without facts that a client may omit."""
    g = np.random.default_rng(3)
    for i in range(count):
        if i < len(EDGES):
            length = EDGES[i]
        else:
            length = int(g.integers(1, MAX_LEN // 2))
        tokens = int(g.integers(1, MAX_LEN - length + 1))
        expected = [None, 1, tokens][i % 3]
        more: dict[str, Any] = {"expected": expected, "truth": tokens if i % 2 else None}
        session = [0, i % 4 + 1][i % 2]
        yield facts(i, length, **more, session=session), tokens


class PredictorConformance(Lasting, SpecConformance):
    """The conformance suite of predictors."""

    kind = "predictor"

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (CTX,)

    def exercise(self, instance: Predictor) -> Any:
        """Predict and end some requests, and return the predictions."""
        return self.played(instance, 30)

    def once_more(self, instance: Predictor, number: int) -> None:
        """Predict a request of a new client, end it, and let the predictor learn a step."""
        one = facts(number, 40, client=number)
        instance.output_tokens(one)
        instance.ended(one, 1 + number % 50, False)
        instance.stepped(WORKS[number % len(WORKS)], 3.0)

    def played(self, made: Predictor, count: int) -> list[Any]:
        """Predict and end ``count`` requests, two of which are always open, and return all predictions."""
        open_requests: list[tuple[RequestFacts, int]] = []
        found: list[Any] = []
        for one, tokens in requests(count):
            found.append(made.output_tokens(one))
            open_requests.append((one, tokens))
            work = WORKS[one.number % len(WORKS)]
            made.stepped(work, cost_ms(work))
            found.append(made.step_ms(work))
            if len(open_requests) > 2:
                made.ended(*open_requests.pop(0), cut=one.number % 3 == 0)
        return found

    @since(1, 0)
    def test_a_prediction_is_a_positive_number_or_none(self) -> None:
        """Check predictions before anything was learned, and while requests end and steps are learned.

        Each length and each time is None or a positive finite number.
        """
        for found in self.played(self.build(*self.context()), 200):
            number = isinstance(found, (int, float, np.number)) and not isinstance(found, bool)
            ok = found is None or (number and 0 < float(found) < math.inf)
            assert ok, f"a prediction is {found!r}: expected a positive finite number, or None"

    @since(1, 0)
    def test_a_prediction_does_not_depend_on_the_number_of_calls(self) -> None:
        """Check that a repeated call for the same request returns the same prediction.

        A policy may call again, and nothing may be learned from a call.
        """
        made = self.build(*self.context())
        self.played(made, 60)
        for i in range(10):
            one = facts(1000 + i, 50 + i)
            first = made.output_tokens(one), made.step_ms(WORKS[i])
            again = made.output_tokens(one), made.step_ms(WORKS[i])
            assert first == again, f"the same request was predicted as {first}, then as {again}"

    @since(1, 0)
    def test_equal_histories_give_equal_predictions(self) -> None:
        """Check that two instances with the same seed and the same calls predict the same, so that runs repeat."""
        one = self.build(*self.context())
        other = self.build(*self.context())
        found = self.played(one, 80)
        expected = self.played(other, 80)
        assert found == expected, "two instances with equal calls predict different numbers"

    @since(1, 0)
    def test_a_call_changes_no_prompt(self) -> None:
        """Check that the token ids of a prompt are the same after all calls."""
        made = self.build(*self.context())
        one = facts(1, 300)
        prompt = one.prompt.copy()
        prompt.flags.writeable = True
        same = RequestFacts(prompt, one.max_out, one.client, one.number, one.arrival)
        made.output_tokens(same)
        made.ended(same, 10, False)
        assert np.array_equal(prompt, one.prompt), "a call changed the prompt: copy it first"

    @since(1, 0)
    def test_requests_that_never_end_and_ends_in_any_order_do_no_harm(self) -> None:
        """Check that requests may end in any order, and some never, such as failed or aborted ones."""
        made = self.build(*self.context())
        open_requests = list(requests(40))
        for one, _ in open_requests:
            made.output_tokens(one)
        for one, tokens in reversed(open_requests[::2]):
            made.ended(one, tokens, False)
        found = made.output_tokens(facts(99, 20))
        assert found is None or 0 < found < math.inf, f"a prediction is {found!r}"

    @since(1, 0)
    def test_learned_times_of_steps_are_near_the_measured_ones(self) -> None:
        """Check a predictor of step times: after 100 steps of a device with linear costs it is within a factor of 2.

        A predictor that returns no times is skipped.
        """
        made = self.build(*self.context())
        for i in range(100):
            work = WORKS[i % len(WORKS)]
            made.stepped(work, cost_ms(work))
        for work in WORKS:
            found = made.step_ms(work)
            if type(made).stepped is Predictor.stepped or found is None:
                continue
            want = cost_ms(work)
            assert want / 2 <= found <= want * 2, f"{work} takes {want:.1f} ms, and {found:.1f} were predicted"

    @since(1, 0)
    def test_a_call_is_fast(self) -> None:
        """Check that each call takes at most a millisecond for a prompt of 4,095 tokens, after 500 requests."""
        made = self.build(*self.context())
        self.played(made, 500)
        one = facts(7, MAX_LEN - 1)

        def calls() -> Sequence[float]:
            times = []
            ask, end = lambda: made.output_tokens(one), lambda: made.ended(one, 10, False)
            learn, time_of = lambda: made.stepped(WORKS[0], 3.0), lambda: made.step_ms(WORKS[0])
            for call in (ask, end, learn, time_of):
                start = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - start))
            return times

        best = np.min([calls() for _ in range(TRIES)], axis=0).max()
        assert best <= MS, f"a call takes {best:.2f} ms: expected at most {MS}"

    @since(1, 0)
    def test_figures_are_numbers_and_change_nothing(self) -> None:
        """Check that ``figures`` returns valid metrics, and that reading them changes no prediction."""
        made = self.build(*self.context())
        self.played(made, 40)
        same_figures(made.figures)

    @since(1, 0)
    def test_an_engine_with_it_generates_the_same_tokens(self) -> None:
        """Check that a simulated engine gives the same tokens with and without the predictor, which never fails."""
        made: list[Predictor] = []

        def build(ctx: PredictorContext) -> Predictor:
            made.append(self.build(ctx))
            return made[0]

        engine = sim_engine(slots=3, max_len=60, blocks=40, budget=32, predictor=build)
        prompts = []
        for i in range(8):
            prompts.append([i % 7 + 1, *range(1, 3 + i)])
        requested = []
        for i, p in enumerate(prompts):
            max_tokens = 1 + 3 * i % 20
            requested.append(request(engine, str(i), p, max_tokens=max_tokens, seed=i))
        for _ in range(2000):
            if not engine.busy:
                break
            engine.step()
        at_rest(engine)
        for one in requested:
            expected = [answer(one.prompt.tolist(), one.params, s.sample, 60) for s in one.sequences]
            assert outputs(one) == expected
        stats = engine.stats()["predictor"]
        assert stats["failed"] == 0, f"a call failed: {stats['error']}"
