"""What the executor says about itself."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(2, 4),
    summary="runs the steps on a thread of its own, so that the next one is planned meanwhile",
    limits={"device": ANY, "tensor_parallel_size": {1}},
)
