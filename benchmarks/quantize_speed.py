"""Measure the seconds that ``minivllm quantize`` takes for a layer of a model's shape, by phase, and its memory.

    python benchmarks/quantize_speed.py --config DIR --layers 2 --work DIR gptq awq

Layers of random weights of the shape in ``--config`` are written to ``--work``, and quantized on the GPU if there is
one, with ``--samples`` times ``--length`` random tokens.  The times of the layers are printed, and an estimate for all
layers.  The first layer compiles kernels, so it is not counted if there are more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from packed_load import status, write

from minivllm.lab.quantize import gptq, run
from minivllm.lab.quantize.options import QuantizeOptions

GPU = torch.cuda.is_available()


class Phases:
    """Seconds by the name of a function, without the time of named functions that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def timed(self, name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(of)
        def call(*args: Any, **more: Any) -> Any:
            self._inner.append(0.0)
            begun = now()
            try:
                return of(*args, **more)
            finally:
                spent = now() - begun
                self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return call

    def put(self, owner: Any, name: str, call: str) -> None:
        setattr(owner, call, self.timed(name, getattr(owner, call)))


def now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(args: argparse.Namespace, folder: Path, method: str, layers: int) -> None:
    out, phases, ends = folder.parent / f"out-{method}", Phases(), list[float]()
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(f"{out}.partial", ignore_errors=True)
    options = QuantizeOptions(method, samples=args.samples, length=args.length, skip=tuple(args.skip))
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    work = run.Quantizing(str(folder), out, options, str(folder.parent / "ids.jsonl"), "cuda" if GPU else "cpu")
    plain = run.gptq.solve, run.gptq.inverse_factor, run.watch, run.awq.find_scales, run.awq.lost, run.fold_in
    places = (
        (run.gptq, "solve", "solve"), (gptq, "factor", "inverse_factor"), (run, "watch", "watch"),
        (run.awq, "scales", "find_scales"), (run.awq, "error", "lost"), (run, "fold", "fold_in"),
        (work, "onwards", "_onwards"), (work, "pack", "_packed"), (work.grid, "grid", "coded"),
    )  # fmt: skip
    for owner, name, call in places:
        phases.put(owner, name, call)
    whole = work._layer

    def layer(*given: Any) -> Any:
        if len(ends) == 1:
            phases.seconds.clear()
        made = phases.timed("rest", whole)(*given)
        ends.append(now())
        return made

    work._layer = layer  # type: ignore[method-assign]
    phases.put(work.work, "write", "write")
    work.run()
    run.gptq.solve, run.gptq.inverse_factor, run.watch, run.awq.find_scales, run.awq.lost, run.fold_in = plain
    counted = max(1, len(ends) - 1)
    each = (ends[-1] - ends[0]) / counted if len(ends) > 1 else sum(phases.seconds.values())
    by = ", ".join(f"{n} {s / counted:.2f}" for n, s in sorted(phases.seconds.items(), key=lambda item: -item[1]))
    peak = f"device peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, " if GPU else ""
    print(f"{method}: {each:.2f} s a layer, {each * layers / 60:.1f} min for {layers}: {by}", flush=True)
    print(
        f"{method}: {peak}host {status('RssAnon'):.2f} GiB, highest with mapped files {status('VmHWM'):.2f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", choices=("gptq", "awq"))
    parser.add_argument("--config", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--skip", action="append", default=[])
    args = parser.parse_args()
    config = json.loads((Path(args.config) / "config.json").read_text())
    layers, config["num_hidden_layers"] = config["num_hidden_layers"], args.layers
    config |= {"vocab_size": 4096, "tie_word_embeddings": True}  # these do not affect the time of a layer
    folder = Path(args.work) / "model"
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(config, folder, "plain")
    ids = torch.randint(0, 4096, (args.samples, args.length), generator=torch.Generator().manual_seed(0))
    (folder.parent / "ids.jsonl").write_text("\n".join(json.dumps({"ids": row.tolist()}) for row in ids))
    for method in args.methods:
        measure(args, folder, method, layers)


if __name__ == "__main__":
    main()
