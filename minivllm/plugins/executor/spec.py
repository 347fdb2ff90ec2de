"""What the built-in executors say about themselves."""

from minivllm.spec import ANY, Spec

LOCAL = Spec(
    impl="minivllm.plugins.executor.local:Local",
    api=(1, 0),
    summary="runs the steps in this process, on one device",
    priority=10,
    limits={"device": ANY, "tensor_parallel_size": {1}},
)
