"""Measure the parts of a decode step on a GPU, in microseconds from the end of one kernel to the end of the next.

    python benchmarks/step_kernels.py --model DIR --load-format dummy fp8+fp8 --rows 1 32 256

A format is a quantizer, its options after a colon, and a KV format after a plus, as in quant_speed.py.  Kernels that
are launched while the preceding kernel runs overlap, so their own times do not add up, but the times between ends do.
A line has the number of launches, the median between ends, the median of the kernel's own time, the share of the total,
the kernel, its grid, and the kernel before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quant_speed import options_of
from torch.profiler import ProfilerActivity, profile

from minivllm import LLM, SamplingParams

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 60  # characters of a kernel's name


def events_of(run: Any) -> list[dict[str, Any]]:
    """Return the kernels in the order of their ends, without the first half, which has prompts and captures."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if event.get("cat") in KINDS]
    events.sort(key=lambda event: event["ts"] + event["dur"])
    return events[len(events) // 2 :]


def table(events: list[dict[str, Any]], lines: int) -> None:
    between: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for before, event in itertools.pairwise(events):
        passed = event["ts"] + event["dur"] - before["ts"] - before["dur"]
        place = event["name"][:SHOWN], str(event.get("args", {}).get("grid", "")), before["name"][: SHOWN // 3]
        between[place].append((passed, event["dur"]))
    total = sum(passed for own in between.values() for passed, _ in own)
    order = sorted(between.items(), key=lambda item: -sum(passed for passed, _ in item[1]))
    for (name, grid, other), own in order[:lines]:
        passed, lasted = np.array(own).T
        share = 100 * passed.sum() / total
        print(f"{len(own):6} {np.median(passed):9.2f} {np.median(lasted):9.2f} {share:5.1f} %  {name} {grid} | {other}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format")
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lines", type=int, default=24)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is there: kernels are those of a GPU's steps")
    options: dict[str, Any] = dict(model=args.model, load_format=args.load_format, skip_tokenizer_init=True)
    options |= dict(max_model_len=args.prompt + args.steps + 64, enable_prefix_caching=False)
    with LLM(**options, max_num_seqs=max(args.rows), **options_of(args.format)) as llm:
        rng, top = np.random.default_rng(0), min(10_000, llm.engine.capacity.vocab_size)
        params = SamplingParams(temperature=0.6, max_tokens=args.steps, ignore_eos=True)
        for rows in args.rows:
            prompts = [rng.integers(0, top, args.prompt).tolist() for _ in range(rows)]
            llm.generate(prompts, params, use_tqdm=False)  # captures
            events = events_of(lambda prompts=prompts: llm.generate(prompts, params, use_tqdm=False))
            span = events[-1]["ts"] - events[0]["ts"]
            print(f"{args.format}, {rows} rows, {span / 1e3:.1f} ms in all", flush=True)
            table(events, args.lines)


if __name__ == "__main__":
    main()
