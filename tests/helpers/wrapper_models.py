"""Tiny random checkpoints of several models, a text model and encoders, made by transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minivllm.testing.tiny import quiet, save, small_config, tiny_model, write_tensors

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8]
ENCODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "mlp_dim": 32,
    "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": 32,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "projection_dim": 32,
    "num_position_embeddings": 16, "num_key_value_heads": 4, "head_dim": 8, "vision_output_dim": 32,
    "projector_input_dim": 32, "num_channels": 3, "projector_output_dim": 32, "global_head_dim": 8, "vocab_size": 61,
    "position_embedding_size": 16,
}  # fmt: skip
MODELS = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections), **more}}


MROPE, HALF = _rope(2, 1, 1), _rope(1, 1, 0, partial_rotary_factor=0.5)
TURNS = _rope(2, 1, 1, mrope_interleaved=True)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS,
}  # fmt: skip
GEMMA4 = {
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 6,
    "use_bidirectional_attention": "vision",
}
# model type of a whole checkpoint -> fields of its text model besides the small sizes
NATIVE: dict[str, dict[str, Any]] = {
    "deepseek_vl": {}, "deepseek_vl_hybrid": {}, "gemma3": {"sliding_window": 6}, "glm46v": HALF, "glm4v": HALF,
    "glm_ocr": HALF, "glmasr": {}, "got_ocr2": {}, "granite_speech": {}, "idefics2": {}, "idefics3": {}, "internvl": {},
    "janus": {}, "lighton_ocr": {}, "llava": {}, "llava_next": {}, "llava_next_video": {}, "llava_onevision": {},
    "mistral3": {}, "ovis2": {}, "qianfan_ocr": {}, "qwen2_5_omni_thinker": MROPE, "qwen2_5_vl": MROPE,
    "qwen2_audio": {}, "qwen2_vl": MROPE, "qwen3_asr": {}, "qwen3_omni_moe_thinker": TURNS, "qwen3_vl": TURNS,
    "qwen3_vl_moe": TURNS, "smolvlm": {}, "video_llama_3": {}, "video_llava": {}, "vipllava": {}, "voxtral": {},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {  # checkpoints whose text models run by transformers' own classes
    "aria": {}, "exaone4_5": {}, "gemma4": GEMMA4, "gemma4_unified": GEMMA4,
    "glm4v_moe": {**HALF, **EXPERTS, "n_routed_experts": 6, "n_group": 1, "topk_group": 1},
    "hyperclovax_vision_v2": {}, "kimi_k25": MLA,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {"gemma4": {"vision_config": {}}, "gemma4_unified": {"vision_config": {}}}


def small_part(cls: Any, own: dict[str, Any]) -> Any:
    """Return an encoder's configuration with those fields of ``ENCODER`` that it has, and ``own``."""
    known = {f.name for f in dataclasses.fields(cls)} | cls.attribute_map.keys()
    return cls(**copy.deepcopy({**{k: v for k, v in ENCODER.items() if k in known}, **own}))


def small_whole(model_type: str, text: dict[str, Any], **more: Any) -> Any:
    """Return the configuration of a whole checkpoint, with the text model as in ``tiny.SMALL`` and small encoders."""
    cls, parts = CONFIG_MAPPING[model_type], {}
    default, more = cls(), {**WHOLE.get(model_type, {}), **more}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is None:
            continue
        if name == "text_config":
            kind = CONFIG_MAPPING[text.get("model_type", part.model_type)]
            parts[name] = small_config(kind, **{k: v for k, v in text.items() if k != "model_type"})
        else:
            parts[name] = small_part(type(part), more.pop(name, {}))
    return cls(**parts, **more)


def make(path: Path, model_type: str, seed: int = 0, text: dict[str, Any] | None = None, **more: Any) -> Any:
    """Write config.json and safetensors of random weights; return transformers' model."""
    with quiet():
        cfg = small_whole(model_type, {**(NATIVE | OTHERS).get(model_type, {}), **(text or {})}, **more)
        name = MODELS[model_type]
        hf = tiny_model(cfg, seed, getattr(transformers, name if isinstance(name, str) else name[0]))
        save(hf, path)
    return hf


@torch.inference_mode()
def logits(hf: Any, ids: list[int]) -> Tensor:
    """Return the logits [tokens, V] of text alone."""
    return hf(input_ids=torch.tensor([ids])).logits[0].float()


def greedy(hf: Any, ids: list[int], n: int) -> list[int]:
    ids = list(ids)
    for _ in range(n):
        ids.append(int(logits(hf, ids)[-1].argmax()))
    return ids[-n:]


# layout -> names of the body and the head of the text model, and prefixes of other models
LAYOUTS = {
    "transformers 5": ("model.language_model.", "lm_head.", "model."),
    "transformers 4": ("language_model.model.", "language_model.lm_head.", ""),
    "body without a root": ("language_model.", "lm_head.", ""),
    "beside the encoder": ("model.", "lm_head.", ""),
    "thinker": ("thinker.model.", "thinker.lm_head.", "thinker."),
    "llm": ("llm.model.", "llm.lm_head.", ""),
    "text_model": ("model.text_model.", "lm_head.", "model."),
    "twice": ("model.language_model.model.", "model.language_model.lm_head.", "model."),
    # Voxtral and Qwen2-Audio, saved by transformers 5.17
    "head outside": ("language_model.model.model.", "language_model.lm_head.", ""),
}


def body_of(hf: Any) -> str:
    """Return the beginning of the names of the text model's tensors in transformers' model, without the head's."""
    embedding = hf.get_input_embeddings()
    name = next(name for name, module in hf.named_modules() if module is embedding)
    return name.rpartition(".")[0] + "."


def relay(path: Path, hf: Any, layout: str) -> int:
    """Write the tensors of a model under the names of a layout, and return how many do not belong to the text model."""
    body, head, other = LAYOUTS[layout]
    old_body = body_of(hf)
    tensors, others = {}, 0
    for name, tensor in hf.state_dict().items():
        if name.startswith(old_body):
            name = body + name.removeprefix(old_body)
        elif name.startswith("lm_head."):
            if hf.lm_head.weight is hf.get_input_embeddings().weight:
                continue
            name = head + name.removeprefix("lm_head.")
        else:
            others, name = others + 1, other + name.removeprefix("model.")
        tensors[name] = tensor.clone()
    write_tensors(path, tensors)
    return others


def edit(path: Path, **values: Any) -> None:
    """Change keys of config.json; ``...`` removes one."""
    raw = json.loads((path / "config.json").read_text())
    raw.update(values)
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
