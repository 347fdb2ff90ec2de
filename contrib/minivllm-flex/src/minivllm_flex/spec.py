"""The spec of the back end."""

from minivllm.plugin import ANY, MultipleOf, Needs, Spec

FLEX = Spec(
    impl="minivllm_flex.backend:Flex",
    api=(1, 3),
    summary="torch's FlexAttention: windows, soft caps and sinks as score functions, compiled on a GPU",
    options="minivllm_flex.options:FlexOptions",
    limits={
        "device": {"cpu", "cuda"},
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "kv_format": {"bf16", "fp16", "fp32"},
        "dim_qk": MultipleOf(16),  # the compiled kernel needs at least 16 elements
        "dim_v": MultipleOf(16),
        "queries_per_kv": ANY,
        "block": MultipleOf(1),
    },
    features=frozenset({"lse", "sinks", "softcap", "window"}),
    needs=(Needs("torch", "2.11", "pip install 'torch>=2.11'"),),
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host"},
)
