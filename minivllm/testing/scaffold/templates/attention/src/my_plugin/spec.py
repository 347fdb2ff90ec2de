"""The spec of the back end.  The engine refuses requests outside of its claims, and the kit tests the claims."""

from minivllm.plugin import ANY, MultipleOf, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 7),
    summary="attention row by row, in float32",
    limits={
        "device": ANY,
        "sm": ANY,  # 10 * major + minor of the GPU's compute capability; AtLeast(90) is Hopper
        "dtype": {"bfloat16", "float16", "float32"},
        "kv_format": {"bf16", "fp16", "fp32"},
        "dim_qk": ANY,
        "dim_v": ANY,
        "queries_per_kv": ANY,
        "block": MultipleOf(1),
    },
    features=frozenset({"window"}),  # add softcap, sinks, lse ... once it supports them
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host"},
)
