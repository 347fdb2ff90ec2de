"""What the built-in KV formats say about themselves.

``holds`` is asked for when the user left the format open: the dtypes whose keys and values it stores without loss.
"""

from minivllm.registration.spec import ANY, Spec

BF16 = Spec(
    impl="minivllm.plugins.kvformat.plain:Bf16",
    api=(1, 0),
    summary="keys and values in bfloat16",
    priority=10,
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "holds": {"bfloat16"}},
)
FP16 = Spec(
    impl="minivllm.plugins.kvformat.plain:Fp16",
    api=(1, 0),
    summary="keys and values in float16",
    priority=10,
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "holds": {"float16"}},
)
FP32 = Spec(
    impl="minivllm.plugins.kvformat.plain:Fp32",
    api=(1, 0),
    summary="keys and values in float32",
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "holds": {"bfloat16", "float16", "float32"}},
)
INT8 = Spec(
    impl="minivllm.plugins.kvformat.scaled:Int8KV",
    api=(1, 0),
    summary="keys and values in int8, a float32 scale for each token and head",
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "holds": frozenset()},
)
FP8 = Spec(
    impl="minivllm.plugins.kvformat.scaled:Fp8KV",
    api=(1, 0),
    summary="keys and values in float8 (e4m3), a float32 scale for each token and head",
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "holds": frozenset()},
)
