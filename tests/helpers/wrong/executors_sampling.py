"""Wrong executors, which are ``Local`` with a fault in the inputs of draws, in ends or in log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minivllm.plugins.executor.local import Local
from minivllm.registration.spec import ANY, Spec

from .executors import Edited

SEAM = "executor"
HOST = "test_a_host_row_gives_its_logits_and_takes_its_token_later"
ENGINE = "test_the_engine_serves_with_it"
HELD = "test_a_held_row_draws_nothing_and_gives_its_logprobs"
PROMPT = "test_prompt_logprobs_come_with_the_chunks_that_compute_them"
DRAFTS = "test_steps_with_drafts_give_the_tokens_of_steps_without"
GUIDES = "test_a_row_with_a_guide_is_drawn_from_both"
LOGPROBS = "test_logprobs_come_if_they_are_asked_for"
READ = "test_rows_read_what_transformers_has_at_points_of_the_model"
ADDED = "test_what_is_added_to_a_row_changes_it_alone_and_goes_on_with_its_forks"
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
    "ReadsNothing": (READ,),
    "ReadsOneEarlier": (READ,),
    "AddsNothing": (ADDED,),
    "AddsToEverybody": (ADDED,),
    "AddsToTheNextOwner": (ADDED,),
    "ForksAddNothing": (ADDED,),
}
RIGHT = ()


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (2, 3), "a planted fault", limits={"device": ANY, "tensor_parallel_size": {1}})


class Joins(Local):
    """Changes the values with which sequences join."""

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
    """Returns the prompt's log-probabilities of the preceding token."""

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


class ReadsNothing(Edited):
    spec = spec("ReadsNothing")

    def edit(self, result):
        return replace(result, taps=result.taps[:0])


class ReadsOneEarlier(Local):
    """Where not all tokens of a row are read, those from the one before on."""

    spec = spec("ReadsOneEarlier")

    def submit(self, plan):
        super().submit(replace(plan, taps=np.maximum(plan.taps - [0, 0, 1], 0).astype(np.int32)))


class AddsNothing(Local):
    spec = spec("AddsNothing")

    def submit(self, plan):
        super().submit(replace(plan, steered=plan.steered[:0]))


class AddsToEverybody(Local):
    spec = spec("AddsToEverybody")

    def submit(self, plan):
        super().submit(plan)
        for column in self.runner.taps.steering.values():
            column[:] = column.sum(0)


class AddsToTheNextOwner(Local):
    """A vector of a slot is added for later owners of the slot too, at all points that were ever used."""

    spec = spec("AddsToTheNextOwner")

    def submit(self, plan):
        taps = self.runner.taps
        kept = {point: column.clone() for point, column in taps.steering.items()}
        apply = taps.apply

        def again(delta):
            apply(delta)
            for point, column in kept.items():
                taps.steering[point].copy_(column)

        taps.apply = again if kept and plan.delta.join is not None else apply
        numbers = [taps.names.index(point) for point in taps.steering]
        super().submit(replace(plan, steered=np.array(numbers or plan.steered, np.int32)))
        taps.apply = apply


class ForksAddNothing(Local):
    spec = spec("ForksAddNothing")

    def submit(self, plan):
        super().submit(plan)
        for column in self.runner.taps.steering.values():
            column[plan.delta.fork[:, 1]] = 0
