"""A line of the log now and then about what the engine does, as long as it does something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.errors import EngineDeadError

from . import logs

if TYPE_CHECKING:
    from .link.client import EngineClient

COUNTED = ("prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits")


async def tell(client: EngineClient, seconds: float) -> None:
    """Write a line every so many seconds in which a token was computed or a request was there; 0: never."""
    before: Mapping[str, Any] = {}
    since = time.monotonic()
    while seconds:
        await asyncio.sleep(seconds)
        try:
            stats = await client.stats()
        except EngineDeadError:  # another one may be started
            before = {}
            continue
        now = time.monotonic()
        if line := figures(stats, before, now - since):
            logs.event("throughput", told=sentence(line), **line)
        before, since = stats, now


def figures(stats: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return tokens a second and what is there, since ``before``; nothing if there was nothing to do."""
    more = {name: max(stats.get(name, 0) - before.get(name, 0), 0) for name in COUNTED}
    if not (more["prompt_tokens"] or more["generated_tokens"] or stats["running"] or stats["waiting"]):
        return {}
    total = max(stats["blocks_total"], 1)
    return {
        "prompt_tokens_per_s": round(more["prompt_tokens"] / seconds, 1),
        "generation_tokens_per_s": round(more["generated_tokens"] / seconds, 1),
        "running": stats["running"],
        "waiting": stats["waiting"],
        "kv_usage": round((total - stats["blocks_free"] - stats["blocks_cached"]) / total, 4),
        "prefix_hit_rate": round(more["prefix_hits"] / more["prefix_queries"], 4) if more["prefix_queries"] else None,
    }


def sentence(line: Mapping[str, Any]) -> str:
    """Return the figures as a sentence, for a terminal."""
    rates = f"{line['prompt_tokens_per_s']:,} prompt and {line['generation_tokens_per_s']:,} generated tokens/s"
    queue = f"{line['running']:,} running, {line['waiting']:,} waiting"
    hits = "" if line["prefix_hit_rate"] is None else f", {100 * line['prefix_hit_rate']:.1f} % prefix hits"
    return f"{rates}; {queue}; KV cache {100 * line['kv_usage']:.1f} % used{hits}"
