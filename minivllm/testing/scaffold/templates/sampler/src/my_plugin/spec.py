"""The spec of the sampler."""

from minivllm.plugin import ANY, Param, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 4),
    summary="temperature and top-a",
    limits={"device": ANY},
    features=frozenset({"multi_position"}),
    params=(
        Param(
            "my_plugin",
            float,
            0.0,
            ge=0,
            le=1,
            wanted="a number from 0 to 1",
            summary="a of top-a: tokens with p < a * max(p) ** 2 are excluded",
        ),
    ),
)
