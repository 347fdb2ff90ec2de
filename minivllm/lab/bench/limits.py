"""The limits of an engine for a benchmark's requests: vocabulary, longest request, rows, tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config import Loaded
from minivllm.errors import ConfigError


@dataclass(frozen=True)
class EngineLimits:
    """The limits of an engine."""

    vocab: int
    tokens: int  # tokens of the longest request, prompt and answer, that ``max_model_len`` and the KV cache allow
    rows: int
    step: int  # tokens
    block: int  # tokens of a block of the KV cache
    cache: int | None = None  # tokens of the whole KV cache; None means that the engine chooses the size

    def room(self, requests: int = 1) -> int:
        """Return the tokens that each of ``requests`` concurrent requests may have without preemption."""
        if self.cache is None:
            return self.tokens
        blocks_each = self.cache // self.block // max(1, requests)
        return min(self.tokens, blocks_each * self.block)


def planned(loaded: Loaded) -> EngineLimits:
    """Return the limits of a configuration before its engine is built.  Raise the errors of ``resolve``."""
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    from minivllm.config.resolve import resolve
    from minivllm.registry import Catalog

    found = resolve(loaded.engine, Catalog.discover(), loaded.origins)
    wiring = found.wiring
    vocab = int(found.hf_config.vocab_size)
    if found.parts["executor"].name == "minivllm/sim":
        vocab = int(loaded.engine.executor.options.get("vocab_size") or vocab)
    blocks = loaded.engine.num_kvcache_blocks
    return _limits(wiring, vocab, blocks * wiring.block if blocks > 0 else None)


def of_engine(llm: Any) -> EngineLimits:
    """Return the limits of a running engine."""
    wiring = llm.engine.wiring
    capacity = llm.engine.capacity
    room = (min(capacity.blocks) - 1) * wiring.block
    return _limits(wiring, capacity.vocab_size, room)


def _limits(wiring: Any, vocab: int, cache: int | None) -> EngineLimits:
    """Return the limits of an engine with a KV cache of ``cache`` tokens, None if the size is not known."""
    tokens = wiring.max_model_len if cache is None else min(wiring.max_model_len, cache)
    return EngineLimits(vocab, tokens, wiring.max_num_seqs, wiring.max_num_batched_tokens, wiring.block, cache)


def smallest(found: Sequence[EngineLimits]) -> EngineLimits:
    """Return the smallest limits of several engines."""
    caches = [one.cache for one in found if one.cache is not None]
    least = {}
    for name in ("vocab", "tokens", "rows", "step", "block"):
        least[name] = min(getattr(one, name) for one in found)
    return EngineLimits(**least, cache=min(caches) if caches else None)


def fitted(
    given: Mapping[str, int | None],
    defaults: Mapping[str, int],
    least: Mapping[str, int],
    fits: Callable[[Mapping[str, int]], bool],
    refusal: Callable[[Mapping[str, int]], str],
) -> dict[str, int]:
    """Return the user's value for each option in ``given``, or its default, scaled down until ``fits(values)``.

    All defaults shrink by the same share, at most down to ``least``.  Raise ConfigError with ``refusal(values)`` as the
    message if the given values leave no room.
    """
    free = [name for name in defaults if given.get(name) is None]
    for share in range(100, -1, -1):
        values = {name: int(given.get(name) or 0) for name in defaults}
        for name in free:
            values[name] = max(least[name], defaults[name] * share // 100)
        if fits(values):
            return values
        if not free:
            break
    raise ConfigError(refusal(values))
