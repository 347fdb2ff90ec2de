"""Limits of numbers in config.json, which refuse impossible numbers by key before anything is built.

The limits are several times the values of the largest published models.  They prevent a typing error or a hostile file
from exhausting the machine's memory.  ``shapes`` refuses sizes that contradict the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import ModelError, shown

from . import Fields
from .text_model import NESTED, nested_parts

MOST_LAYERS = 2_000  # published models have up to about 130 layers; a model with thousands takes seconds to build
INT32 = (1 << 31) - 1  # positions and token ids are held in 32 bits
TINY = 2.0**-126  # float32 stores numbers from this limit to HUGE without loss
HUGE = 2.0**127
DTYPES = ("float64", "float32", "float16", "bfloat16", "float", "double", "half", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Whole:
    """The limits of a field that is a whole number, or null if ``null`` is set."""

    least: int
    most: int
    null: bool = False

    def refuse(self, value: Any) -> str | None:
        """Return a description of the accepted values, or None if the value is accepted."""
        if value is None and self.null:
            return None
        if type(value) is int and self.least <= value <= self.most:
            return None
        wanted = f"a whole number from {self.least} to {self.most}"
        return f"{wanted} or null" if self.null else wanted


@dataclass(frozen=True)
class Real:
    """The limits of a field that is a number or null."""

    least: float
    most: float

    def refuse(self, value: Any) -> str | None:
        if value is None:
            return None
        if type(value) in (int, float) and self.least <= value <= self.most:
            return None
        return f"a number from {self.least:.3g} to {self.most:.3g}"


@dataclass(frozen=True)
class Ids:
    """The limits of a field that is a token id, a list of token ids, or null."""

    least: int = 0

    def refuse(self, value: Any) -> str | None:
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if all(type(i) is int and self.least <= i <= INT32 for i in ids):
            return None
        return f"token ids from {self.least} to {INT32}, or null"


class Dtype:
    """The accepted values of a field that is the name of a dtype, or null."""

    def refuse(self, value: Any) -> str | None:
        if value is None:
            return None
        if isinstance(value, str) and value.removeprefix("torch.") in DTYPES:
            return None
        return f"one of {', '.join(DTYPES)}, or null"


VOCABULARY = Whole(1, 1 << 24)
LAYERS = Whole(1, MOST_LAYERS)
LAYERS_OR_NULL = Whole(1, MOST_LAYERS, null=True)
WIDTH = Whole(1, 1 << 18)  # limits of the hidden size (width of the hidden states)
WIDTH_OR_NULL = Whole(1, 1 << 18, null=True)
INNER = Whole(1, 1 << 22)  # width inside an MLP
INNER_OR_NULL = Whole(1, 1 << 22, null=True)
HEADS = Whole(1, 1 << 14)
HEADS_OR_NULL = Whole(1, 1 << 14, null=True)
HEAD_DIM = Whole(1, 1 << 12, null=True)
EXPERTS = Whole(1, 1 << 14)
POSITIONS = Whole(1, INT32)
POSITIONS_OR_NULL = Whole(1, INT32, null=True)
WINDOW_LAYERS = Whole(0, INT32, null=True)
SCALE = Real(TINY, HUGE)
FRACTION = Real(TINY, 1.0)
IDS = Ids()
IDS_OR_UNSET = Ids(-1)  # some checkpoints store -1 for a missing id, which is not used
LABELS = Whole(0, 1 << 16, null=True)  # transformers creates a name for each label, though labels are not used
DTYPE = Dtype()
# fields that the engine and its architectures read -> their accepted values
LIMITS: Mapping[str, Whole | Real | Ids | Dtype] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_OR_NULL,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS_OR_NULL,
    "sliding_window": POSITIONS_OR_NULL,
    "max_window_layers": WINDOW_LAYERS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "decoder_sparse_step": LAYERS,
    "swiglu_limit": SCALE,
    "swiglu_alpha": SCALE,
    "rms_norm_eps": FRACTION,
    "layer_norm_eps": FRACTION,
    "norm_epsilon": FRACTION,
    "ffn_dim": INNER,
    "n_embd": WIDTH,
    "n_inner": INNER_OR_NULL,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "d_model": WIDTH_OR_NULL,
    "n_heads": HEADS_OR_NULL,
    "n_layers": LAYERS_OR_NULL,
    "num_heads": HEADS_OR_NULL,
    "num_layers": LAYERS_OR_NULL,
    "n_embed": WIDTH_OR_NULL,
    "num_kv_heads": HEADS_OR_NULL,
    "ffn_hidden_size": INNER_OR_NULL,
    "max_seq_len": POSITIONS_OR_NULL,
    "seq_length": POSITIONS_OR_NULL,
    "window_size": POSITIONS_OR_NULL,
    "layer_norm_epsilon": FRACTION,
    "query_pre_attn_scalar": SCALE,
    "attn_logit_softcapping": SCALE,
    "final_logit_softcapping": SCALE,
    "logit_scale": SCALE,
    "logits_scaling": SCALE,
    "attention_multiplier": SCALE,
    "embedding_multiplier": SCALE,
    "residual_multiplier": SCALE,
    "block_ffn_dim_multiplier": SCALE,
    "rope_local_base_freq": SCALE,
    "rope_theta": SCALE,
    "partial_rotary_factor": FRACTION,
    "bos_token_id": IDS,
    "eos_token_id": IDS,
    "pad_token_id": IDS_OR_UNSET,
    "num_labels": LABELS,
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
}
ROPE = ("rope_parameters", "rope_scaling")
ROPE_LIMITS: Mapping[str, Whole | Real] = {
    "rope_theta": SCALE,
    "factor": SCALE,
    "low_freq_factor": SCALE,
    "high_freq_factor": SCALE,
    "attention_factor": SCALE,
    "beta_fast": SCALE,
    "beta_slow": SCALE,
    "partial_rotary_factor": FRACTION,
    "original_max_position_embeddings": POSITIONS_OR_NULL,
}
PARTS = ("quantization_config", *NESTED)
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
OF_EXPERTS = {
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step",
    "swiglu_limit", "swiglu_alpha",
}  # fmt: skip
OF_WINDOWS = {"sliding_window", "max_window_layers"}


def with_floats(value: Any) -> Any:
    """Replace each object such as {"__float__": "Infinity"} in a value of config.json by its number.

    transformers writes infinities and NaN in this form.  ModelError for lists and objects that are nested too deeply.
    """
    try:
        return _with_floats(value)
    except RecursionError:
        raise ModelError("lists or objects are nested too deeply") from None


def _with_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    name = value.get("__float__") if len(value) == 1 else None
    if isinstance(name, str) and name in FLOATS:
        return FLOATS[name]
    return {key: _with_floats(one) for key, one in value.items()}


def _is_none(value: Any) -> bool:
    """Return whether a field's value, a number of experts or of units, means that the model has none: null or 0."""
    return value is None or (type(value) is int and value == 0)


def unread(part: Fields) -> set[str]:
    """Return the keys of a configuration that are not used, because they belong to a disabled part."""
    counts = {key: part[key] for key in COUNTS if key in part}
    found = {key for key, value in counts.items() if _is_none(value)}
    without_experts = bool(counts) and len(found) == len(counts)
    if without_experts or part.get("enable_moe_block") is False:
        found |= OF_EXPERTS | set(COUNTS)
    if _is_none(part.get("shared_expert_intermediate_size")):
        found.add("shared_expert_intermediate_size")
    if part.get("use_sliding_window") is False:
        found |= OF_WINDOWS
    return found


def check_numbers(where: str, raw: Fields) -> None:
    """Raise ModelError for the first impossible number, with the key, its value and the accepted values.

    ``raw`` is the content of config.json, and ``where`` its path.  Parts that the configuration disables are not
    checked.
    """

    def refuse(key: str, value: Any, wanted: str | None) -> None:
        if wanted is not None:
            raise ModelError(f"{where}: {key}={shown(value)}: expected {wanted}")

    for prefix, part in (("", raw), *nested_parts(raw)):
        for name in PARTS:
            inner = part.get(name)
            refuse(prefix + name, inner, _not_of(inner, dict, "an object or null"))
        kind = part.get("model_type")
        refuse(f"{prefix}model_type", kind, _not_of(kind, str, "a name, or null"))
        skipped = unread(part)
        for key, value in part.items():
            if key == "sliding_window" and value == 0 and kind == "qwen2_moe":
                continue  # for this model type transformers writes 0 for no window
            if key == "intermediate_size" and value is None and kind == "gpt_neo":
                continue  # four times hidden_size
            if key in LIMITS and key not in skipped:
                refuse(prefix + key, value, LIMITS[key].refuse(value))
            elif type(value) is int and abs(value) > 1 << 32:
                refuse(prefix + key, value, f"at most {1 << 32}")
        for name in ROPE:
            _check_rope(prefix + name, part.get(name), refuse)


def _not_of(value: Any, kind: type, wanted: str) -> str | None:
    """Return None for a value that is null or an instance of ``kind``; return ``wanted``, the accepted values, for
    another."""
    return None if value is None or isinstance(value, kind) else wanted


def _check_rope(name: str, rope: Any, refuse: Any) -> None:
    """Refuse impossible numbers of a rotary embedding, in one table or in the table of each type of layer.

    ``refuse(key, value, problem)`` raises the error if there is a problem.
    """
    if rope is None:
        return
    if not isinstance(rope, dict):
        refuse(name, rope, "an object or null")
    for key, value in rope.items():
        if key in ROPE_LIMITS:
            refuse(f"{name}.{key}", value, ROPE_LIMITS[key].refuse(value))
        elif key in ("rope_type", "type"):
            refuse(f"{name}.{key}", value, _not_of(value, str, "a word, or null"))
        elif isinstance(value, dict):
            _check_rope(f"{name}.{key}", value, refuse)
        elif isinstance(value, float) and not math.isfinite(value):
            refuse(f"{name}.{key}", value, "a finite number")
