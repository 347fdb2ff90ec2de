"""Measure how a model shared over several GPUs speeds up decode steps, prefill and a workload.

    python benchmarks/ranks_speed.py --shape 8b --ranks 1 2 --rows 1 32 256 --workloads nano chat
    python benchmarks/ranks_speed.py --model DIR --ranks 1 2 --sums auto nccl
    python benchmarks/ranks_speed.py --shape tiny --device cpu --rows 1 4 --prompt 32 --steps 16

``--shape`` makes a model of a known shape with random weights, so that nothing is read.  Each number of ranks runs in a
new process, one after another, with each of ``--sums``.  Decode steps have contexts of about ``--prompt`` tokens and
are medians from start to start.  A workload is the best of two turns (``throughput.py``).  Every figure is printed when
it is measured, with its ratio to the first configuration.  A configuration without a figure for ``--silence`` seconds,
or that takes more than ``--limit``, is ended with all its processes, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from throughput import WORKLOADS

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {  # Llama 3.1 70B and 8B, Llama 3.2 1B, and one for a CPU
    "70b": {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "torch_dtype": "float32"},
}  # fmt: skip
ROW = "ROW "  # before a figure that a measuring process prints


def engine(args: argparse.Namespace) -> Any:
    from minivllm import LLM
    from minivllm.config import load_config

    ranks, keywords = args.ranks[0], dict(skip_tokenizer_init=True, tensor_parallel_size=args.ranks[0])
    keywords |= dict(model=args.model, load_format=args.load_format)
    keywords |= {"device": args.device} if args.device else {}
    if ranks > 1:
        keywords["executor"] = {"name": "multiprocess", "options": {"sums": args.sums[0], "timeout": args.silence}}
    return LLM(config=load_config(sets=[f"max_num_seqs={max(*args.rows, 256)}", *args.set], keywords=keywords))


def measure(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield names and figures, each when it is measured."""
    from minivllm import SamplingParams

    begun = time.perf_counter()
    with engine(args) as llm:
        yield "start_s", time.perf_counter() - begun
        rng, top = np.random.default_rng(0), min(10_000, llm.engine.capacity.vocab_size)

        def requested(tokens: int) -> SamplingParams:
            return SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, detokenize=False)

        def prompts(count: int) -> list[list[int]]:
            return [rng.integers(0, top, args.prompt).tolist() for _ in range(count)]

        def run(rows: int, steps: int) -> float:
            """Return the median seconds of a decode step of ``rows`` rows."""
            clock = llm.engine.clock
            before = clock.count
            llm.generate(prompts(rows), requested(steps), use_tqdm=False)
            ran = np.arange(max(before, clock.count - clock.size), clock.count) % clock.size
            last = ran[clock.rows[ran] == rows][steps // 4 :]
            return float(np.median(np.diff(clock.start[last])))

        for rows in args.rows:
            run(rows, 8)
            yield f"decode_{rows}_ms", 1e3 * min(run(rows, args.steps) for _ in range(2))
        for many in args.prefill:
            times = []
            for _ in range(3):
                given, start = prompts(many), time.perf_counter()
                llm.generate(given, requested(1), use_tqdm=False)
                times.append(time.perf_counter() - start)
            yield f"prefill_{many}_s", sorted(times)[1]
        for name in args.workloads:
            ins, outs = WORKLOADS[name]()
            best = 1e9
            for turn in range(2):
                shifted = [[(t + 17 * (turn + 1)) % top for t in p] for p in ins]
                start = time.perf_counter()
                found = llm.generate(shifted, [requested(n) for n in outs], use_tqdm=False)
                best = min(best, time.perf_counter() - start)
                got = sum(len(o.tokens) for o in found)
                assert got == sum(outs), f"{got} tokens of {sum(outs)}"
            yield f"{name}_tok_s", sum(outs) / best


def watched(command: list[str], silence: float, limit: float, tell: Callable[[str, float], None]) -> str:
    """Call ``tell`` with the figures of a process as they arrive, and return how it ended, "" without a fault.

    The process and its children are ended if it is silent for too long or takes too long in total.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    begun = last = time.monotonic()
    pipe, left = process.stdout.fileno(), b""
    try:
        while (wait := min(last + silence, begun + limit) - time.monotonic()) > 0:
            if not select.select([pipe], (), (), wait)[0]:
                continue
            if not (more := os.read(pipe, 1 << 16)):
                return f"ended with exit code {code}" if (code := process.wait()) else ""
            *lines, left = (left + more).split(b"\n")
            for line in lines:
                if line.startswith(ROW.encode()):
                    last = time.monotonic()
                    tell(*json.loads(line[len(ROW) :]))
        what = "measured nothing for" if last + silence < begun + limit else "took longer than"
        return f"{what} {min(silence, limit):.0f} s, and was ended after {time.monotonic() - begun:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="folder of a model")
    what.add_argument("--shape", choices=list(SHAPES), help="a model with random weights, made here")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="", help="cpu or cuda; default: what is here")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompts whose prefill is timed")
    parser.add_argument("--workloads", nargs="*", default=[], choices=list(WORKLOADS))
    parser.add_argument("--sums", nargs="+", default=["auto"], choices=["auto", "nccl"], help="how ranks add")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of minivllm run")
    parser.add_argument("--silence", type=float, default=180.0, help="seconds for the next figure, the start too")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for a configuration")
    parser.add_argument("--here", action="store_true", help="in this process: one configuration, figures as JSON")
    return parser.parse_args()


def configurations(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each configuration, and the further arguments of its process."""
    for ranks in args.ranks:
        for sums in args.sums if ranks > 1 else args.sums[:1]:
            yield f"{ranks} ranks{f', {sums}' if ranks > 1 else ''}", ["--ranks", str(ranks), "--sums", sums]


def main() -> int:
    args = parse()
    if args.here:
        for name, value in measure(args):
            print(ROW + json.dumps([name, value]), flush=True)
        return 0
    first: dict[str, float] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        given = sys.argv[1:]
        if args.shape:
            Path(folder, "config.json").write_text(json.dumps({**LLAMA, **SHAPES[args.shape]}))
            given = [*without(given, "--shape"), "--model", folder, "--load-format", "dummy"]
        for i, (what, more) in enumerate(configurations(args)):

            def tell(name: str, value: float, what: str = what, base: bool = i == 0) -> None:
                if base:
                    first[name] = value
                beside = f"  {value / first[name]:.2f} x" if name in first and not base else ""
                print(f"{what:16} {name:16} {value:10.4g}{beside}", flush=True)

            command = [sys.executable, __file__, *given, "--here", *more]
            if reported := watched(command, args.silence, args.limit, tell):
                failed = True
                print(f"{what:16} {reported}", flush=True)
    return int(failed)


def without(words: list[str], option: str) -> list[str]:
    """Return the words of a command line without an option and its value."""
    for at, word in enumerate(words):
        if word == option or word.startswith(f"{option}="):
            return words[:at] + words[at + (2 if word == option else 1) :]
    return words


if __name__ == "__main__":
    sys.exit(main())
