"""Wrong policies whose keys cannot be compared between calls, or that keep data for ever."""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.scheduler import SchedulerPolicy, StepShape
from minivllm.registration.spec import Spec

SEAM = "scheduler"
ALONE = "test_a_key_does_not_depend_on_who_comes_with_it_nor_on_bits"
KEPT = "test_what_has_ended_leaves_nothing_behind"
FAULTS = {
    "ShareOfTheLargest": (ALONE,),
    "WorkInInt32": (ALONE,),
    "NeverForgets": (KEPT,),
    "WritesALog": (KEPT,),
}
RIGHT = ("TenantsInTurn", "OneAtATime", "ForgetsWhoEnded", "LastHundred")


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit")


class ShareOfTheLargest(SchedulerPolicy):
    """Divides by the longest prompt among the sequences of the call."""

    spec = spec("ShareOfTheLargest")

    def key(self, new):
        return new.prompt / new.prompt.max()


class WorkInInt32(SchedulerPolicy):
    """Multiplies prompt and answer in the dtype of the columns."""

    spec = spec("WorkInInt32")

    def key(self, new):
        return (new.prompt * new.max_out).astype(np.float64)


class NeverForgets(SchedulerPolicy):
    """When each sequence came, for good."""

    spec = spec("NeverForgets")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.came = {}

    def key(self, new):
        self.came.update(zip(new.id.tolist(), new.arrival.tolist(), strict=True))
        return new.arrival


class WritesALog(SchedulerPolicy):
    """The load of every step."""

    spec = spec("WritesALog")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.log = []

    def shape(self, load, now):
        self.log.append((now, load.waiting))
        return StepShape()


class TenantsInTurn(SchedulerPolicy):
    """Right.

    A lane for each tenant, the tenants with the fewest rows first, and a list of Python numbers as the order.
    """

    spec = spec("TenantsInTurn")

    def lane(self, new):
        return new.tenant.astype(np.int64)

    def order(self, head, running, now):
        busy = running.tenant.tolist()
        return sorted(range(len(head)), key=lambda i: (busy.count(int(head.tenant[i])), head.arrival[i]))


class OneAtATime(SchedulerPolicy):
    """Right.  A window of one, and 8-bit indices."""

    spec = spec("OneAtATime")
    window = 1

    def order(self, head, running, now):
        return np.zeros(len(head), np.uint8)

    def victim(self, candidates, need):
        return np.int16(len(candidates) - 1)


class ForgetsWhoEnded(NeverForgets):
    """Right.  It drops its data about ended sequences."""

    spec = spec("ForgetsWhoEnded")

    def ended(self, gone):
        for number in gone.id.tolist():
            self.came.pop(number, None)


class LastHundred(WritesALog):
    """Right.  It keeps the last hundred steps."""

    spec = spec("LastHundred")

    def shape(self, load, now):
        del self.log[:-99]
        return super().shape(load, now)
