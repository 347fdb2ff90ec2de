"""Log lines about the engine's throughput, at a fixed interval while the engine has work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.errors import EngineDeadError

from . import logs

if TYPE_CHECKING:
    from .link.client import EngineClient


async def report(client: EngineClient, seconds: float) -> None:
    """Log a line every ``seconds`` seconds, unless the engine had no request and no token.  0 means never."""
    before: Mapping[str, Any] = {}
    since = time.monotonic()
    while seconds:
        await asyncio.sleep(seconds)
        try:
            stats = await client.stats()
        except EngineDeadError:  # a restarted engine counts from 0 again
            before = {}
            continue
        now = time.monotonic()
        if line := figures(stats, before, now - since):
            logs.event("throughput", sentence=sentence(line), **line)
        before = stats
        since = now


def figures(stats: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the tokens per second, the queue, the use of the KV cache and the prefix hit rate of an interval.

    ``before`` and ``stats`` are the engine's statistics at the start and the end of the interval of ``seconds``.
    Return {} if the engine was idle.
    """

    def grown(name: str) -> int:
        return max(stats.get(name, 0) - before.get(name, 0), 0)

    prompt, generated = grown("prompt_tokens"), grown("generated_tokens")
    if not (prompt or generated or stats["running"] or stats["waiting"]):
        return {}
    queries, hits = grown("prefix_queries"), grown("prefix_hits")
    blocks = max(stats["blocks_total"], 1)
    used = blocks - stats["blocks_free"] - stats["blocks_cached"]
    prompt_rate = round(prompt / seconds, 1)
    generation_rate = round(generated / seconds, 1)
    usage = round(used / blocks, 4)
    hit_rate = round(hits / queries, 4) if queries else None
    return {
        "prompt_tokens_per_s": prompt_rate,
        "generation_tokens_per_s": generation_rate,
        "running": stats["running"],
        "waiting": stats["waiting"],
        "kv_usage": usage,
        "prefix_hit_rate": hit_rate,
    }


def sentence(line: Mapping[str, Any]) -> str:
    """Return the figures as a sentence for text logs."""
    rates = f"{line['prompt_tokens_per_s']:,} prompt and {line['generation_tokens_per_s']:,} generated tokens/s"
    queue = f"{line['running']:,} running, {line['waiting']:,} waiting"
    cache = f"KV cache {100 * line['kv_usage']:.1f} % used"
    hits = "" if line["prefix_hit_rate"] is None else f", {100 * line['prefix_hit_rate']:.1f} % prefix hits"
    return f"{rates}; {queue}; {cache}{hits}"
