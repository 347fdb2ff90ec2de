"""The spec of the predictor."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 0),
    summary="the mean length of all answers so far",
)
