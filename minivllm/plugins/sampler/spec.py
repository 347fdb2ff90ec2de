"""What the built-in samplers say about themselves."""

from minivllm.spec import ANY, Spec

DEFAULT = Spec(
    impl="minivllm.plugins.sampler.default:DefaultSampler",
    api=(1, 0),
    summary="greedy, temperature, top-k, top-p and min-p",
    priority=10,
    limits={"device": ANY},
    features=frozenset({"graph_safe"}),
)
