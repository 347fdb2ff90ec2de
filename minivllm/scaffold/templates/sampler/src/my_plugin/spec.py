"""What the sampler says about itself."""

from minivllm.spec import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 1),
    summary="temperature and top-a",
    limits={"device": ANY},
    features=frozenset({"multi_position"}),
)
