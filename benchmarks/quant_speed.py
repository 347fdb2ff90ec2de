"""Measure quantizers and KV formats by decode steps, prefill, energy and memory of one model.

    python benchmarks/quant_speed.py --model DIR --load-format dummy none int8 int4:group_size=128 fp8+fp8

A format is a quantizer, its options after a colon, and a KV format after a plus.  Each runs in a new process, one after
another.  Decode steps have contexts of about ``--prompt`` tokens and are medians from start to start.  Joules, watts
and clock are those of the card (NVML) over ``--long`` steps of the largest number of rows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


class Card:
    """The counters of the first GPU, NaN without NVML."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        try:
            self.nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
            self.nvml.nvmlInit_v2()
            self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))
        except OSError:
            self.nvml = None

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        if self.nvml is None or self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(value)):
            return float("nan")
        return value.value / 1e3

    def clock(self) -> float:
        """Return the MHz of the multiprocessors."""
        value = ctypes.c_uint()
        if self.nvml is None or self.nvml.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(value)):
            return float("nan")
        return float(value.value)


def options_of(name: str) -> dict[str, Any]:
    """Return ``QUANTIZER[:KEY=VALUE,...][+KVFORMAT]`` as options of ``LLM``."""
    quantizer, _, kv = name.partition("+")
    quantizer, _, given = quantizer.partition(":")
    pairs = (one.split("=", 1) for one in given.split(",") if one)
    options = {key: json.loads(value) if value[:1] in '0123456789tf["{' else value for key, value in pairs}
    return {"quantizer": {"name": quantizer, "options": options}, **({"kv_format": kv} if kv else {})}


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    import torch

    from minivllm import LLM, SamplingParams

    most, card, begun = max(args.rows), Card(), time.perf_counter()
    found: dict[str, Any] = {"format": name}
    options: dict[str, Any] = dict(model=args.model, load_format=args.load_format, skip_tokenizer_init=True)
    options |= dict(
        max_model_len=args.prompt + max(args.steps, args.long) + 64, max_num_seqs=most, enable_prefix_caching=False
    )
    with LLM(**options, **options_of(name)) as llm:
        found["start_s"] = time.perf_counter() - begun
        rng, top = np.random.default_rng(0), min(10_000, llm.engine.capacity.vocab_size)

        def run(rows: int, steps: int) -> float:
            """Return the median seconds of a decode step of ``rows`` rows."""
            clock = llm.engine.clock
            before = clock.count
            prompts = [rng.integers(0, top, args.prompt).tolist() for _ in range(rows)]
            llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=steps, ignore_eos=True), use_tqdm=False)
            ran = np.arange(max(before, clock.count - clock.size), clock.count) % clock.size
            last = ran[clock.rows[ran] == rows][steps // 4 :]
            return float(np.median(np.diff(clock.start[last])))

        for rows in args.rows:
            run(rows, 8)
            found[f"decode_{rows}_ms"] = 1e3 * min(run(rows, args.steps) for _ in range(args.repeat))
        for many in args.prefill:
            times = []
            for _ in range(3):
                prompts = [rng.integers(0, top, args.prompt).tolist() for _ in range(many)]
                start = time.perf_counter()
                llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True), use_tqdm=False)
                times.append(time.perf_counter() - start)
            found[f"prefill_{many}_s"] = sorted(times)[1]
        found |= energy(card, run, most, args.long) if args.long else {}
        found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return found


def energy(card: Card, run: Any, rows: int, long: int) -> dict[str, float]:
    """Return figures of ``long`` steps of ``rows`` rows, from the difference to a run with fewer steps."""
    clocks: list[float] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            clocks.append(card.clock())

    def spent(steps: int) -> tuple[float, float]:
        start, before = time.perf_counter(), card.joules()
        run(rows, steps)
        return card.joules() - before, time.perf_counter() - start

    short = spent(4)
    watcher = threading.Thread(target=look)
    watcher.start()
    joules, seconds = (a - b for a, b in zip(spent(4 + long), short, strict=True))
    done.set()
    watcher.join()
    found = {"joules_a_token": joules / rows / long, "watts": joules / seconds, "seconds": seconds}
    return {**found, "mhz": float(np.median(clocks)) if clocks else float("nan")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--prefill", type=int, nargs="*", default=[256], help="prompts whose prefill is timed")
    parser.add_argument("--long", type=int, default=300, help="steps whose energy is counted; 0: none")
    parser.add_argument("--here", action="store_true", help="in this process: one format, as JSON")
    args = parser.parse_args()
    if args.here:
        print("FOUND " + json.dumps(measure(args, args.formats[0])), flush=True)
        return
    flags = [given for given in sys.argv[1:] if given not in args.formats]
    first: dict[str, Any] = {}
    for name in args.formats:
        command = [sys.executable, str(Path(__file__).resolve()), name, *flags, "--here"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line[6:] for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
        if not lines:
            print(f"{name}: failed: {ran.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        found = json.loads(lines[0])
        first = first or found
        show(found, first)


def show(found: dict[str, Any], first: dict[str, Any]) -> None:
    """Print each figure, and for times the speed relative to the first format."""
    reported = []
    for key, value in found.items():
        if key.endswith(("_ms", "_s")) and key != "start_s":
            reported.append(f"{key} {value:.3f} ({first.get(key, value) / value:.2f}x)")
        elif key != "format":
            reported.append(f"{key} {value:.3g}" if value < 100 else f"{key} {value:.0f}")
    print(f"{found['format']}: " + ", ".join(reported), flush=True)


if __name__ == "__main__":
    main()
