"""What the processor says about itself."""

from minivllm.plugin import ANY, Param, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 4),
    summary="makes tokens that came a short while ago less likely",
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
            summary="off the logit of each token that came a short while ago",
        ),
    ),
)
