"""What the grammar says about itself."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 1),
    summary="one of several texts, by walking through them",
    features=frozenset({"choice"}),
)
