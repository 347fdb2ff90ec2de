"""Tiny random models, made by transformers and saved as Hugging Face directories, to compare the engine with."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GptOssConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    MixtralConfig,
    MptConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.utils import logging

from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.qwen2 import Qwen2
from minivllm.plugins.model.qwen3 import Qwen3

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
    "cohere2": Cohere2Config,
    "gpt2": GPT2Config,
    "ministral3": Ministral3Config,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "mpt": MptConfig,
    "falcon": FalconConfig,
    "gpt_neo": GPTNeoConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "lfm2": Lfm2Config,
    "lfm2_moe": Lfm2MoeConfig,
    "qwen3_next": Qwen3NextConfig,
}
ARCHS = {"llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
SMALL = {  # config fields of small models: 2 layers, width 32, 61 tokens, 6 experts if any
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28,
    "window_size": 6,
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "moe_shared_expert_intermediate_size": 28,
    "dense_intermediate_size": 48, "shared_intermediate_size": 28, "expert_ffn_hidden_size": 24, "share_expert_dim": 28,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "index_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "ffn_dim": 48, "decoder_ffn_dim": 48,
    "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8,
}  # fmt: skip
# other names in config classes for the number of experts, and for the number of experts per token
EXPERTS = re.compile(r"\w*n(um)?_(\w+_)?experts?|\w*expert_num")
CHOSEN = re.compile(r"\w*experts_per_tok(en)?|moe_(k|top_?k)|top_k_experts")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    values = {"rope_type": kind, "rope_theta": 100.0, **values}
    return {"rope_parameters": values}


def _window(types: list[str], **values: Any) -> dict[str, Any]:
    if types:
        layers = {"layer_types": types, "num_hidden_layers": len(types)}
    else:
        layers = {}
    return {"use_sliding_window": True, "sliding_window": 6, **layers, **values}


FULL = "full_attention"
NEAR = "sliding_attention"
# values of config.json to test, axis -> name -> fields; contexts of the rope variants are shorter than the prompts
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "heads": {
        "mha": {"num_key_value_heads": 4}, "mqa": {"num_key_value_heads": 1},
        "kv heads null": {"num_key_value_heads": None},
        "8 heads": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
    },
    "head_dim": {"head_dim 16": {"head_dim": 16}, "head_dim 6": {"head_dim": 6}, "head_dim null": {"head_dim": None}},
    "tied": {"tied": {"tie_word_embeddings": True}},
    "size": {
        "one layer": {"num_hidden_layers": 1}, "three layers": {"num_hidden_layers": 3},
        "64 tokens": {"vocab_size": 64}, "odd intermediate_size": {"intermediate_size": 37},
    },
    "eps": {"rms_norm_eps 0.05": {"rms_norm_eps": 0.05}, "layer_norm_eps 0.05": {"layer_norm_eps": 0.05}},
    "bias": {
        "attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True},
        "both biases": {"attention_bias": True, "mlp_bias": True},
    },
    "rope": {
        "rope_theta": _rope("default", rope_theta=37.0),
        "rope linear": _rope("linear", factor=4.0, rope_theta=5000.0),
        "rope llama3": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=16, rope_theta=10000.0),
        "rope llama3 of max_position_embeddings": {
            **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), "max_position_embeddings": 16},
        "rope dynamic": {**_rope("dynamic", factor=4.0), "max_position_embeddings": 16},
        "rope yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=16),
        "rope yarn truncated": _rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0,
                                     beta_slow=2.0, attention_factor=1.3, truncate=False),
        "rope yarn with queries that grow": _rope("yarn", factor=4.0, original_max_position_embeddings=16,
                                                  llama_4_scaling_beta=0.7),
        "rope longrope": {
            **_rope("longrope", factor=4.0, original_max_position_embeddings=16,
                    short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 2.0, 3.0, 4.0]),
            "original_max_position_embeddings": 16},
        "rope proportional": _rope("proportional", partial_rotary_factor=0.5),
        "half of each head rotates": _rope("default", partial_rotary_factor=0.5),
        "partial_rotary_factor": {"partial_rotary_factor": 0.5},
        "rope_scaling, the old name": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 50.0},
        "rope of each layer type": {"rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 50.0}, NEAR: {"rope_type": "default", "rope_theta": 9.0}}},
    },
    "window": {
        "window": {"sliding_window": 6}, "window from layer 1 on": _window([], max_window_layers=1),
        "window in all layers": _window([], max_window_layers=0), "window in layer 0": _window([NEAR, FULL]),
        "window of one token": _window([NEAR, NEAR], sliding_window=1),
        "window switched off": {**_window([], max_window_layers=1), "use_sliding_window": False},
        "chunked attention": {"layer_types": ["chunked_attention", FULL], "attention_chunk_size": 4},
    },
    "experts": {
        "weights of the chosen are normalized": {"norm_topk_prob": True},
        "experts in every other layer": {"decoder_sparse_step": 2, "num_hidden_layers": 3},
        "a layer without experts": {"mlp_only_layers": [1]}, "one expert a token": {"num_experts_per_tok": 1},
        "all experts a token": {"num_experts_per_tok": 6}, "16 experts": {"num_experts": 16},
        "a gate that is clamped at once": {"swiglu_limit": 0.3, "swiglu_alpha": 3.0},
        "a small shared expert": {"shared_expert_intermediate_size": 12}, "no bias of q, k and v": {"qkv_bias": False},
    },
    "other": {
        "hidden_act swish": {"hidden_act": "swish"}, "hidden_act gelu": {"hidden_act": "gelu"},
        "hidden_act relu": {"hidden_act": "relu"}, "not causal": {"is_causal": False},
        "pretraining_tp": {"pretraining_tp": 2},
        "a layer with a window of its own": {"per_layer_config": {"1": {"sliding_window": 4}}},
        "a layer of its own size": {"per_layer_config": {"1": {"intermediate_size": 24}}},
        "logits capped": {"final_logit_softcapping": 3.0}, "scores capped": {"attn_logit_softcapping": 3.0},
        "scaled": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
                   "attention_multiplier": 0.3},
    },
}  # fmt: skip


def _defaults(cls: Any) -> dict[str, Any]:
    """Return the arguments of a config class with their defaults.  Up to transformers 5.2 it is no dataclass."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.default for field in dataclasses.fields(cls)}
    arguments = inspect.signature(cls).parameters
    return {name: argument.default for name, argument in arguments.items()}


def small_config(cls: Any, **values: Any) -> PretrainedConfig:
    """Return a small config of any config class of transformers.

    It has the fields of ``SMALL`` that the class has, under any alias, at most six experts, and ``values``.
    """
    fields = _defaults(cls)
    known = fields.keys() | cls.attribute_map.keys()
    values = {**_layers(known, values), **values}

    def canonical(name: str) -> str:
        return cls.attribute_map.get(name, name)

    small = {name: value for name, value in SMALL.items() if name in known}
    aliases = {canonical(name) for name in (*small, *values)}
    for name, default in fields.items():
        for pattern, most in ((EXPERTS, SMALL["num_experts"]), (CHOSEN, SMALL["num_experts_per_tok"])):
            large = type(default) is int and default > most
            if large and pattern.fullmatch(name) and name not in aliases:
                small[name] = most
    for name in list(small):
        if name not in values and canonical(name) in values:
            del small[name]
    # a copy, because some classes change the values that they receive
    return cls(**copy.deepcopy({**small, **values}))


def _layers(known: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that give the kind of each layer, if its class has such fields."""
    layers = values.get("num_hidden_layers", SMALL["num_hidden_layers"])
    if "attention_types" in known:  # GPT-Neo has a list of [kinds of layers, repetitions]
        pairs = [["global", "local"], layers // 2]
        last = [["global"], layers % 2]
        return {"attention_types": [pairs, last]}
    if "linear_num_key_heads" in known:  # layers with attention alternate with layers that have a recurrent state
        return {"layer_types": _alternating("linear_attention", layers)}
    if "conv_L_cache" not in known:
        return {}
    kinds = _alternating("conv", layers)
    own = {"layer_types": kinds, "block_multiple_of": 16, "num_dense_layers": 1}
    return {name: value for name, value in own.items() if name in known}


def _alternating(kind: str, layers: int) -> list[str]:
    """Return the kinds of layers that alternate with full attention; a single layer has full attention."""
    if layers == 1:
        return [FULL]
    return [FULL if i % 2 else kind for i in range(layers)]


def tiny_config(family: str = "llama", heads: str = "gqa", **values) -> PretrainedConfig:
    """Return a config of a model family: 2 layers, width 32, 61 tokens; ``values`` replace fields."""
    q, kv = HEADS[heads]
    values = {"num_attention_heads": q, "num_key_value_heads": kv, **values}
    return small_config(CONFIGS[family], **values)


def attention_of(cfg: Any) -> str:
    """Return the attention implementation of transformers to compare with.

    It is "eager", or "sdpa" for Falcon, whose eager attention adds ALiBi's slopes twice (transformers 5.24).
    """
    if getattr(cfg, "model_type", "") == "falcon":
        return "sdpa"
    return "eager"


def tiny_model(cfg: PretrainedConfig, seed: int = 0, cls: Any = AutoModelForCausalLM):
    """Return a random float32 model of transformers.

    Weights are large enough that logits differ clearly, and biases and norms are random too.
    """
    torch.manual_seed(seed)
    make = getattr(cls, "from_config", None) or cls._from_config
    model = make(cfg, dtype=torch.float32, attn_implementation=attention_of(cfg)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3 if p.dim() > 1 else 0.1)
            if "norm" in name:
                p.add_(1)
    return model


def save(model: Any, path: Path, shard: str | None = None) -> Path:
    """Write config.json and safetensors of a model into a directory, and return it.

    ``shard="20KB"`` splits the weights over several files of at most that size.
    """
    limits = {"max_shard_size": shard} if shard else {}
    with quiet():
        model.save_pretrained(path, **limits)
    return Path(path)


def tiny_dir(path: Path, family: str = "llama", heads: str = "gqa", seed: int = 0, shard: str | None = None, **values):
    """Make and save a random model (see ``save``), and return (path, config, model of transformers)."""
    cfg = tiny_config(family, heads, **values)
    model = tiny_model(cfg, seed)
    return save(model, path, shard), cfg, model


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off the progress bars and warnings of transformers in a block."""
    bars = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory with a single safetensors file."""
    return load_file(path / "model.safetensors")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the safetensors file of a directory."""
    save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})


def edits(path: Path, change: Callable[[Tensor], Tensor | None]) -> Iterator[str]:
    """Change one tensor of a model directory at a time, yield its name, and restore all tensors at the end.

    A ``change`` that returns None leaves the tensor out.
    """
    tensors = read_tensors(path)
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        others = {k: v for k, v in tensors.items() if k != name}
        new = change(tensor)
        write_tensors(path, others if new is None else {**others, name: new})
        yield name
    write_tensors(path, tensors)
