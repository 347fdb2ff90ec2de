"""``minivllm bench``: the command group, and its measurement ``profile``.

Parsing it imports no large package.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli import bench_runs
from minivllm.cli.common import JsonObject, add_switch, add_value, load, open_llm
from minivllm.errors import ConfigError, EngineDeadError, where_requests_go

if TYPE_CHECKING:
    from minivllm.lab.bench.limits import EngineLimits

WARM = 2  # decode steps before the profiled steps
SPARE = 2  # tokens of an answer that are requested and never drawn, so that no row ends during the profile


def add_commands(command: Any, record: argparse.ArgumentParser, *parents: argparse.ArgumentParser) -> None:
    """Add ``bench`` with all its measurements.

    ``command(name, ...)`` makes the parser of a command.  Each measurement gets the flags of ``parents``.  Only
    ``profile`` gets those of ``record``: the results of the other measurements contain the bill of materials (versions
    and hashes of all parts) already.
    """
    group = command("bench", "cli.bench:profile", "Measure the speed and the memory of a configuration.")
    verbs = group.add_subparsers(metavar="WHAT", required=True, parser_class=type(group))
    text = "Profile eager steps with torch's profiler; print each seam's share of device time (on a CPU: CPU time)."
    sub = verbs.add_parser("profile", help=text, description=text, parents=[*parents, record])
    sub.set_defaults(run="minivllm.cli.bench:profile")
    add_value(sub, "--batch-size", bench_runs.count, "N", "concurrent requests (default 8)")
    add_value(sub, "--input-len", bench_runs.count, "N", "tokens of a prompt (default 128)")
    add_value(sub, "--steps", bench_runs.count, "N", "decode steps to profile (default 16)")
    add_value(sub, "--trace", str, "FILE", "write the decode steps as a Chrome trace", "")
    add_switch(sub, "--json", "print the figures as JSON")
    bench_runs.add_commands(verbs, *parents)


def profile(args: argparse.Namespace) -> int:
    """Run ``bench profile`` and return its exit code.  It profiles prefill and decode separately.  ConfigError if
    ``--trace`` names a file of requests."""
    from minivllm.lab.bench.limits import of_engine

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # without this setting torch's profiler logs its own progress
    loaded = load(args)
    if args.trace:
        if args.trace.startswith(("sample:", "synthetic:")) or args.trace.endswith((".csv", ".jsonl")):
            problem = f"--trace {args.trace}: this flag names the Chrome trace to write; expected a .json file"
            raise ConfigError(f"{problem}; {where_requests_go()}")
        files.check_output(args.trace)
    # the profiler cannot divide a captured step, which is a single launch, nor separate steps that overlap
    engine = loaded.engine.model_copy(update={"enforce_eager": True, "run_ahead": 0})
    with open_llm(replace(loaded, engine=engine), args) as llm:
        batch, length, steps = profile_sizes(args, of_engine(llm))
        figures = measure(llm, batch, length, steps, args.trace)
    print(json.dumps(figures) if args.json else table(figures))
    return 0


def profile_sizes(args: argparse.Namespace, limits: EngineLimits) -> tuple[int, int, int]:
    """Return the number of requests, prompt tokens and decode steps of ``bench profile``.

    The engine must hold all requests at once, so sizes that the user left out shrink to fit.  ConfigError if the
    user's sizes do not fit.
    """
    from minivllm.lab.bench.limits import fitted

    batch = args.batch_size or _default_batch(limits)
    if batch > limits.rows:
        raise ConfigError(f"--batch-size {batch} is more than max_num_seqs={limits.rows}; lower it")
    room = limits.room(batch)
    chosen = {"input_len": args.input_len, "steps": args.steps}
    defaults = {"input_len": 128, "steps": 16}
    least = {"input_len": 1, "steps": 1}

    def need(sizes: Mapping[str, int]) -> int:
        return sizes["input_len"] + answer_of(batch, sizes["input_len"], sizes["steps"], limits)

    def fits(sizes: Mapping[str, int]) -> bool:
        return need(sizes) <= room

    def refusal(sizes: Mapping[str, int]) -> str:
        flags = f"--batch-size {batch}, --input-len {sizes['input_len']} and --steps {sizes['steps']}"
        cache = f" and {limits.cache} in the KV cache" if limits.cache is not None else ""
        have = f"max_model_len and the KV cache allow {limits.tokens} for one request{cache}"
        need_text = f"{flags} need {need(sizes)} tokens for each request"
        return f"{need_text}, and {have}; lower them, or raise num_kvcache_blocks"

    sizes = fitted(chosen, defaults, least, fits, refusal)
    reason = f"{batch} requests of this engine may have {room} tokens each"
    bench_runs.report_smaller(chosen, sizes, defaults, reason)
    return batch, sizes["input_len"], sizes["steps"]


def _default_batch(limits: EngineLimits) -> int:
    """Return the largest number of requests, at most 8, for which each may have more than 16 tokens."""
    for batch in range(min(8, limits.rows), 1, -1):
        if limits.room(batch) > 16:
            return batch
    return 1


def answer_of(batch: int, length: int, steps: int, limits: EngineLimits) -> int:
    """Return the number of answer tokens that keeps every request running until the profile ends.

    The first request decodes while later prompts are computed, so it needs a token for each prefill step as well.
    """
    prefill_steps = -(-batch * length // max(1, limits.step - batch))
    return prefill_steps + steps + WARM + SPARE


def measure(llm: Any, batch: int, length: int, steps: int, trace: str = "") -> JsonObject:
    """Profile prefill and ``steps`` decode steps of ``batch`` requests with ``length`` prompt tokens each.

    Return ``{"prefill": {"steps", "ms": {seam: milliseconds per step}}, "decode": ..., "host_ms": ..., ...}``; a seam
    is a kind of plug-in.  ``trace`` is the file of the Chrome trace, "" for none.  EngineDeadError if a request fails.
    """
    from minivllm.frontend.llm import uninterrupted
    from minivllm.lab.bench.limits import of_engine

    engine = llm.engine
    answer = answer_of(batch, length, steps, of_engine(llm))

    def step() -> None:
        with uninterrupted():  # an interrupted step would end the engine
            engine.step()

    def prefill() -> None:
        while any(request.first_token is None for request in engine.requests.values()):
            step()

    def decode() -> None:
        for _ in range(steps):
            step()

    phases: JsonObject = {}
    # the first round is a warm-up, because first calls compile, allocate and fill caches
    for measured in (False, True):
        names = _add_requests(llm, batch, length, answer, 1 + measured)
        phases["prefill"] = _phase(llm, measured, prefill)
        for _ in range(WARM):
            step()
        phases["decode"] = _phase(llm, measured, decode, trace if measured else "")
        for name in names:
            engine.abort(name)
        if engine.dead:
            raise EngineDeadError(engine.dead)
    return {
        "model": llm.config.model,
        "device": engine.wiring.device,
        "dtype": engine.wiring.dtype,
        "batch_size": batch,
        "input_len": length,
        "parts": {seam: part.name for seam, part in llm.resolved.parts.items()},
        **phases,
        "host_ms": llm.stats()["seam_ms"],
    }


def _add_requests(llm: Any, batch: int, length: int, answer: int, seed: int) -> list[str]:
    """Add requests of random tokens, which share no cached prefix, and return their ids."""
    import time

    import numpy as np

    from minivllm.core.engine.request import Request
    from minivllm.core.interfaces.params import SamplingParams

    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=seed)
    names = [f"profile-{seed}-{i}" for i in range(batch)]
    for name in names:
        prompt = rng.integers(0, llm.engine.capacity.vocab_size, length).astype(np.int32)
        llm.engine.add(Request(name, prompt, params, time.monotonic()))
    return names


def _phase(llm: Any, measured: bool, run: Callable[[], None], trace: str = "") -> JsonObject:
    """Call ``run`` and return how many steps the engine made.

    If ``measured``, the result also has the milliseconds per step of each seam (kind of plug-in).
    """
    engine = llm.engine
    before = engine.clock.count
    if measured:
        engine.call("seams_start")
    run()
    seam_ms = engine.call("seams_stop", {"trace": trace}) if measured else {}
    steps = max(1, engine.clock.count - before)
    return {"steps": steps, "ms": {seam: ms / steps for seam, ms in seam_ms.items()}}


def table(figures: JsonObject) -> str:
    """Return the figures of a profile as a text table, sorted by decode time, the largest first."""
    phases = {name: figures[name]["ms"] for name in ("prefill", "decode")}
    totals = {name: sum(ms.values()) or 1.0 for name, ms in phases.items()}
    unit = "device ms" if figures["device"].startswith("cuda") else "CPU ms"
    heads = [_steps_text(name, figures[name]["steps"]) for name in phases]
    lines = [
        f"{figures['model']} on {figures['device']}, {figures['dtype']}, {figures['batch_size']} requests of "
        f"{figures['input_len']} tokens; eager steps, {unit} a step",
        f"{'seam':10} {'plug-in':22} {heads[0]:>20} {heads[1]:>20}",
    ]
    seams = {seam for ms in phases.values() for seam in ms}
    for seam in sorted(seams, key=lambda seam: -phases["decode"].get(seam, 0.0)):
        kind, _, plugin = seam.partition(":")
        cells = []
        for name, phase in phases.items():
            ms = phase.get(seam, 0.0)
            cells.append(f"{ms:>12.3f} {100 * ms / totals[name]:>5.1f} %")
        lines.append(f"{kind:10} {plugin or figures['parts'].get(kind, '-'):22} {' '.join(cells)}")
    sums = " ".join(f"{sum(ms.values()):>12.3f} 100.0 %" for ms in phases.values())
    lines.append(f"{'all':10} {'':22} {sums}")
    by_time = sorted(figures["host_ms"].items(), key=lambda item: -item[1])
    host = ", ".join(f"{seam} {ms:.3f}" for seam, ms in by_time if ms)
    lines.append(f"host ms a step, of all steps (stats()['seam_ms']): {host}")
    return "\n".join(lines)


def _steps_text(name: str, steps: int) -> str:
    """Return the column head of a phase, such as ``decode, 16 steps``."""
    return f"{name}, {steps} step" if steps == 1 else f"{name}, {steps} steps"
