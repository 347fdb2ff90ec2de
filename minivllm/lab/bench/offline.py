"""Measure an engine in this process, with all requests at once: latency, throughput and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, EngineDeadError, MinivllmError
from minivllm.runtime.hooks.figures import FIGURE, flat

from . import Result, Row, Rows
from .answers import PERCENTILES, TimedAnswer, figures, spread
from .statistics import percentile
from .workload import BenchAsk, Generated

Runs = tuple[list[Result], list[Result]]  # results and states of the machine, one of each per run


def generate(llm: Any, asks: Sequence[BenchAsk], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
    """Call ``LLM.generate`` once, and return the answers and the seconds.  Raise MinivllmError if a request fails."""
    from minivllm.core.interfaces.params import SamplingParams

    plain: Result = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
    params = []
    prompts = []
    for number, ask in enumerate(asks, seed):
        params.append(SamplingParams(max_tokens=ask.max_tokens, seed=number, **plain))
        prompts.append(ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt))
    begun = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - begun
    answers = []
    for output in outputs:
        if output.error:
            error = EngineDeadError if llm.engine.dead else MinivllmError
            raise error(f"a request failed: {output.error}")
        ids = list(output.outputs[0].token_ids)
        first = (output.metrics.first_token_time or begun) - begun
        last = (output.metrics.finished_time or begun) - begun
        answers.append(TimedAnswer(0.0, first, last, [], len(output.prompt_token_ids), len(ids), token_ids=ids))
    return answers, seconds


def repeated(once: Callable[[int], Result], warmups: int, repeats: int, seed: int, watch: Callable[[], Any]) -> Runs:
    """Call ``once`` with a different seed for each run, and return the results without those of the ``warmups``
    runs."""
    found: list[Result] = []
    states: list[Result] = []
    for turn in range(-warmups, repeats):
        with watch() as state:
            figures_of = once(seed + turn)
        if turn >= 0:
            found.append(figures_of)
            states.append(state.found)
    return found, states


def throughput(
    llm: Any, asks: Sequence[BenchAsk], temperature: float, seed: int, by: Callable[..., Any] = generate
) -> Result:
    """Measure one run and return its results, with the names of ``vllm bench throughput`` and the answers' token ids.

    The prefix cache is emptied first.  ``by`` runs the requests, and has the arguments and the result of ``generate``.
    """
    llm.reset_prefix_cache()
    before = llm.stats()
    with held_blocks(llm.engine) as held:
        answers, seconds = by(llm, asks, temperature, seed)
    found = figures(answers, seconds)
    # token times are unknown here, so figures about them are removed
    found = {key: value for key, value in found.items() if "_itl_" not in key}
    found |= {"elapsed_time": seconds, "num_requests": len(asks)}
    found["total_num_tokens"] = found["total_input_tokens"] + found["total_output_tokens"]
    found["requests_per_second"] = found["request_throughput"]
    found["tokens_per_second"] = found["total_token_throughput"]
    found |= _counts(before, llm.stats())
    found["mean_rows"] = held.mean_rows
    found["most_rows"] = held.most_rows
    found["kv_peak_mib"] = held.bytes / 2**20
    found["token_ids"] = [one.token_ids for one in answers]
    return found


def _counts(before: Row, after: Row) -> Result:
    """Return the differences of the engine's counters, and the current counters of its plug-ins."""
    steps, preemptions, evictions, queries, hits = (
        after[key] - before[key] for key in ("steps", "preemptions", "evictions", "prefix_queries", "prefix_hits")
    )
    found = {"engine_steps": steps, "preemptions": preemptions, "evictions": evictions}
    found["prefix_hit_rate"] = hits / queries if queries else 0.0
    if "compression" in after:
        earlier = before["compression"]
        found["compressions"] = after["compression"]["compressions"] - earlier["compressions"]
    if "speculation" in after:
        proposed, accepted = (
            after["speculation"][key] - before["speculation"][key] for key in ("proposed", "accepted")
        )
        found |= {"draft_tokens": proposed, "draft_tokens_accepted": accepted}
        found["draft_acceptance"] = accepted / proposed if proposed else 0.0
    for name, value in flat(after).items():
        found[f"{FIGURE}{name}"] = value
    return found


def latency(llm: Any, batch: int, requests: Generated, temperature: float, seed: int) -> Result:
    """Measure a batch from its call to its last token, and return its results."""
    llm.reset_prefix_cache()
    answers, seconds = generate(llm, requests.asks(seed)[:batch], temperature, seed)
    found = figures(answers, seconds)
    names = ("total_input_tokens", "total_output_tokens", "output_throughput", "median_ttft_ms", "median_tpot_ms")
    return {"latency": seconds, **{name: found[name] for name in names}}


def latencies(runs: Rows) -> Result:
    """Return results over the runs of a batch size and prompt length, under the names of ``vllm bench latency``."""
    seconds = [run["latency"] for run in runs]
    percentiles = {str(q): percentile(seconds, q) for q in (10, 25, *PERCENTILES)}
    mean = sum(seconds) / len(seconds)
    return {"avg_latency": mean, "latencies": seconds, "percentiles": percentiles, **spread("e2el", seconds)}


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(build: Callable[[], Any], work: Callable[[Any], Any]) -> Result:
    """Return the bytes of an engine by component.  ``build`` makes the engine and ``work(engine)`` runs requests.

    ``kv_peak_bytes`` is the largest KV memory that requests held at a time.  ``rest_bytes`` is the rest of the peak:
    activations, buffers, captured steps, and on a CPU also libraries that are loaded meanwhile.  On a GPU the peak is
    that of torch's allocator, with the whole KV pool.  On a CPU it is that of this process, with the written blocks
    only.  Raise ConfigError if the engine computes in another process, whose memory is not visible here.
    """
    import torch

    reset_peak()
    before = resident()
    llm = build()
    try:
        executor = llm.resolved.parts["executor"].name
        if executor != "minivllm/local":
            problem = f"bench memory measures this process, and executor={executor} computes elsewhere"
            raise ConfigError(f"{problem}; use executor=local")
        built = resident()
        capacity = llm.engine.capacity
        held = HeldBlocks(llm.engine)
        work(llm)
        pool = sum(n * size for n, size in zip(capacity.blocks, capacity.block_bytes, strict=True))
        states = state_memory(llm.engine)
        found: Result = {"weight_bytes": capacity.weight_bytes, "kv_pool_bytes": pool}
        if states:
            found |= {"state_bytes": states, "state_bytes_per_request": capacity.state_bytes}
            found["state_checkpoints"] = capacity.checkpoints
        found |= {"kv_peak_bytes": held.bytes, "process_before_bytes": before, "process_built_bytes": built}
        found["process_peak_bytes"] = peak()
        if llm.engine.wiring.device.startswith("cuda"):
            top = torch.cuda.max_memory_allocated()
            free, whole = torch.cuda.mem_get_info()
            found["device_peak_bytes"] = top
            found["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
            found["device_used_bytes"] = whole - free
            rest = top - pool - states - capacity.weight_bytes
        else:
            rest = found["process_peak_bytes"] - before - capacity.weight_bytes - held.bytes
        found["rest_bytes"] = max(0, rest)
        return found
    finally:
        llm.close()


def state_memory(engine: Any) -> int:
    """Return the bytes of all recurrent states: one for each slot, a spare one, and the checkpoints."""
    capacity = engine.capacity
    if capacity.checkpoints is None:
        return 0
    return (engine.wiring.max_num_seqs + 1 + capacity.checkpoints) * capacity.state_bytes


class HeldBlocks:
    """Records the largest number of KV blocks that requests held, by KV group, and the numbers of running rows.

    Both are read at the end of each turn (an iteration of the engine's loop).

    ``rows`` is the sum of the running rows over ``turns`` with rows, and ``most_rows`` the largest number of them."""

    def __init__(self, engine: Any) -> None:
        self.pools = engine.cache.pools
        self.slots = engine.slots
        self.sizes = engine.capacity.block_bytes
        self.most = [0] * len(self.pools)
        self.rows = 0
        self.turns = 0
        self.most_rows = 0
        engine.events.turn_ended.subscribe(self._look)

    def _look(self) -> None:
        self.most = [max(most, pool.held) for most, pool in zip(self.most, self.pools, strict=True)]
        rows = self.slots.n_running
        self.rows += rows
        self.turns += rows > 0
        self.most_rows = max(self.most_rows, rows)

    @property
    def mean_rows(self) -> float:
        """Return the mean number of running rows over the turns that had running rows, 0 without such turns."""
        return self.rows / max(self.turns, 1)

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the largest number of KV blocks that requests held at a time."""
        return sum(n * size for n, size in zip(self.most, self.sizes, strict=True))


@contextmanager
def held_blocks(engine: Any) -> Iterator[HeldBlocks]:
    """Return a context that records the blocks and rows of an engine."""
    event = engine.events.turn_ended
    before = event.listeners
    held = HeldBlocks(engine)
    try:
        yield held
    finally:
        event.listeners = before


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes.  Raise ConfigError on other systems than Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ConfigError(f"/proc/self/status has no {name}: bench memory needs Linux")


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return _status("VmRSS")


def peak() -> int:
    """Return the peak of ``resident`` since ``reset_peak``, or since the start of the process if the reset failed."""
    return _status("VmHWM")


def reset_peak() -> bool:
    """Reset the peak, and return False if the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
