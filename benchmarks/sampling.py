"""Time sampling on a GPU, with each pipeline as a captured graph, medians of replays with a cold L2 cache.

python benchmarks/sampling.py [--vocab 151936] [--rows 1 32 256] [--spread 0.3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minivllm import SamplingParams
from minivllm.core.interfaces.sampling import Draw, Rows, SamplingContext
from minivllm.device.worker import sampling
from minivllm.device.worker.state import ProcessorState
from minivllm.plugins.processor.penalties import Penalties
from minivllm.plugins.sampler.default import DefaultSampler

DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.5": {"top_p": 0.5},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "temperature 0.8, min-p 0.05, top-k 50, top-p 0.9": {"temperature": 0.8, "min_p": 0.05, "top_k": 50, "top_p": 0.9},
    "top-k 5000, top-p 0.9": {"top_k": 5000, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def rows_of(plugin: Any, params: SamplingParams, n: int, length: int, vocab: int) -> tuple[Rows, Any]:
    """Return n rows with the same parameters and histories of ``length`` tokens, half of them output."""
    state, row = ProcessorState(plugin, n, torch.device("cuda")), torch.arange(n, device="cuda")
    bound = plugin.bind(params, length // 2)
    state.join(np.arange(n), dict.fromkeys(range(n), bound))
    tokens = torch.randint(0, vocab, (n, length + 1), dtype=torch.int32, device="cuda")
    rows = Rows(row, row * 0 + length, row * 0 + length // 2, row * 7919, row * 0, bound.variant, tokens, length)
    return rows, state.columns


def microseconds(run: Callable[[], Any], replays: int = 30) -> float:
    """Return the median of a captured call, with the cache flushed before each."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush, times = torch.empty(1 << 27, dtype=torch.int8, device="cuda"), []
    for _ in range(replays + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--spread", type=float, default=0.3, help="standard deviation of the logits")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sampling.py: no CUDA device is here; it times kernels that need one")
    torch.set_grad_enabled(False)
    context = SamplingContext(args.vocab, 4096, ())
    sampler, penalties = DefaultSampler(None, context), Penalties(None, context)

    def show(name: str, make: Callable[[int, torch.Tensor], Callable[[], Any]]) -> None:
        logits = ((n, (torch.randn(n, args.vocab, device="cuda") * args.spread).bfloat16()) for n in args.rows)
        print(f"{name:50}" + "".join(f"{microseconds(make(n, x)):9.1f}" for n, x in logits), flush=True)

    print(f"{f'us for rows of {args.vocab} bfloat16 logits':50}" + "".join(f"{n:9}" for n in args.rows))
    for name, requested in DRAWS.items():

        def drawn(n: int, x: torch.Tensor, requested: dict[str, Any] = requested) -> Callable[[], Any]:
            rows, columns = rows_of(sampler, SamplingParams(**requested), n, 1, args.vocab)
            out = Draw(torch.zeros(n, dtype=torch.int64, device="cuda"))
            return lambda: sampler.draw(x, rows, columns, out)

        show(name, drawn)
    for k in (0, 1, 20):
        show(
            f"log-probabilities, {k} best",
            lambda n, x, k=k: lambda: sampling.logprobs_of(x, torch.arange(n, device="cuda"), k, fuse=True),
        )
    show("float32 copy, which penalties need", lambda n, x: lambda: x.float())
    for length in (600, 4096):

        def penalized(n: int, x: torch.Tensor, length: int = length) -> Callable[[], Any]:
            rows, columns = rows_of(penalties, SamplingParams(repetition_penalty=1.1), n, length, args.vocab)
            whole = x.float()
            return lambda: penalties.apply(whole, rows, columns)

        show(f"repetition penalty, history {length}", penalized)


if __name__ == "__main__":
    main()
