"""The text model of a checkpoint that also has other models, such as encoders of images or sound, projectors and speech
decoders.

Its configuration is nested in config.json.  Some text models have a model type of their own, but compute the same on
text as another model type with a class of its own.  They are read as that model type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import ModelError, shown

from . import Fields

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
# keys beside which old files of Qwen2-VL have the fields of the text model at the top level
ENCODERS = ("vision_config", "audio_config")
# fields of rotary embeddings for several axes; for text all axes have equal positions, so the fields have no effect
MROPE = ("mrope_section", "mrope_interleaved", "interleaved")
MARK = "text_of"  # attribute of a text model's configuration with facts about the whole checkpoint
PREFIX_LM = (
    "reads the tokens of a prompt with attention to later ones (a prefix language model), which is not implemented"
)
REFUSED = {"paligemma": PREFIX_LM}


@dataclass(frozen=True)
class Alike:
    """A model type that computes the same as a text model without a class of its own.

    ``fields`` are values of its configuration that the text model has as constants.  ``turned`` are ends of names of
    tensors that the text model stores as [experts, in, out] and the model type as [experts, out, in].
    """

    model_type: str
    fields: Fields = field(default_factory=dict)
    turned: tuple[str, ...] = ()


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ALIKE: Mapping[str, Alike] = {
    "qwen2_vl_text": Alike("qwen2"),
    "qwen2_5_vl_text": Alike("qwen2"),
    "qwen2_5_omni_text": Alike("qwen2"),
    "qwen3_vl_text": Alike("qwen3"),
    "qwen3_vl_moe_text": Alike("qwen3_moe", {"norm_topk_prob": True}, EXPERTS),
    "qwen3_omni_moe_text": Alike("qwen3_moe"),
    "glm4v_text": Alike("glm4", {"attention_bias": True}),
    "glm4v_moe_text": Alike("glm4_moe", {"use_qk_norm": False}),
    "glm_ocr_text": Alike("glm4", {"attention_bias": False}),
}


@dataclass(frozen=True)
class TextModel:
    """A text model inside a larger checkpoint.  ``config`` is transformers' configuration object, and ``wrapper`` the
    name of the architecture of the whole checkpoint."""

    config: Any
    architecture: str
    model_type: str
    wrapper: str


def holds_text_model(raw: Fields) -> bool:
    """Return whether config.json describes several models, one of which is a text model."""
    nested = any(isinstance(raw.get(name), dict) for name in (*NESTED, *ENCODERS))
    return nested and not raw.get("is_encoder_decoder")


def nested_parts(raw: Fields, prefix: str = "") -> list[tuple[str, Fields]]:
    """Return (prefix of keys, object) of the configurations of text models inside config.json, outer ones first."""
    found: list[tuple[str, Fields]] = []
    for name in NESTED:
        part = raw.get(name)
        if isinstance(part, dict) and prefix.count(".") < len(NESTED):
            found += [(f"{prefix}{name}.", part), *nested_parts(part, f"{prefix}{name}.")]
    return found


def find_text_model(raw: Fields, wrapper: str) -> TextModel | None:
    """Return the text model of a checkpoint with the config.json ``raw``.

    Return None if transformers' configuration class of the checkpoint has the text model's fields itself.  ModelError
    for a model that cannot be served.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind in REFUSED:
        raise ModelError(f"model_type={shown(kind)} {REFUSED[str(kind)]}")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        whole = CONFIG_MAPPING[kind].from_dict(dict(raw))
        text = whole.get_text_config()
        if text is whole:
            return None
        # If transformers' configuration class has no nested text model, ``get_text_config`` returns a plain dict.
        if isinstance(text, Mapping):
            raise ModelError(
                f"model_type={shown(kind)} has no text model inside it, and the file has "
                f"{nested_parts(raw)[0][0][:-1]}: expected the model_type of the whole checkpoint, or the keys at the "
                "top"
            )
        owner = getattr(whole, "thinker_config", whole)
        tied = getattr(owner, "tie_word_embeddings", False)
    else:
        text, tied = _of_unknown(raw, CONFIG_MAPPING)
    return _made(text, raw, tied, wrapper)


def _of_unknown(raw: Fields, known: Any) -> tuple[Any, bool | None]:
    """Return the configuration of the text model in a checkpoint whose model type transformers lacks.

    Also return whether its head shares the embedding's weight, None if the file does not set this.
    """
    parts = nested_parts(raw)
    for prefix, part in reversed(parts):
        if (kind := part.get("model_type")) in known:
            return known[kind].from_dict(dict(part)).get_text_config(), _tied(raw, part)
        if kind is None and not nested_parts(part):
            raise ModelError(f"{prefix}model_type is missing: expected the name of the text model's type")
    kinds = [str(part.get("model_type")) for _, part in parts]
    wrapper = f"nor {prefix_of(parts)}model_type={shown(kinds[-1])} " if kinds else ""
    raise ModelError(
        f"model_type={shown(raw.get('model_type'))}: neither this {wrapper}is known to transformers: expected a text "
        "model that is"
    )


def prefix_of(parts: list[tuple[str, Fields]]) -> str:
    """Return the prefix of the keys of the innermost text model's configuration, such as "text_config."."""
    return parts[-1][0]


def _tied(raw: Fields, part: Fields) -> bool | None:
    """Return ``tie_word_embeddings`` of the text model's part of config.json, else that of the top level, else None."""
    return next((c["tie_word_embeddings"] for c in (part, raw) if "tie_word_embeddings" in c), None)


def _made(text: Any, raw: Fields, tied: bool | None, wrapper: str) -> TextModel:
    """Return the text model with the fields that config.json has at its top level added to its configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    own = text.model_type
    alike = ALIKE.get(own)
    if alike is not None:
        text = CONFIG_MAPPING[alike.model_type].from_dict(_as(alike, text.to_dict()))
    named = CAUSAL.get(text.model_type)
    if named is None:
        raise ModelError(
            f"its text model, model_type={shown(own)}, has no class in transformers, and none here "
            "that computes the same; expected a text model with a class, or a plug-in that serves the architecture"
        )
    architecture = named if isinstance(named, str) else named[0]
    text.architectures = [architecture]
    if tied is not None:
        text.tie_word_embeddings = bool(tied)
    if raw.get("quantization_config"):
        text.quantization_config = raw["quantization_config"]
    setattr(text, MARK, {"architecture": wrapper, "turned": list(alike.turned if alike else ())})
    return TextModel(text, architecture, text.model_type, wrapper)


def _as(alike: Alike, fields: Fields) -> dict[str, Any]:
    """Return the fields of a text model's configuration for the model type ``alike``, which computes the same."""
    found = {k: v for k, v in fields.items() if k not in ("model_type", "architectures")}
    rope = found.get("rope_parameters")
    if isinstance(rope, dict):
        found["rope_parameters"] = {k: v for k, v in rope.items() if k not in MROPE}
    if found.get("head_dim") is None:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return {**found, **alike.fields}
