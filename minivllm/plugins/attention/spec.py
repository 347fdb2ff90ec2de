"""What the built-in attention back ends say about themselves."""

from minivllm.spec import ANY, MultipleOf, Spec

SDPA = Spec(
    impl="minivllm.plugins.attention.sdpa:Sdpa",
    api=(1, 0),
    summary="torch's scaled dot-product attention over gathered blocks; any device, the reference",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "dim_qk": ANY,
        "dim_v": ANY,
        "queries_per_kv": ANY,
        "kv_format": {"bf16", "fp16", "fp32"},
        "block": MultipleOf(1),
    },
    features=frozenset({"lse", "sinks", "softcap", "window"}),
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host"},
)
