"""What the built-in scheduling policies say about themselves."""

from minivllm.registration.spec import Spec

_HERE = "minivllm.plugins.scheduler"
_FREE = frozenset({"starvation_free"})

ADAPTIVE = Spec(
    impl=f"{_HERE}.adaptive:Adaptive",
    api=(1, 2),
    summary="newcomers wait for each other where the learned cost of a step says so",
    options=f"{_HERE}.options:AdaptiveOptions",
    features=_FREE,
)
DEADLINE = Spec(
    impl=f"{_HERE}.deadline:Deadline",
    api=(1, 2),
    summary="least slack first by ttft_ms, prefill capped for tpot_ms",
    options=f"{_HERE}.options:DeadlineOptions",
    features=_FREE,
)
FAIR = Spec(
    impl=f"{_HERE}.fair:Fair",
    api=(1, 2),
    summary="fair shares of tokens among tenants (virtual token counters)",
    options=f"{_HERE}.options:FairOptions",
    features=_FREE,
)
FCFS = Spec(
    impl=f"{_HERE}.fcfs:Fcfs",
    api=(1, 2),
    summary="first come, first served; the youngest is preempted",
    priority=10,
    features=_FREE,
)
PREFILL_FIRST = Spec(
    impl=f"{_HERE}.prefill_first:PrefillFirst",
    api=(1, 2),
    summary="two phases, prefill before decode; newcomers in groups of like length",
    options=f"{_HERE}.options:PrefillFirstOptions",
    features=_FREE,
)
PREFIX_AWARE = Spec(
    impl=f"{_HERE}.prefix_aware:PrefixAware",
    api=(1, 2),
    summary="longest cached prefix first, with a bounded wait",
    options=f"{_HERE}.options:PrefixAwareOptions",
    features=_FREE,
)
PRIORITY = Spec(
    impl=f"{_HERE}.priority:Priority",
    api=(1, 2),
    summary="by priority, smaller first; waiting makes up for it",
    options=f"{_HERE}.options:PriorityOptions",
    features=_FREE,
)
SHORTEST_JOB = Spec(
    impl=f"{_HERE}.shortest_job:ShortestJob",
    api=(1, 2),
    summary="least work first by prompt and expected output, with a bounded wait",
    options=f"{_HERE}.options:ShortestJobOptions",
    features=_FREE,
)
STATIC = Spec(
    impl=f"{_HERE}.static:Static",
    api=(1, 2),
    summary="batches that start and end together, the textbook's baseline",
    options=f"{_HERE}.options:StaticOptions",
    features=_FREE,
)
