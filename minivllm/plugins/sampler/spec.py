"""Describe the built-in samplers."""

from minivllm.registration.spec import ANY, Param, Spec

SMALL_K = 1024  # up to here the k best are selected; above, or for top-p alone, the row is sorted (bisected by kernels)

DEFAULT = Spec(
    impl="minivllm.plugins.sampler.default:DefaultSampler",
    api=(1, 4),
    summary="greedy, temperature, top-k, top-p and min-p",
    priority=10,
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
MIROSTAT = Spec(
    impl="minivllm.plugins.sampler.mirostat:MirostatSampler",
    api=(1, 4),
    summary="default, and mirostat 2.0: holds the surprise at a target",
    limits={"device": ANY},
    features=frozenset({"graph_safe"}),
    params=(
        Param(
            "mirostat_tau",
            float,
            gt=0,
            le=64,
            wanted="bits, above 0 and up to 64",
            summary="the surprise of a token, in bits, that it holds on average",
        ),
        Param(
            "mirostat_eta",
            float,
            0.1,
            ge=1e-6,
            le=1,
            wanted="a number in (0, 1]",
            summary="with `mirostat_tau`: how fast it learns",
        ),
    ),
)
TYPICAL = Spec(
    impl="minivllm.plugins.sampler.typical:TypicalSampler",
    api=(1, 4),
    summary="default, and locally typical sampling",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
    params=(
        Param(
            "typical_p",
            float,
            1.0,
            gt=0,
            le=1,
            wanted="a number in (0, 1]",
            summary="the tokens of most typical surprise with this probability together",
        ),
    ),
)
