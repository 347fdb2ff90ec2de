"""``minivllm bench``: measure.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli import bench_runs
from minivllm.cli.common import load, open_llm
from minivllm.errors import ConfigError, EngineDeadError, where_requests_go

if TYPE_CHECKING:
    from minivllm.lab.bench.limits import EngineLimits


def add_commands(command: Any, record: argparse.ArgumentParser, *own: argparse.ArgumentParser) -> None:
    """Add ``bench`` and what it measures.  ``command`` and the parents of its flags are of ``minivllm.cli``.  Only
    ``profile`` takes ``--record``: the results of the others have the bill of materials in them."""
    group = command("bench", "cli.bench:profile", "Measure what a configuration does on this machine.")
    whats = group.add_subparsers(metavar="WHAT", required=True, parser_class=type(group))
    text = "Eager steps under torch's profiler: each seam's share of the device (on a CPU: of the CPU's time)."
    sub = whats.add_parser("profile", help=text, description=text, parents=[*own, record])
    sub.set_defaults(run="minivllm.cli.bench:profile")
    sub.add_argument("--batch-size", type=_count, metavar="N", help="requests at once (default 8)")
    sub.add_argument("--input-len", type=_count, metavar="N", help="tokens of a prompt (default 128)")
    sub.add_argument("--steps", type=_count, metavar="N", help="decode steps that are profiled (default 16)")
    sub.add_argument("--trace", default="", metavar="FILE", help="write the decode steps as a Chrome trace")
    sub.add_argument("--json", action="store_true", help="print the figures as JSON")
    bench_runs.add_commands(whats, *own)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: want a positive number")
    return value


def profile(args: argparse.Namespace) -> int:
    """Run ``bench profile`` and return its exit code: prefill and decode apart, because their costs differ."""
    from minivllm.lab.bench.limits import of_engine

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of its own steps otherwise
    loaded = load(args)
    if args.trace:
        if args.trace.startswith(("sample:", "synthetic:")) or args.trace.endswith((".csv", ".jsonl")):
            what = f"--trace {args.trace}: a Chrome trace is written there, want a .json"
            raise ConfigError(f"{what}; {where_requests_go()}")
        files.check_output(args.trace)
    # a captured step is one launch, and steps that overlap cannot be told apart
    engine = loaded.engine.model_copy(update={"enforce_eager": True, "run_ahead": 0})
    with open_llm(replace(loaded, engine=engine), args) as llm:
        figures = measure(llm, *profile_sizes(args, of_engine(llm)), args.trace)
    print(json.dumps(figures) if args.json else table(figures))
    return 0


def profile_sizes(args: argparse.Namespace, limits: EngineLimits) -> tuple[int, int, int]:
    """Return requests, prompt tokens and decode steps of ``bench profile``.

    Sizes that no flag gives shrink to the engine, which has to hold all requests at once.  ConfigError if those given
    do not fit.
    """
    from minivllm.lab.bench.limits import fitted

    batch = args.batch_size or next(n for n in range(min(8, limits.rows), 0, -1) if n == 1 or limits.room(n) > 16)
    if batch > limits.rows:
        raise ConfigError(f"--batch-size {batch} is more than max_num_seqs={limits.rows}; lower it")
    room = limits.room(batch)
    given = {"input_len": args.input_len, "steps": args.steps}
    defaults = {"input_len": 128, "steps": 16}
    need = lambda sizes: sizes["input_len"] + answer_of(batch, sizes["input_len"], sizes["steps"], limits)  # noqa: E731

    def refusal(sizes: Mapping[str, int]) -> str:
        what = f"--batch-size {batch}, --input-len {sizes['input_len']} and --steps {sizes['steps']} need"
        cache = f" and {limits.cache} in the KV cache" if limits.cache is not None else ""
        have = f"max_model_len and the KV cache allow {limits.tokens} for one request{cache}"
        return f"{what} {need(sizes)} tokens for each request, and {have}; lower them, or raise num_kvcache_blocks"

    sizes = fitted(given, defaults, {"input_len": 1, "steps": 1}, lambda sizes: need(sizes) <= room, refusal)
    if smaller := [name for name, value in given.items() if value is None and sizes[name] < defaults[name]]:
        texts = [f"--{name.replace('_', '-')} {sizes[name]} (not {defaults[name]})" for name in smaller]
        bench_runs.say_smaller(texts, f"{batch} requests of this engine may have {room} tokens each")
    return batch, sizes["input_len"], sizes["steps"]


def answer_of(batch: int, length: int, steps: int, limits: EngineLimits) -> int:
    """Return the answer tokens that keep every row busy: the first row decodes while later prompts are computed."""
    prefill = -(-batch * length // max(1, limits.step - batch))
    return prefill + steps + WARM + SPARE


def measure(llm: Any, batch: int, length: int, steps: int, trace: str = "") -> dict[str, Any]:
    """Return ``{"prefill": {"steps", "ms": {seam: ms a step}}, "decode": ..., "host_ms": ..., ...}``."""
    from minivllm.lab.bench.limits import of_engine

    w = llm.engine.wiring
    answer = answer_of(batch, length, steps, of_engine(llm))
    found: dict[str, Any] = {}
    for measured in (False, True):  # once to warm up: first calls compile, allocate and fill caches
        ids = _prompts(llm, batch, length, answer, 1 + measured)
        found["prefill"] = _phase(llm, measured, lambda: _prefill(llm))
        for _ in range(WARM):
            llm.engine.step()
        path = trace if measured else ""
        found["decode"] = _phase(llm, measured, lambda: [llm.engine.step() for _ in range(steps)], path)
        for i in ids:
            llm.engine.abort(i)
        if llm.engine.dead:
            raise EngineDeadError(llm.engine.dead)
    parts = {seam: part.name for seam, part in llm.resolved.parts.items()}
    return {
        "model": llm.config.model,
        "device": w.device,
        "dtype": w.dtype,
        "batch_size": batch,
        "input_len": length,
        "parts": parts,
        **found,
        "host_ms": llm.stats()["seam_ms"],
    }


WARM = 2  # decode steps before those that are profiled
SPARE = 2  # tokens of an answer that are never drawn, so that no row ends inside the profile


def _prompts(llm: Any, batch: int, length: int, answer: int, seed: int) -> list[str]:
    """Add requests of random tokens, which hit no prefix, and return their ids."""
    import time

    import numpy as np

    from minivllm.core.engine.request import Request
    from minivllm.core.interfaces.params import SamplingParams

    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=seed)
    ids = [f"profile-{seed}-{i}" for i in range(batch)]
    for name in ids:
        prompt = rng.integers(0, llm.engine.capacity.vocab_size, length).astype(np.int32)
        llm.engine.add(Request(name, prompt, params, time.monotonic()))
    return ids


def _prefill(llm: Any) -> None:
    """Step until every request has drawn its first token."""
    engine = llm.engine
    while any(r.first_token is None for r in engine.requests.values()):
        engine.step()


def _phase(llm: Any, measured: bool, run: Any, trace: str = "") -> dict[str, Any]:
    """Milliseconds a step by seam of what ``run`` does."""
    engine, before = llm.engine, llm.engine.clock.count
    if measured:
        engine.call("seams_start")
    run()
    spent = engine.call("seams_stop", {"trace": trace}) if measured else {}
    steps = max(1, engine.clock.count - before)
    return {"steps": steps, "ms": {seam: ms / steps for seam, ms in spent.items()}}


def table(figures: dict[str, Any]) -> str:
    """The figures as a table, the seam that takes most of decoding first."""
    phases = {name: figures[name]["ms"] for name in ("prefill", "decode")}
    totals = {name: sum(ms.values()) or 1.0 for name, ms in phases.items()}
    what = "device ms" if figures["device"].startswith("cuda") else "CPU ms"
    steps = {name: f"{name}, {figures[name]['steps']} step{'s' * (figures[name]['steps'] > 1)}" for name in phases}
    lines = [
        f"{figures['model']} on {figures['device']}, {figures['dtype']}, {figures['batch_size']} requests of "
        f"{figures['input_len']} tokens; eager steps, {what} a step",
        f"{'seam':10} {'plug-in':22} {steps['prefill']:>20} {steps['decode']:>20}",
    ]
    for seam in sorted({s for ms in phases.values() for s in ms}, key=lambda s: -phases["decode"].get(s, 0.0)):
        kind, _, own = seam.partition(":")
        spent = {name: ms.get(seam, 0.0) for name, ms in phases.items()}
        cells = (f"{ms:>12.3f} {100 * ms / totals[name]:>5.1f} %" for name, ms in spent.items())
        lines.append(f"{kind:10} {own or figures['parts'].get(kind, '-'):22} {' '.join(cells)}")
    sums = " ".join(f"{sum(ms.values()):>12.3f} 100.0 %" for ms in phases.values())
    lines.append(f"{'all':10} {'':22} {sums}")
    host = ", ".join(f"{seam} {ms:.3f}" for seam, ms in sorted(figures["host_ms"].items(), key=lambda x: -x[1]) if ms)
    return "\n".join([*lines, f"host ms a step, of all steps (stats()['seam_ms']): {host}"])
