"""Measure the cost of plug-ins in a decode step, with registry and timing against direct calls.

    python benchmarks/plugin_overhead.py

The calls of plug-ins in a decode step of pocket are counted in the runner, and multiplied by the extra time of one
call.  The engine's host side runs with a device that answers at once, in both ways in turns of 50 steps.  Figures are
microseconds per step, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from plan_step import VOCAB, engine

from minivllm import LLM, SamplingParams
from minivllm.config.resolve import make_part
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.params import SamplingParams as Params
from minivllm.core.timing import SeamTimes
from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog, build_part

BATCH = 50


class Untimed(SeamTimes):
    """A replacement of the timed calls that calls directly."""

    def run(self, seam, call, *args):
        return call(*args)


def by_registry(kind: str, name: str, *context):
    from minivllm.config import PluginChoice

    registry = Catalog.discover()[kind]
    chosen = registry.select(PluginQuery(), name).require()
    return build_part(kind, make_part(registry, chosen, PluginChoice(name=name), kind, {}), *context)


def host_side(rows: int, steps: int) -> tuple[float, float]:
    """Return the microseconds of plan and publish, (direct, with registry and timing)."""
    made = {name: engine(rows) for name in ("direct", "plug-ins")}
    for name, e in made.items():
        if name == "direct":
            e.clock.seams.__class__ = Untimed
        else:
            e.planner.policy = by_registry("scheduler", "fcfs", e.planner.policy.ctx)
        for i in range(rows):
            prompt = np.random.default_rng(i).integers(0, VOCAB, 100).astype(np.int32)
            e.add(Request(f"r{i}", prompt, Params(max_tokens=3900, ignore_eos=True), time.monotonic()))
        for _ in range(10):
            e.step()
    took: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(steps // BATCH):
        for name, e in made.items():
            start = e.clock.count
            for _ in range(BATCH):
                e.step()
            part = e.clock.part[np.arange(start, start + BATCH) % e.clock.size]
            took[name] += list((part[:, 0] + part[:, 3]) * 1e6)
    return statistics.median(took["direct"]), statistics.median(took["plug-ins"])


def calls_of_a_step() -> int:
    """Return the number of timed calls of plug-ins in the runner, for a step in which all rows decode."""
    calls = 0

    class Counted(SeamTimes):
        def run(self, seam, call, *args):
            nonlocal calls
            calls += 1
            return super().run(seam, call, *args)

    with LLM("pocket", device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=512) as llm:
        llm.engine.executor.runner.seams.__class__ = Counted
        few, many = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (10, 30))
        llm.generate([[5, 6, 7]] * 8, few, use_tqdm=False)
        first, calls = calls, 0
        llm.generate([[5, 6, 7]] * 8, many, use_tqdm=False)
    return round((calls - first) / 20)


def cost_of_a_call(n: int = 20_000) -> float:
    def nothing():
        return None

    costs = []
    timed, direct = SeamTimes(), Untimed()
    for _ in range(15):
        spans = []
        for times in (timed, direct):
            start = time.perf_counter()
            for _ in range(n):
                times.run("seam", nothing)
            spans.append(time.perf_counter() - start)
        costs.append((spans[0] - spans[1]) / n * 1e6)
    return statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    cost, calls = cost_of_a_call(), calls_of_a_step()
    print(f"runner: {calls} calls a step, {cost:.2f} us each more than a direct call: {calls * cost:.1f} us")
    print(f"{'rows':>5} {'direct':>8} {'plug-ins':>9} {'more':>6} {'with the runner':>16}")
    for rows in (1, 64, 256):
        direct, plugged = host_side(rows, args.steps)
        more = plugged - direct
        print(f"{rows:>5} {direct:>8.1f} {plugged:>9.1f} {more:>6.1f} {more + calls * cost:>16.1f}", flush=True)


if __name__ == "__main__":
    main()
