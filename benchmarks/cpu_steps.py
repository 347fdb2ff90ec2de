"""Measure tokens per second on a CPU for several configurations in turns, with --gguf also for llama.cpp.

    python benchmarks/cpu_steps.py [--model pocket] [--prompt 64] [--out 128] [--batch 1 8 32] [--repeat 5]
        [--ways float32 float32:off float32:int8 ...]  [--gguf FILE ... --python PYTHON] [--load-format dummy]

A way is dtype[:quantizer][:kv=FORMAT][:off], where "off" means graph=off, so that torch runs each operation separately.
Requests are greedy with random prompts, no prefix cache and the default number of threads.  A figure is output tokens
over the time of the whole call, including prompts, as the best and the median of ``--repeat`` calls in turns.  The CPU
time of a call is printed too, because other work on the machine disturbs it least.  For ways with captured steps the
time of a step is printed.  PYTHON is an interpreter with llama-cpp-python.  Its process takes turns with the others and
has as many threads as torch.

A CPU without AVX-512 is emulated by MINIVLLM_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
MKL_ENABLE_INSTRUCTIONS=AVX2, and a llama.cpp that was built with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON
-DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple


def prompts(rows: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(seed).integers(3, vocab, (rows, length)).tolist()


class Measured(NamedTuple):
    """Seconds of a call, its seconds of CPU time, and the time of a captured step as text."""

    seconds: float
    cpu: float
    step: str = ""


class Way:
    """An engine of minivllm and its measurements."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from minivllm import LLM

        dtype, *more = name.split(":")
        options: dict[str, Any] = {"dtype": dtype, "graph": "off" if "off" in more else "auto"}
        for word in more:
            if word.startswith("kv="):
                options["kv_format"] = word.removeprefix("kv=")
            elif word != "off":
                options["quantizer"] = word
        if args.load_format:
            options["load_format"] = args.load_format
        length = args.prompt + args.out + 8
        self.name, self.args = name, args
        self.llm = LLM(
            args.model,
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_seqs=max(args.batch),
            enable_prefix_caching=False,
            **options,
        )
        runner = self.llm.engine.executor.runner
        self.vocab, self.notes = runner.worker.vocab_size, runner.worker.notes
        self.times: dict[str, list[float]] = {"forward": [], "sample": []}
        if runner.native is not None:
            for part in self.times:
                setattr(runner.native.program, part, self._timed(part, getattr(runner.native.program, part)))

    def _timed(self, part: str, call: Any) -> Any:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            call(*args)
            self.times[part].append(time.perf_counter() - start)

        return timed

    def measure(self, rows: int, seed: int) -> Measured:
        from minivllm import SamplingParams

        args = self.args
        ids = prompts(rows, args.prompt, self.vocab, seed)
        for times in self.times.values():
            times.clear()
        start, used = time.perf_counter(), time.process_time()
        params = SamplingParams(temperature=0, max_tokens=args.out, ignore_eos=True)
        outputs = self.llm.generate(ids, params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - used
        if sum(len(o.tokens) for o in outputs) != rows * args.out:
            sys.exit(f"{self.name}: tokens are missing")
        if not self.times["forward"]:
            return Measured(seconds, cpu)
        layers, draw = (1e6 * statistics.median(self.times[part]) for part in ("forward", "sample"))
        return Measured(seconds, cpu, f"layers {layers:.0f} us, draw {draw:.0f} us")


class Peer:
    """llama.cpp in its own process, which does the same work in turns with the engines of minivllm."""

    def __init__(self, path: str, threads: int, args: argparse.Namespace) -> None:
        self.name = "llama.cpp " + path.split("/")[-1]
        work = [f"--{name}={getattr(args, name)}" for name in ("prompt", "out")]
        command = [args.python, __file__, *work, f"--threads={threads}", "--gguf", path]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **pipes, text=True)

    def measure(self, rows: int, seed: int) -> Measured:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{rows} {seed}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.name}: its process has ended")
        return Measured(*json.loads(answer))


def serve_llama(path: str, args: argparse.Namespace) -> None:
    """Read lines with rows and a seed, and write seconds and seconds of CPU time.

    It runs in the interpreter that has llama.cpp.
    """
    import llama_cpp as lib

    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(path.encode(), model_params)
    made: dict[int, LlamaBatch] = {}
    for line in sys.stdin:
        rows, seed = map(int, line.split())
        if rows not in made:
            made[rows] = LlamaBatch(lib, model, rows, args)
        print(json.dumps(made[rows].measure(seed)), flush=True)


class LlamaBatch:
    """llama.cpp's batch interface for a number of rows, greedy."""

    def __init__(self, lib: Any, model: Any, rows: int, args: argparse.Namespace) -> None:
        self.lib, self.rows, self.args = lib, rows, args
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        size = rows * args.prompt
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = rows * (args.prompt + args.out + 16), rows, True
        params.n_batch, params.n_ubatch = max(512, size), 512
        params.n_threads = params.n_threads_batch = args.threads
        self.context = lib.llama_init_from_model(model, params)
        self.batch = lib.llama_batch_init(size, 0, 1)

    def put(self, at: int, token: int, position: int, row: int, draws: bool) -> None:
        batch = self.batch
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, int(draws)
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, row

    def step(self, tokens: int, outputs: list[int]) -> list[int]:
        import numpy as np

        self.batch.n_tokens = tokens
        if self.lib.llama_decode(self.context, self.batch):
            sys.exit("llama.cpp: a step failed")
        pointers = [self.lib.llama_get_logits_ith(self.context, at) for at in outputs]
        kind = ctypes.POINTER(ctypes.c_float)
        return [int(np.ctypeslib.as_array(ctypes.cast(p, kind), (self.vocab,)).argmax()) for p in pointers]

    def measure(self, seed: int) -> tuple[float, float]:
        """Return the seconds of a call, and its seconds of CPU time."""
        length, rows = self.args.prompt, self.rows
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        ids = prompts(rows, length, self.vocab, seed)
        start, used = time.perf_counter(), time.process_time()
        for row, prompt in enumerate(ids):
            for position, token in enumerate(prompt):
                self.put(row * length + position, token, position, row, position + 1 == length)
        drawn = self.step(rows * length, [(row + 1) * length - 1 for row in range(rows)])
        for i in range(self.args.out - 1):
            for row, token in enumerate(drawn):
                self.put(row, token, length + i, row, True)
            drawn = self.step(rows, list(range(rows)))
        return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--load-format", default="")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["float32", "float32:off", "float32:int8", "float32:int4"])
    parser.add_argument("--gguf", nargs="+", default=[])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)  # threads of llama.cpp's process
    args = parser.parse_args()
    if args.threads:
        serve_llama(args.gguf[0], args)
        return

    import torch

    ways: list[Way | Peer] = [Way(name, args) for name in args.ways]
    for way in ways:
        print(f"{way.name}: {'; '.join(way.notes) or 'captured'}")
    ways += [Peer(path, torch.get_num_threads(), args) for path in args.gguf]
    found: dict[tuple[str, int], list[Measured]] = {}
    for rows in args.batch:
        for seed in range(-1, args.repeat):  # the first call of each way is not counted
            for way in ways:
                one = way.measure(rows, seed + 1)
                if seed >= 0:
                    found.setdefault((way.name, rows), []).append(one)
    print(f"{'':28}" + "".join(f"{f'batch {rows}':>30}" for rows in args.batch))
    print(f"{'':28}" + f"{'tok/s: best  median  CPU s':>30}" * len(args.batch))
    for way in ways:
        print(f"{way.name:28}" + "".join(summary(found[way.name, rows], rows * args.out) for rows in args.batch))
        fastest = {rows: min(found[way.name, rows], key=lambda one: one.seconds) for rows in args.batch}
        if steps := [f"batch {rows}: {one.step}" for rows, one in fastest.items() if one.step]:
            print("    " + "; ".join(steps))


def summary(measured: list[Measured], tokens: int) -> str:
    """Return the best and the median tokens per second of several calls, and the median of their CPU seconds."""
    times = [one.seconds for one in measured]
    cpu = statistics.median(one.cpu for one in measured)
    return f"{tokens / min(times):14,.1f}{tokens / statistics.median(times):8,.1f}{cpu:8.2f}"


if __name__ == "__main__":
    main()
