"""What the built-in scheduling policies say about themselves."""

from minivllm.spec import Spec

FCFS = Spec(
    impl="minivllm.plugins.scheduler.fcfs:Fcfs",
    api=(1, 0),
    summary="first come, first served; the youngest is preempted",
    priority=10,
    features=frozenset({"starvation_free"}),
)
