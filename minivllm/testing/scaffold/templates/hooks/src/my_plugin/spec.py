"""The spec of the hooks."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="logs percentiles of the durations of steps when the engine stops",
    options="my_plugin.options:Options",
)
