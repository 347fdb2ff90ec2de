"""Specs of the built-in attention back ends."""

from collections.abc import Sequence
from functools import partial

from minivllm.registration.spec import ANY, AtLeast, MultipleOf, Needs, PluginQuery, Range, Reason, Spec, plain

EVERY_BLOCK = MultipleOf(1)  # limit of the block size: any number of tokens
PAGES_OF_256 = MultipleOf(256)
FROM_AMPERE = AtLeast(80)  # limit of the compute capability times 10
UP_TO_16 = Range(1, 16)  # limits of the number of query heads per KV head
UP_TO_64 = Range(1, 64)
HERE = "minivllm.plugins.attention"
_back_end = partial(Spec, api=(1, 7))


def invariant_on_cpu(request: PluginQuery) -> Sequence[Reason]:
    """Refuse batch invariance on a GPU, where torch chooses kernels by the size of the step."""
    device = request.facts.get("device", "cpu")
    if "batch_invariant" in request.features and device != "cpu":
        return [Reason("device with batch_invariant", plain(device), "{cpu}", "take the back end triton")]
    return []


SDPA_LIMITS = {
    "device": ANY,
    "sm": ANY,
    "dtype": {"bfloat16", "float16", "float32"},
    "dim_qk": ANY,
    "dim_v": ANY,
    "queries_per_kv": ANY,
    "kv_format": {"bf16", "fp16", "fp32", "int8", "fp8"},
    "block": EVERY_BLOCK,
}
SDPA_FEATURES = {"alibi", "batch_invariant", "lse", "sinks", "softcap", "spans", "window"}
SDPA = _back_end(
    impl=f"{HERE}.sdpa:Sdpa",
    summary="torch's scaled dot-product attention over gathered blocks; any device, the reference",
    limits=SDPA_LIMITS,
    features=frozenset(SDPA_FEATURES),
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host", "drafts": "merged"},
    check=invariant_on_cpu,
)


def float8_on(request: PluginQuery) -> Sequence[Reason]:
    """Refuse float8 on GPUs without instructions for float8."""
    facts = request.facts
    if facts.get("kv_format") != "fp8" or facts.get("device") != "cuda":
        return []
    sm = facts.get("sm", 89)
    if sm >= 89:
        return []
    return [Reason("kv_format with sm", f"fp8 with {sm}", "sm 89 or later", "take kv_format=int8")]


DIMS = frozenset(range(8, 257, 8))
TRITON_LIMITS = {
    "device": {"cuda"},
    "sm": FROM_AMPERE,
    "dtype": {"bfloat16", "float16", "float32"},
    "dim_qk": DIMS,
    "dim_v": DIMS,
    "queries_per_kv": UP_TO_64,
    "kv_format": {"bf16", "fp16", "fp32", "int8", "fp8"},
    "block": EVERY_BLOCK,
}
TRITON_FEATURES = {*SDPA_FEATURES, "repeatable", "v_in_k"}
TRITON_PACKAGE = Needs("triton", "3.4", 'pip install "minivllm[triton]"')
TRITON = _back_end(
    impl=f"{HERE}.triton_backend:Triton",
    summary="paged attention in Triton: decode at the memory's speed, fused write, captured decode steps",
    options=f"{HERE}.options:TritonOptions",
    priority=20,
    limits=TRITON_LIMITS,
    features=frozenset(TRITON_FEATURES),
    needs=(TRITON_PACKAGE,),
    prefer={"block": 64},
    traits={"graph": "mixed", "plan": "device"},
    check=float8_on,
)


# ---- over libraries: they read the cache in place, in the dtype of the model ----------------------------------------

HALVES = {"bfloat16": "bf16", "float16": "fp16"}  # dtype -> KV format that stores it unchanged
HALF_DTYPES = frozenset(HALVES)
HALF_FORMATS = frozenset(HALVES.values())


def plainly(request: PluginQuery) -> Sequence[Reason]:
    """Refuse keys and values of different sizes, and a KV format whose dtype is not the model's."""
    facts = request.facts
    reasons = []
    if "dim_qk" in facts and "dim_v" in facts:
        dim_qk, dim_v = facts["dim_qk"], facts["dim_v"]
        if _set(dim_qk) != _set(dim_v):
            reasons.append(Reason("dim_v", plain(dim_v), f"that of dim_qk, {plain(dim_qk)}"))
    if "dtype" in facts and "kv_format" in facts:
        dtype, kv_format = facts["dtype"], facts["kv_format"]
        want = HALVES.get(dtype)
        if want != kv_format:
            reasons.append(Reason("kv_format", kv_format, f"{want or 'none'} with dtype={dtype}"))
    return reasons


def _set(value: object) -> frozenset:
    """Return a set as it is, or a single value as a set."""
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return frozenset({value})


# Priorities below sdpa's, so that these back ends are chosen by name only, until the kit has passed on a GPU and a
# measurement shows their rank (docs/attention.md).
_library = partial(_back_end, priority=-1, check=plainly)
FLASH_ATTN_LIMITS = {
    "device": {"cuda"},
    "sm": {90},
    "dtype": HALF_DTYPES,
    "dim_qk": {64, 96, 128, 192, 256},
    "dim_v": {64, 96, 128, 192, 256},
    "queries_per_kv": UP_TO_16,
    "kv_format": HALF_FORMATS,
    # excludes block sizes that equal a key tile of the kernels, which read beyond the end of such blocks
    "block": {16, 32, 256},
}
FLASH_ATTN_FEATURES = frozenset({"lse", "repeatable", "sinks", "softcap", "window"})
FLASH_ATTN_PACKAGE = Needs("flash_attn.cute", "4.0.0b36", 'pip install "flash-attn-4[cu13]"', dist="flash-attn-4")
FLASH_ATTN = _library(
    impl=f"{HERE}.flash_attn:FlashAttn",
    summary="FlashAttention-4 on Hopper: one call for prompts, chunks and decode rows",
    limits=FLASH_ATTN_LIMITS,
    features=FLASH_ATTN_FEATURES,
    needs=(FLASH_ATTN_PACKAGE,),
    prefer={"block": 32},
    traits={"graph": "mixed", "plan": "device"},
)
FLASH_ATTN2_LIMITS = {
    "device": {"cuda"},
    "sm": FROM_AMPERE,
    "dtype": HALF_DTYPES,
    "dim_qk": DIMS,
    "dim_v": DIMS,
    "queries_per_kv": UP_TO_64,
    "kv_format": HALF_FORMATS,
    "block": PAGES_OF_256,
}
FLASH_ATTN2_INSTALL = "pip install flash-attn --no-build-isolation"
FLASH_ATTN2_PACKAGE = Needs("flash_attn.flash_attn_interface", "2.6", FLASH_ATTN2_INSTALL, dist="flash-attn")
FLASH_ATTN2 = _library(
    impl=f"{HERE}.flash_attn2:FlashAttn2",
    summary="FlashAttention-2 over pages of 256 tokens, split-KV decode; Ampere and later",
    limits=FLASH_ATTN2_LIMITS,
    features=frozenset({"lse", "softcap", "window"}),
    needs=(FLASH_ATTN2_PACKAGE,),
    prefer={"block": 256},
    traits={"graph": "none", "plan": "device"},  # captured steps have not been tested
)
FLASHINFER_LIMITS = {
    "device": {"cuda"},
    "sm": {90},
    "dtype": HALF_DTYPES,
    "dim_qk": {64, 128, 256},
    "dim_v": {64, 128, 256},
    "queries_per_kv": UP_TO_16,
    "kv_format": HALF_FORMATS,
    "block": {16, 32, 64, 128},
}
FLASHINFER_INSTALL = "pip install flashinfer-python==0.6.14"
FLASHINFER_PACKAGE = Needs("flashinfer", "0.6.14", FLASHINFER_INSTALL, dist="flashinfer-python")
FLASHINFER = _library(
    impl=f"{HERE}.flashinfer:FlashInfer",
    summary="FlashInfer on Hopper: XQA for decode rows, planned paged prefill for longer ones",
    options=f"{HERE}.options:FlashInferOptions",
    limits=FLASHINFER_LIMITS,
    features=frozenset({"window"}),
    needs=(FLASHINFER_PACKAGE,),
    prefer={"block": 64},
    traits={"graph": "decode", "plan": "device"},
)
