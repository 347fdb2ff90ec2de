"""Models and other choices that exclude a compressor, because rows of the KV cache cannot be compressed with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.core.interfaces.compressor import CompressorContext
from minivllm.core.interfaces.executor import NO_COMPRESSION
from minivllm.core.interfaces.model import ModelArch
from minivllm.errors import ConfigError
from minivllm.registry import build_part
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.executor import CacheWiring, Part

    from .values import EngineConfig

# options of the engine that belong to compression, without the compressor's own ones
COMPRESSION_OPTIONS = ("kv_budget", "compress_every", "pressure_budget")


PLAIN_FORMATS = ("bf16", "fp16", "fp32")  # KV formats that store keys as plain floating-point numbers, without scales


class CompressedModel(NamedTuple):
    """The facts about a model and its processors that may exclude a compressor."""

    specs: Sequence[AttnSpec]  # layers with attention
    config: Any  # the model's config object
    recurrent: bool  # whether the model has recurrent states
    drafts: int  # number of drafts
    own_models: bool  # whether a processor has a second model
    facts: Mapping[str, Any]  # facts of the wiring: device, dtype, max_model_len


def wire_compression(
    cache: CacheWiring,
    config: EngineConfig,
    origins: Mapping[str, str],
    parts: Mapping[str, Part],
    model: CompressedModel,
) -> tuple[CacheWiring, list[tuple[str, str]]]:
    """Return the options of the KV cache with those of compression, and the notes for ``minivllm explain``.

    ``parts`` are the chosen plug-ins.  Raise ConfigError if the chosen compressor cannot be used, or if an option needs
    one and none is chosen.
    """
    options = {name: getattr(config, name) for name in COMPRESSION_OPTIONS}
    notes = _checked(config, origins, parts, model)
    rerotates = bool(notes) and _rerotates(parts["compressor"], model)
    if rerotates:
        reason = _fixed_positions(parts, model)
        if reason:
            label, name = begins(source_of(origins, "compressor")), parts["compressor"].name.removeprefix("minivllm/")
            todo = "choose a compressor that leaves keys as they are (streaming: rerotate=false)"
            raise ConfigError(
                f"{label}compressor={name} rotates keys to new positions, which is impossible here: {reason}; {todo}"
            )
        note = "kept keys are rotated to the positions 0, 1 ..., and later tokens follow"
        notes.append(("compressor.positions", note))
    return replace(cache, rerotates=rerotates, **options), notes


def _rerotates(part: Part, model: CompressedModel) -> bool:
    """Return whether a compressor rotates kept keys to new positions."""
    facts = model.facts
    ctx = CompressorContext(facts["device"], facts["dtype"], facts["max_model_len"])
    return bool(build_part("compressor", part, ctx).rerotates)


def _fixed_positions(parts: Mapping[str, Part], model: CompressedModel) -> str:
    """Return why the keys of a model cannot be rotated to new positions, "" if they can."""
    kv_format = parts["kvformat"].name.removeprefix("minivllm/")
    if kv_format not in PLAIN_FORMATS:
        return (
            f"kv_format={kv_format} stores rounded keys, which would be rounded again; use {' or '.join(PLAIN_FORMATS)}"
        )
    if any(spec.window is not None for spec in model.specs):
        return "layers with a sliding window are not compressed, and keep their positions"
    if any(spec.v_in_k for spec in model.specs):
        return "values of the model are parts of its keys"
    arch = build_part("model", parts["model"])
    name = parts["model"].name.removeprefix("minivllm/")
    if type(arch).describe is ModelArch.describe:
        return f"model plug-in {name} does not describe its rotary embedding"
    described = arch.describe(model.config)
    if described.positions or all(layer.rope is None for layer in described.layers):
        return f"the model (plug-in {name}) has no rotary embedding"
    return ""


def _checked(
    config: EngineConfig, origins: Mapping[str, str], parts: Mapping[str, Part], model: CompressedModel
) -> list[tuple[str, str]]:
    """Return the notes about the budget.  There are none without a compressor.

    Raise ConfigError if the chosen compressor cannot be used, as ``wire_compression`` does.
    """
    name = parts["compressor"].name
    if name == NO_COMPRESSION:
        for option in COMPRESSION_OPTIONS:
            _refuse_option(config, origins, option)
        return []
    reason = _excluded(model, parts["drafter"].name)
    if reason:
        label = begins(source_of(origins, "compressor"))
        raise ConfigError(f"{label}compressor={name.removeprefix('minivllm/')}: {reason}")
    for option, whole in (("kv_budget", "the prompt"), ("pressure_budget", "the computed tokens")):
        budget = getattr(config, option)
        if budget >= 1 and budget != int(budget):
            label = begins(source_of(origins, option))
            expected = f"a whole number of tokens, or a share of {whole} below 1"
            raise ConfigError(f"{label}{option}={budget}: expected {expected}")
    return [("compressor.keeps", _budget_explained(config))]


def _budget_explained(config: EngineConfig) -> str:
    """Return a sentence about the times at which requests are compressed, and the number of tokens that they keep."""
    often = f", and after every {config.compress_every} generated tokens" if config.compress_every else ""
    text = f"{_tokens(config.kv_budget, 'the prompt')} at the end of the prompt{often}"
    if not config.kv_budget:
        text = f"as many tokens as the kv_budget of a request says, at the end of its prompt{often}"
    if not config.pressure_budget:
        return text
    return f"{text}; {_tokens(config.pressure_budget, 'the computed tokens')} when KV blocks are short"


def _tokens(budget: float, whole: str) -> str:
    """Return a budget of tokens in words.  Below 1 it is a share of the tokens that ``whole`` describes."""
    return f"{budget:g} of {whole}" if budget < 1 else f"{budget:g} tokens"


def _refuse_option(config: EngineConfig, origins: Mapping[str, str], option: str) -> None:
    value = getattr(config, option)
    if not value:
        return
    label = begins(source_of(origins, option))
    todo = "choose a compressor, or remove the option"
    raise ConfigError(f"{label}{option}={value}: compressor=none compresses nothing; {todo}")


def _excluded(model: CompressedModel, drafter: str) -> str:
    """Return why the KV cache of this model and drafter cannot be compressed, or "" if it can."""
    specs = model.specs
    if model.recurrent:
        return "the model has recurrent states, which are not compressed"
    if any(spec.alibi is not None for spec in specs):
        return "attention of the model (ALiBi) reads the distance between tokens from their places in the cache"
    if all(spec.window is not None for spec in specs):
        return "every layer of the model has a sliding window, which limits the cache already"
    if model.drafts:
        return f"drafter={drafter.removeprefix('minivllm/')} needs all tokens; use none"
    if model.own_models:
        return "a processor has a second model, which needs all tokens; remove the processor"
    return ""
