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
    """A whole number between two limits, or null if ``null`` is set."""

    least: int
    most: int
    null: bool = False

    def refuse(self, value: Any) -> str | None:
        """Return a description of the accepted values, or None if the value is accepted."""
        if (value is None and self.null) or (type(value) is int and self.least <= value <= self.most):
            return None
        return f"a whole number from {self.least} to {self.most}{' or null' if self.null else ''}"


@dataclass(frozen=True)
class Real:
    """A number between two limits, or null."""

    least: float
    most: float

    def refuse(self, value: Any) -> str | None:
        if value is None or (type(value) in (int, float) and self.least <= value <= self.most):
            return None
        return f"a number from {self.least:.3g} to {self.most:.3g}"


@dataclass(frozen=True)
class Ids:
    """A token id, a list of them, or null."""

    least: int = 0

    def refuse(self, value: Any) -> str | None:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(type(i) is int and self.least <= i <= INT32 for i in ids):
            return None
        return f"token ids from {self.least} to {INT32}, or null"


class Dtype:
    """The name of a dtype that weights have, or null."""

    def refuse(self, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES):
            return None
        return f"one of {', '.join(DTYPES)}, or null"


# fields that the engine and its architectures read -> their accepted values
LIMITS: Mapping[str, Whole | Real | Ids | Dtype] = {
    "vocab_size": Whole(1, 1 << 24),
    "hidden_size": Whole(1, 1 << 18),
    "intermediate_size": Whole(1, 1 << 22),
    "num_hidden_layers": Whole(1, MOST_LAYERS),
    "num_attention_heads": Whole(1, 1 << 14),
    "num_key_value_heads": Whole(1, 1 << 14, null=True),
    "head_dim": Whole(1, 1 << 12, null=True),
    "max_position_embeddings": Whole(1, INT32, null=True),
    "sliding_window": Whole(1, INT32, null=True),
    "max_window_layers": Whole(0, INT32, null=True),
    "num_experts": Whole(1, 1 << 14),
    "num_local_experts": Whole(1, 1 << 14),
    "num_experts_per_tok": Whole(1, 1 << 14),
    "moe_intermediate_size": Whole(1, 1 << 22),
    "shared_expert_intermediate_size": Whole(1, 1 << 22),
    "decoder_sparse_step": Whole(1, MOST_LAYERS),
    "swiglu_limit": Real(TINY, HUGE),
    "swiglu_alpha": Real(TINY, HUGE),
    "rms_norm_eps": Real(TINY, 1.0),
    "layer_norm_eps": Real(TINY, 1.0),
    "norm_epsilon": Real(TINY, 1.0),
    "ffn_dim": Whole(1, 1 << 22),
    "n_embd": Whole(1, 1 << 18),
    "n_inner": Whole(1, 1 << 22, null=True),
    "n_layer": Whole(1, MOST_LAYERS),
    "n_head": Whole(1, 1 << 14),
    "n_positions": Whole(1, INT32),
    "d_model": Whole(1, 1 << 18, null=True),
    "n_heads": Whole(1, 1 << 14, null=True),
    "n_layers": Whole(1, MOST_LAYERS, null=True),
    "num_heads": Whole(1, 1 << 14, null=True),
    "num_layers": Whole(1, MOST_LAYERS, null=True),
    "n_embed": Whole(1, 1 << 18, null=True),
    "num_kv_heads": Whole(1, 1 << 14, null=True),
    "ffn_hidden_size": Whole(1, 1 << 22, null=True),
    "max_seq_len": Whole(1, INT32, null=True),
    "seq_length": Whole(1, INT32, null=True),
    "window_size": Whole(1, INT32, null=True),
    "layer_norm_epsilon": Real(TINY, 1.0),
    "query_pre_attn_scalar": Real(TINY, HUGE),
    "attn_logit_softcapping": Real(TINY, HUGE),
    "final_logit_softcapping": Real(TINY, HUGE),
    "logit_scale": Real(TINY, HUGE),
    "logits_scaling": Real(TINY, HUGE),
    "attention_multiplier": Real(TINY, HUGE),
    "embedding_multiplier": Real(TINY, HUGE),
    "residual_multiplier": Real(TINY, HUGE),
    "rope_local_base_freq": Real(TINY, HUGE),
    "rope_theta": Real(TINY, HUGE),
    "partial_rotary_factor": Real(TINY, 1.0),
    "bos_token_id": Ids(),
    "eos_token_id": Ids(),
    "pad_token_id": Ids(-1),  # some checkpoints store -1 for a missing id, which is not used
    # transformers creates a name for each label, though labels are not used
    "num_labels": Whole(0, 1 << 16, null=True),
    "dtype": Dtype(),
    "torch_dtype": Dtype(),
}
ROPE = ("rope_parameters", "rope_scaling")
ROPE_LIMITS: Mapping[str, Whole | Real] = {
    "rope_theta": Real(TINY, HUGE),
    "factor": Real(TINY, HUGE),
    "low_freq_factor": Real(TINY, HUGE),
    "high_freq_factor": Real(TINY, HUGE),
    "attention_factor": Real(TINY, HUGE),
    "beta_fast": Real(TINY, HUGE),
    "beta_slow": Real(TINY, HUGE),
    "partial_rotary_factor": Real(TINY, 1.0),
    "original_max_position_embeddings": Whole(1, INT32, null=True),
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
    """Return whether a number of experts or units means that there are none."""
    return value is None or (type(value) is int and value == 0)


def unread(part: Fields) -> set[str]:
    """Return the keys of a configuration that are not used, because they belong to a disabled part."""
    counts = {key: part[key] for key in COUNTS if key in part}
    found = {key for key, value in counts.items() if _is_none(value)}
    if part.get("enable_moe_block") is False or (counts and all(map(_is_none, counts.values()))):
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
            refuse(prefix + name, part.get(name), _not_of(part.get(name), dict, "an object or null"))
        refuse(f"{prefix}model_type", part.get("model_type"), _not_of(part.get("model_type"), str, "a name, or null"))
        skipped = unread(part)
        for key, value in part.items():
            if key == "sliding_window" and value == 0 and part.get("model_type") == "qwen2_moe":
                continue  # for this model type transformers writes 0 for no window
            if key == "intermediate_size" and value is None and part.get("model_type") == "gpt_neo":
                continue  # four times hidden_size
            if key in LIMITS and key not in skipped:
                refuse(prefix + key, value, LIMITS[key].refuse(value))
            elif type(value) is int and abs(value) > 1 << 32:
                refuse(prefix + key, value, f"at most {1 << 32}")
        for name in ROPE:
            _check_rope(prefix + name, part.get(name), refuse)


def _not_of(value: Any, kind: type, wanted: str) -> str | None:
    """Return ``wanted`` for a value that is neither of a kind nor null."""
    return None if value is None or isinstance(value, kind) else wanted


def _check_rope(name: str, rope: Any, refuse: Any) -> None:
    """Check the rotary embedding's numbers, in one table or one for each type of layer."""
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
