"""Changes of config.json before it is read, by the option ``hf_overrides``.

A key that the engine would not read is refused, as is a value that other keys of the file make ineffective.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from minivllm.device.layers.fields import ROPES
from minivllm.errors import ConfigError, shown, suggest
from minivllm.validation import merge

from . import Fields
from .plain_config import FIELDS, ROPE, PlainConfig
from .text_model import MARK, NESTED, nested_parts

BY_ENGINE = {  # keys of config.json that are read for every architecture -> by what
    "architectures": "chooses the plug-in", "model_type": "chooses the plug-in", "dtype": "read by the engine",
    "torch_dtype": "read by the engine", "quantization_config": "read by the quantizer",
    "compression_config": "read by the quantizer", "max_position_embeddings": "the engine's limit of a sequence",
    "eos_token_id": "read by the engine",
}  # fmt: skip
UNREAD = {  # keys that are never read -> reason
    "transformers_version": "a note", "name_or_path": "a note", "_name_or_path": "a note",
    "bos_token_id": "the tokenizer has its own", "pad_token_id": "there is no padding",
    "sep_token_id": "of training", "initializer_range": "of training", "gradient_checkpointing": "of training",
    "attention_dropout": "of training", "hidden_dropout": "of training", "resid_pdrop": "of training",
    "embd_pdrop": "of training", "attn_pdrop": "of training", "residual_dropout": "of training",
    "output_router_logits": "of training", "router_aux_loss_coef": "of training",
    "use_cache": "there is always a cache", "return_dict": "form of the output", "output_attentions": "not given out",
    "output_hidden_states": "not given out", "problem_type": "of classifiers", "id2label": "of classifiers",
    "label2id": "of classifiers", "is_encoder_decoder": "only decoders are served",
    "chunk_size_feed_forward": "it saves memory only", "ignore_keys_at_rope_validation": "of transformers' checks",
}  # fmt: skip
# older rotary fields, known for a configuration class with ``rope_parameters``
OLDER = {*ROPE, "partial_rotary_factor", "original_max_position_embeddings"}
CHECKED = {"is_causal", "per_layer_config", "use_bidirectional_attention", "use_mrope"}  # by ``device.layers.fields``


def lay_over(raw: Fields, overrides: Fields | None) -> dict[str, Any]:
    """Return config.json with overrides in it.  ConfigError for a text model's table that the file does not have."""
    wrong = [key for key in overrides or {} if key in NESTED and not isinstance(raw.get(key), Mapping)]
    if wrong:
        raise ConfigError(f"hf_overrides: {shown(wrong[0])}: config.json has no such table; write its keys at the top")
    return merge(raw, overrides or {})


def in_words(overrides: Fields) -> str:
    """Return the overrides as ``key.key=value``, for a message."""
    return ", ".join(f"{'.'.join(path)}={json.dumps(value)}" for path, value in _leaves(overrides, ()))


def _leaves(values: Fields, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def refuse_unread(overrides: Fields, raw: Fields, cfg: Any, ignores: Sequence[str], who: str) -> None:
    """Raise ConfigError for an override without an effect, with its key and advice.

    ``raw`` is config.json with the overrides, and ``cfg`` the configuration that was read from it.  ``ignores`` are the
    fields that the architecture does not use, and ``who`` is its name.
    """
    parts = nested_parts(raw) if hasattr(cfg, MARK) else []
    _refuse_in(overrides, parts[-1][0] if parts else "", "", cfg, ignores, who)


def _refuse_in(table: Fields, text: str, at: str, cfg: Any, ignores: Sequence[str], who: str) -> None:
    """Raise ConfigError for a key of the hf_overrides table ``at`` that is not read from there, or that has no effect.

    ``text`` is the prefix of the text model's keys, such as "text_config."; both are prefixes of dotted keys.
    """
    for key, value in table.items():
        if key in BY_ENGINE or (at != text and key == "tie_word_embeddings"):
            continue
        if at == text:
            _refuse(key, value, cfg, ignores, who, at)
        elif text.startswith(f"{at}{key}.") and isinstance(value, Mapping):
            _refuse_in(value, text, f"{at}{key}.", cfg, ignores, who)
        elif key in known_keys(cfg):
            raise ConfigError(
                f"hf_overrides: {shown(at + key)}: the text model has this key in {text[:-1]}; write {text}{key}"
            )
        else:
            raise ConfigError(
                f"hf_overrides: {shown(at + key)}: only the text model is served; write keys of {text[:-1]}"
            )


def known_keys(cfg: Any) -> set[str]:
    """Return the keys of config.json that the class of a configuration reads, in any spelling."""
    if isinstance(cfg, PlainConfig):
        return {*FIELDS[cfg.model_type], *ROPE}
    kind = type(cfg)
    known = set[str]()
    for cls in kind.__mro__:
        if cls.__module__ == "transformers.configuration_utils" or not hasattr(cls, "model_type"):
            break
        known |= set(_own_texts(cls))
    if dataclasses.is_dataclass(kind):
        known |= {field.name for field in dataclasses.fields(kind)}
    known |= set(getattr(kind, "attribute_map", {}))
    return known | (OLDER if hasattr(cfg, "rope_parameters") else set())


def _own_texts(cls: type) -> Iterator[str]:
    """Yield the texts and names in the methods of a class, which may be keys without a field, such as in
    ``kwargs.get("sliding_window_pattern")``."""
    written = [value for name, value in vars(cls).items() if name[:2] != "__" or name == "__post_init__"]
    todo = [found.__code__ for found in map(inspect.unwrap, written) if hasattr(found, "__code__")]
    while todo:
        code = todo.pop()
        yield from (text for text in (*code.co_consts, *code.co_names) if isinstance(text, str))
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _refuse(key: str, value: Any, cfg: Any, ignores: Sequence[str], who: str, at: str) -> None:
    """Raise ConfigError if setting ``key`` of config.json to ``value`` by hf_overrides has no effect on the model."""
    option = f"hf_overrides: {shown(at + key)}"
    if key in UNREAD:
        raise ConfigError(f"{option} changes nothing: {UNREAD[key]}; leave it out")
    known = known_keys(cfg)
    if key not in known | CHECKED:
        near = suggest(key, sorted(known - UNREAD.keys()))
        raise ConfigError(f"{option}: {who} reads no such key.{near or ' Leave it out.'}")
    derived = set() if isinstance(cfg, PlainConfig) else set(_own_texts(type(cfg)))
    plain = FIELDS.get(getattr(cfg, "model_type", ""), {})
    if key in ignores and key not in derived | OLDER | plain.keys():
        raise ConfigError(f"{option} changes nothing: {who} does not read it; leave it out")
    if key in ("rope_scaling", "rope_parameters", "rope_theta"):
        tables = list(_tables(getattr(cfg, "rope_parameters", None) or {}))
        given = {key: value} if key == "rope_theta" else dict(_flat(value or {}))
        for name, number in given.items():
            if number is None or any(table.get(name) == number for table in tables):
                continue
            read = tables[0].get(name) if tables else None
            want = f"{name}={shown(number)}"
            have = f"{name}={shown(read)}"
            raise ConfigError(
                f"{option} has no effect: config.json has another spelling of the rotary embedding, which comes first: "
                f"{want} was set, and the model gets {have}; make the change in that of rope_scaling and "
                "rope_parameters which the file has, or the other one set to null"
            )
        kinds = {str(table.get("rope_type") or "default") for table in tables}
        _refuse_idle(option, given, kinds)
    elif isinstance(value, (bool, int, float, str)) and hasattr(cfg, key) and getattr(cfg, key) != value:
        raise ConfigError(
            f"{option}={shown(value)} has no effect: with the other keys of config.json it becomes "
            f"{shown(getattr(cfg, key))}; change those too, or leave it out"
        )


def _refuse_idle(option: str, given: Fields, kinds: set[str]) -> None:
    """Refuse numbers of a rotary embedding that none of its types reads."""
    read: set[str] = set()
    every: set[str] = set()
    for kind, (needs, takes) in ROPES.items():
        names = {*needs, *takes}
        every |= names
        if kind in kinds - {"default"}:
            read |= names
    unread = every - read
    idle = [name for name, value in given.items() if value is not None and name in unread]
    if idle:
        raise ConfigError(
            f"{option}: {idle[0]} has no effect with rope_type={' and '.join(sorted(kinds))}; set rope_type too, "
            "or leave it out"
        )


def _tables(found: Fields) -> Iterator[Fields]:
    """Yield the tables of a rotary embedding: a single one, or one for each type of layer."""
    inner = [table for table in found.values() if isinstance(table, Mapping)]
    yield from inner or [found]


def _flat(table: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a rotary embedding at any depth, and its type under the new name."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif name != "type" or "rope_type" not in table:
            yield ("rope_type" if name == "type" else name), value
