"""The spec of the compressor."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="keeps the tokens whose values are largest",
    limits={"device": ANY},
)
