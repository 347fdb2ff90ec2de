"""Predictors: policies receive predictions, a failing one harms nothing, and simulations hide the true lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_costs import COSTS

from minivllm import LLM, SamplingParams
from minivllm.config import load_config
from minivllm.core.interfaces.predictor import Predictor, PredictorContext, RequestFacts, StepWork
from minivllm.core.interfaces.scheduler import SchedulerContext, SchedulerPolicy
from minivllm.lab.simulate import cases
from minivllm.lab.traces.trace import build
from minivllm.plugins.predictor.lengths import ClientHistory, Oracle, PromptFeatures
from minivllm.plugins.predictor.options import OracleOptions
from minivllm.plugins.scheduler.options import ShortestJobOptions
from minivllm.plugins.scheduler.shortest_job import ShortestJob
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine

CTX = PredictorContext(1000, 8, 64, seed=1)


def trace(n=120):
    """Return requests with prompts of 20 tokens that arrive faster than they are served; lengths are log-normal."""
    g = np.random.default_rng(4)
    lengths = np.maximum(1, np.exp(3 + g.standard_normal(n))).astype(int).tolist()
    runs = [[(i, 20)] for i in range(n)]
    return build("hand", [20.0 * i for i in range(n)], [20] * n, lengths, [1000 + i for i in range(n)], runs)


def facts(prompt=(1, 2, 3), number=0, client=0, **more):
    return RequestFacts(np.array(prompt, np.int32), 500, client, number, 0.0, **more)


class ByFirstToken(Predictor):
    """Ten times the first token of the prompt."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.learned = []

    def output_tokens(self, request):
        return 10.0 * request.prompt[0]

    def ended(self, request, tokens, cut):
        self.learned.append((request.number, tokens, cut))


class Watches(SchedulerPolicy):
    seen: list = []

    def key(self, new):
        self.seen += zip(new.id.tolist(), new.predicted_out.tolist(), new.max_out.tolist(), strict=True)
        return new.arrival


def test_policies_receive_predictions_within_the_limit_and_ends_are_reported():
    Watches.seen.clear()
    made = []

    def build(ctx):
        made.append(ByFirstToken(None, ctx))
        return made[0]

    engine = sim_engine(slots=3, max_len=60, blocks=60, policy=Watches, predictor=build)
    requested = [request(engine, str(i), [i + 1, 2, 3], max_tokens=20, expected_tokens=7, seed=i) for i in range(4)]
    assert [predicted for _, predicted, _ in Watches.seen] == [10, 20, 20, 20]
    run(engine)
    ends = {(int(r.id), len(ids), reason == "length") for r in requested for ids, reason in outputs(r)}
    assert set(made[0].learned) == ends and len(made[0].learned) == 4
    true = [len(outputs(r)[0][0]) for r in requested if outputs(r)[0][1] != "length"]
    predicted = [one for _, one, _ in Watches.seen]
    whole = [outputs(r)[0][1] != "length" for r in requested]
    errors = [
        abs(math.log(p / len(outputs(r)[0][0])))
        for r, p, ended in zip(requested, predicted, whole, strict=True)
        if ended
    ]
    stats = engine.stats()["predictor"]
    assert stats["made"] == 4 and stats["failed"] == 0
    assert stats["mean_log_error"] == (pytest.approx(np.mean(errors)) if true else None)


class Breaks(ByFirstToken):
    def output_tokens(self, request):
        kind = request.number % 4
        if kind == 0:
            raise RuntimeError("no idea")
        return [None, math.nan, "12", -3][kind]

    def ended(self, request, tokens, cut):
        raise KeyError("nobody")


def test_a_predictor_that_fails_or_answers_nonsense_changes_nothing_and_is_reported():
    Watches.seen.clear()
    engine = sim_engine(slots=3, max_len=60, blocks=60, policy=Watches, predictor=lambda ctx: Breaks(None, ctx))
    requested = [request(engine, str(i), [i + 1, 2, 3], max_tokens=20, expected_tokens=7, seed=i) for i in range(8)]
    run(engine)
    assert [predicted for _, predicted, _ in Watches.seen] == [7] * 8
    assert [outputs(r)[0] for r in requested] == [answer(r.prompt.tolist(), r.params, 0, 60) for r in requested]
    at_rest(engine)
    stats = engine.stats()["predictor"]
    assert stats["made"] == 0 and stats["failed"] >= 8 + 8 and "nobody" in stats["error"]


def case(*sets):
    given = ["max_num_seqs=8", "max_num_batched_tokens=64", *sets]
    return cases.cases([("x", load_config([], given))], COSTS, lambda _: None)[0]


SHORTEST = ("scheduler=shortest-job", "scheduler.options.seconds_per_token=10")
ORACLE = (*SHORTEST, "predictor=oracle")


def simulated(*sets, known=False):
    made = case(*sets)
    made = cases.replace(made, known=known)
    return cases.simulate(made, trace(), COSTS)


def test_an_oracle_without_noise_serves_as_known_lengths_do_and_noise_costs_latency():
    known, exact = simulated(*SHORTEST, known=True), simulated(*ORACLE)
    assert np.array_equal(known.first, exact.first, True) and np.array_equal(known.finished, exact.finished, True)
    again, noisy = (simulated(*ORACLE, "predictor.options.noise=3") for _ in range(2))
    assert np.array_equal(again.finished, noisy.finished, True)
    assert not np.array_equal(exact.finished, noisy.finished, True)

    def mean(found):
        return float(np.nanmean(found.finished - found.arrival))

    assert mean(exact) < mean(noisy) <= mean(simulated("scheduler=fcfs")) * 1.1
    assert case(*ORACLE, "predictor.options.noise=3").head["scheduler"].endswith(" + oracle{noise: 3.0}")


class Spies(ShortestJob):
    seen: set = set()

    def key(self, new):
        self.seen.update(zip(new.prompt.tolist(), new.max_out.tolist(), new.predicted_out.tolist(), strict=True))
        return super().key(new)


def test_a_simulation_with_a_predictor_hides_the_true_lengths_from_the_policy(monkeypatch):
    Spies.seen.clear()
    from minivllm.plugins.scheduler import shortest_job

    monkeypatch.setattr(shortest_job, "ShortestJob", Spies)
    simulated(*SHORTEST, "predictor=history")
    limit = int(COSTS.engine["max_model_len"])
    assert Spies.seen and all(prompt + most == limit for prompt, most, _ in Spies.seen)


def test_the_error_of_an_oracle_is_log_normal_and_a_function_of_seed_and_request():
    made = [Oracle(OracleOptions(noise=0.5), CTX) for _ in range(2)]
    one, other = ([p.output_tokens(facts(number=i, truth=100)) for i in range(2000)] for p in made)
    logs = np.log(np.array(one) / 100)
    assert one == other and abs(logs.mean()) < 0.05 and abs(logs.std() - 0.5) < 0.03
    elsewhere = Oracle(OracleOptions(noise=0.5), PredictorContext(1000, 8, 64, seed=2))
    assert elsewhere.output_tokens(facts(truth=100)) != one[0]
    assert made[0].output_tokens(facts(truth=None, expected=7)) == 7
    assert made[0].output_tokens(facts(truth=None)) is None


def test_features_of_prompts_and_histories_of_clients_are_learned():
    by_prompt, by_client, g = PromptFeatures(None, CTX), ClientHistory(None, CTX), np.random.default_rng(0)
    for i in range(600):
        client, length = i % 3, int(g.integers(4, 400))
        one = facts(g.integers(0, 50, length), i, client)
        by_prompt.ended(one, max(1, round(0.5 * length * math.exp(0.1 * g.standard_normal()))), False)
        by_client.ended(one, [10, 100, 400][client], False)
    for length in (20, 100, 300):
        found = by_prompt.output_tokens(facts(g.integers(0, 50, length)))
        assert length / 4 < found < length, (length, found)
    found = [by_client.output_tokens(facts(client=c)) for c in range(3)]
    assert found == pytest.approx([10, 100, 400], rel=0.01)
    assert 10 < by_client.output_tokens(facts(client=9)) < 400  # a new client gets the mean of all
    assert by_client.output_tokens(facts(client=0, expected=33)) == 33


def test_ageing_puts_requests_back_by_their_predicted_seconds():
    options = ShortestJobOptions(ageing=3.0, seconds_per_token=100.0, prefill_cost=0.0, max_wait=1e6)
    works = []
    context = SchedulerContext(8, 64, 16, step_ms=lambda work: works.append(work) or 20.0)
    assert ShortestJob(options, context).seconds_per_token() == pytest.approx(0.06)
    assert works == [StepWork(8, 0)]
    assert ShortestJob(options, SchedulerContext(8, 64, 16)).seconds_per_token() == 100.0


MINE = """
from minivllm.plugin import Predictor


class Mine(Predictor):
    def output_tokens(self, request):
        return 2.0 * len(request.prompt)
"""


def test_a_class_in_a_file_of_the_user_predicts_with_one_option(tmp_path, monkeypatch):
    (tmp_path / "my_lengths.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"model": "pocket", "dtype": "float32", "max_num_seqs": 2, "num_kvcache_blocks": 64}
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with LLM(**options) as llm:
        want = llm.generate([[5, 6, 7]], params, False)[0].tokens
        assert "predictor" not in llm.stats()
    with LLM(**options, predictor="my_lengths:Mine", allow_targets=["my_lengths"]) as llm:
        assert llm.generate([[5, 6, 7]], params, False)[0].tokens == want
        assert llm.stats()["predictor"]["made"] == 1 and llm.stats()["predictor"]["failed"] == 0


def test_a_served_model_learns_lengths_and_times_of_steps(tmp_path):
    options = {"model": "pocket", "dtype": "float32", "max_num_seqs": 4, "num_kvcache_blocks": 64}
    with LLM(**options, predictor="history", scheduler="shortest-job") as llm:
        params = [SamplingParams(max_tokens=n, tenant=t, ignore_eos=True) for t, n in (("a", 4), ("b", 12)) * 3]
        llm.generate([[5, 6, 7]] * 6, params, False)
        assert llm.engine.predictions.step_ms(StepWork(4, 0, 60)) > 0
        assert llm.stats()["figures"]["predictor"]["clients"] == 2
