"""Tiny random models as Hugging Face directories, made by transformers: what the engine is compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.qwen2 import Qwen2
from minivllm.plugins.model.qwen3 import Qwen3

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
ARCHS = {"llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_config(family: str = "llama", heads: str = "gqa", **values) -> PretrainedConfig:
    """2 layers, 32 wide, 61 tokens; ``values`` override."""
    q, kv = HEADS[heads]
    base = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return CONFIGS[family](**{**base, **values})


def tiny_model(cfg: PretrainedConfig, seed: int = 0):
    """transformers' float32 model with weights large enough that logits differ clearly, biases and norms random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cfg, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3 if p.dim() > 1 else 0.1)
            if "norm" in name:
                p.add_(1)
    return model


def tiny_dir(path: Path, family: str = "llama", heads: str = "gqa", seed: int = 0, shard: str | None = None, **values):
    """Write config.json and safetensors (several with ``shard="20KB"``); returns (path, config, transformers model)."""
    cfg = tiny_config(family, heads, **values)
    model = tiny_model(cfg, seed)
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    return Path(path), cfg, model
