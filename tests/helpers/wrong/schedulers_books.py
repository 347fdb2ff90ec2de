"""Policies that keep data for each request for ever, and a right one with a bound."""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.scheduler import SchedulerPolicy
from minivllm.registration.spec import Spec

SEAM = "scheduler"
KEPT = "test_what_has_ended_leaves_nothing_behind"
FAULTS = {
    "TenantsForGood": (KEPT,),
    "CountersOfTenants": (KEPT,),
    "PrioritiesForGood": (KEPT,),
    "LengthsForGood": (KEPT,),
}
RIGHT = ("LastTenants",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit")


class Books(SchedulerPolicy):
    """Counts requests by the value of a column."""

    column, most = "tenant", None

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.count = {}

    def key(self, new):
        for value in getattr(new, self.column).tolist():
            self.count[value] = self.count.pop(value, 0) + 1
            if self.most is not None and len(self.count) > self.most:
                del self.count[next(iter(self.count))]
        return new.arrival


class TenantsForGood(Books):
    spec = spec("TenantsForGood")


class PrioritiesForGood(Books):
    spec, column = spec("PrioritiesForGood"), "priority"


class LengthsForGood(Books):
    spec, column = spec("LengthsForGood"), "max_out"


class CountersOfTenants(SchedulerPolicy):
    """An array by number of tenant, as long as the largest number."""

    spec = spec("CountersOfTenants")
    served = np.zeros(1)

    def ended(self, gone):
        if len(gone):
            more = int(gone.tenant.max()) + 1 - len(self.served)
            self.served = np.concatenate([self.served, np.zeros(max(more, 0))])
            self.served[gone.tenant] += gone.known


class LastTenants(Books):
    """Right.  It keeps data of the last 200 tenants."""

    spec, most = spec("LastTenants"), 200
