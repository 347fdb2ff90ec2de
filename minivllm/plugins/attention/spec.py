"""What the built-in attention back ends say about themselves."""

from minivllm.spec import ANY, AtLeast, MultipleOf, Needs, Range, Spec

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
DIMS = frozenset(range(8, 257, 8))
TRITON = Spec(
    impl="minivllm.plugins.attention.triton_backend:Triton",
    api=(1, 0),
    summary="paged attention in Triton: decode at the memory's speed, fused write, captured decode steps",
    priority=20,
    limits={
        "device": {"cuda"},
        "sm": AtLeast(80),
        "dtype": {"bfloat16", "float16", "float32"},
        "dim_qk": DIMS,
        "dim_v": DIMS,
        "queries_per_kv": Range(1, 64),
        "kv_format": {"bf16", "fp16", "fp32"},
        "block": MultipleOf(1),
    },
    features=frozenset({"lse", "repeatable", "sinks", "softcap", "v_in_k", "window"}),
    needs=(Needs("triton", "3.4", 'pip install "minivllm[triton]"'),),
    prefer={"block": 64},
    traits={"graph": "mixed", "plan": "device"},
)
