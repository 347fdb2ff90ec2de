"""The spec of the back end."""

from minivllm.plugin import AtLeast, MultipleOf, Needs, Range, Spec

XFORMERS = Spec(
    impl="minivllm_xformers.backend:Xformers",
    api=(1, 6),
    summary="xFormers' memory-efficient attention over gathered keys and values",
    limits={
        "device": {"cuda"},
        "sm": AtLeast(80),
        "dtype": {"bfloat16", "float16", "float32"},
        "kv_format": {"bf16", "fp16", "fp32"},
        "dim_qk": MultipleOf(8),  # the kernel loads 16 bytes at once
        "dim_v": MultipleOf(8),
        "queries_per_kv": Range(1, 64),
        "block": MultipleOf(1),
    },
    features=frozenset({"lse", "sinks", "window"}),
    needs=(Needs("xformers", "0.0.35", "pip install 'xformers>=0.0.35'"),),
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host"},
)
