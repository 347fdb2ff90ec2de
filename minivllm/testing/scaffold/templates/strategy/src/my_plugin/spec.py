"""The spec of the strategy."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 4),
    summary="n samples, the highest mean log-probability first",
)
