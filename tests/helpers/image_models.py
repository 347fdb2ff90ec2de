"""Tiny random checkpoints with image encoders, their processors, and greedy answers of transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minivllm.testing.tiny import quiet, save, tiny_model

VOCAB, IMAGE, START, END = 320, 319, 317, 316
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
CLASSES = {
    "llava": "LlavaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def config_of(family: str) -> Any:
    """Return the configuration of a tiny checkpoint."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    text = {**TEXT, **(EXPERTS if family.endswith("moe") else {})}
    if family == "llava":
        whole = {"image_token_index": IMAGE, "text_config": {**text, "model_type": "llama", "rope_parameters": rope}}
    else:
        rope |= {"mrope_section": [2, 3, 3], **({"mrope_interleaved": True} if family.startswith("qwen3") else {})}
        ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
        whole = {**ids, "video_token_id": 318, "text_config": {**text, "rope_parameters": rope}}
    return CONFIG_MAPPING[family].from_dict({**whole, "vision_config": dict(VISION[family])})


def make(path: Path, family: str, seed: int = 0) -> Any:
    """Write a checkpoint of random weights with its image processor; return transformers' model."""
    with quiet():
        hf = tiny_model(config_of(family), seed, getattr(transformers, CLASSES[family]))
        with torch.no_grad():  # no special token is ever the likeliest
            head = hf.lm_head.weight
            head[300:] = 0.5 * head[1]
        save(hf, path)
    write_processor(path, family)
    return hf


def write_processor(path: Path, family: str) -> None:
    """Write the preprocessor_config.json of a family."""
    if family == "llava":
        side = {"height": 28, "width": 28}
        fields = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": side}
    else:
        patch = VISION[family]["patch_size"]
        edge = 2 * patch
        limits = {"shortest_edge": edge**2, "longest_edge": 24 * edge**2}
        fields = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "size": limits}
        fields |= {"merge_size": 2, "temporal_patch_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps(fields))


def picture(seed: int, width: int = 40, height: int = 40) -> np.ndarray:
    """Return an image of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


SIZES = ((40, 40), (90, 30), (30, 120), (200, 150), (33, 77))


def prompt_of(family: str, images: int, seed: int = 0, text: int = 5) -> list[int]:
    """Return token ids with a placeholder for each image, with text before, between and behind them."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(1, 300, text).tolist()
    for _ in range(images):
        mark = [IMAGE] if family == "llava" else [START, IMAGE, END]
        ids += [*mark, *draw.integers(1, 300, text).tolist()]
    return ids


class Reference:
    """Transformers' model over a prompt with images, computed as a whole for each token."""

    def __init__(self, hf: Any, path: Path, ids: list[int], images: list[np.ndarray]) -> None:
        from PIL import Image

        from minivllm.runtime.images.reader import quiet as silent

        self.hf, self.more = hf, {}
        self.ids = list(ids)
        if not images:
            return
        with silent():
            processor = transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True)
            found = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
        self.more["pixel_values"] = found["pixel_values"]
        if "image_grid_thw" in found:
            self.more["image_grid_thw"] = found["image_grid_thw"]
            counts = (found["image_grid_thw"].prod(-1) // 4).tolist()
        else:
            counts = [16] * len(images)
        left = iter(counts)
        self.ids = [i for one in ids for i in ([one] * next(left) if one == IMAGE else [one])]

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        """Return log-probabilities [tokens, V]."""
        more = dict(self.more)
        if "image_grid_thw" in more:
            more["mm_token_type_ids"] = torch.tensor([[int(i == IMAGE) for i in ids]])
        out = self.hf(input_ids=torch.tensor([ids]), use_cache=False, **more)
        return out.logits[0].float().log_softmax(-1)

    def check(self, tokens: list[int], scores: list[float]) -> None:
        """Assert that tokens behind the prompt are the likeliest ones, and that their log-probabilities are right."""
        found = self.logprobs([*self.ids, *tokens])[len(self.ids) - 1 : -1]
        best, which = found.max(-1)
        assert which.tolist() == tokens
        assert np.abs(best.numpy() - np.array(scores)).max() < 1e-4


CHAT = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tokenizer(path: Path, family: str) -> None:
    """Write a tokenizer of bytes with the special tokens of a family, and a chat template that prints images."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = {314: "<|im_start|>", 315: "<|im_end|>", END: "<|vision_end|>", START: "<|vision_start|>", 318: "<video>"}
    special[IMAGE] = "<image>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"unused{i}" for i in range(len(alphabet), 314))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special[i], special=True) for i in sorted(special)])
    backend.save(str(path / "tokenizer.json"))
    mark = "<image>" if family == "llava" else "<|vision_start|><image><|vision_end|>"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT.replace("MARK", mark),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
