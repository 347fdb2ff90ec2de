"""The spec of the store."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 1),
    summary="keeps compressed pages in memory",
)
