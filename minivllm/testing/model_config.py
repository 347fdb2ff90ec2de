"""Fields of a Hugging Face config: which a decoder need not read, other values for them, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

IGNORED = {  # fields that no decoder here need read, and why
    "architectures": "chooses the plug-in", "model_type": "chooses the plug-in", "transformers_version": "a note",
    "name_or_path": "a note", "dtype": "read by the engine", "torch_dtype": "read by the engine",
    "quantization_config": "read by the quantizer", "max_position_embeddings": "the engine's limit of a sequence",
    "bos_token_id": "read by the tokenizer", "eos_token_id": "read by the engine", "pad_token_id": "no padding",
    "sep_token_id": "of training", "initializer_range": "of training", "gradient_checkpointing": "of training",
    "attention_dropout": "of training", "hidden_dropout": "of training", "resid_pdrop": "of training",
    "embd_pdrop": "of training", "attn_pdrop": "of training", "residual_dropout": "of training",
    "use_cache": "there is always a cache", "return_dict": "form of the output", "output_attentions": "not given out",
    "output_hidden_states": "not given out", "problem_type": "of classifiers", "id2label": "of classifiers",
    "label2id": "of classifiers", "is_encoder_decoder": "a decoder", "chunk_size_feed_forward": "saves memory only",
}  # fmt: skip
UNCHANGED = {"architectures", "model_type", "return_dict", "is_encoder_decoder"}  # of those, not ones to vary


def names(values: Any) -> Iterator[str]:
    """Names of fields, and of those inside of them."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from names(value)


def others(value: Any) -> list[Any]:
    """Values to try in place of one; none for what is no number."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2] if value else [1]
    return [value * 1.5 + 0.05] if isinstance(value, float) else []


def record(cfg: Any) -> set[str]:
    """The set that holds, from now on, the names of all attributes that are read of a config."""
    cls: Any = type(cfg)
    read: set[str] = set()

    def recorder(self: Any, name: str) -> Any:
        read.update((name, cls.attribute_map.get(name, name)))  # a class may have a name of its own for it
        return cls.__getattribute__(self, name)

    cfg.__class__ = type(cls.__name__, (cls,), {"__getattribute__": recorder})
    return read
