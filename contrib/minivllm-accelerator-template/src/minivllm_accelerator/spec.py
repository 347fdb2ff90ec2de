"""The specs of the attention back end and of the executor."""

from minivllm.plugin import ANY, MultipleOf, Spec

ATTENTION = Spec(
    impl="minivllm_accelerator.attention:AcceleratorAttention",
    api=(1, 6),
    summary="template: attention by two functions of an accelerator, in batches of few shapes",
    options="minivllm_accelerator.options:AcceleratorOptions",
    limits={
        "device": {"cpu"},  # the option ``device`` of minivllm, which names the device of its own kernels
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "kv_format": {"bf16", "fp16", "fp32"},
        "dim_qk": ANY,
        "dim_v": ANY,
        "queries_per_kv": ANY,
        "block": MultipleOf(1),
    },
    features=frozenset({"window"}),  # add softcap, sinks, alibi and lse once ``Device.attend`` supports them
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host"},
)
EXECUTOR = Spec(
    impl="minivllm_accelerator.executor:Accelerator",
    api=(2, 9),
    summary="template: runs the steps on an accelerator of torch",
    options="minivllm_accelerator.options:AcceleratorOptions",
    limits={"device": {"cpu"}, "tensor_parallel_size": {1}},
)
