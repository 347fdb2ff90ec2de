"""Prompts with images for tiny random checkpoints, and the greedy answers of transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from devices import DEVICE
from torch import Tensor

from minivllm.testing.tiny_images import END, IMAGE, LINES, PIXTRAL, START, make

__all__ = ["CHAT", "SIZES", "Reference", "make", "picture", "prompt_of", "write_tokenizer"]


def picture(seed: int, width: int = 40, height: int = 40) -> np.ndarray:
    """Return an image of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


# largest difference of two log-probabilities in float32; the reference runs on a CPU, and transformers' own model on an
# H200 differs from it by up to 3.8e-4 (21 batches of seven families)
CLOSE = 1e-4 if DEVICE == "cpu" else 5e-4
MARKS = {"llava": [IMAGE], "gemma3": [START]}  # family -> the tokens that stand for an image in a prompt
SIZES = ((40, 40), (90, 30), (30, 120), (200, 150), (33, 77))


def prompt_of(family: str, images: int, seed: int = 0, text: int = 5) -> list[int]:
    """Return token ids with a placeholder for each image, with text before, between and behind them."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(1, 300, text).tolist()
    for _ in range(images):
        mark = [IMAGE] if family in PIXTRAL else MARKS.get(family, [START, IMAGE, END])
        ids += [*mark, *draw.integers(1, 300, text).tolist()]
    return ids


def rows_of(rows: int, columns: int) -> list[int]:
    """Return the tokens of an image of Mistral 3: each row of patches ends with a break, and the last with an end."""
    return [*([*[IMAGE] * columns, START] * rows)[:-1], END]


class Reference:
    """Transformers' model over a prompt with images, computed as a whole for each token."""

    def __init__(self, hf: Any, path: Path, ids: list[int], images: list[np.ndarray]) -> None:
        from PIL import Image

        from minivllm.plugins.encoder.tower import quiet as silent

        self.hf, self.more = hf, {}
        self.ids = list(ids)
        if not images:
            return
        with silent():
            processor = transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True)
            merged = {"patch_size": {"height": 14, "width": 14}} if hf.config.model_type == "mistral3" else {}
            found = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt", **merged)
        self.more["pixel_values"] = found["pixel_values"]
        if "image_grid_thw" in found:
            self.more["image_grid_thw"] = found["image_grid_thw"]
            counts = (found["image_grid_thw"].prod(-1) // 4).tolist()
        else:
            counts = [16] * len(images)
        if hf.config.model_type == "gemma3":
            around = {START: [LINES[1], START, *[IMAGE] * 16, END, LINES[1]]}
            self.ids = [i for one in ids for i in around.get(one, [one])]
            self.more["token_type_ids"] = None
            return
        if hf.config.model_type == "mistral3":
            self.more["image_sizes"] = found["image_sizes"]
            sizes = iter((found["image_sizes"] // 14).tolist())
            self.ids = [i for one in ids for i in (rows_of(*next(sizes)) if one == IMAGE else [one])]
            return
        left = iter(counts)
        self.ids = [i for one in ids for i in ([one] * next(left) if one == IMAGE else [one])]

    @property
    def placeholders(self) -> list[int]:
        """Return the ids with a placeholder at each token of an image, as an engine reports them."""
        if self.hf.config.model_type != "mistral3":
            return self.ids
        return [IMAGE if i == START else i for i in self.ids]

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        """Return log-probabilities [tokens, V]."""
        more = dict(self.more)
        if "image_grid_thw" in more:
            more["mm_token_type_ids"] = torch.tensor([[int(i == IMAGE) for i in ids]])
        if "token_type_ids" in more:
            more["token_type_ids"] = torch.tensor([[int(i == IMAGE) for i in ids]])
        out = self.hf(input_ids=torch.tensor([ids]), use_cache=False, **more)
        return out.logits[0].float().log_softmax(-1)

    def check(self, tokens: list[int], scores: list[float]) -> None:
        """Assert that the tokens behind the prompt are the likeliest ones, and that their log-probabilities are
        correct, both within ``CLOSE``.
        """
        found = self.logprobs([*self.ids, *tokens])[len(self.ids) - 1 : -1]
        own = found.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        below = float((found.amax(-1) - own).max())
        assert below < CLOSE, f"a token is {below:.1e} less likely than the likeliest one"
        off = float(np.abs(own.numpy() - np.array(scores)).max())
        assert off < CLOSE, f"a log-probability differs by {off:.1e}"


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
