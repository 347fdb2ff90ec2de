"""Specs of the built-in quantizers."""

from collections.abc import Set
from typing import Any

from minivllm.registration.spec import ANY, AtLeast, Spec

HERE = "minivllm.plugins.quantizer"
FLOATS = frozenset({"bfloat16", "float16", "float32"})
WIDE = frozenset({"bfloat16", "float32"})  # the dtypes with float32's range of exponents
FLOAT8 = AtLeast(89)  # compute capability times 10 of GPUs with float8

# the 16 numbers of NF4: quantiles of a normal distribution (arXiv:2305.14314, appendix E)
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def reader(target: str, checkpoint: str, summary: str, dtypes: Set[str] = FLOATS, sm: Any = ANY, **more: Any) -> Spec:
    """Return the spec of a quantizer for checkpoints that are quantized with the method ``checkpoint``.

    ``target`` is the module and the class of the quantizer.  ``dtypes`` are the supported dtypes of a run, ``sm``
    limits the compute capability of GPUs, and ``more`` are further fields of ``Spec``.
    """
    limits: dict[str, Any] = {"device": ANY, "sm": sm}
    limits["dtype"] = dtypes
    limits["checkpoint"] = {checkpoint}
    return Spec(impl=f"{HERE}.{target}", api=(1, 7), summary=summary, limits=limits, **more)


def maker(target: str, options: str, summary: str, sm: Any = ANY, **traits: Any) -> Spec:
    """Return the spec of a quantizer that quantizes weights while it loads them from a checkpoint of floating point.

    ``target`` is the module and the class of the quantizer, and ``options`` the class of its options.
    """
    path = f"{HERE}.options:{options}"
    return reader(target, "none", summary, sm=sm, options=path, traits=traits)


AWQ = reader("awq:Awq", "awq", "checkpoints of AWQ, version gemm: 4 bits with zero points")
BITSANDBYTES = reader(
    "bitsandbytes:BitsAndBytes",
    "bitsandbytes",
    "checkpoints of bitsandbytes: NF4, FP4 (nested too), int8",
    traits={"online": "nf4"},  # the quantizer that is used instead for an unquantized checkpoint
)
COMPRESSED_TENSORS = reader(
    "compressed:CompressedTensors",
    "compressed-tensors",
    "checkpoints of compressed-tensors: 2 to 8 bits packed, int8, float8",
)
FP8 = maker(
    "eight:Fp8",
    "Fp8Options",
    "float8 weights with a scale per output row, float8 activations with one per token",
    sm=FLOAT8,
    bits=8,
    exponent=4,
    inputs=8,
)
FP8_CHECKPOINT = reader(
    "fp8_checkpoint:Fp8Checkpoint",
    "fp8",
    "checkpoints of float8 weights with a scale per block, per row, or one (DeepSeek, Qwen)",
)
FP8_WEIGHT = maker(
    "eight:Fp8WeightOnly",
    "Fp8WeightOptions",
    "float8 weights with a scale per output row, made while loading",
    sm=FLOAT8,
    bits=8,
    exponent=4,
)
GGUF = reader(
    "gguf:Gguf",
    "gguf",
    "weights of GGUF files as they lie there: Q8_0, Q4_0, Q4_K, Q6_K; others unpacked while loading",
)
GPTQ = reader("gptq:Gptq", "gptq", "checkpoints of GPTQ: 2, 3, 4 or 8 bits, act-order")
INT4 = maker(
    "int4:Int4",
    "Int4Options",
    "int4 weights with a scale per group of inputs of an output row, made while loading",
    bits=4,  # not sliceable, because modules with 8 bits (option ``bits``) have the layout of int8
)
INT8 = maker(
    "int8:Int8",
    "Int8Options",
    "int8 weights with a scale per output row, made while loading",
    bits=8,  # not sliceable, because a share of the inputs would need its own row scales
)
INT8_W8A8 = maker(
    "eight:Int8W8A8",
    "Int8W8A8Options",
    "int8 weights with a scale per output row, int8 activations with one per token",
    bits=8,
    inputs=8,
)
LLM_INT8 = maker(
    "eight:LlmInt8",
    "LlmInt8Options",
    "as bitsandbytes' LLM.int8(): int8 weights and activations, large activations as they are",
    bits=8,
    inputs=8,
)
MXFP4 = reader(
    "mxfp4:Mxfp4",
    "mxfp4",
    "checkpoints whose experts are MXFP4 (GPT-OSS), unpacked to the dtype of the run while loading",
    WIDE,
    features=frozenset({"batch_invariant"}),
    priority=10,
)
MXFP4_KEPT = reader(
    "mxfp4:Mxfp4Kept",
    "mxfp4",
    "checkpoints whose experts are MXFP4 (GPT-OSS), in 4 bits; a step unpacks those it uses",
    WIDE,
)
NF4 = maker(
    "nf4:Nf4",
    "Nf4Options",
    "as bitsandbytes' NF4: 4 bits that stand for 16 numbers, a scale per 64 inputs of an output row",
    bits=4,
    table=NF4_TABLE,
    group=64,
)
NONE = Spec(
    impl="minivllm.plugins.quantizer.none:Unquantized",
    api=(1, 7),
    summary="weights as they are in the checkpoint, in the dtype of the run",
    priority=10,
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "checkpoint": {"none"}},
    features=frozenset({"batch_invariant"}),
)
