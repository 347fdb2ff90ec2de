"""Tiny random checkpoints with image encoders and their image processors, for the kit and the engine's own tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .tiny import quiet, save, tiny_model

VOCAB = 320
IMAGE = 319
START = 317
END = 316
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
}  # fmt: skip
QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
VISION: dict[str, dict[str, Any]] = {
    "llava": CLIP,
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
    "qwen2_5_vl": {**QWEN, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**QWEN, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
VISION["qwen3_5"] = {**QWEN, "patch_size": 16, "num_position_embeddings": 16}
VISION["qwen3_5_moe"] = VISION["qwen3_5"]
VISION["gemma3"] = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
}  # fmt: skip
VISION["mistral3"] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 140, "patch_size": 7,
}  # fmt: skip
# families of the model type mistral3 -> the type of their text model
PIXTRAL = {"mistral3": "mistral", "ministral3": "ministral3"}
VISION["ministral3"] = VISION["mistral3"]
CLASSES = {
    **dict.fromkeys(PIXTRAL, "Mistral3ForConditionalGeneration"),
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
HYBRID = {  # linear attention in three of four layers, and a rotary embedding of a part of a head
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def config_of(family: str) -> Any:
    """Return the transformers config of a tiny checkpoint of a model family."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    text = dict(TEXT)
    if family.endswith("moe"):
        text |= EXPERTS
    if family == "gemma3":
        return _with_vision(family, _gemma_fields(text))
    if family in PIXTRAL:
        if family == "ministral3":
            growth = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
            rope |= {"rope_type": "yarn", "factor": 4.0, **growth}
        text |= {"model_type": PIXTRAL[family], "sliding_window": None, "rope_parameters": rope}
        family = "mistral3"
        whole = {"image_token_index": IMAGE, "tie_word_embeddings": False, "text_config": text}
    elif family == "llava":
        text |= {"model_type": "llama", "rope_parameters": rope}
        whole = {"image_token_index": IMAGE, "text_config": text}
    else:
        sections = {"mrope_section": [2, 3, 3]}
        if family.startswith("qwen3_5"):
            text |= HYBRID
            sections = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        rope |= sections
        if family.startswith("qwen3"):
            rope["mrope_interleaved"] = True
        text["rope_parameters"] = rope
        ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
        whole = {**ids, "video_token_id": 318, "text_config": text}
    return _with_vision(family, whole)


def _with_vision(family: str, fields: Mapping[str, Any]) -> Any:
    """Return a config with these fields and the tower of a family."""
    vision = dict(VISION[family])
    return CONFIG_MAPPING[family].from_dict({**fields, "vision_config": vision})


def _gemma_fields(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a tiny Gemma 3 with layers of full attention and of a window of 20 tokens."""
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    window = {"layer_types": types, "sliding_window": 20, "query_pre_attn_scalar": 16}
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 100.0}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 20.0}
    ids = {"boi_token_index": START, "eoi_token_index": END, "image_token_index": IMAGE}
    text_config = {**text, **window, "rope_parameters": rope}
    return {**ids, "mm_tokens_per_image": 16, "text_config": text_config}


def make(path: Path, family: str, seed: int = 0) -> Any:
    """Write a checkpoint of random weights with its image processor; return transformers' model."""
    with quiet():
        cls = getattr(transformers, CLASSES[family])
        hf = tiny_model(config_of(family), seed, cls)
        with torch.no_grad():  # the special tokens are never the likeliest ones
            head = hf.lm_head.weight
            head[300:] = 0.5 * head[1]
        save(hf, path)
    write_processor(path, family)
    if family == "gemma3":
        write_lines(path)
    if family in PIXTRAL:
        write_tokens(path, ROWS)
    return hf


def write_processor(path: Path, family: str) -> None:
    """Write the preprocessor_config.json (image processor) of a model family."""
    if family == "gemma3":
        fields = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}
        (path / "preprocessor_config.json").write_text(json.dumps(fields))
        return
    if family in PIXTRAL:
        patch = {"height": 7, "width": 7}
        fields = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84}, "patch_size": patch}
    elif family == "llava":
        side = {"height": 28, "width": 28}
        fields = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": side}
    else:
        patch = VISION[family]["patch_size"]
        edge = 2 * patch
        limits = {"shortest_edge": edge**2, "longest_edge": 24 * edge**2}
        fields = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "size": limits}
        fields |= {"merge_size": 2, "temporal_patch_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps(fields))


ROWS = {START: "[IMG_BREAK]", END: "[IMG_END]", IMAGE: "[IMG]"}
LINES = range(300, 308)  # token ids of one to eight newlines


def write_lines(path: Path) -> None:
    """Write a tokenizer.json of bytes, with tokens for one to eight newlines."""
    write_tokens(path, {START: "<start_of_image>", END: "<end_of_image>", IMAGE: "<image_soft_token>"})


def write_tokens(path: Path, marks: Mapping[int, str]) -> None:
    """Write a tokenizer.json of bytes, with tokens for one to eight newlines and special tokens ``marks`` by id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first_newline = LINES[0]
    unused = [f"unused{i}" for i in range(len(alphabet), first_newline)]
    vocabulary = {word: i for i, word in enumerate([*alphabet, *unused])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    newlines = ["\n" * (1 + i) for i in range(len(LINES))]
    backend.add_tokens([AddedToken(text, normalized=False) for text in newlines])
    names = []
    for i in range(LINES[-1] + 1, VOCAB):
        names.append(marks.get(i, f"<unused{i}>"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.save(str(path / "tokenizer.json"))
