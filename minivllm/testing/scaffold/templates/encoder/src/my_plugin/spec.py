"""The spec of the encoder."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 4),
    summary="sixteen patches of colours and a linear projection",
    limits={"device": ANY, "dtype": ANY, "model_type": ANY},
)
