"""Measure the extra time of a step in worker processes, with the executors ``local`` and another one in turns.

    python benchmarks/process_step.py                                   a clock in the device's place
    python benchmarks/process_step.py --device nothing                  a step's cost alone: the forward takes no time
    python benchmarks/process_step.py --device cuda --rows 1 32 256     a tiny model with random weights
    python benchmarks/process_step.py --device cuda --shape 0.6b --modes single --rounds 3 --rows 1 32 256
    python benchmarks/process_step.py --device-us 300 --launch-us 150   a faster device whose launches cost more
    python benchmarks/process_step.py --ranks 2                         ``multiprocess`` of so many ranks, the clock
    python benchmarks/process_step.py --ranks 2 --profile               and which functions take the engine's time
    python benchmarks/process_step.py --ranks 2 --pieces                what of that is which piece

The clock takes ``--device-us`` for each step, one step behind the other, and no CPU time but ``--launch-us`` for its
launch, so what is seen is what lies round it: codecs, messages, wake-ups.  Engine, planning and publishing are real.

Prints medians of the microseconds from step to step by rows: *one by one* (each is collected before the next is
planned) and *ahead* (one step runs while the next is planned).  Behind them the CPU time of a step: of the engine's
thread with either executor and of the worker's; at last what the codecs of a plan and its result take together.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.executor import Capacity
from minivllm.core.interfaces.plan import LENGTH, StepPlan, StepResult
from minivllm.core.timing import StartTimes
from minivllm.device.worker import runner
from minivllm.plugins.executor import multiprocess, process, process_worker

DEVICE_US, LAUNCH_US = "PROCESS_STEP_DEVICE_US", "PROCESS_STEP_LAUNCH_US"  # the worker inherits these variables
NAP = 150e-6  # seconds before the end of a wait that are not slept, because a sleep may take longer than requested
VOCAB = 61
MODES = ["single", "ahead"]
QWEN3 = {  # of 0.6B parameters
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


class ClockStep:
    """A step that ends at a time of the clock."""

    def __init__(self, plan: StepPlan, ends: float, packed: np.ndarray) -> None:
        self.plan, self.ends, self.packed, self.sampled = plan, ends, packed, False

    def finished(self) -> bool:
        return time.perf_counter() >= self.ends

    def result(self) -> StepResult:
        if (left := self.ends - time.perf_counter()) > NAP:
            time.sleep(left - NAP)
        while not self.finished():
            pass
        tokens, count, flags = self.packed
        seams = {"model": 1e-5, "attention": 1e-5, "sampler": 1e-5}
        return StepResult(self.plan.id, self.plan.slots, tokens, count, flags.astype(np.uint8), seams=seams)


class ClockRunner:
    """A device that is a clock: every token is the same, and rows end where they should."""

    def __init__(self, wiring) -> None:
        self.wiring, self.device = wiring, SimpleNamespace(type="clock")
        self.worker = SimpleNamespace(times=StartTimes())
        self.device_s, self.launch_s = (float(os.environ[name]) / 1e6 for name in (DEVICE_US, LAUNCH_US))
        self.free_at = 0.0
        self.end = np.zeros(wiring.max_num_seqs + 1, np.int32)

    def capacity(self) -> Capacity:
        depth = self.wiring.steps.run_ahead
        return Capacity((self.wiring.cache.num_kvcache_blocks,), (1,), VOCAB, 0, 1 if depth is None else depth)

    def forward(self, plan: StepPlan) -> ClockStep:
        begun = time.perf_counter()
        if plan.delta.join is not None:
            self.end[plan.delta.join.slot] = plan.delta.join.end
        packed = np.ones((3, len(plan.samples)), np.int32)
        drawn = plan.samples
        packed[2] = LENGTH * (plan.computed[drawn] + plan.q_len[drawn] + 1 >= self.end[plan.slots[drawn]])
        while time.perf_counter() < begun + self.launch_s:
            pass
        self.free_at = max(self.free_at, time.perf_counter()) + self.device_s
        return ClockStep(plan, self.free_at, packed)

    def sample(self, running: ClockStep, late=None) -> None:
        running.sampled = True

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        return np.empty((rows, words), np.int32)

    def close(self) -> None:
        pass


def serve(sock: str, memory: str) -> None:
    """Run the loop of the worker process with a clock as the device."""
    runner.Runner = ClockRunner
    process_worker.main(sock, memory)


def serve_rank(sock: str, memory: str) -> None:
    """Run the loop of a rank's process with a clock as the device.  Such ranks have nothing to sum."""
    from minivllm.plugins.executor import multiprocess_worker, ranks

    ranks.RankRunner = lambda wiring, *others: ClockRunner(wiring)
    multiprocess_worker.main(sock, memory)


def cpu_us(pid: int) -> float:
    """Return the microseconds of CPU time of a process's first thread, which computes in a worker; NaN without
    ``/proc``."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3
    except OSError:
        return float("nan")


def step_us(llm: LLM, rows: int, steps: int) -> tuple[float, float, float]:
    """Return the median microseconds between two steps of ``rows`` decoding rows, and the microseconds of CPU time of a
    step in this thread and in the worker's (0 without a worker)."""
    clock, child = llm.engine.clock, getattr(llm.engine.executor, "_child", None)
    before, spent, worker = clock.count, time.thread_time(), cpu_us(child.pid) if child else 0.0
    prompts = [[5 + i % 50] for i in range(rows)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True), use_tqdm=False)
    ran = np.arange(before, clock.count) % clock.size
    ran = ran[clock.rows[ran] == rows][steps // 4 :]
    n = clock.count - before
    there = (cpu_us(child.pid) if child else 0.0) - worker
    return float(np.median(np.diff(clock.start[ran]))) * 1e6, (time.thread_time() - spent) * 1e6 / n, there / n


def codec_us(rows: int, times: int = 2000) -> float:
    """Return the microseconds to encode and decode a plan that refers to the preceding one, and its result."""
    from minivllm.plugins.executor.steps import Plans, StepResults

    ids = np.arange(rows, dtype=np.int32)
    plan = StepPlan(1, ids, ids, ids, ids)
    seams = {"model": 1e-5, "attention": 1e-5, "sampler": 1e-5}
    result = StepResult(1, ids, ids, ids, ids.astype(np.uint8), seams=seams)
    sender, worker, back, engine = Plans(), Plans(), StepResults(), StepResults()
    begun = time.perf_counter()
    for _ in range(times):
        kind, parts = sender.encode(plan)
        came = worker.decode(kind, bytearray(b"".join(parts)))
        kind, parts = back.encode(replace(result, slots=came.slots), came.slots)
        engine.decode(kind, bytearray(b"".join(parts)), plan.slots)
        plan = plan.further(plan.id + 1, plan.computed + 1, plan.delta)
    return 1e6 * (time.perf_counter() - begun) / times


def pieces_us(rows: int, ranks: int) -> dict[str, float]:
    """Return the microseconds of the parts of a step that ranks add to ``local``.

    Each is the median of the fastest quarter of the turns.  Both ends run in this process, so that no process sleeps or
    waits.
    """
    from minivllm.plugins.executor.steps import Plans, StepResults
    from minivllm.runtime.processes.channel import Channel, shared_file
    from minivllm.runtime.processes.status import BEGUN, DONE, StatusPage

    page, ends = StatusPage(shared_file(StatusPage.room(ranks)), ranks, multiprocess.OPERATIONS), []
    for _ in range(ranks):
        memory = shared_file(Channel.BYTES)
        ends.append([Channel(sock, memory, i > 0) for i, sock in enumerate(socket.socketpair())])
    ids = np.arange(rows, dtype=np.int32)
    plan = StepPlan(1, ids, ids, ids, ids)
    seams = {"model": 1e-5, "attention": 1e-5, "sampler": 1e-5}
    result = StepResult(1, ids, ids, ids, ids.astype(np.uint8), seams=seams)
    sender, worker, back, engine = Plans(), Plans(), StepResults(), StepResults()
    spent: dict[str, list[float]] = {}
    marks: list[tuple[str, float]] = []

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    for turn in range(4000):
        marks.clear()
        mark("")
        kind, parts = sender.encode(plan)
        data = b"".join(parts)
        mark("engine: the plan as bytes")
        page.moves()
        mark("engine: the page of states")
        ends[0][0].send(kind, [data])
        mark("engine: to rank 0")
        for end in ends[1:]:
            end[0].send(kind, [data])
        mark("engine: to the others")
        message = ends[0][1].receive(wait=False)
        mark("rank 0: reads")
        came = worker.decode(message.kind, message.data)
        mark("rank 0: bytes to a plan")
        page.set(0, BEGUN, turn)
        page.set(0, DONE, turn)
        kind, parts = back.encode(replace(result, slots=came.slots), came.slots)
        mark("rank 0: the result as bytes")
        ends[0][1].send(kind, parts)
        mark("rank 0: to the engine")
        message = ends[0][0].receive(wait=False)
        mark("engine: reads")
        engine.decode(message.kind, message.data, plan.slots)
        mark("engine: bytes to a result")
        for end in ends[1:]:
            end[1].receive(wait=False)
        for (_, before), (name, after) in itertools.pairwise(marks):
            spent.setdefault(name, []).append(after - before)
        plan = plan.further(plan.id + 1, plan.computed + 1, plan.delta)
    return {name: 1e6 * float(np.median(np.sort(times)[: len(times) // 4])) for name, times in spent.items()}


def compare(args: argparse.Namespace, options: dict, ahead: int) -> dict[int, list[float]]:
    """Return the medians of ``step_us`` for ``local`` and then for the other executor, by the number of rows."""
    found = {}
    apart = {"executor": "process"}
    if args.ranks:
        apart = {"executor": "multiprocess", "tensor_parallel_size": args.ranks}
    with (
        LLM(**options, executor="local", run_ahead=ahead) as local,
        LLM(**options, **apart, run_ahead=ahead) as other,
    ):
        if args.profile:
            profile(other, max(args.rows), args.steps)
        for rows in args.rows:
            rounds = []
            for _ in range(args.rounds):
                rounds.append([*step_us(local, rows, args.steps), *step_us(other, rows, args.steps)])
            found[rows] = [statistics.median(column) for column in zip(*rounds, strict=True)]
    return found


def profile(llm: LLM, rows: int, steps: int) -> None:
    """Print the functions of the engine's process that take longest in steps of ``rows`` rows."""
    watch = cProfile.Profile()
    watch.enable()
    step_us(llm, rows, steps)
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="clock", help="clock, nothing, or where a model runs: cpu, cuda")
    parser.add_argument("--shape", choices=["tiny", "0.6b"], default="tiny", help="of the model, with random weights")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="one by one, ahead")
    parser.add_argument("--device-us", type=float, default=500, help="of a step, by the clock")
    parser.add_argument("--launch-us", type=float, default=50, help="CPU time of a step's launch, before the clock")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=0, help="of multiprocess; 0: the executor process")
    parser.add_argument("--pieces", action="store_true", help="time what a step of ranks consists of, and nothing else")
    parser.add_argument("--profile", action="store_true", help="of the engine's process, before anything is timed")
    args = parser.parse_args()
    if args.pieces:
        show_pieces(args)
        return
    device = args.device
    if device == "nothing":
        device, args.device_us, args.launch_us = "clock", 0.0, 0.0
    os.environ[DEVICE_US], os.environ[LAUNCH_US] = str(args.device_us), str(args.launch_us)
    if device == "clock":
        runner.Runner, process.WORKER, device = ClockRunner, "process_step:serve", "cpu"
        multiprocess.WORKER = "process_step:serve_rank"
    with tempfile.TemporaryDirectory() as folder:
        options = dict(model=make_model(Path(folder), args.shape), device=device, skip_tokenizer_init=True)
        options |= dict(load_format="auto", dtype="float32") if args.shape == "tiny" else dict(load_format="dummy")
        most = max(args.rows)
        options |= dict(max_num_seqs=most, max_model_len=args.steps + 16, max_num_batched_tokens=max(most, 64))
        options |= dict(num_kvcache_blocks=(args.steps // 16 + 2) * most, enable_prefix_caching=False)
        found = {mode: compare(args, options, MODES.index(mode)) for mode in args.modes}
    show(args.rows, found, "ranks" if args.ranks else "process")


def show_pieces(args: argparse.Namespace) -> None:
    found = [pieces_us(rows, args.ranks or 2) for rows in args.rows]
    print(f"{'microseconds of a step, rows:':30}" + "".join(f"{rows:8}" for rows in args.rows))
    for name in found[0]:
        print(f"{name:30}" + "".join(f"{one[name]:8.1f}" for one in found))
    print(f"{'all':30}" + "".join(f"{sum(one.values()):8.1f}" for one in found))


def make_model(folder: Path, shape: str) -> str:
    if shape == "tiny":
        from minivllm.testing.tiny import tiny_dir

        return str(tiny_dir(folder, "qwen3")[0])
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return str(folder)


def show(rows: list[int], found: dict[str, dict[int, list[float]]], other: str) -> None:
    names = {"single": "one by one", "ahead": "ahead"}
    print(
        "      " + "".join(f" {names[mode]:26}" for mode in found) + "CPU: " + "".join(f"{names[m]:26}" for m in found)
    )
    spans, spent = f"   local {other:>7}    more  ", f"  local {other:>7}  worker  "
    print("  rows" + " ".join([spans] * len(found) + [spent] * len(found)) + "  codec")
    for n in rows:
        shown = [f"{n:6}"]
        for local, _, _, apart, _, _ in (by_rows[n] for by_rows in found.values()):
            shown.append(f"{local:7.0f} {apart:7.0f} {apart - local:+7.0f}  ")
        for _, mine, _, _, engine, worker in (by_rows[n] for by_rows in found.values()):
            shown.append(f"{mine:7.0f} {engine:7.0f} {worker:7.0f}  ")
        print(" ".join([*shown, f"{codec_us(n):6.0f}"]))


if __name__ == "__main__":
    sys.modules.setdefault("process_step", sys.modules["__main__"])
    main()
