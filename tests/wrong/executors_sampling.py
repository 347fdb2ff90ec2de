"""Wrong executors: ``Local`` with a fault in what draws depend on, in ends or in log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minivllm.plugins.executor.local import Local
from minivllm.spec import ANY, Spec

from .executors import Edited

SEAM = "executor"
HOST = "test_a_host_row_gives_its_logits_and_takes_its_token_later"
ENGINE = "test_the_engine_serves_with_it"
LOGPROBS = "test_logprobs_come_if_they_are_asked_for"
FAULTS = {
    "SeedsInHalf": (ENGINE,),
    "OneSample": (ENGINE,),
    "EndsEarly": (ENGINE,),
    "AnyEndIsAStopId": (ENGINE,),
    "NoLogprobs": (ENGINE, LOGPROBS),
    "LogprobsAlways": (LOGPROBS, HOST),
    "LogprobsByAnotherRow": (LOGPROBS,),
}
RIGHT = ()


def spec(name: str) -> Spec:
    return Spec(
        f"{__name__}:{name}", (1, 0), "a planted fault", limits={"device": ANY, "tensor_parallel_size": {1}}
    )  # fmt: skip


class Joins(Local):
    """Changes what sequences join with."""

    def submit(self, plan):
        if plan.delta.join is not None:
            plan = replace(plan, delta=replace(plan.delta, join=self.joined(plan.delta.join)))
        super().submit(plan)


class SeedsInHalf(Joins):
    """Sends seeds as 32 bits."""

    spec = spec("SeedsInHalf")

    def joined(self, join):
        return replace(join, seed=join.seed & 0xFFFFFFFF)


class OneSample(Joins):
    """All branches of a request draw the same."""

    spec = spec("OneSample")

    def submit(self, plan):
        if len(plan.delta.fork):
            plan = replace(plan, delta=replace(plan.delta, fork=plan.delta.fork * [1, 1, 0]))
        super().submit(plan)

    def joined(self, join):
        return replace(join, sample=np.zeros_like(join.sample))


class EndsEarly(Joins):
    """min_tokens is lost."""

    spec = spec("EndsEarly")

    def joined(self, join):
        return replace(join, min_end=np.zeros_like(join.min_end))


class AnyEndIsAStopId(Joins):
    spec = spec("AnyEndIsAStopId")

    def joined(self, join):
        return replace(join, n_eos=np.zeros_like(join.n_eos))


class NoLogprobs(Edited):
    spec = spec("NoLogprobs")

    def edit(self, result):
        return replace(result, logprobs=None)


class LogprobsAlways(Local):
    spec = spec("LogprobsAlways")

    def submit(self, plan):
        super().submit(replace(plan, topk=max(plan.topk, 0)))


class LogprobsByAnotherRow(Edited):
    spec = spec("LogprobsByAnotherRow")

    def edit(self, result):
        lp = result.logprobs
        if lp is None:
            return result
        return replace(result, logprobs=replace(lp, chosen=lp.chosen[::-1], top=lp.top[::-1]))
