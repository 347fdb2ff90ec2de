"""Host time of one decode step, with a device that answers at once: plan and publish, by rows running and waiting.

    python benchmarks/plan_step.py

Prints medians in microseconds.  ``waiting`` and ``finished`` must not matter: the planner looks at the head of the
queue only.  One step plans the next token of every running row; once in ``block`` steps rows take a new block.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from minivllm.core.engine import Engine
from minivllm.core.interfaces.executor import Capacity, Executor, Part, Wiring
from minivllm.core.interfaces.plan import LENGTH, StepResult
from minivllm.core.interfaces.sampling import Row
from minivllm.core.request import Request, SamplingParams
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.strategy.single import Single

VOCAB, BLOCK = 50_000, 16


class Instant(Executor):
    """Every row draws token 7; nobody ends unless ``end`` is set, then everybody does."""

    end = False

    def start(self, wiring):
        return Capacity((wiring.num_blocks,), (1,), VOCAB, 0, 0)

    def submit(self, plan):
        n = len(plan.samples)
        tokens, ones, flags = np.full(n, 7, np.int32), np.ones(n, np.int32), np.full(n, LENGTH * self.end, np.uint8)
        self.result = StepResult(plan.id, plan.slots[plan.samples], tokens, ones, flags)

    def supply(self, step, late):
        raise AssertionError("no late rows here")

    def collect(self, in_flight):
        return [self.result]

    def alive(self):
        return True

    def stop(self, deadline=10.0):
        pass


class Nothing:
    reads = frozenset()

    def columns(self):
        return {}

    def bind(self, params, prompt_len):
        return Row()


def engine(rows: int, max_len: int = 4096) -> Engine:
    blocks = rows * (max_len // BLOCK + 1) + 1
    part = Part("bench/none", "none:None")
    wiring = Wiring(
        model_dir="", load_format="dummy", device="cpu", dtype="float32", block=BLOCK, max_num_seqs=rows,
        max_num_batched_tokens=16384, max_model_len=max_len, num_blocks=blocks, memory_utilization=0.9,
        batch_invariant=False, seed=0, parts={"model": part},
    )  # fmt: skip
    executor = Instant()
    return Engine(
        wiring, executor, executor.start(wiring), lambda ctx: Fcfs(None, ctx), lambda ctx: Lru(None, ctx),
        [("bench/none", Nothing())], [("minivllm/single", Single(None))],
    )  # fmt: skip


def measure(rows: int, waiting: int, finished: int, steps: int = 400) -> tuple[float, float]:
    e = engine(rows)
    rng = np.random.default_rng(0)

    def add(i, **p):
        prompt = rng.integers(0, VOCAB, 100).astype(np.int32)
        e.add(Request(f"r{i}", prompt, SamplingParams(**p), time.monotonic()))

    for i in range(finished):
        add(f"f{i}", max_tokens=1)
    e.executor.end = True
    while e.busy:
        e.step()
    e.executor.end = False
    for i in range(rows + waiting):
        add(i, max_tokens=3000, ignore_eos=True)
    for _ in range(10):
        e.step()
    start = e.clock.count
    for _ in range(steps):
        e.step()
    part = e.clock.part[np.arange(start, start + steps) % e.clock.size] * 1e6
    return float(np.median(part[:, 0])), float(np.median(part[:, 3]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print(f"{'rows':>6} {'waiting':>8} {'finished':>9} {'plan us':>9} {'publish us':>11}")
    for rows, waiting, finished in (
        (1, 0, 0),
        (64, 0, 0),
        (256, 0, 0),
        (256, 10_000, 0),
        (256, 10_000, 5_000),
        (1024, 0, 0),
    ):
        plan, publish = measure(rows, waiting, finished, args.steps)
        print(f"{rows:>6} {waiting:>8} {finished:>9} {plan:>9.1f} {publish:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
