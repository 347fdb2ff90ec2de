"""Random options of an engine.  Lists are short if each value needs a compilation on a GPU."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from minivllm.device.native import library

MODELS = {
    "qwen3": 16, "llama": 13, "qwen2": 15, "pocket": 12, "gemma3": 9, "phi3": 9, "cohere2": 8, "gpt2": 5,
    "mixtral": 4, "qwen2_moe": 4, "qwen3_moe": 6, "gpt_oss": 6, "mpt": 6, "falcon": 6, "gpt_neo": 4,
    "qwen3_5": 18, "lfm2": 12,
}  # fmt: skip
VOCAB = {
    "qwen3": 288, "llama": 257, "qwen2": 320, "pocket": 2048, "gemma3": 264, "phi3": 296, "cohere2": 272, "gpt2": 280,
    "mixtral": 259, "qwen2_moe": 304, "qwen3_moe": 312, "gpt_oss": 328,
    "mpt": 336, "falcon": 344, "gpt_neo": 352, "qwen3_5": 360, "lfm2": 368,
}  # fmt: skip
# if two experts are nearly equal, rounding decides between them, and all later results differ
ROUTED = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
# models whose bits depend on the batch on a CPU without the native part
VARIABLE = {"qwen3_5"} if library.load() is None else set[str]()
HEADED = {"qwen3", "qwen3_5"}  # models whose checkpoints hold a head for next-token prediction
# choices without drafts; ``auto`` uses a head on a GPU only, and where nothing excludes it
NO_DRAFTS = ("none", "auto")
DRAFTERS = ["none", "none", "none", "ngram", "model", "suffix"]
HEAD_DRAFTERS = ["auto", "auto", "mtp", "mtp"]  # more of them for a model in ``HEADED``
SCHEDULERS: list[Any] = [
    "fcfs", "fcfs", "adaptive", "deadline", "fair", "prefill-first", "prefix-aware", "priority", "shortest-job",
    "static",
    {"name": "static", "options": {"batch": 3, "max_hold": 0.01}},
    {"name": "prefill-first", "options": {"batch": 3, "max_hold": 0.01, "prefill_cap": 40}},
    {"name": "deadline", "options": {"min_chunk": 5, "max_wait": 0.01}},
    {"name": "priority", "options": {"ageing": 0.01}},
]  # fmt: skip
EVICTORS: list[Any] = [
    "lru", "lfu", "fifo", "s3fifo", "prefix-depth", "cost-aware",
    {"name": "s3fifo", "options": {"small": 0.5, "promote_after": 1}},
    {"name": "prefix-depth", "options": {"band": 2}},
    {"name": "cost-aware", "options": {"horizon": 0.1, "ghosts": 0.0}},
    "agent-ttl",
    {"name": "tail-lru", "options": {"budget": 40}},
]  # fmt: skip
RULES = {"skip": ["layers.0.attn.o"], "bits": {"re:.*\\.qkv\\.[kv]": 16, "*.mlp.down": "fp8-weight", "*.mlp.*": 4}}
SMALL = {"group_size": 32}  # of 96 inputs
# forms with quantized activations, in which a last bit may become a step; those of fp8 are too large for a comparison
ROUNDING = ("int8-w8a8", "llm-int8")
FORMS: list[Any] = [
    "int8", "int8", "int4", "fp8-weight", {"name": "nf4", "options": SMALL}, *ROUNDING,
    {"name": "fp8-weight", "options": {"lm_head": True, "skip": ["layers.0.*"]}},
    {"name": "int4", "options": {"symmetric": False, "clip": True, "lm_head": True, "bits": {"*.down": 8}}},
    {"name": "int8", "options": {"embedding": True, **RULES}},
    {"name": "nf4", "options": {**SMALL, "lm_head": True, "bits": {"*.attn.*": "llm-int8"}}},
    {"name": "int4", "options": {"embedding": True, "bits": {"layers.1.*": "int8"}}},
    {"name": "llm-int8", "options": {"threshold": 2.0, **RULES}},
]  # fmt: skip
ROUTED_FORMS: list[Any] = [  # forms whose rules name no module that mixtures lack, and with unquantized activations
    "int8", "int4", "fp8-weight", {"name": "nf4", "options": SMALL},
    {"name": "int4", "options": {"symmetric": False, "lm_head": True, "bits": {"*.attn.*": 8}}},
    {"name": "int8", "options": {"embedding": True, "skip": ["layers.0.*"]}},
]  # fmt: skip
QUANTIZERS: list[Any] = [*["none"] * 2 * len(FORMS), *FORMS]
DISK = {"path": str(Path(tempfile.gettempdir()) / "minivllm-fuzz-kv"), "bytes": 1 << 26}
# by default a store loads only pages whose load is predicted to take less time than computing them, which is rare for
# models of this size
LOADED: dict[str, Any] = {"load": "always", "patience": 5.0}
STORES: list[Any] = [
    ["cpu"],
    [{"name": "cpu", "options": LOADED}], [{"name": "cpu", "options": {**LOADED, "eager": True}}],
    [{"name": "cpu", "options": {"bytes": 1 << 20, "eager": True}}, {"name": "disk", "options": {**DISK, **LOADED}}],
    [{"name": "disk", "options": {**DISK, **LOADED, "eager": False, "patience": 0.05}}],
]  # fmt: skip
ADAPTERS: list[dict[str, Any]] = [
    *[{"enable_lora": True}] * 3, {"adapters": ["ia3"]}, {"adapters": ["steering"]}, {"adapters": ["ia3", "steering"]},
    {"adapters": ["steering", "ia3"], "enable_lora": True}, {"adapters": ["lora", "ia3", "steering"]},
    {"adapters": ["ia3", "lora"]},
]  # fmt: skip
# compressors whose scores depend only on positions; scores of keys may be nearly equal, so rounding would decide
COMPRESSORS: list[Any] = [
    "streaming", {"name": "streaming", "options": {"sinks": 0}}, "random", {"name": "h2o", "options": {"recent": 1}},
]  # fmt: skip
REROTATED = {"name": "streaming", "options": {"sinks": 2, "rerotate": True}}
ROTARY = {"qwen3", "llama", "pocket", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"}  # without windows
UNCOMPRESSED = {"mpt", "falcon", "qwen3_5", "lfm2"}  # models with ALiBi or recurrent states
KV_FORMATS = ("auto", "auto", "auto", "auto", "auto", "int8", "fp8")
SAMPLERS = ("default", "default", "typical", "mirostat")
PLAIN = {  # the values that shrinking tries first
    "scheduler": "fcfs", "evictor": "lru", "sampler": "default", "drafter": "none", "quantizer": "none",
    "kv_format": "auto", "logprobs_mode": "raw_logprobs", "enable_prefix_caching": False,
    "partial_prefix_hits": False, "kvstore": [], "graph": "off", "run_ahead": 0, "batch_invariant": True, "fuse": True,
    "max_num_batched_tokens": 4096, "max_num_seqs": 16, "kvcache_block_size": 16, "num_kvcache_blocks": 2000,
    "max_model_len": 512, "speculate": "always", "num_speculative_tokens": 2, "compressor": "none", "compress_every": 0,
    "captured_drafts": False,
}  # fmt: skip


def device_defaults(device: str) -> dict[str, Any]:
    """Return the options that depend on the device and not on the seed.

    Ten processes share a GPU, each with several engines.
    """
    if device == "cuda":
        # the share is only a limit, because the number of blocks is given
        return {"device": "cuda", "attention": "triton", "gpu_memory_utilization": 0.9}
    return {"device": "cpu", "attention": "sdpa"}


def draw(rng: random.Random, device: str, dtype: str) -> dict[str, Any]:
    """Draw all options except the number of blocks, which depends on the requests."""
    model = rng.choices(list(MODELS), list(MODELS.values()))[0]
    seqs = rng.choice([1, 2, 3, 4, 8, 8, 16, 16, 24, 64])
    sampler = rng.choice(SAMPLERS)
    options: dict[str, Any] = {
        "model": model,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([n for n in (16, 33, 64, 256, 1024, 4096) if n >= seqs]),
        "max_model_len": rng.choice([256, 512, 512]),
        "kvcache_block_size": rng.choice([16, 16, 32, 64]),
        "enable_prefix_caching": rng.random() < 0.8,
        "partial_prefix_hits": rng.random() < 0.7,
        "graph": rng.choice(["auto", "auto", "mixed", "decode", "off"]),
        "graph_captures": rng.choice(["gradual", "start"]),
        "run_ahead": rng.choice([None, 0, 1, 1, 2, 3, 4]),
        "batch_invariant": rng.random() < 0.8,
        "fuse": rng.random() < 0.9,
        "scheduler": rng.choice(SCHEDULERS),
        "evictor": rng.choice(EVICTORS),
        "sampler": sampler,
        "drafter": rng.choice(DRAFTERS + HEAD_DRAFTERS * (model in HEADED)),
        "num_speculative_tokens": rng.choice([1, 2, 4, 7]),
        "speculate": rng.choice(["always", "always", "auto"]),
        "captured_drafts": rng.choice(["auto", "auto", True, False]),
        "logprobs_mode": rng.choice(["raw_logprobs", "raw_logprobs", "processed_logprobs"]),
        "quantizer": rng.choice(QUANTIZERS),
        "kv_format": rng.choice(KV_FORMATS),
    }
    return sound(options, device)


def sound(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the options without combinations that the engine refuses."""
    out = dict(options)
    if out["model"] in ROUTED:
        out["batch_invariant"] = True
    if out["model"] in VARIABLE:
        out["batch_invariant"] = out["batch_invariant"] and device != "cpu"
    if out["batch_invariant"]:
        out["quantizer"], out["fuse"] = "none", out["fuse"] or device == "cuda"
    if out["sampler"] == "mirostat" and out["drafter"] != "auto":  # it updates its state after each token of a row
        out["drafter"] = "none"
    if out["captured_drafts"] is True and (out["drafter"] in NO_DRAFTS or out["graph"] == "off"):
        out["captured_drafts"] = "auto"
    if device == "cpu" and out["graph"] != "off":
        out["graph"] = "auto"
    return out


def rounds(options: dict[str, Any]) -> bool:
    """Return whether a last bit that differs with the batch may become a step of a quantized value."""
    return options["kv_format"] != "auto" or any(name in json.dumps(options["quantizer"]) for name in ROUNDING)


def quantized(seed: int, engine: int, options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the options with a quantizer that is drawn for the seed.

    Mixtures of experts are float32 only, in which a last bit seldom decides between two experts.
    """
    routed = options["model"] in ROUTED
    if routed and dtype != "float32":
        return options
    chosen = random.Random(f"quantizer {seed} {engine}").choice(ROUTED_FORMS if routed else FORMS)
    more = {"kv_format": "auto"} if routed else {}  # a step of a quantized KV cache is larger than a last bit
    return {**options, **more, "batch_invariant": False, "quantizer": chosen}


def with_blocks(rng: random.Random, options: dict[str, Any], need: int) -> dict[str, Any]:
    """Draw ``num_kvcache_blocks`` between slightly more than the largest request needs and more than enough."""
    kind = rng.random()
    if kind < 0.45:
        blocks = need + rng.choice([0, 0, 1, 2, 3])
    else:
        blocks = int(need * rng.uniform(1.2, 3)) + 1 if kind < 0.75 else 4 * need + 200
    return {**options, "num_kvcache_blocks": blocks}


def with_stores(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Draw ``kvstore`` for half of the engines that cache prefixes.  The files of a disk store remain between cases."""
    stores = rng.choice([[]] * len(STORES) + STORES)
    return {**options, "kvstore": stores if options["enable_prefix_caching"] else []}


def with_adapters(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Draw methods and places for 1 to 8 adapters for some engines, with little host memory or enough for all."""
    if rng.random() < 0.5:
        return options
    places = rng.choice([1, 1, 2, 3, 8])
    return {
        **options,
        **rng.choice(ADAPTERS),
        "max_loras": places,
        "max_cpu_loras": rng.choice([places, places + 1, 16]),
    }


def with_compression(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Draw a compressor for some engines without drafts."""
    if rng.random() < 0.65 or options["drafter"] not in NO_DRAFTS or options["model"] in UNCOMPRESSED:
        return {**options, "compressor": "none", "compress_every": 0}
    able = options["model"] in ROTARY and options["kv_format"] == "auto"
    choices = [*COMPRESSORS, REROTATED] if able else COMPRESSORS
    return {**options, "compressor": rng.choice(choices), "compress_every": rng.choice([0, 0, 1, 3, 8])}


PASSED = ("adapters", "compressor", "compress_every", "encoder", "weights")  # options of a plain engine, if there


def plain_of(options: dict[str, Any], device: str, other: bool = False) -> dict[str, Any]:
    """Return the options of the plain engine, which computes the reference answers one at a time.

    It has no captures, no run-ahead and no shared data.  Options on which answers depend are as in ``options``.  With
    ``other`` its last bits differ, because fused norms and gates are separate or the reverse, and prompts are computed
    in pieces.
    """
    able = options["model"] not in VARIABLE if device == "cpu" else options["fuse"]
    spans = options.get("encoder", {}).get("options", {}).get("kind") == "span"  # not with batch_invariant
    invariant = options["quantizer"] == "none" and able and not spans
    kept = ("model", "fuse", "sampler", "logprobs_mode", "quantizer", "kv_format", "max_model_len")
    return {
        **{name: options[name] for name in kept},
        "fuse": options["fuse"] != other,
        "batch_invariant": invariant and not other,
        "graph": "off",
        "run_ahead": 0,
        "scheduler": "fcfs",
        "evictor": "lru",
        "drafter": "none",
        "enable_prefix_caching": False,
        "partial_prefix_hits": False,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8 if other else 1024,
        "kvcache_block_size": 32,
        "num_kvcache_blocks": 200,
        **{name: options[name] for name in PASSED if name in options},
    }
