"""The spec of the policy."""

from minivllm.plugin import Spec

SRPT = Spec(
    impl="minivllm_srpt.srpt:Srpt",
    api=(1, 0),
    summary="shortest remaining predicted time first, with a bounded wait; learns lengths by tenant",
    options="minivllm_srpt.options:SrptOptions",
    features=frozenset({"starvation_free"}),
)
