"""The spec of the processor."""

from minivllm.plugin import ANY, Param, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 4),
    summary="makes recent tokens less likely",
    options="my_plugin.options:Options",
    limits={"device": ANY},
    features=frozenset({"multi_position"}),
    params=(
        Param(
            "my_plugin",
            float,
            0.0,
            ge=0,
            le=1e4,
            wanted="a number from 0 to 10000",
            summary="subtracted from the logit of each recent token",
        ),
    ),
)
