"""``minivllm bench kernels``: time each operation of an engine's step.

``bench_runs`` parses its flags.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    bill_of,
    check_output,
    engine_title,
    machine_line,
    print_result,
    progress,
    report_smaller,
    settings,
    watch_of,
)
from minivllm.cli.common import JsonObject, load, open_llm
from minivllm.errors import ResourceError

if TYPE_CHECKING:
    from minivllm.lab.bench.floors import MachinePeaks, OperationClock, RepeatedRound
    from minivllm.lab.bench.kernels import Operation
    from minivllm.lab.bench.limits import EngineLimits

# errors that torch and kernels raise for an operation that cannot run
FAILED = (RuntimeError, ValueError, TypeError, NotImplementedError)


def kernels(args: argparse.Namespace) -> int:
    """Run ``bench kernels`` and return its exit code."""
    import torch

    from minivllm.lab.bench import offline, repeats
    from minivllm.lab.bench.floors import OperationClock, machine_peaks
    from minivllm.lab.bench.kernels import KernelBench
    from minivllm.lab.bench.limits import of_engine

    check_output(args)
    loaded = load(args)
    rows: list[JsonObject] = []
    runs: list[JsonObject] = []
    states: list[JsonObject] = []
    with open_llm(loaded, args) as llm, torch.inference_mode(), explained_memory_error():
        bench = KernelBench(llm)
        clock = OperationClock(llm.engine.wiring.device)
        fit(args, of_engine(llm))
        bench.check(args.batch_size, args.context_len, args.input_len)
        peaks = machine_peaks(bench.device, bench.dtype)
        torch.manual_seed(args.seed)
        watch = watch_of(llm.config, bench.device)
        for batch, tokens, context in _loads(args):
            measured = [Measured(operation, clock) for operation in bench.operations(batch, tokens, context)]

            def once(_seed: int, measured: Sequence[Measured] = measured) -> JsonObject:
                return time_all(measured)

            load_runs, load_states = offline.repeated(once, args.warmups, args.repeats, args.seed, watch)
            merged = repeats.merged(load_runs)
            rows += [operation.row(merged, peaks) for operation in measured]
            runs += load_runs
            states += load_states
            bench.clear()
            progress(f"{batch} rows of {tokens} tokens, context {context}: {len(measured)} operations")
        title = engine_title(llm, f"{args.repeats} runs; medians, ± half the 95 % interval, of a call")
        bill = bill_of(llm, args)
    roofs = [{"memory_bytes_per_s": peaks.bytes_per_s, "flops_per_s": peaks.flops_per_s} for _ in runs]
    model = title.partition(": ")[0]
    result = repeats.result("kernels", roofs, states, settings(args), bill, rows=rows, model_id=model)
    result["repeats"] = runs
    return print_result(result, args, [*lines(title, rows, peaks), machine_line(states)])


def _loads(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return (rows, new tokens per row, context tokens) of each step to measure: decode steps, then prefill steps."""
    decode = [(batch, 1, context) for context in args.context_len for batch in args.batch_size]
    prefill = [(1, length, length) for length in args.input_len]
    return decode + prefill


def fit(args: argparse.Namespace, limits: EngineLimits) -> None:
    """Fill in the sizes of ``bench kernels`` that the user left out, at most as large as the engine allows."""
    if args.batch_size is None:
        args.batch_size = sorted({1, min(8, limits.rows)})
    if args.context_len is None:
        context = max(1, min(256, limits.room(max(args.batch_size))))
        args.context_len = [context]
        reason = "this engine holds no more"
        report_smaller({"context_len": None}, {"context_len": context}, {"context_len": 256}, reason)
    if args.input_len is None:
        length = min(128, limits.tokens, limits.step)
        args.input_len = [length]
        reason = "a step of this engine computes no more"
        report_smaller({"input_len": None}, {"input_len": length}, {"input_len": 128}, reason)


@contextlib.contextmanager
def explained_memory_error() -> Iterator[None]:
    """Turn torch's OutOfMemoryError into a ResourceError that names the option to change.

    The measurement allocates its own operands, and the engine's KV cache may have taken that memory.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        problem = "no memory beside the engine for operands to compare with"
        raise ResourceError(f"{problem}; lower gpu_memory_utilization, or set num_kvcache_blocks") from None


class Measured:
    """An operation with the prepared calls that time it, and its equivalent in torch.

    ``failure`` is the error of a call that cannot run, "" if all can.
    """

    def __init__(self, operation: Operation, clock: OperationClock) -> None:
        self.operation = operation
        self.failure = ""
        self.ours = self._prepared(clock, operation.calls, operation.captured)
        self.torch = self._prepared(clock, operation.torch, True) if self.ours else None

    def _prepared(self, clock: OperationClock, calls: Sequence[Any], captured: bool) -> RepeatedRound | None:
        """Return a repeatable round of timed calls, or None if there are none or one of them fails."""
        if not calls:
            return None
        try:
            return clock.prepare(calls, captured)
        except FAILED as exc:
            text = f"{type(exc).__name__}: {exc}"
            self.failure = self.failure or text.splitlines()[0][:200]
            return None

    def row(self, merged: JsonObject, peaks: MachinePeaks) -> JsonObject:
        """Return the result row: microseconds of a call, their interval, the lower bound, and torch's time."""
        operation = self.operation
        own_key = f"{operation.key}: us"
        torch_key = f"{operation.key}: torch us"
        us = merged.get(own_key)
        torch_us = merged.get(torch_key)
        floor, bound = peaks.floor(operation.size, operation.flops)
        floor_us = 1e6 * floor
        return {
            "operation": operation.name,
            "batch_size": operation.rows,
            "tokens": operation.rows * operation.tokens,
            "context": operation.context,
            "calls": len(operation.calls),
            "run_by": self.ours.how if self.ours else None,
            "us": us,
            "torch_us": torch_us,
            "bytes": operation.size,
            "flops": operation.flops,
            "floor_us": floor_us,
            "bound_by": bound,
            "share_of_floor": floor_us / us if us else None,
            "torch_over_own": torch_us / us if us and torch_us else None,
            "not_measured": self.failure,
            "intervals": {
                "us": merged["intervals"].get(own_key),
                "torch_us": merged["intervals"].get(torch_key),
            },
        }


def time_all(measured: Sequence[Measured]) -> JsonObject:
    """Return the time of each operation of a step in microseconds, measured once.

    The caller repeats this, so that drift of the machine affects all operations alike."""
    run: JsonObject = {}
    for operation in measured:
        key = operation.operation.key
        if operation.ours is not None:
            run[f"{key}: us"] = 1e6 * operation.ours.seconds()
        if operation.torch is not None:
            run[f"{key}: torch us"] = 1e6 * operation.torch.seconds()
    return run


def lines(title: str, rows: Sequence[JsonObject], peaks: MachinePeaks) -> list[str]:
    """Return the lines of the printed table of operations."""
    roofs = f"{peaks.bytes_per_s / 1e9:.1f} GB/s of memory, {peaks.flops_per_s / 1e9:.0f} Gflop/s of a product"
    out = [
        title,
        f"measured here: {roofs}; floor: the longer of bytes over the one and arithmetic over the other",
        f"{'operation':26} {'rows':>5} {'tokens':>6} {'context':>7} {'calls':>5} {'us':>18} {'floor us':>10} "
        f"{'by':>10} {'of floor':>9} {'torch us':>10} {'torch/own':>9}",
    ]
    return out + [_line(row) for row in rows]


def _line(row: JsonObject) -> str:
    """Return the table's line of an operation, with its time, the bound of the hardware and the ratio to torch."""
    from minivllm.lab.bench.repeats import with_bounds

    name = f"{row['operation']:26} {row['batch_size']:>5}"
    if row["us"] is None:
        return f"{name} not measured: {row['not_measured']}"
    torch_us = "-" if row["torch_us"] is None else f"{row['torch_us']:.1f}"
    ratio = "-" if row["torch_over_own"] is None else f"{row['torch_over_own']:.2f}"
    intervals = {key: interval for key, interval in row["intervals"].items() if interval}
    us = with_bounds({"us": row["us"], "intervals": intervals}, "us")
    return (
        f"{name} {row['tokens']:>6} {row['context']:>7} {row['calls']:>5} {us:>18} {row['floor_us']:>10.1f} "
        f"{row['bound_by']:>10} {100 * row['share_of_floor']:>7.0f} % {torch_us:>10} {ratio:>9}"
    )
