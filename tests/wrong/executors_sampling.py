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
HELD = "test_a_held_row_draws_nothing_and_gives_its_logprobs"
PROMPT = "test_prompt_logprobs_come_with_the_chunks_that_compute_them"
DRAFTS = "test_steps_with_drafts_give_the_tokens_of_steps_without"
GUIDES = "test_a_row_with_a_guide_is_drawn_from_both"
LOGPROBS = "test_logprobs_come_if_they_are_asked_for"
FAULTS = {
    "SeedsInHalf": (ENGINE,),
    "OneSample": (ENGINE,),
    "EndsEarly": (ENGINE,),
    "AnyEndIsAStopId": (ENGINE,),
    "NoLogprobs": (ENGINE, LOGPROBS),
    "LogprobsAlways": (LOGPROBS, HOST),
    "LogprobsByAnotherRow": (LOGPROBS,),
    "HeldRowsDraw": (HELD,),
    "NoPromptScores": (PROMPT,),
    "PromptScoresOneLater": (PROMPT,),
    "DraftsAlwaysHold": (DRAFTS,),
    "OneDraftToken": (DRAFTS,),
    "ForgetsDrafted": (DRAFTS,),
    "IgnoresGuides": (GUIDES,),
    "ScalesByOne": (GUIDES,),
}
RIGHT = ()


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (2, 1), "a planted fault", limits={"device": ANY, "tensor_parallel_size": {1}})


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


class HeldRowsDraw(Local):
    spec = spec("HeldRowsDraw")

    def submit(self, plan):
        super().submit(replace(plan, held=plan.held[:0]))


class NoPromptScores(Edited):
    spec = spec("NoPromptScores")

    def edit(self, result):
        return replace(result, prompt=None)


class PromptScoresOneLater(Edited):
    """Of the token before the one that is asked for."""

    spec = spec("PromptScoresOneLater")

    def edit(self, result):
        lp = result.prompt
        return result if lp is None else replace(result, prompt=replace(lp, chosen=np.roll(lp.chosen, 1)))


class DraftsAlwaysHold(Edited):
    spec = spec("DraftsAlwaysHold")

    def edit(self, result):
        return replace(result, count=np.ones_like(result.count)) if len(result.drafted) else result


class OneDraftToken(Edited):
    """A step gives a row one token, as ever."""

    spec = spec("OneDraftToken")

    def edit(self, result):
        first = np.unique(result.slots, return_index=True)[1]
        return replace(result, count=np.where(np.isin(np.arange(len(result.slots)), first), result.count, 0))


class ForgetsDrafted(Edited):
    spec = spec("ForgetsDrafted")

    def edit(self, result):
        return replace(result, drafted=result.drafted[:0])


class IgnoresGuides(Local):
    """Each row is drawn from its own logits."""

    spec = spec("IgnoresGuides")

    def submit(self, plan):
        super().submit(replace(plan, guided=plan.guided[:0], scale=plan.scale[:0]))


class ScalesByOne(Local):
    """The scale of a guide is taken for 1."""

    spec = spec("ScalesByOne")

    def submit(self, plan):
        super().submit(replace(plan, scale=np.ones_like(plan.scale)))
