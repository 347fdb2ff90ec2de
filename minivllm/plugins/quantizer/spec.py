"""Specs of the built-in quantizers."""

from minivllm.registration.spec import ANY, AtLeast, Spec

# quantiles of a normal distribution (arXiv:2305.14314, appendix E)
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

AWQ = Spec(
    impl="minivllm.plugins.quantizer.awq:Awq",
    api=(1, 7),
    summary="checkpoints of AWQ, version gemm: 4 bits with zero points",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"awq"}},
)
BITSANDBYTES = Spec(
    impl="minivllm.plugins.quantizer.bitsandbytes:BitsAndBytes",
    api=(1, 7),
    summary="checkpoints of bitsandbytes: NF4, FP4 (nested too), int8",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"bitsandbytes"}},
    traits={"online": "nf4"},  # the quantizer for an unquantized checkpoint
)
COMPRESSED_TENSORS = Spec(
    impl="minivllm.plugins.quantizer.compressed:CompressedTensors",
    api=(1, 7),
    summary="checkpoints of compressed-tensors: 2 to 8 bits packed, int8, float8",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "checkpoint": {"compressed-tensors"},
    },
)
FP8 = Spec(
    impl="minivllm.plugins.quantizer.eight:Fp8",
    api=(1, 7),
    summary="float8 weights with a scale per output row, float8 activations with one per token",
    options="minivllm.plugins.quantizer.options:Fp8Options",
    limits={"device": ANY, "sm": AtLeast(89), "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 8, "exponent": 4, "inputs": 8},
)
FP8_CHECKPOINT = Spec(
    impl="minivllm.plugins.quantizer.fp8_checkpoint:Fp8Checkpoint",
    api=(1, 7),
    summary="checkpoints of float8 weights with a scale per block, per row, or one (DeepSeek, Qwen)",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"fp8"}},
)
FP8_WEIGHT = Spec(
    impl="minivllm.plugins.quantizer.eight:Fp8WeightOnly",
    api=(1, 7),
    summary="float8 weights with a scale per output row, made while loading",
    options="minivllm.plugins.quantizer.options:Fp8WeightOptions",
    limits={"device": ANY, "sm": AtLeast(89), "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 8, "exponent": 4},
)
GGUF = Spec(
    impl="minivllm.plugins.quantizer.gguf:Gguf",
    api=(1, 7),
    summary="weights of GGUF files as they lie there: Q8_0, Q4_0, Q4_K, Q6_K; others unpacked while loading",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"gguf"}},
)
GPTQ = Spec(
    impl="minivllm.plugins.quantizer.gptq:Gptq",
    api=(1, 7),
    summary="checkpoints of GPTQ: 2, 3, 4 or 8 bits, act-order",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"gptq"}},
)
INT4 = Spec(
    impl="minivllm.plugins.quantizer.int4:Int4",
    api=(1, 7),
    summary="int4 weights with a scale per group of inputs of an output row, made while loading",
    options="minivllm.plugins.quantizer.options:Int4Options",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 4},  # not sliceable, because modules with 8 bits (option ``bits``) have the layout of int8
)
INT8 = Spec(
    impl="minivllm.plugins.quantizer.int8:Int8",
    api=(1, 7),
    summary="int8 weights with a scale per output row, made while loading",
    options="minivllm.plugins.quantizer.options:Int8Options",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 8},  # not sliceable, because a share of the inputs would need its own row scales
)
INT8_W8A8 = Spec(
    impl="minivllm.plugins.quantizer.eight:Int8W8A8",
    api=(1, 7),
    summary="int8 weights with a scale per output row, int8 activations with one per token",
    options="minivllm.plugins.quantizer.options:Int8W8A8Options",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 8, "inputs": 8},
)
LLM_INT8 = Spec(
    impl="minivllm.plugins.quantizer.eight:LlmInt8",
    api=(1, 7),
    summary="as bitsandbytes' LLM.int8(): int8 weights and activations, large activations as they are",
    options="minivllm.plugins.quantizer.options:LlmInt8Options",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 8, "inputs": 8},
)
MXFP4 = Spec(
    impl="minivllm.plugins.quantizer.mxfp4:Mxfp4",
    api=(1, 7),
    summary="checkpoints whose experts are MXFP4 (GPT-OSS), unpacked to the dtype of the run while loading",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float32"}, "checkpoint": {"mxfp4"}},
    features=frozenset({"batch_invariant"}),
    priority=10,
)
MXFP4_KEPT = Spec(
    impl="minivllm.plugins.quantizer.mxfp4:Mxfp4Kept",
    api=(1, 7),
    summary="checkpoints whose experts are MXFP4 (GPT-OSS), in 4 bits; a step unpacks those it uses",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float32"}, "checkpoint": {"mxfp4"}},
)
NF4 = Spec(
    impl="minivllm.plugins.quantizer.nf4:Nf4",
    api=(1, 7),
    summary="as bitsandbytes' NF4: 4 bits that stand for 16 numbers, a scale per 64 inputs of an output row",
    options="minivllm.plugins.quantizer.options:Nf4Options",
    limits={"device": ANY, "sm": ANY, "dtype": {"bfloat16", "float16", "float32"}, "checkpoint": {"none"}},
    traits={"bits": 4, "table": NF4_TABLE, "group": 64},
)
NONE = Spec(
    impl="minivllm.plugins.quantizer.none:Unquantized",
    api=(1, 7),
    summary="weights as they are in the checkpoint, in the dtype of the run",
    priority=10,
    limits={"device": ANY, "sm": ANY, "dtype": ANY, "checkpoint": {"none"}},
    features=frozenset({"batch_invariant"}),
)
