"""First come, first served: by arrival; the youngest is preempted first."""

from __future__ import annotations

from minivllm.core.interfaces.scheduler import SchedulerPolicy


class Fcfs(SchedulerPolicy):
    """The defaults of ``SchedulerPolicy`` are this policy: key = arrival, victim = the latest arrival.

    No starvation: nothing is ever admitted before an older request that waits.
    """
