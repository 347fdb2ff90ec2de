"""Limits of an engine that a benchmark's requests must keep: vocabulary, longest request, rows, tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config import Loaded
from minivllm.errors import ConfigError


@dataclass(frozen=True)
class EngineLimits:
    """The sizes of one engine.  ``tokens``: the longest request (prompt and answer), by ``max_model_len`` and by the
    KV cache; ``cache``: tokens of the whole KV cache, None if the engine chooses its size; ``block``: tokens of a
    block of it."""

    vocab: int
    tokens: int
    rows: int
    step: int
    block: int
    cache: int | None = None

    def room(self, requests: int = 1) -> int:
        """Return the tokens that each of ``requests`` concurrent requests may have without preemption."""
        if self.cache is None:
            return self.tokens
        return min(self.tokens, self.cache // self.block // max(1, requests) * self.block)


def planned(loaded: Loaded) -> EngineLimits:
    """Return the limits of a configuration before its engine is built.  Raises the errors of ``resolve``."""
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    from minivllm.config.resolve import resolve
    from minivllm.registry import Catalog

    found = resolve(loaded.engine, Catalog.discover(), loaded.origins)
    vocab, wiring = int(found.hf_config.vocab_size), found.wiring
    own = found.parts["executor"].name == "minivllm/sim" and loaded.engine.executor.options.get("vocab_size")
    cache = loaded.engine.num_kvcache_blocks * wiring.block if loaded.engine.num_kvcache_blocks > 0 else None
    return _limits(wiring, int(own or vocab), cache)


def of_engine(llm: Any) -> EngineLimits:
    """Return the limits of an engine that runs."""
    wiring, capacity = llm.engine.wiring, llm.engine.capacity
    return _limits(wiring, capacity.vocab_size, (min(capacity.blocks) - 1) * wiring.block)


def _limits(wiring: Any, vocab: int, cache: int | None) -> EngineLimits:
    tokens = wiring.max_model_len if cache is None else min(wiring.max_model_len, cache)
    return EngineLimits(vocab, tokens, wiring.max_num_seqs, wiring.max_num_batched_tokens, wiring.block, cache)


def smallest(found: Sequence[EngineLimits]) -> EngineLimits:
    """Return the limits that all of several engines keep."""
    caches = [one.cache for one in found if one.cache is not None]
    least = {name: min(getattr(one, name) for one in found) for name in ("vocab", "tokens", "rows", "step", "block")}
    return EngineLimits(**least, cache=min(caches) if caches else None)


def fitted(
    given: Mapping[str, int | None],
    defaults: Mapping[str, int],
    least: Mapping[str, int],
    fits: Callable[[Mapping[str, int]], bool],
    refusal: Callable[[Mapping[str, int]], str],
) -> dict[str, int]:
    """Return a value for each default: the given one, or the default scaled down until ``fits``.

    All defaults shrink by one share, down to ``least``.  ConfigError with ``refusal(values)`` if the given values
    leave no room.
    """
    free = [name for name in defaults if given.get(name) is None]
    for share in range(100, -1, -1):
        scaled = {name: max(least[name], defaults[name] * share // 100) for name in free}
        values = {name: scaled[name] if name in scaled else int(given[name] or 0) for name in defaults}
        if fits(values):
            return values
        if not free:
            break
    raise ConfigError(refusal(values))
