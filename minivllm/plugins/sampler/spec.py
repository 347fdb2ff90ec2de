"""What the built-in samplers say about themselves."""

from minivllm.spec import ANY, Spec

SMALL_K = 1024  # up to here the k best are selected; above, or for top-p alone, the row is sorted (bisected by kernels)

DEFAULT = Spec(
    impl="minivllm.plugins.sampler.default:DefaultSampler",
    api=(1, 1),
    summary="greedy, temperature, top-k, top-p and min-p",
    priority=10,
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
MIROSTAT = Spec(
    impl="minivllm.plugins.sampler.mirostat:MirostatSampler",
    api=(1, 1),
    summary="default, and mirostat 2.0: holds the surprise at a target",
    limits={"device": ANY},
    features=frozenset({"graph_safe"}),
)
TYPICAL = Spec(
    impl="minivllm.plugins.sampler.typical:TypicalSampler",
    api=(1, 1),
    summary="default, and locally typical sampling",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
