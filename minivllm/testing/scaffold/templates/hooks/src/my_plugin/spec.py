"""What the hooks say about themselves."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="says how long steps took, in percentiles, when the engine stops",
    options="my_plugin.options:Options",
)
