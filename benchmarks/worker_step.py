"""What a step costs more in a worker process: the same steps by the executors ``local`` and ``process``, in turns.

    python benchmarks/worker_step.py
    python benchmarks/worker_step.py --device cuda --rows 1 8 64 256

Steps of a tiny model with random weights, each planned, submitted and collected before the next one, so that nothing
hides what lies between: two codecs, the shared memory, two wake-ups.  Prints medians in microseconds by rows: of a
step, of what it takes beside its time on the device (``device_ms``), and what the codec alone takes of that.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces import codec
from minivllm.testing.tiny import tiny_dir


def step_us(llm: LLM, rows: int, steps: int) -> tuple[float, float]:
    """Median microseconds of ``submit`` to ``collect`` over steps of so many decoding rows, whole and beside those of
    the device."""
    took: list[tuple[float, float]] = []
    executor = llm.engine.executor
    submit, collect = executor.submit, executor.collect
    begun = [0.0]

    def timed_submit(plan):
        begun[0] = time.perf_counter()
        submit(plan)

    def timed_collect(in_flight):
        found = collect(in_flight)
        if found and len(found[0].slots) == rows:
            seconds = time.perf_counter() - begun[0]
            took.append((1e6 * seconds, 1e6 * seconds - 1e3 * found[0].device_ms))
        return found

    executor.submit, executor.collect = timed_submit, timed_collect
    prompts = [[5 + i % 50, 7] for i in range(rows)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True), use_tqdm=False)
    executor.submit, executor.collect = submit, collect
    whole, beside = zip(*took[len(took) // 4 :], strict=True)
    return statistics.median(whole), statistics.median(beside)


def codec_us(rows: int, times: int = 2000) -> float:
    """Microseconds to encode and decode a plan and a result of decoding rows."""
    from minivllm.core.interfaces.plan import StepPlan, StepResult

    ids = np.arange(rows, dtype=np.int32)
    plan = StepPlan(1, ids, ids, ids, ids)
    result = StepResult(1, ids, ids, ids, ids.astype(np.uint8), seams={"attention": 1e-5, "sampler": 1e-5})
    begun = time.perf_counter()
    for _ in range(times):
        codec.decode_plan(bytearray(b"".join(codec.encode_plan(plan))))
        codec.decode_result(bytearray(b"".join(codec.encode_result(result))))
    return 1e6 * (time.perf_counter() - begun) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, *_ = tiny_dir(Path(folder), "qwen3")
        most = max(args.rows)
        options = dict(model=str(path), device=args.device, dtype="float32", skip_tokenizer_init=True)
        options |= dict(run_ahead=0, max_num_seqs=most, max_model_len=args.steps + 16, num_kvcache_blocks=32 * most)
        with LLM(**options, executor="local") as local, LLM(**options, executor="process") as process:
            print("         step            beside the device")
            print("  rows   local  process   local  process   codec")
            for rows in args.rows:
                pairs = [[step_us(llm, rows, args.steps) for llm in (local, process)] for _ in range(args.rounds)]
                found = [statistics.median(pair[i][j] for pair in pairs) for j in range(2) for i in range(2)]
                print(f"{rows:6} {found[0]:7.0f} {found[1]:8.0f} {found[2]:7.0f} {found[3]:8.0f} {codec_us(rows):7.0f}")


if __name__ == "__main__":
    main()
