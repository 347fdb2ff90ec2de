"""What the strategy says about itself."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 4),
    summary="n samples, the one of the highest mean log-probability first",
)
