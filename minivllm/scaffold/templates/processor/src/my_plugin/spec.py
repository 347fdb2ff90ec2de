"""What the processor says about itself."""

from minivllm.spec import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 1),
    summary="makes tokens that came a short while ago less likely",
    options="my_plugin.options:Options",
    limits={"device": ANY},
    features=frozenset({"multi_position"}),
)
