"""Random config.json files of the native families, and the comparison of a file's model with transformers' model.

Each key is present, absent or null, in old and new spelling, alone and in conflict.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ModelError
from minivllm.plugins.model import spec as specs
from minivllm.testing.harness import Harness
from minivllm.testing.model_config import logits, unstable
from minivllm.testing.tiny import SMALL, quiet, save

FULL, NEAR = "full_attention", "sliding_attention"
FAMILIES = {
    next(iter(s.limits["model_type"])): (next(iter(s.limits["architecture"])), s.impl)
    for s in vars(specs).values()
    if isinstance(s, specs.Spec) and isinstance(s.limits, Mapping) and isinstance(s.limits["model_type"], set)
}
PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(24)]
ABSENT = object()
PLAIN = ("llama", "qwen2", "qwen3")  # read without transformers
ROPES: tuple[dict[str, Any], ...] = (
    {}, {"factor": 4.0, "kind": "linear"}, {"factor": 4.0, "kind": "dynamic"},
    {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, {"kind": "yarn", "factor": 4.0},
    {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": 1.3,
     "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    {"kind": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"kind": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
     "original_max_position_embeddings": 16},
    {"kind": "default"}, {"kind": "default", "partial_rotary_factor": 0.5},
)  # fmt: skip
# key -> values in files of families that have it, and sometimes of others
KEYS: Mapping[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 2, 4, None, ABSENT), "head_dim": (8, 16, None, ABSENT),
    "tie_word_embeddings": (True, False, None, ABSENT),
    "sliding_window": (6, 1, None, ABSENT, 0), "use_sliding_window": (True, False, None, ABSENT),
    "max_window_layers": (0, 1, 2, ABSENT, None), "sliding_window_pattern": (2, 3, ABSENT),
    "layer_types": ([FULL, NEAR, FULL], [NEAR] * 3, [FULL] * 3, ["attention", NEAR, FULL], None, ABSENT, [FULL, NEAR]),
    "attention_bias": (True, False, None, ABSENT), "mlp_bias": (True, False, None, ABSENT),
    "qkv_bias": (True, False, ABSENT), "use_bias": (True, False, ABSENT), "enable_bias": (True, False, ABSENT),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new", "swish", None, ABSENT),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu", "silu", None, ABSENT),
    "activation_function": ("gelu_new", "gelu", "relu", ABSENT),
    "max_position_embeddings": (16, 64, 256), "original_max_position_embeddings": (16, None, ABSENT, ABSENT),
    "partial_rotary_factor": (0.5, 1.0, None, ABSENT, ABSENT), "rope_theta": (37.0, 5000, None, ABSENT),
    "rope_local_base_freq": (9.0, None, ABSENT), "rope_interleaved": (True, ABSENT),
    "rms_norm_eps": (0.05, 1e-6, ABSENT), "layer_norm_eps": (0.05, ABSENT), "norm_epsilon": (0.05, ABSENT),
    "layer_norm_epsilon": (0.05, ABSENT),
    "num_experts": (4, 6, ABSENT), "num_local_experts": (4, 6, ABSENT), "num_experts_per_tok": (1, 2, ABSENT),
    "moe_intermediate_size": (24, 12), "shared_expert_intermediate_size": (28, 16),
    "decoder_sparse_step": (1, 2, ABSENT), "mlp_only_layers": ([], [1], None, ABSENT),
    "norm_topk_prob": (True, False, None, ABSENT),
    "swiglu_limit": (0.3, None, ABSENT), "swiglu_alpha": (3.0, ABSENT),
    "no_rope_layers": ([1, 0, 1], [0, 1, 1], None, ABSENT, [1, 0]), "no_rope_layer_interval": (2, 3, ABSENT),
    "query_pre_attn_scalar": (8, 20, ABSENT), "attn_logit_softcapping": (3.0, None, ABSENT),
    "final_logit_softcapping": (3.0, None, ABSENT), "logit_scale": (0.5, 1.0, None, ABSENT),
    "use_qk_norm": (False, None, ABSENT), "use_bidirectional_attention": (False, None, ABSENT, True),
    "embedding_multiplier": (2.0, ABSENT), "residual_multiplier": (0.5, ABSENT), "logits_scaling": (2.0, ABSENT),
    "attention_multiplier": (0.3, ABSENT),
    "n_embd": (32, 48, ABSENT), "n_layer": (1, 2, ABSENT), "n_head": (2, 4, ABSENT), "n_positions": (64, 128, ABSENT),
    "n_inner": (40, None, ABSENT), "scale_attn_weights": (True, False, ABSENT),
    "scale_attn_by_inverse_layer_idx": (True, False, ABSENT),
    "do_layer_norm_before": (True, ABSENT), "word_embed_proj_dim": (32, ABSENT), "ffn_dim": (40, 48),
    "eos_token_id": (2, [2, 3], None, ABSENT), "bos_token_id": (1, None, ABSENT), "pad_token_id": (0, None, ABSENT),
    "pretraining_tp": (1, 2, ABSENT), "is_causal": (True, ABSENT), "per_layer_config": (None, ABSENT),
    "quantization_config": (None, ABSENT), "use_mrope": (False, ABSENT), "auto_map": ({}, ABSENT),
    "unknown_key": ("x", ABSENT),
}  # fmt: skip
PLACES = {"num_hidden_layers": (1, 2, 3), "hidden_size": (32,), "num_attention_heads": (4,), "vocab_size": (61, 64),
          "intermediate_size": (48, 37)}  # fmt: skip
# entries without which transformers' Ministral 3 does not run
GROWTH = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
LONG = {"layer_types", "no_rope_layers"}  # keys with one entry for each layer


def rope_of(choose: random.Random, nested: bool) -> dict[str, Any]:
    """Return the keys of a file that describe its rotary embedding, in one or several spellings."""
    found: dict[str, Any] = {}
    for name in choose.choice((("rope_parameters",), ("rope_scaling",), ("rope_scaling", "rope_parameters"), ())):
        found[name] = _table(choose, nested)
    if choose.random() < 0.5:
        found["rope_theta"] = choose.choice((37.0, 5000, None) if choose.random() < 0.3 else (37.0, 5000))
    return found


def _table(choose: random.Random, nested: bool) -> Any:
    if choose.random() < 0.1:
        return choose.choice((None, {}))
    if choose.random() < (0.4 if nested else 0.05):
        kinds = choose.choice(((FULL, NEAR), (FULL, NEAR), (FULL,), (NEAR,)))
        return {kind: choose.choice((_flat(choose), _flat(choose), None)) for kind in kinds}
    return _flat(choose)


def _flat(choose: random.Random) -> dict[str, Any]:
    table = dict(choose.choice(ROPES))
    kind = table.pop("kind", None)
    for name in choose.choice((("rope_type",), ("type",), ("rope_type", "type"))):
        if kind is not None:
            table[name] = kind
    if choose.random() < 0.5:
        table["rope_theta"] = choose.choice((100.0, 5000, 5000.0))
    if choose.random() < 0.05 and table:
        table[choose.choice(sorted(table))] = None
    return table


def model_of(family: str) -> dict[str, Any]:
    """Return a small config.json of a family."""
    cls = CONFIG_MAPPING[family]
    own = {f.name for f in dataclasses.fields(cls)} | cls.attribute_map.keys()
    small = {k: v for k, v in SMALL.items() if k in own}
    if "linear_num_key_heads" in own:
        small["layer_types"] = ["linear_attention", "full_attention"]
    elif family == "lfm2_moe":  # its class has no default for it
        small["layer_types"] = ["conv", "full_attention"]
    return {"model_type": family, "architectures": [FAMILIES[family][0]], **small}


def make_file(family: str, seed: int, plain: bool = False) -> dict[str, Any]:
    """Return a config.json of a family with random keys.  ``plain`` adds few keys that the family does not have."""
    choose, cls = random.Random(f"{family} {seed}"), CONFIG_MAPPING[family]
    own = {f.name for f in dataclasses.fields(cls)} | cls.attribute_map.keys()
    raw = model_of(family)
    raw |= {k: choose.choice(v) for k, v in PLACES.items() if k in own}
    layers = raw.get("num_hidden_layers", 2)
    if "layer_types" in raw:
        raw["layer_types"] = (raw["layer_types"] * 2)[-layers:]
    if family == "gpt_neo":
        raw["attention_types"] = [[[choose.choice(("global", "local"))], 1] for _ in range(layers)]
    for key, values in KEYS.items():
        if choose.random() < (0.35 if key in own else 0.001 if plain else 0.02):
            value = choose.choice(values)
            if value is None and choose.random() < 0.7:  # many classes refuse null
                continue
            if key in LONG and isinstance(value, list) and choose.random() < 0.9:
                value = (value * 2)[:layers]
            if value is ABSENT:
                raw.pop(key, None)
            else:
                raw[key] = copy.deepcopy(value)
    if "max_position_embeddings" in own and choose.random() < 0.9:
        raw.setdefault("max_position_embeddings", 256)
    if "rope_parameters" in own or choose.random() < 0.1:
        raw |= rope_of(choose, family in ("gemma3_text", "olmo3") or choose.random() < 0.1 * (not plain))
    if family == "ministral3" and choose.random() < 0.9:
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(raw.get(name), dict):
                raw[name] = {**GROWTH, **raw[name]}
    raw |= choose.choice(({}, {"dtype": "float32"}, {"torch_dtype": "float32"}, {"torch_dtype": None}))
    return raw


def judge(raw: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Return ("equal" | "refused" | "no such config" | "wrong", reason) of a file, read as by the engine."""
    family = raw["model_type"]
    try:
        with quiet():
            cfg = CONFIG_MAPPING[family].from_dict(copy.deepcopy(dict(raw)))
            hf = random_model(cfg)
            want = logits(hf, PROMPT)
        assert want.isfinite().all()
    except Exception as exc:
        return "no such config", f"{type(exc).__name__}: {exc}"
    save(hf, folder)
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        with quiet():
            mine, arch = open_checkpoint(str(folder)).hf_config(), locate(FAMILIES[family][1].replace(":", "."))()
            got = Harness(folder, arch, mine, max_len=len(PROMPT)).step({0: PROMPT})[0]
    except ModelError as exc:
        return "refused", str(exc).partition("config.json: ")[2] or str(exc)
    except Exception as exc:
        return "wrong", f"raises {type(exc).__name__}: {exc}"
    off, room = float((got - want).abs().max()), max(1e-4, 2e-5 * float(want.abs().max()))
    if off <= room or unstable(hf, PROMPT, 10 * room):
        return "equal", ""
    return "wrong", f"logits differ by {off:.3g}, allowed are {room:.1e}"


def random_model(cfg: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        cfg, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3 if p.dim() > 1 else 0.1)
            if "norm" in name:
                p.add_(1)
    return model
