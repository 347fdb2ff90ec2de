"""The spec of the grammar."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="restricts the output to one of several texts",
    features=frozenset({"choice"}),
)
