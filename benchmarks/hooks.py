"""Measure the time that hooks add to a step on the host, with a device that answers at once and ``--rows`` decoding
rows.

    python benchmarks/hooks.py

The engines take turns, so that other work on the machine slows all of them.  Figures are microseconds, the smallest
median of all rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
from plan_step import VOCAB, engine

from minivllm.core.engine.request import Request
from minivllm.core.interfaces.params import SamplingParams
from minivllm.plugins.hooks.options import LiveOptions, StepLogOptions
from minivllm.plugins.hooks.step_log import StepLog
from minivllm.runtime.energy.account import EnergyAccount
from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.runtime.hooks.bridge import EngineHooks
from minivllm.runtime.hooks.manager import HookManager


class Quiet(Hooks):
    """Hooks for events that do not occur in a decode step."""

    @hookimpl
    def minivllm_engine_stopped(self):
        pass


class Observer(Hooks):
    @hookimpl
    def minivllm_step_finished(self, step):
        pass


class Wrapper(Hooks):
    @hookimpl(wrapper=True)
    def minivllm_plan_and_submit(self):
        yield

    @hookimpl(wrapper=True)
    def minivllm_publish(self):
        yield


class Stored(Hooks):
    @hookimpl
    def minivllm_stored(self, blocks):
        pass


class Watts:
    """An energy counter that changes at every read."""

    name = "made up"

    def joules(self):
        return 100 * time.perf_counter()


def live():
    from rich.console import Console

    from minivllm.plugins.hooks.live import Live

    return Live(LiveOptions(), Console(file=open(os.devnull, "w")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    log = StepLog(StepLogOptions(path=os.path.join(tempfile.mkdtemp(), "steps.jsonl")))
    plugins = {
        "none": None,
        "a hook elsewhere": Quiet(),
        "step_finished": Observer(),
        "both wrappers": Wrapper(),
        "stored": Stored(),
        "step_log": log,
        "live": live(),
        "energy": None,  # no hook, but a listener of the energy account
    }
    engines = {}
    for name, plugin in plugins.items():
        engines[name] = made = engine(args.rows)
        if name == "energy":
            EnergyAccount(Watts()).attach(made, [None])
        elif plugin is not None:
            EngineHooks(HookManager([(f"bench/{name}", plugin)]), {}, made).started()
        rng = np.random.default_rng(0)
        for i in range(args.rows):
            prompt = rng.integers(0, VOCAB, 100).astype(np.int32)
            made.add(Request(f"{i}", prompt, SamplingParams(max_tokens=3900, ignore_eos=True), time.monotonic()))
        for _ in range(20):
            made.step()
    median: dict[str, list[float]] = {name: [] for name in engines}
    mean: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, made in engines.items():
            spans = []
            for _ in range(args.steps):
                start = time.perf_counter()
                made.step()
                spans.append(time.perf_counter() - start)
            median[name].append(float(np.median(spans)) * 1e6)
            mean[name].append(float(np.mean(spans)) * 1e6)
    print(f"{'hooks':18} {'median us':>10} {'more':>7} {'mean us':>10} {'more':>7}   ({args.rows} rows)")
    for name in engines:
        a, b = min(median[name]), min(mean[name])
        print(f"{name:18} {a:>10.1f} {a - min(median['none']):>7.1f} {b:>10.1f} {b - min(mean['none']):>7.1f}")
    for made in engines.values():
        made.stop()


if __name__ == "__main__":
    main()
