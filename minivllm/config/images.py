"""Whether an engine reads images, and the facts of the checkpoint for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.device.loading.tensor_names import OF_TEXT
from minivllm.device.loading.vision import FAMILIES, TOWERS, merge_of, whole_config
from minivllm.errors import ConfigError, ModelError, shown
from minivllm.runtime.images.reader import NO_ENCODER, PROCESSOR
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part, Wiring
    from minivllm.device.loading.hf_config import Checkpoint

    from .values import EngineConfig

EXECUTORS = ("minivllm/local", "minivllm/process")


def wire_images(
    config: EngineConfig,
    origins: Mapping[str, str],
    checkpoint: Checkpoint,
    wiring: Wiring,
    parts: Mapping[str, Part],
    notes: list[tuple[str, str]],
) -> Wiring:
    """Return the wiring with the options of images, or the reason if the engine reads none.  Add it to ``notes``.

    ConfigError if the user has set ``max_images`` and the engine cannot read images."""
    reason = _why_not(config, checkpoint, wiring, parts)
    images = ImageWiring(why_not=reason)
    if not reason:
        try:
            images = _facts(config, checkpoint)
        except ModelError as exc:
            reason = str(exc)
            images = ImageWiring(why_not=reason)
    if not reason:
        notes[:] = [note for note in notes if not note[1].startswith(OF_TEXT)]
    if reason != NO_ENCODER:
        notes.append(("images", f"none: {reason}" if reason else f"up to {images.max_images} in a request"))
    fields = type(config).model_fields
    if reason and config.max_images not in (0, fields["max_images"].default):
        place = begins(source_of(origins, "max_images"))
        raise ConfigError(f"{place}max_images={config.max_images}: {reason}; leave it out, or set it to 0")
    return replace(wiring, images=images)


def _why_not(config: EngineConfig, checkpoint: Checkpoint, wiring: Wiring, parts: Mapping[str, Part]) -> str:
    """Return why an engine reads no images, "" if nothing forbids it."""
    raw = checkpoint.raw
    family = str(raw.get("model_type"))
    if not isinstance(raw.get("vision_config"), dict):
        return NO_ENCODER
    if family not in FAMILIES:
        return f"images of model_type={shown(family)} are not implemented; expected {', '.join(FAMILIES)}"
    if not config.max_images:
        return "max_images=0"
    if find_spec("PIL") is None:
        return 'Pillow is missing: pip install "minivllm[images]"'
    if not files.is_there(checkpoint.folder / PROCESSOR):
        return f"the checkpoint has no {PROCESSOR}"
    beside = {
        "tensor_parallel_size": wiring.parallel.tensor_parallel_size > 1,
        "drafter": wiring.speculation.num_speculative_tokens > 0,
        "compressor": wiring.compressor is not None,
        "kvstore": bool(wiring.cache.stores),
        "enable_lora": config.enable_lora,
        "processors with a second model": bool(wiring.own_models),
        "load_format": config.load_format not in ("auto", "safetensors"),
        "executor": parts["executor"].name not in EXECUTORS,
    }
    if FAMILIES[family].mrope:
        beside["a rotary embedding that changes with the length"] = wiring.rope_switch is not None
        # its first step may have more tokens than there are rotary rows for parts of images
        beside["scheduler=static"] = parts["scheduler"].name == "minivllm/static"
    name = next((name for name, is_set in beside.items() if is_set), None)
    return "" if name is None else f"images are not implemented with {name}"


def _check_sections(sections: tuple[Any, ...], text: Any, rope: Mapping[str, Any]) -> None:
    """Raise ModelError if the parts of the rotary embedding for time, height and width are not half its dimensions."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    share = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    half = int(head * share) // 2
    numbers = all(type(part) is int and part >= 0 for part in sections)
    if len(sections) != 3 or not numbers or sum(sections) != half:
        raise ModelError(f"mrope_section={shown(sections)}: expected three numbers with the sum {half}")


def _facts(config: EngineConfig, checkpoint: Checkpoint) -> ImageWiring:
    """Return the facts of a checkpoint with images.  ModelError for an encoder that is not implemented."""
    whole = whole_config(checkpoint.raw)
    vision: dict[str, Any] = whole.vision_config.to_dict()
    family = str(checkpoint.raw["model_type"])
    facts = FAMILIES[family]
    if not facts.grid and vision.get("model_type") not in TOWERS:
        raise ModelError(f"vision_config.model_type={shown(vision.get('model_type'))}: expected {' or '.join(TOWERS)}")
    token = getattr(whole, "image_token_id", None)
    if token is None:
        raise ModelError("config.json has no image_token_id")
    sections: tuple[int, ...] = ()
    if facts.mrope:
        rope = whole.get_text_config().rope_parameters or {}
        sections = tuple(rope.get("mrope_section") or ())
        _check_sections(sections, whole.get_text_config(), rope)
    return ImageWiring(
        max_images=config.max_images,
        family=family,
        token=int(token),
        cache_mb=config.image_cache_mb,
        merge=merge_of(vision),
        sections=sections,
        interleaved=facts.deepstack,
    )
