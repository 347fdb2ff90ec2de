"""Wrong scheduling policies, and right ones that are not like ``Fcfs``."""

from __future__ import annotations

import random
import time

import numpy as np

from minivllm.core.interfaces.scheduler import SchedulerPolicy, StepShape
from minivllm.registration.spec import Spec

SEAM = "scheduler"
LAWFUL = "test_whatever_happens_every_answer_is_lawful_and_every_token_right"
SAME = "test_the_same_trace_gives_the_same_decisions"
BACKLOG = "test_a_backlog_longer_than_the_window_is_worked_off"
STARVES = "test_nobody_starves"
LATE = "test_keys_hold_however_long_the_engine_has_run"
FIGURES = "test_its_figures_are_numbers_by_name_and_asking_changes_nothing"
FAULTS = {
    "OrderTwice": (LAWFUL, BACKLOG),
    "KeyOfTheFirst": ("test_key_gives_a_number_for_each_of_several_sequences",),
    "ShortestFirst": (STARVES,),
    "ShortestInTheWindow": (STARVES,),
    "ForgetsThePreempted": (STARVES,),
    "OverdueLast": (STARVES,),
    "NewTenantsFirst": (STARVES,),
    "ShortestIntoTheWindow": (STARVES,),
    "LongPromptsAlone": (STARVES,),
    "NoLongPrompts": (STARVES,),
    "MillisecondsInInt32": (LATE,),
    "HalfPrecision": (LATE,),
    "OrderOneTooFar": (LAWFUL, BACKLOG),
    "OrderGivesIds": (LAWFUL,),
    "HalfTheWindow": (LAWFUL, BACKLOG),
    "VictimOneTooFar": (LAWFUL,),
    "VictimIsAnId": (LAWFUL,),
    "VictimIsAFloat": (LAWFUL,),
    "KeyIsNaN": (LAWFUL, "test_key_gives_a_number_for_each_of_several_sequences"),
    "KeyByTheClock": (SAME,),
    "KeyByChance": (SAME,),
    "SortsInPlace": (LAWFUL, SAME),
    "AlwaysHolds": (LAWFUL, SAME),
    "NoPrefill": (LAWFUL,),
    "UnknownShape": (LAWFUL,),
    "KnowsOnlyWhatItQueued": (LAWFUL,),
    "FigureIsText": (FIGURES,),
    "CountsSinceLastAsked": (FIGURES,),
    "PlansByWhoAsked": (FIGURES,),
    "SharedServed": ("test_two_instances_share_no_state", SAME),
}
RIGHT = ("AgedPriority", "ShortestJob", "PrefillFirst", "PreemptsTheOldest", "Gathers", "FairShare")


def spec(name: str, *features: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", features=frozenset(features))


class ShortestFirst(SchedulerPolicy):
    """Has no ageing, but declares that no request starves."""

    spec = spec("ShortestFirst", "starvation_free")

    def key(self, new):
        return new.prompt + new.predicted_out


class ShortestInTheWindow(SchedulerPolicy):
    """By arrival into the window, and by length out of it."""

    spec = spec("ShortestInTheWindow", "starvation_free")

    def order(self, head, running, now):
        return np.lexsort((head.arrival, head.predicted_out))


class ShortestIntoTheWindow(SchedulerPolicy):
    """By length into the window, and by arrival out of it: fair while all that wait are in it."""

    spec = spec("ShortestIntoTheWindow", "starvation_free")

    def key(self, new):
        return new.prompt + new.max_out

    def order(self, head, running, now):
        return np.argsort(head.arrival, kind="stable")


class LongPromptsAlone(SchedulerPolicy):
    """A prompt of many steps waits until nothing runs."""

    spec = spec("LongPromptsAlone", "starvation_free")

    def order(self, head, running, now):
        return np.flatnonzero((head.prompt <= 4 * self.ctx.max_num_batched_tokens) | (len(running) == 0))


class NoLongPrompts(SchedulerPolicy):
    """For short prompts only."""

    spec = spec("NoLongPrompts", "starvation_free")

    def order(self, head, running, now):
        return np.flatnonzero(head.prompt <= 256)


class MillisecondsInInt32(SchedulerPolicy):
    """Right for 24 days."""

    spec = spec("MillisecondsInInt32", "starvation_free")

    def key(self, new):
        return (new.arrival * 1000).astype(np.int64).astype(np.int32)


class HalfPrecision(SchedulerPolicy):
    spec = spec("HalfPrecision", "starvation_free")

    def key(self, new):
        with np.errstate(over="ignore"):
            return new.arrival.astype(np.float16)


class ForgetsThePreempted(SchedulerPolicy):
    """Queues preempted requests behind all others."""

    spec = spec("ForgetsThePreempted", "starvation_free")

    def key(self, new):
        return np.where(new.preempted > 0, np.inf, new.arrival)


class OverdueLast(SchedulerPolicy):
    """A request that has missed its deadline is lost anyway."""

    spec = spec("OverdueLast", "starvation_free")

    def order(self, head, running, now):
        return np.lexsort((head.arrival, head.ttft_due < now))


class NewTenantsFirst(SchedulerPolicy):
    """Fair over all time, so a tenant pays for ever for earlier service."""

    spec = spec("NewTenantsFirst", "starvation_free")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.got: dict[int, int] = {}

    def key(self, new):
        for tenant, work in zip(new.tenant.tolist(), (new.prompt + new.max_out).tolist(), strict=True):
            self.got[tenant] = self.got.get(tenant, 0) + work
        return np.array([self.got[t] for t in new.tenant.tolist()], float)


class OrderTwice(SchedulerPolicy):
    spec = spec("OrderTwice")

    def order(self, head, running, now):
        return np.concatenate([np.argsort(head.priority)[:1], np.arange(len(head))])


class OrderOneTooFar(SchedulerPolicy):
    spec = spec("OrderOneTooFar")

    def order(self, head, running, now):
        return np.arange(1, len(head) + 1)


class OrderGivesIds(SchedulerPolicy):
    spec = spec("OrderGivesIds")

    def order(self, head, running, now):
        return head.id[np.argsort(head.arrival)]


class HalfTheWindow(SchedulerPolicy):
    """The last one waits for company."""

    spec = spec("HalfTheWindow")

    def order(self, head, running, now):
        return np.arange(len(head) // 2)


class VictimOneTooFar(SchedulerPolicy):
    spec = spec("VictimOneTooFar")

    def victim(self, candidates, need):
        return len(candidates)


class VictimIsAnId(SchedulerPolicy):
    spec = spec("VictimIsAnId")

    def victim(self, candidates, need):
        return int(candidates.id.max())


class VictimIsAFloat(SchedulerPolicy):
    spec = spec("VictimIsAFloat")

    def victim(self, candidates, need):
        return (len(candidates) - 1) / 2


class KeyIsNaN(SchedulerPolicy):
    """Slack of a request without a deadline: inf - inf."""

    spec = spec("KeyIsNaN")

    def key(self, new):
        with np.errstate(invalid="ignore"):
            return new.ttft_due - new.tpot_due


class KeyOfTheFirst(SchedulerPolicy):
    spec = spec("KeyOfTheFirst")

    def key(self, new):
        return new.arrival[:1]


class KeyByTheClock(SchedulerPolicy):
    """Its own clock and not the engine's."""

    spec = spec("KeyByTheClock")

    def key(self, new):
        return np.full(len(new), time.time() // 3600)


class KeyByChance(SchedulerPolicy):
    spec = spec("KeyByChance")

    def key(self, new):
        return np.array([random.random() for _ in range(len(new))])


class SortsInPlace(SchedulerPolicy):
    spec = spec("SortsInPlace")

    def order(self, head, running, now):
        head.priority.sort()
        return np.arange(len(head))


class AlwaysHolds(SchedulerPolicy):
    """Waits for a larger batch, and again."""

    spec = spec("AlwaysHolds")

    def shape(self, load, now):
        return StepShape(hold_until=now + 0.05 if load.waiting < 100 else 0.0)


class NoPrefill(SchedulerPolicy):
    """Limits prefill by the free part of a pool that is always nearly full."""

    spec = spec("NoPrefill")

    def shape(self, load, now):
        return StepShape(prefill_cap=load.free_blocks - load.total_blocks // 2)


class UnknownShape(SchedulerPolicy):
    spec = spec("UnknownShape")

    def shape(self, load, now):
        return StepShape("decode_first" if load.running else "mix")


class KnowsOnlyWhatItQueued(SchedulerPolicy):
    """Keeps a record of each sequence that got a key, but forked branches never got one."""

    spec = spec("KnowsOnlyWhatItQueued")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.seen = {}

    def key(self, new):
        self.seen.update(zip(new.id.tolist(), new.arrival.tolist(), strict=True))
        return new.arrival

    def victim(self, candidates, need):
        return int(np.argmax([self.seen[i] for i in candidates.id.tolist()]))


class SharedServed(SchedulerPolicy):
    """The service of each tenant is counted for all engines together."""

    spec = spec("SharedServed")
    served: dict = {}

    def key(self, new):
        for tenant in new.tenant.tolist():
            self.served[tenant] = self.served.get(tenant, 0) + 1
        return np.array([self.served[t] for t in new.tenant.tolist()], float)


class AgedPriority(SchedulerPolicy):
    """Right.  A level of priority is worth 30 seconds of waiting."""

    spec = spec("AgedPriority", "starvation_free")

    def key(self, new):
        return new.arrival + 30.0 * np.clip(new.priority, -10, 10)

    def victim(self, candidates, need):
        return int(np.lexsort((candidates.arrival, candidates.priority))[-1])


class ShortestJob(SchedulerPolicy):
    """Right.  Shortest job first, which may starve long jobs and declares nothing else."""

    spec = spec("ShortestJob")

    def key(self, new):
        return new.prompt - new.cached + new.predicted_out

    def victim(self, candidates, need):
        return np.argmax(candidates.max_out - (candidates.known - candidates.prompt))


class PrefillFirst(SchedulerPolicy):
    """Right.  Separate phases, cached prefixes first, a small window, and a list as the order."""

    spec = spec("PrefillFirst")
    window = 4

    def order(self, head, running, now):
        return sorted(range(len(head)), key=lambda i: (-head.cached[i], head.id[i]))

    def shape(self, load, now):
        return StepShape("static" if load.oldest_wait > 10 else "prefill_first", prefill_cap=max(1, load.free_blocks))


class PreemptsTheOldest(SchedulerPolicy):
    """Right, if inefficient, because the engine's protection limits its preemptions."""

    spec = spec("PreemptsTheOldest", "starvation_free")

    def victim(self, candidates, need):
        return int(np.argmin(candidates.arrival))


class Gathers(SchedulerPolicy):
    """Right.  New requests are admitted together, and the first waits for at most 0.2 seconds."""

    spec = spec("Gathers", "starvation_free")

    def shape(self, load, now):
        first = now - load.oldest_wait
        return StepShape(hold_until=first + 0.2 if load.waiting < 8 and load.oldest_wait < 0.2 else 0.0)


class FairShare(SchedulerPolicy):
    """Right.  A virtual clock for each tenant never lags behind the arrivals, and forks are not counted.

    A clock that the arrivals have passed is deleted.
    """

    spec = spec("FairShare", "starvation_free")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.clock: dict[int, float] = {}

    def key(self, new):
        keys = []
        for tenant, arrival, work in zip(new.tenant.tolist(), new.arrival.tolist(), new.prompt.tolist(), strict=True):
            keys.append(max(arrival, self.clock.get(tenant, 0.0)))
            self.clock[tenant] = keys[-1] + 0.01 * work
        newest = new.arrival.max(initial=0.0)
        self.clock = {tenant: clock for tenant, clock in self.clock.items() if clock > newest}
        return np.array(keys)


class Counts(SchedulerPolicy):
    """Counts the sequences that came."""

    came = 0

    def key(self, new):
        self.came += len(new)
        return new.arrival


class FigureIsText(Counts):
    spec = Spec(f"{__name__}:FigureIsText", (1, 1), "a planted fault")

    def figures(self):
        return {"came": str(self.came)} if self.came else {}


class CountsSinceLastAsked(Counts):
    spec = Spec(f"{__name__}:CountsSinceLastAsked", (1, 1), "a planted fault")

    def figures(self):
        came, self.came = self.came, 0
        return {"came": came}


class PlansByWhoAsked(Counts):
    """A call of its figures changes the order of arrival that it stores."""

    spec = Spec(f"{__name__}:PlansByWhoAsked", (1, 1), "a planted fault")
    requested = False

    def key(self, new):
        return -new.arrival if self.requested else new.arrival

    def figures(self):
        self.requested = True
        return {}
