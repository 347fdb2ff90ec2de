"""The spec of the adapter method."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="adds a trained vector to the outputs of linear layers",
    limits={"device": ANY},
    traits={"peft_type": "MY_PLUGIN"},
)
