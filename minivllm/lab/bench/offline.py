"""An engine in this process, all requests there at once: latency, throughput, and where its memory goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, EngineDeadError, MinivllmError
from minivllm.runtime.hooks.figures import FIGURE, flat

from .answers import PERCENTILES, TimedAnswer, figures, spread
from .statistics import percentile
from .workload import BenchAsk, Generated

Runs = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # figures and machine states, one each a run


def generate(llm: Any, asks: Sequence[BenchAsk], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
    """Answers and seconds of one call of ``LLM.generate``.  MinivllmError if a request failed."""
    from minivllm.core.interfaces.params import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, max_tokens=a.max_tokens, ignore_eos=True, seed=seed + i, detokenize=False
        )
        for i, a in enumerate(asks)
    ]
    prompts = [ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt) for ask in asks]
    begun = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, answers = time.monotonic() - begun, []
    for output in outputs:
        if output.error:
            raise (EngineDeadError if llm.engine.dead else MinivllmError)(f"a request failed: {output.error}")
        times = output.metrics
        ids = list(output.outputs[0].token_ids)
        first, last = (times.first_token_time or begun) - begun, (times.finished_time or begun) - begun
        answers.append(TimedAnswer(0.0, first, last, [], len(output.prompt_token_ids), len(ids), token_ids=ids))
    return answers, seconds


def repeated(
    once: Callable[[int], dict[str, Any]], warmups: int, repeats: int, seed: int, watch: Callable[[], Any]
) -> Runs:
    """``once(seed)`` with a seed of its own each time; the first ``warmups`` are not counted."""
    found: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    for turn in range(-warmups, repeats):
        with watch() as state:
            figures_of = once(seed + turn)
        if turn >= 0:
            found.append(figures_of)
            states.append(state.found)
    return found, states


def throughput(
    llm: Any, asks: Sequence[BenchAsk], temperature: float, seed: int, by: Callable[..., Any] = generate
) -> dict[str, Any]:
    """Figures of one run, also under the names of ``vllm bench throughput``, and the ``token_ids`` of each answer.  No
    prefix of an earlier run is found.  ``by``: how requests are run, as ``generate`` is called and returns."""
    llm.reset_prefix_cache()
    before = llm.stats()
    answers, seconds = by(llm, asks, temperature, seed)
    found = figures(answers, seconds)
    found = {key: value for key, value in found.items() if "_itl_" not in key}  # a call has no times of single tokens
    tokens = found["total_input_tokens"] + found["total_output_tokens"]
    return found | {
        "elapsed_time": seconds,
        "num_requests": len(asks),
        "total_num_tokens": tokens,
        "requests_per_second": found["request_throughput"],
        "tokens_per_second": found["total_token_throughput"],
        **_counted(before, llm.stats()),
        "token_ids": [one.token_ids for one in answers],
    }


def _counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine counted in between, and the figures of its plug-ins as they are now."""
    gone = {
        key: after[key] - before[key] for key in ("steps", "preemptions", "evictions", "prefix_queries", "prefix_hits")
    }
    rate = gone["prefix_hits"] / gone["prefix_queries"] if gone["prefix_queries"] else 0.0
    counts = {"preemptions": gone["preemptions"], "evictions": gone["evictions"]}
    found = {"engine_steps": gone["steps"], **counts, "prefix_hit_rate": rate}
    if "speculation" in after:
        drafts = {key: after["speculation"][key] - before["speculation"][key] for key in ("proposed", "accepted")}
        found |= {"draft_tokens": drafts["proposed"], "draft_tokens_accepted": drafts["accepted"]}
        found["draft_acceptance"] = drafts["accepted"] / drafts["proposed"] if drafts["proposed"] else 0.0
    return {**found, **{f"{FIGURE}{name}": value for name, value in flat(after).items()}}


def latency(llm: Any, batch: int, asked: Generated, temperature: float, seed: int) -> dict[str, Any]:
    """Figures of one batch, from its call to its last token."""
    llm.reset_prefix_cache()
    answers, seconds = generate(llm, asked.asks(seed)[:batch], temperature, seed)
    found = figures(answers, seconds)
    names = ("total_input_tokens", "total_output_tokens", "output_throughput", "median_ttft_ms", "median_tpot_ms")
    return {"latency": seconds, **{name: found[name] for name in names}}


def latencies(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over the iterations of one batch size and prompt length, under the names of ``vllm bench latency``."""
    seconds = [run["latency"] for run in runs]
    return {
        "avg_latency": sum(seconds) / len(seconds),
        "latencies": seconds,
        "percentiles": {str(q): percentile(seconds, q) for q in (10, 25, *PERCENTILES)},
        **spread("e2el", seconds),
    }


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(build: Callable[[], Any], work: Callable[[Any], Any]) -> dict[str, Any]:
    """Bytes by component of an engine that ``build`` makes while it does ``work``.

    ``kv_peak_bytes`` are the most that requests held at once, ``rest_bytes`` what is left of the peak: activations,
    buffers, captured steps, on a CPU libraries that were loaded meanwhile.  On a GPU the peak is that of torch's
    allocator, which has all of the KV pool; on a CPU that of this process, which has the blocks that were written.
    ConfigError if the engine computes in another process, into which nobody looks from here.
    """
    import torch

    reset_peak()
    before = resident()
    llm = build()
    try:
        executor = llm.resolved.parts["executor"].name
        if executor != "minivllm/local":
            what = f"bench memory looks into this process, and executor={executor} computes elsewhere"
            raise ConfigError(f"{what}: want executor=local")
        built, capacity, held = resident(), llm.engine.capacity, HeldBlocks(llm.engine)
        work(llm)
        pool = sum(n * size for n, size in zip(capacity.blocks, capacity.block_bytes, strict=True))
        found: dict[str, Any] = {
            "weight_bytes": capacity.weight_bytes,
            "kv_pool_bytes": pool,
            "kv_peak_bytes": held.bytes,
            "process_before_bytes": before,
            "process_built_bytes": built,
            "process_peak_bytes": peak(),
        }
        if llm.engine.wiring.device.startswith("cuda"):
            top = torch.cuda.max_memory_allocated()
            free, whole = torch.cuda.mem_get_info()
            found |= {
                "device_peak_bytes": top,
                "device_reserved_bytes": torch.cuda.max_memory_reserved(),
                "device_used_bytes": whole - free,
            }
            return found | {"rest_bytes": max(0, top - pool - capacity.weight_bytes)}
        rest = found["process_peak_bytes"] - before - capacity.weight_bytes - held.bytes
        return found | {"rest_bytes": max(0, rest)}
    finally:
        llm.close()


class HeldBlocks:
    """The most blocks that requests of an engine held at the end of a turn, by KV group."""

    def __init__(self, engine: Any) -> None:
        self.pools, self.sizes = engine.cache.pools, engine.capacity.block_bytes
        self.most = [0] * len(self.pools)
        engine.events.turn_ended.subscribe(self._look)

    def _look(self) -> None:
        self.most = [max(most, pool.held) for most, pool in zip(self.most, self.pools, strict=True)]

    @property
    def bytes(self) -> int:
        return sum(n * size for n, size in zip(self.most, self.sizes, strict=True))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ConfigError(f"/proc/self/status has no {name}: bench memory needs Linux")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _status("VmRSS")


def peak() -> int:
    """The most that ``resident`` was since ``reset_peak``, or since the process began where that is not allowed."""
    return _status("VmHWM")


def reset_peak() -> bool:
    """False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
