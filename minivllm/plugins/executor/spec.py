"""Specs of the built-in executors."""

from minivllm.registration.spec import ANY, Needs, Range, Spec

LOCAL = Spec(
    impl="minivllm.plugins.executor.local:Local",
    api=(2, 17),
    summary="runs the steps in this process, on one device",
    priority=10,
    limits={"device": ANY, "tensor_parallel_size": {1}},
)
PROCESS = Spec(
    impl="minivllm.plugins.executor.process:Process",
    api=(2, 17),
    summary="runs the steps in a worker process of its own, while this one plans and serves",
    limits={"device": ANY, "tensor_parallel_size": {1}},
)
SIM = Spec(
    impl="minivllm.plugins.executor.sim:Sim",
    api=(2, 17),
    summary="computes no model: made-up tokens at a chosen pace, to measure and test what is round it",
    options="minivllm.plugins.executor.options:SimOptions",
    priority=-100,  # lowest: invented tokens are only served if the user names this executor
    limits={"device": ANY, "tensor_parallel_size": {1}},
    traits={
        "made_up": "minivllm.plugins.executor.made_up:logits_after",
        "unused": "attention kvformat quantizer sampler",
    },
)
MULTIPROCESS = Spec(
    impl="minivllm.plugins.executor.multiprocess:Multiprocess",
    api=(2, 17),
    summary="runs the steps in a worker process for each device, which share the model (tensor parallelism)",
    options="minivllm.plugins.executor.options:MultiprocessOptions",
    priority=-10,  # lower than for executors with one worker, which need no messages between ranks
    limits={"device": ANY, "tensor_parallel_size": Range(1, 8)},
)
RAY = Spec(
    impl="minivllm.plugins.executor.ray_executor:Ray",
    api=(2, 17),
    summary="runs the steps in actors of a Ray cluster, which share the model; they may be on several machines",
    options="minivllm.plugins.executor.options:RayOptions",
    priority=-50,  # low: a cluster is only used if the user names this executor
    limits={"device": ANY, "tensor_parallel_size": Range(1, 8)},
    needs=(Needs("ray", "2.52", 'pip install "minivllm[ray]"'),),
    traits={"cluster": "address"},  # the option with the address of a cluster whose machines have the devices
)
