"""Describe the built-in scheduling policies."""

from functools import partial

from minivllm.registration.spec import Spec

_HERE = "minivllm.plugins.scheduler"
_policy = partial(Spec, api=(1, 5), features=frozenset({"starvation_free"}))

ADAPTIVE = _policy(
    impl=f"{_HERE}.adaptive:Adaptive",
    summary="new requests wait for each other if the learned cost of a step makes it worthwhile",
    options=f"{_HERE}.options:AdaptiveOptions",
)
DEADLINE = _policy(
    impl=f"{_HERE}.deadline:Deadline",
    summary="least slack first by ttft_ms, prefill capped for tpot_ms",
    options=f"{_HERE}.options:DeadlineOptions",
)
FAIR = _policy(
    impl=f"{_HERE}.fair:Fair",
    summary="fair shares of tokens among tenants (virtual token counters)",
    options=f"{_HERE}.options:FairOptions",
)
FCFS = _policy(
    impl=f"{_HERE}.fcfs:Fcfs",
    summary="first come, first served; the youngest is preempted",
    priority=10,
)
PREFILL_FIRST = _policy(
    impl=f"{_HERE}.prefill_first:PrefillFirst",
    summary="two phases, prefill before decode; new requests in groups of similar length",
    options=f"{_HERE}.options:PrefillFirstOptions",
)
PREFIX_AWARE = _policy(
    impl=f"{_HERE}.prefix_aware:PrefixAware",
    summary="longest cached prefix first, with a bounded wait",
    options=f"{_HERE}.options:PrefixAwareOptions",
)
PRIORITY = _policy(
    impl=f"{_HERE}.priority:Priority",
    summary="by priority, smaller first; waiting raises the priority",
    options=f"{_HERE}.options:PriorityOptions",
)
SHORTEST_JOB = _policy(
    impl=f"{_HERE}.shortest_job:ShortestJob",
    summary="least work first by prompt and expected output, with a bounded wait",
    options=f"{_HERE}.options:ShortestJobOptions",
)
STATIC = _policy(
    impl=f"{_HERE}.static:Static",
    summary="batches that start and end together, a baseline",
    options=f"{_HERE}.options:StaticOptions",
)
