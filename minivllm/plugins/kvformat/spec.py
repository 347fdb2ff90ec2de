"""Specs of the built-in KV formats.

``holds`` lists the dtypes of a model whose keys and values a format stores without loss.  A format is chosen by it if
the configuration names none.
"""

from typing import Any

from minivllm.registration.spec import ANY, Spec


def _kv_format(target: str, summary: str, holds: set[str], **more: Any) -> Spec:
    """Return the spec of a format that runs on any device."""
    limits = {"device": ANY, "sm": ANY, "dtype": ANY, "holds": holds}
    impl = f"minivllm.plugins.kvformat.{target}"
    return Spec(impl=impl, api=(1, 0), summary=summary, limits=limits, **more)


BF16 = _kv_format("plain:Bf16", "keys and values in bfloat16", {"bfloat16"}, priority=10)
FP16 = _kv_format("plain:Fp16", "keys and values in float16", {"float16"}, priority=10)
FP32 = _kv_format("plain:Fp32", "keys and values in float32", {"bfloat16", "float16", "float32"})
INT8 = _kv_format("scaled:Int8KV", "keys and values in int8, a float32 scale for each token and head", set())
FP8 = _kv_format("scaled:Fp8KV", "keys and values in float8 (e4m3), a float32 scale for each token and head", set())
