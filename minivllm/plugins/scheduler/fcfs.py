"""Serve requests in order of arrival, and preempt the youngest first."""

from __future__ import annotations

from minivllm.core.interfaces.scheduler import SchedulerPolicy


class Fcfs(SchedulerPolicy):
    """The policy of the defaults of ``SchedulerPolicy``: the key is the arrival, the victim the latest arrival.

    No request starves, since no request is admitted before an older one.
    """
