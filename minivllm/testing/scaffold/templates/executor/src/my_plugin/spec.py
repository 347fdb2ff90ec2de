"""The spec of the executor."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(2, 17),
    summary="runs the steps on a thread, so that the next step is planned during a step",
    limits={"device": ANY, "tensor_parallel_size": {1}},
)
