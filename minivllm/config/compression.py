"""Models and other choices that exclude a compressor, because rows of the KV cache cannot be compressed with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.executor import NO_COMPRESSION
from minivllm.errors import ConfigError
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.executor import Part

    from .values import EngineConfig

COMPRESSION_OPTIONS = ("kv_budget", "compress_every", "pressure_budget")  # of the engine, without its compressor


def check_compression(
    config: EngineConfig,
    origins: Mapping[str, str],
    parts: Mapping[str, Part],
    specs: Sequence[AttnSpec],
    recurrent: bool,
    drafts: int,
    own_models: bool,
) -> list[tuple[str, str]]:
    """Return the notes for ``minivllm explain``.  Raise ConfigError if the chosen compressor cannot be used, or if an
    option needs one and none is chosen.

    ``parts`` are the chosen plug-ins, ``specs`` those of the layers with attention.  ``recurrent`` means that the model
    has recurrent states, ``own_models`` that a processor has a second model.  ``drafts`` is the number of drafts.
    """
    name = parts["compressor"].name
    if name == NO_COMPRESSION:
        for option in COMPRESSION_OPTIONS:
            _refuse_option(config, origins, option)
        return []
    reason = _excluded(specs, recurrent, drafts, own_models, parts["drafter"].name)
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
    """Return when requests are compressed, and to how many tokens."""
    often = f", and after every {config.compress_every} generated tokens" if config.compress_every else ""
    text = f"{_tokens(config.kv_budget, 'the prompt')} at the end of the prompt{often}"
    if not config.kv_budget:
        text = f"as many tokens as the kv_budget of a request says, at the end of its prompt{often}"
    if not config.pressure_budget:
        return text
    return f"{text}; {_tokens(config.pressure_budget, 'the computed tokens')} when KV blocks are short"


def _tokens(budget: float, whole: str) -> str:
    """Return the text of a budget."""
    return f"{budget:g} of {whole}" if budget < 1 else f"{budget:g} tokens"


def _refuse_option(config: EngineConfig, origins: Mapping[str, str], option: str) -> None:
    value = getattr(config, option)
    if not value:
        return
    label = begins(source_of(origins, option))
    todo = "choose a compressor, or remove the option"
    raise ConfigError(f"{label}{option}={value}: compressor=none compresses nothing; {todo}")


def _excluded(specs: Sequence[AttnSpec], recurrent: bool, drafts: int, own_models: bool, drafter: str) -> str:
    """Return why rows cannot be compressed, "" if they can."""
    if recurrent:
        return "the model has recurrent states, which are not compressed"
    if any(spec.alibi is not None for spec in specs):
        return "attention of the model (ALiBi) reads the distance between tokens from their places in the cache"
    if all(spec.window is not None for spec in specs):
        return "every layer of the model has a sliding window, which limits the cache already"
    if drafts:
        return f"drafter={drafter.removeprefix('minivllm/')} needs all tokens; use none"
    if own_models:
        return "a processor has a second model, which needs all tokens; remove the processor"
    return ""
