"""``minivllm bench kernels``: what ``bench_runs`` parses, done."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    bill_of,
    checked,
    head,
    machine_line,
    progress,
    say_smaller,
    settings,
    tell,
    watch_of,
)
from minivllm.cli.common import load, open_llm
from minivllm.errors import ResourceError

if TYPE_CHECKING:
    from minivllm.lab.bench.floors import MachinePeaks, OperationClock, RepeatedRound
    from minivllm.lab.bench.kernels import Operation
    from minivllm.lab.bench.limits import EngineLimits

FAILED = (RuntimeError, ValueError, TypeError, NotImplementedError)  # what torch and kernels raise


def kernels(args: argparse.Namespace) -> int:
    import torch

    from minivllm.lab.bench import offline, repeats
    from minivllm.lab.bench.floors import OperationClock, machine_peaks
    from minivllm.lab.bench.kernels import KernelBench
    from minivllm.lab.bench.limits import of_engine

    loaded = load(checked(args))
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    with open_llm(loaded, args) as llm, torch.inference_mode(), memory_told():
        bench, clock = KernelBench(llm), OperationClock(llm.engine.wiring.device)
        fit(args, of_engine(llm))
        bench.check(args.batch_size, args.context_len, args.input_len)
        peaks = machine_peaks(bench.device, bench.dtype)
        torch.manual_seed(args.seed)
        loads = [(n, 1, context) for context in args.context_len for n in args.batch_size]
        for n, tokens, context in [*loads, *((1, length, length) for length in args.input_len)]:
            found = [Measured(one, clock) for one in bench.operations(n, tokens, context)]
            watch = watch_of(llm.config, bench.device)
            own, seen = offline.repeated(lambda _, f=found: once(f), args.warmups, args.repeats, args.seed, watch)  # type: ignore[misc]
            rows += [one.row(repeats.merged(own), peaks) for one in found]
            runs, states = [*runs, *own], [*states, *seen]
            bench.clear()
            progress(f"{n} rows of {tokens} tokens, context {context}: {len(found)} operations")
        title = head(llm, f"{args.repeats} runs; medians, ± half the 95 % interval, of a call")
        bill = bill_of(llm, args)
    roofs = {"memory_bytes_per_s": peaks.bytes_per_s, "flops_per_s": peaks.flops_per_s}
    whole = repeats.result(
        "kernels", [roofs] * len(runs), states, settings(args), bill, rows=rows, model_id=title.partition(": ")[0]
    )
    whole["repeats"] = runs
    return tell(whole, args, "\n".join([*lines(title, rows, peaks), machine_line(states)]))


def fit(args: argparse.Namespace, limits: EngineLimits) -> None:
    """Fill in the sizes of ``bench kernels`` that no flag gives, lowered to what the engine holds."""
    if args.batch_size is None:
        args.batch_size = sorted({1, min(8, limits.rows)})
    if args.context_len is None:
        args.context_len = [max(1, min(256, limits.room(max(args.batch_size))))]
        if args.context_len[0] < 256:
            say_smaller([f"--context-len {args.context_len[0]} (not 256)"], "this engine holds no more")
    if args.input_len is None:
        args.input_len = [min(128, limits.tokens, limits.step)]
        if args.input_len[0] < 128:
            say_smaller([f"--input-len {args.input_len[0]} (not 128)"], "a step of this engine computes no more")


@contextlib.contextmanager
def memory_told() -> Iterator[None]:
    """What is measured beside an engine needs memory that its KV cache may have."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        what = "no memory beside the engine for operands to compare with"
        raise ResourceError(f"{what}; lower gpu_memory_utilization, or set num_kvcache_blocks") from None


class Measured:
    """An operation with what it is timed by; what cannot be run is said instead."""

    def __init__(self, operation: Operation, clock: OperationClock) -> None:
        self.operation, self.why_not = operation, ""
        self.own = self._prepared(clock, operation.calls, operation.captured)
        self.torch = self._prepared(clock, operation.torch, True) if self.own else None

    def _prepared(self, clock: OperationClock, calls: Sequence[Any], captured: bool) -> RepeatedRound | None:
        if not calls:
            return None
        try:
            return clock.prepare(calls, captured)
        except FAILED as exc:
            self.why_not = self.why_not or f"{type(exc).__name__}: {exc}".splitlines()[0][:200]
            return None

    def row(self, found: dict[str, Any], peaks: MachinePeaks) -> dict[str, Any]:
        """Microseconds of a call with their interval, beside the floor and torch's."""
        one, own = self.operation, found.get(f"{self.operation.key}: us")
        floor, bound = peaks.floor(one.size, one.flops)
        torch_us = found.get(f"{one.key}: torch us")
        return {
            "operation": one.name,
            "batch_size": one.rows,
            "tokens": one.rows * one.tokens,
            "context": one.context,
            "calls": len(one.calls),
            "run_by": self.own.how if self.own else None,
            "us": own,
            "torch_us": torch_us,
            "bytes": one.size,
            "flops": one.flops,
            "floor_us": 1e6 * floor,
            "bound_by": bound,
            "share_of_floor": 1e6 * floor / own if own else None,
            "torch_over_own": torch_us / own if own and torch_us else None,
            "not_measured": self.why_not,
            "intervals": {
                "us": found["intervals"].get(f"{one.key}: us"),
                "torch_us": found["intervals"].get(f"{one.key}: torch us"),
            },
        }


def once(found: Sequence[Measured]) -> dict[str, Any]:
    """All operations of a load, one after another, so that what drifts does so for all."""
    run: dict[str, Any] = {}
    for one in found:
        if one.own is not None:
            run[f"{one.operation.key}: us"] = 1e6 * one.own.seconds()
        if one.torch is not None:
            run[f"{one.operation.key}: torch us"] = 1e6 * one.torch.seconds()
    return run


def lines(title: str, rows: Sequence[dict[str, Any]], peaks: MachinePeaks) -> list[str]:
    from minivllm.lab.bench.repeats import with_bounds

    roofs = f"{peaks.bytes_per_s / 1e9:.1f} GB/s of memory, {peaks.flops_per_s / 1e9:.0f} Gflop/s of a product"
    out = [
        title,
        f"measured here: {roofs}; floor: the longer of bytes over the one and arithmetic over the other",
        f"{'operation':26} {'rows':>5} {'tokens':>6} {'context':>7} {'calls':>5} {'us':>18} {'floor us':>10} "
        f"{'by':>10} {'of floor':>9} {'torch us':>10} {'torch/own':>9}",
    ]
    for row in rows:
        if row["us"] is None:
            out.append(f"{row['operation']:26} {row['batch_size']:>5} not measured: {row['not_measured']}")
            continue
        torch_us = "-" if row["torch_us"] is None else f"{row['torch_us']:.1f}"
        over = "-" if row["torch_over_own"] is None else f"{row['torch_over_own']:.2f}"
        bounds = {key: one for key, one in row["intervals"].items() if one}
        own = with_bounds({"us": row["us"], "intervals": bounds}, "us")
        out.append(
            f"{row['operation']:26} {row['batch_size']:>5} {row['tokens']:>6} {row['context']:>7} {row['calls']:>5} "
            f"{own:>18} {row['floor_us']:>10.1f} {row['bound_by']:>10} {100 * row['share_of_floor']:>7.0f} % "
            f"{torch_us:>10} {over:>9}"
        )
    return out
