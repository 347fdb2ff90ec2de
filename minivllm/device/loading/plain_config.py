"""Read config.json of Llama, Qwen 2 and Qwen 3 without transformers, whose import takes a second of every start.

A file is read here if all of its keys are known and their values are of the usual types.  Other files, including all
faulty ones, are left to transformers.  The result has the same values as transformers' object, which a test compares.
An attribute that is not known here is read from transformers' object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import Fields

WHOLE = int
REAL = (int, float)
FLAG = bool
WORD = str
NULL = type(None)
MANY = list
Kinds = tuple[type, ...]
THETA = 10_000.0  # base of the rotary embedding if a file has none


def _kinds(*kinds: Any) -> Kinds:
    """Return one flat tuple of types."""
    return tuple(k for kind in kinds for k in (kind if isinstance(kind, tuple) else (kind,)))


SIZES: Mapping[str, tuple[Any, Kinds]] = {  # field -> (default, kinds of its values)
    "hidden_size": (4096, _kinds(WHOLE)),
    "num_hidden_layers": (32, _kinds(WHOLE)),
    "num_attention_heads": (32, _kinds(WHOLE)),
    "hidden_act": ("silu", _kinds(WORD)),
    "rms_norm_eps": (1e-6, _kinds(REAL)),
    "tie_word_embeddings": (False, _kinds(FLAG)),
}
QWEN2: Mapping[str, tuple[Any, Kinds]] = {
    **SIZES,
    "vocab_size": (151936, _kinds(WHOLE)),
    "intermediate_size": (22016, _kinds(WHOLE)),
    "max_position_embeddings": (32768, _kinds(WHOLE)),
    "num_key_value_heads": (32, _kinds(WHOLE, NULL)),
    "use_sliding_window": (False, _kinds(FLAG)),
    "sliding_window": (4096, _kinds(WHOLE, NULL)),
    "max_window_layers": (28, _kinds(WHOLE)),
    "layer_types": (None, _kinds(MANY, NULL)),
}
FIELDS: Mapping[str, Mapping[str, tuple[Any, Kinds]]] = {
    "llama": {
        **SIZES,
        "vocab_size": (32000, _kinds(WHOLE)),
        "intermediate_size": (11008, _kinds(WHOLE)),
        "max_position_embeddings": (2048, _kinds(WHOLE)),
        "num_key_value_heads": (None, _kinds(WHOLE, NULL)),
        "head_dim": (None, _kinds(WHOLE, NULL)),
        "attention_bias": (False, _kinds(FLAG)),
        "mlp_bias": (False, _kinds(FLAG)),
    },
    "qwen2": QWEN2,
    "qwen3": {**QWEN2, "head_dim": (128, _kinds(WHOLE)), "attention_bias": (False, _kinds(FLAG))},
}
NO_MATTER = {  # fields that do not change the computation
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "model_type", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# the names that this reader accepts; a file with older names is left to transformers
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE = {"rope_parameters", "rope_scaling", "rope_theta"}
ROPE_KINDS = {"default", "linear", "llama3"}
ROPE_NUMBERS = {
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
}  # fmt: skip
# fields that architectures read; one that this reader has not set does not exist (AttributeError)
UNSET = {
    "layer_types", "original_max_position_embeddings", "partial_rotary_factor", "per_layer_config",
    "quantization_config", "rope_scaling", "rope_theta", "sliding_window", "text_of", "use_bidirectional_attention",
    "use_mrope",
}  # fmt: skip


class PlainConfig:
    """Fields of a config.json as attributes.

    ``whole`` creates transformers' object, which has the other attributes.
    """

    def __init__(self, values: Fields, whole: Callable[[], Any]) -> None:
        self.__dict__.update(values)
        self._whole = whole
        self._made = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in UNSET:
            raise AttributeError(name)
        return getattr(self.made(), name)

    def made(self) -> Any:
        """Return transformers' object, made once."""
        if self._made is None:
            self._made = self._whole()
        return self._made


def plain_config(raw: Fields, whole: Callable[[], Any]) -> PlainConfig | None:
    """Return the configuration of a file, or None if the file is left to transformers, which ``whole`` calls."""
    fields = FIELDS.get(str(raw.get("model_type")))
    if fields is None or not set(raw) <= fields.keys() | NO_MATTER | ROPE:
        return None
    values = {}
    for name, (default, kinds) in fields.items():
        values[name] = raw.get(name, default)
        if type(values[name]) not in kinds:
            return None
    rope = _rope(raw)
    heads = values["num_attention_heads"]
    layers = values["num_hidden_layers"]
    types = values.get("layer_types")
    if rope is None or heads < 1 or values["hidden_size"] % heads:
        return None
    if types is not None and (len(types) != layers or not all(kind in LAYER_TYPES for kind in types)):
        return None
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    if "head_dim" in values:
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // heads
    if "use_sliding_window" in values:
        window = values["sliding_window"] if values["use_sliding_window"] else None
        first = values["max_window_layers"] if window is not None else layers
        values["sliding_window"] = window
        values["layer_types"] = types or [
            "sliding_attention" if i >= first else "full_attention" for i in range(layers)
        ]
    values |= {"model_type": str(raw["model_type"]), "rope_parameters": rope}
    return PlainConfig({**values, "is_causal": True, "is_heterogeneous": False}, whole)


def two_ropes(raw: Fields) -> str:
    """Return a note for a file with both ``rope_scaling`` and ``rope_parameters``, or "".

    Only ``rope_scaling`` is then read.
    """
    scaling = raw.get("rope_scaling")
    parameters = raw.get("rope_parameters")
    if not isinstance(scaling, Mapping) or not isinstance(parameters, Mapping):
        return ""
    if not scaling or not parameters:
        return ""
    lost = parameters.get("rope_theta")
    theta = scaling.get("rope_theta", raw.get("rope_theta", THETA))
    more = ""
    if lost is not None and lost != theta and "rope_theta" not in scaling:
        more = f"; rope_theta is {theta} and not {lost}: write rope_theta in rope_scaling too"
    return f"rope_scaling is read, and rope_parameters is not, as in transformers{more}"


def _rope(raw: Fields) -> dict[str, Any] | None:
    """Return ``rope_parameters`` in the form of transformers 5, for files in the old and the new form.

    If a file has both, ``rope_scaling`` is used.  None for a kind or for fields that this reader does not know.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or not given.keys() <= ROPE_NUMBERS | {"rope_type", "type"}:
        return None
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        return None
    theta = given.get("rope_theta", raw.get("rope_theta", THETA))
    numbers = {name: given[name] for name in given.keys() & ROPE_NUMBERS}
    if not all(type(number) in (int, float) for number in (theta, *numbers.values())):
        return None
    return {**numbers, "rope_type": kind, "rope_theta": theta}
