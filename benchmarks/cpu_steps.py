"""Tokens per second on a CPU by way to run, in turns; with --gguf also of llama.cpp on the same work.

    python benchmarks/cpu_steps.py [--model pocket] [--prompt 64] [--out 128] [--batch 1 8 32] [--repeat 5]
        [--ways float32 float32:off float32:int8 ...]  [--gguf FILE ... --python PYTHON] [--load-format dummy]

A way is dtype[:quantizer][:kv=FORMAT][:off]; "off" is graph=off, each operation of torch by itself.  Greedy, no prefix
cache, the default number of threads; prompts are random ids.  A figure is output tokens over the time of the whole
call, prompts included: the best of ``--repeat`` calls, which other work on the machine disturbs least.  For ways with
captured steps the time of a step is told too: layers, draw, and all else.  PYTHON is an interpreter that has
llama-cpp-python; it runs after the others, with as many threads as torch has.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from typing import Any


def prompts(rows: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(seed).integers(3, vocab, (rows, length)).tolist()


class Way:
    """An engine of ours, and what it has measured."""

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

    def measure(self, rows: int, seed: int) -> tuple[float, str]:
        """(tokens per second, what a step took)."""
        from minivllm import SamplingParams

        args = self.args
        ids = prompts(rows, args.prompt, self.vocab, seed)
        for times in self.times.values():
            times.clear()
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=args.out, ignore_eos=True)
        outputs = self.llm.generate(ids, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        if sum(len(o.tokens) for o in outputs) != rows * args.out:
            sys.exit(f"{self.name}: tokens are missing")
        if not self.times["forward"]:
            return rows * args.out / seconds, ""
        layers, draw = (1e6 * statistics.median(self.times[part]) for part in ("forward", "sample"))
        return rows * args.out / seconds, f"layers {layers:.0f} us, draw {draw:.0f} us"


def llama(path: str, threads: int, args: argparse.Namespace) -> dict[int, float]:
    """The same work by llama.cpp: its batch interface, greedy.  Runs in the interpreter that has it."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(path.encode(), model_params)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    best = {}
    for rows in args.batch:
        size = rows * args.prompt
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = rows * (args.prompt + args.out + 16), rows, True
        params.n_batch, params.n_ubatch = max(512, size), 512
        params.n_threads = params.n_threads_batch = threads
        context = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(size, 0, 1)

        def put(at: int, token: int, position: int, row: int, draws: bool, batch: Any = batch) -> None:
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, int(draws)
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row

        def step(tokens: int, outputs: list[int], batch: Any = batch, context: Any = context) -> list[int]:
            batch.n_tokens = tokens
            if lib.llama_decode(context, batch):
                sys.exit("llama.cpp: a step failed")
            pointers = [lib.llama_get_logits_ith(context, at) for at in outputs]
            return [
                int(np.ctypeslib.as_array(ctypes.cast(p, ctypes.POINTER(ctypes.c_float)), (vocab,)).argmax())
                for p in pointers
            ]

        for seed in range(args.repeat):
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            ids = prompts(rows, args.prompt, vocab, seed)
            start = time.perf_counter()
            for row, prompt in enumerate(ids):
                for position, token in enumerate(prompt):
                    put(row * args.prompt + position, token, position, row, position + 1 == args.prompt)
            drawn = step(size, [(row + 1) * args.prompt - 1 for row in range(rows)])
            for i in range(args.out - 1):
                for row, token in enumerate(drawn):
                    put(row, token, args.prompt + i, row, True)
                drawn = step(rows, list(range(rows)))
            best[rows] = max(best.get(rows, 0.0), rows * args.out / (time.perf_counter() - start))
        lib.llama_batch_free(batch)
        lib.llama_free(context)
    return best


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
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)  # of the peer's own process
    args = parser.parse_args()
    if args.threads:
        print(json.dumps(llama(args.gguf[0], args.threads, args)))
        return

    import torch

    ways = [Way(name, args) for name in args.ways]
    for way in ways:
        print(f"{way.name}: {'; '.join(way.notes) or 'captured'}")
    print(f"{'':28}" + "".join(f"{f'batch {rows}':>12}" for rows in args.batch) + "  tok/s")
    best: dict[str, dict[int, tuple[float, str]]] = {way.name: {} for way in ways}
    for rows in args.batch:
        for seed in range(args.repeat):
            for way in ways:
                best[way.name][rows] = max(best[way.name].get(rows, (0.0, "")), way.measure(rows, seed))
    for name, found in best.items():
        print(f"{name:28}" + "".join(f"{found[rows][0]:12,.1f}" for rows in args.batch))
        if steps := [f"batch {rows}: {found[rows][1]}" for rows in args.batch if found[rows][1]]:
            print("    " + "; ".join(steps))
    work = [f"--{name}={getattr(args, name)}" for name in ("prompt", "out", "repeat")]
    for path in args.gguf:
        threads = f"--threads={torch.get_num_threads()}"
        command = [args.python, __file__, *work, threads, "--gguf", path, "--batch", *map(str, args.batch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        peer = json.loads(done.stdout.splitlines()[-1])
        print(f"{'llama.cpp ' + path.split('/')[-1]:28}" + "".join(f"{peer[str(rows)]:12,.1f}" for rows in args.batch))


if __name__ == "__main__":
    main()
