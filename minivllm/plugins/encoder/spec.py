"""Describe the built-in image encoders."""

from minivllm.registration.spec import ANY, Spec

API = (1, 4)


def _encoder(target: str, summary: str, *model_types: str, features: frozenset[str] = frozenset()) -> Spec:
    """Return the spec of an encoder of this package for checkpoints of some model types."""
    limits = {"device": ANY, "dtype": ANY, "model_type": set(model_types)}
    return Spec(f"minivllm.plugins.encoder.{target}", API, summary, priority=10, limits=limits, features=features)


GEMMA3 = _encoder("gemma3:Gemma3Images", "a tower of SigLIP; the tokens of an image attend to each other", "gemma3")
LLAVA = _encoder("llava:Llava", "a tower of CLIP or SigLIP; positions as of text", "llava")
PIXTRAL = _encoder(
    "pixtral:Pixtral", "a tower of Pixtral, whose images have rows of any length; positions as of text", "mistral3"
)
QWEN_VL = _encoder(
    "qwen_vl:QwenVL",
    "patches of any resolution; a position for each axis",
    "qwen2_vl",
    "qwen2_5_vl",
)
QWEN3_VL = _encoder(
    "qwen_vl:Qwen3VL",
    "patches of any resolution; a position for each axis, features behind the first layers (deepstack)",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    features=frozenset({"graph_safe"}),
)
