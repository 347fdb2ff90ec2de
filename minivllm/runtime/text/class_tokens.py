"""Default special tokens of transformers' tokenizer classes, used if tokenizer_config.json does not set them.

transformers marks these tokens as special even if tokenizer.json does not, such as ``<mask>`` of Gemma.  A test
compares the table with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_QWEN2 = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "CodeLlamaTokenizer": _LLAMA,
    "CohereTokenizer": {
        "unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>",
        "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "LlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": _QWEN2,
    "Qwen3_5Tokenizer": _QWEN2,
}  # fmt: skip


def class_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the default special tokens of a tokenizer class that its tokenizer_config.json does not set."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    return [token for key, token in CLASS_TOKENS.get(name, {}).items() if key not in config]
