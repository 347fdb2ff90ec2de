"""Choose the image encoder of a checkpoint, and find out whether an engine reads images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.encoder import EncoderContext, ImageFacts
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.device.loading.tensor_names import OF_TEXT
from minivllm.errors import ConfigError, MinivllmError, ModelError, describe_error, shown
from minivllm.registry import build_part
from minivllm.runtime.images.reader import NO_ENCODER
from minivllm.validation import begins, source_of

from .kv_groups import attention_layers

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part, Wiring
    from minivllm.device.loading.hf_config import Checkpoint
    from minivllm.registry import Selection

    from .values import EngineConfig, PluginChoice

EXECUTORS = ("minivllm/local", "minivllm/process")


def wire_images(
    config: EngineConfig,
    origins: Mapping[str, str],
    checkpoint: Checkpoint,
    wiring: Wiring,
    parts: Mapping[str, Part],
    notes: list[tuple[str, str]],
    selection: Selection,
    keep: Callable[[Selection, PluginChoice], Part],
) -> Wiring:
    """Return the wiring with the encoder and the options of images, or the reason if the engine reads none.

    ``selection`` is the choice of an encoder, and ``keep`` stores it.  The result is added to ``notes``.  ConfigError
    if the user has set ``max_images`` or ``encoder`` and the engine cannot read images."""
    named = config.encoder.name != "auto"
    if named:
        selection.require()
    reason = _why_not(config, checkpoint, wiring, parts, selection)
    images = ImageWiring(why_not=reason)
    if not reason:
        part = keep(selection, config.encoder)
        try:
            facts = _facts(part, checkpoint)
            reason = _unsupported(facts, checkpoint, wiring, parts)
        except ModelError as exc:
            reason = str(exc)
        images = ImageWiring(why_not=reason)
        if not reason:
            images = ImageWiring(config.max_images, cache_mb=config.image_cache_mb, facts=facts)
            notes[:] = [note for note in notes if not note[1].startswith(OF_TEXT)]
            wiring = replace(wiring, parts={**wiring.parts, "encoder": part})
    if reason != NO_ENCODER:
        notes.append(("images", f"none: {reason}" if reason else f"up to {images.max_images} in a request"))
    if reason:
        _refuse_options(config, origins, reason)
    return replace(wiring, images=images)


def _refuse_options(config: EngineConfig, origins: Mapping[str, str], reason: str) -> None:
    """Raise ConfigError if the user has set options of images, which the engine does not read."""
    default = type(config).model_fields["max_images"].default
    if config.max_images not in (0, default):
        place = begins(source_of(origins, "max_images"))
        raise ConfigError(f"{place}max_images={config.max_images}: {reason}; leave it out, or set it to 0")
    if config.encoder.name != "auto" and config.max_images:
        place = begins(source_of(origins, "encoder"))
        raise ConfigError(f"{place}encoder={config.encoder.name}: {reason}; leave it out")


def _why_not(
    config: EngineConfig, checkpoint: Checkpoint, wiring: Wiring, parts: Mapping[str, Part], selection: Selection
) -> str:
    """Return the reason why an engine reads no images, such as a missing encoder or ``max_images=0``, or "" if it reads
    them."""
    if selection.chosen is None:
        if not isinstance(checkpoint.raw.get("vision_config"), dict):
            return NO_ENCODER
        served = {one for found in selection.candidates if found.spec for one in found.spec.listed("model_type")}
        family = shown(checkpoint.raw.get("model_type"))
        return f"images of model_type={family} are not implemented; expected {', '.join(sorted(served))}"
    if not config.max_images:
        return "max_images=0"
    if find_spec("PIL") is None:
        return 'Pillow is missing: pip install "minivllm[images]"'
    beside = {
        "tensor_parallel_size": wiring.parallel.tensor_parallel_size > 1,
        f"drafter={config.drafter.name}, which has a model of its own": wiring.speculation.draft_model is not None,
        "compressor": wiring.compressor is not None,
        "processors with a second model": bool(wiring.own_models),
        "load_format": config.load_format not in ("auto", "safetensors", "dummy"),
        "executor": parts["executor"].name not in EXECUTORS,
    }
    name = next((name for name, is_set in beside.items() if is_set), None)
    return "" if name is None else f"images are not implemented with {name}"


def _facts(part: Part, checkpoint: Checkpoint) -> ImageFacts:
    """Return the facts that the encoder has about a checkpoint.  ModelError if it cannot serve the checkpoint."""
    encoder = build_part("encoder", part, EncoderContext(str(checkpoint.folder), checkpoint.raw))
    try:
        facts: Any = encoder.facts()
    except MinivllmError as exc:
        raise ModelError(str(exc)) from exc
    except Exception as exc:  # the code of a package may raise anything
        raise ModelError(
            f"the image encoder {part.name} failed on the checkpoint: {describe_error(exc, encoder)}"
        ) from exc
    if not isinstance(facts, ImageFacts):
        raise ModelError(f"facts() of {part.name} gave a {type(facts).__name__}; expected ImageFacts")
    vocab = checkpoint.hf_config().vocab_size
    ids = {facts.token, *facts.before, *facts.after, *(c for _, _, c in facts.joined)}
    wrong = sorted(one for one in ids if not 0 <= one < vocab)
    if wrong:
        raise ModelError(f"the ImageFacts of {part.name} name the token id {wrong[0]}; expected 0 to {vocab - 1}")
    if facts.levels < 1 or facts.merge < 1 or facts.span < 0 or len(facts.sections) not in (0, 3):
        raise ModelError(f"{facts}: expected levels and merge >= 1, span >= 0, and three sections or none")
    return facts


def _unsupported(facts: ImageFacts, checkpoint: Checkpoint, wiring: Wiring, parts: Mapping[str, Part]) -> str:
    """Return why an engine cannot serve images whose encoder has these facts, or "" if it can."""
    if facts.span:
        reason = _excludes_spans(facts, checkpoint, wiring, parts)
        if reason:
            return reason
    if not facts.sections:
        return ""
    if wiring.rope_switch is not None:
        return "images are not implemented with a rotary embedding that changes with the length"
    if parts["scheduler"].name == "minivllm/static":
        # a step of a static batch may have more tokens than the rotary tables for image positions have rows
        return "images are not implemented with scheduler=static"
    return ""


def _excludes_spans(facts: ImageFacts, checkpoint: Checkpoint, wiring: Wiring, parts: Mapping[str, Part]) -> str:
    """Return the reason why an engine cannot serve images whose tokens attend to each other, or ""."""
    problem = "the tokens of an image attend to each other, which"
    back_end = parts["attention"]
    if "spans" not in back_end.features:
        return f"{problem} attention={back_end.name} does not support; use attention=sdpa or triton"
    if wiring.batch_invariant:
        return f"{problem} batch_invariant=true does not support; set it to false"
    if not facts.after:
        return "the image encoder writes no token behind an image, and its tokens attend to each other"
    layers = attention_layers(build_part("model", parts["model"]), checkpoint.hf_config())
    window = min((layer.window for layer in layers if layer.window is not None), default=facts.span)
    if window < facts.span:
        return f"an image has {facts.span} tokens, more than the sliding window of {window}"
    return ""
