"""The spec of the back end."""

from minivllm.plugin import ANY, MultipleOf, Spec

TOPBLOCKS = Spec(
    impl="minivllm_topblocks.backend:TopBlocks",
    api=(1, 5),
    summary="approximate: decode rows attend to the best blocks of their context",
    options="minivllm_topblocks.options:TopBlocksOptions",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"float32", "bfloat16", "float16"},
        "kv_format": {"fp32", "bf16", "fp16"},
        "dim_qk": ANY,
        "dim_v": ANY,
        "queries_per_kv": ANY,
        "block": MultipleOf(1),
    },
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host", "approximate": True},
)
