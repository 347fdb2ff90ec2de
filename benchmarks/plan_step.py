"""Measure the host time of a decode step with a device that answers at once, for plan and publish.

    python benchmarks/plan_step.py                                   rows running, waiting and finished, with fcfs
    python benchmarks/plan_step.py --policy all --rows 256 1000 --waiting 0 100000          every built-in policy
    python benchmarks/plan_step.py --policy fcfs --states       prefix hits need checkpoints of recurrent states

It prints medians in microseconds, with ``--policy`` of CPU time.  ``waiting`` and ``finished`` must have no effect,
because the planner reads only the head of the queue.  A step plans the next token of every running row, and every
``block`` steps rows take a new block.

With ``--policy`` a step is planned in three situations.  In *full* no row is free.  In *blocked* a row is free, but no
waiting request fits, so the policy is called without effect in each step.  In *turnover* one row in 200, chosen by the
device, ends in each step and is replaced.  The policy is then called, and the new request's prompt is hashed and looked
up in the cache.  It gets a row, blocks for its whole prompt, and a copy of a block if another prompt differs inside
that block.  Blocks of ended rows are released when the step's results are published, in the column *publish*.  p99 and
*new*, the new requests per step, are those of turnover.  Requests differ in priority, tenant, target and expected
length, and half of them share one of 50 prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.parts import CacheOptions, EngineParts
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.executor import CacheWiring, Part, StepWiring, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LENGTH
from minivllm.core.interfaces.sampling import Row
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.executor.options import SimOptions
from minivllm.plugins.executor.sim import Sim
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog
from minivllm.testing.session import builtins

VOCAB, BLOCK = 50_000, 16


class Instant(Sim):
    """A device that answers at once.

    With ``all_end`` every row ends with its next token.  In each step ``some`` further rows, chosen at random, end.
    """

    all_end, some = False, 0
    rng = np.random.default_rng(1)

    def _commit(self, slots, tokens):
        flags = super()._commit(slots, tokens)
        chosen = slice(None) if self.all_end else self.rng.permutation(len(slots))[: self.some]
        flags[chosen] |= LENGTH
        self.stopped[slots[chosen]] = True
        return flags


class Nothing:
    reads = frozenset()

    def columns(self):
        return {}

    def bind_prompt(self, params, prompt):
        return Row()


def engine(rows: int, max_len: int = 4096, policy=Fcfs, states: bool = False) -> Engine:
    blocks = rows * (max_len // BLOCK + 1) + 1
    part = Part("bench/none", "none:None")
    wiring = Wiring(
        model_dir="",
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_num_seqs=rows,
        max_num_batched_tokens=16384,
        max_model_len=max_len,
        batch_invariant=False,
        seed=0,
        parts={"model": part},
        cache=CacheWiring(BLOCK, blocks, recurrent=states),
        steps=StepWiring(run_ahead=0),
    )
    executor = Instant(SimOptions(step_ms=0, vocab_size=VOCAB))
    return Engine(
        wiring,
        executor,
        executor.start(wiring),
        EngineParts(
            policy=lambda ctx: policy(None, ctx),
            evictor=lambda ctx: Lru(None, ctx),
            processors=[("bench/none", Nothing())],
            strategies=[("minivllm/parallel", Parallel(None))],
        ),
        CacheOptions(),
    )


def measure(rows: int, waiting: int, finished: int, steps: int = 400) -> tuple[float, float]:
    e = engine(rows)
    rng = np.random.default_rng(0)

    def add(i, **p):
        prompt = rng.integers(0, VOCAB, 100).astype(np.int32)
        e.add(Request(f"r{i}", prompt, SamplingParams(**p), time.monotonic()))

    for i in range(finished):
        add(f"f{i}", max_tokens=1)
    e.executor.all_end = True
    while e.busy:
        e.step()
    e.executor.all_end = False
    for i in range(rows + waiting):
        add(i, max_tokens=3000, ignore_eos=True)
    for _ in range(10):
        e.step()
    start = e.clock.count
    for _ in range(steps):
        e.step()
    part = e.clock.part[np.arange(start, start + steps) % e.clock.size] * 1e6
    return float(np.median(part[:, 0])), float(np.median(part[:, 3]))


def policies() -> dict[str, type]:
    """Return the built-in policies by name."""
    registry = Catalog.discover()["scheduler"]
    return {
        label.partition("/")[2]: registry.load(registry.select(PluginQuery(), label).require())
        for kind, label in builtins()
        if kind == "scheduler"
    }


def timed(took: list[float], call):
    """Return ``call`` with the CPU microseconds of this thread noted, so that other work on the machine does
    not count.
    """

    def run(*args):
        start = time.thread_time_ns()
        made = call(*args)
        took.append((time.thread_time_ns() - start) / 1e3)
        return made

    return run


def situation(
    policy: type, rows: int, waiting: int, kind: str, steps: int, states: bool = False
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return microseconds of each plan and each publication, f64 [steps] both, and the new requests per step."""
    e = engine(rows + (kind == "blocked"), 1024, policy, states)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, (50, 64)).astype(np.int32)

    def add(i, n=1):
        prompt = rng.integers(0, VOCAB, rng.integers(80, 120)).astype(np.int32)
        if i % 2:
            prompt[:64] = shared[i // 2 % 50]
        service = dict(priority=i % 7 - 3, tenant=f"t{i % 100}", ttft_ms=None if i % 3 else 1e3 * (1 + i % 50))
        service |= dict(expected_tokens=int(rng.integers(1, 400)), tpot_ms=None if i % 4 else 50.0)
        p = SamplingParams(n=n, max_tokens=900, ignore_eos=True, **service)
        e.add(Request(f"r{i}", prompt, p, time.monotonic()))

    for i in range(rows):
        add(i)
    for _ in range(30):
        e.step()
    for i in range(rows, rows + waiting):
        add(i, n=1 + (kind == "blocked"))
    e.executor.some = max(1, rows // 200) if kind == "turnover" else 0
    ids = itertools.count(rows + waiting)

    def go(steps):
        for _ in range(steps):
            e.step()
            while kind == "turnover" and e.planner.n_waiting + len(e.slots.running) < rows + waiting:
                add(next(ids))

    go(100 if kind == "turnover" else 10)
    plan, publish, before = [], [], e.slots.next_serial
    e.planner.next, e.publisher.publish = timed(plan, e.planner.next), timed(publish, e.publisher.publish)
    go(steps)
    return np.array(plan), np.array(publish), (e.slots.next_serial - before) / steps


def by_policy(args: argparse.Namespace) -> None:
    there = policies()
    names = list(there) if args.policy == ["all"] else args.policy
    unknown = sorted(set(names) - set(there))
    if unknown:
        raise SystemExit(f"--policy {unknown[0]}: expected all, or some of {', '.join(there)}")
    head = ("policy", "rows", "waiting", "full", "blocked", "turnover", "p99", "new", "publish")
    print("{:<14} {:>5} {:>8} {:>7} {:>8} {:>9} {:>7} {:>5} {:>8}".format(*head))
    for name in names:
        for rows in args.rows:
            for waiting in args.waiting:
                full, blocked, (turnover, publish, new) = (
                    situation(there[name], rows, waiting, kind, args.steps, args.states)
                    for kind in ("full", "blocked", "turnover")
                )
                figures = f"{np.median(full[0]):>7.0f} {np.median(blocked[0]):>8.0f} {np.median(turnover):>9.0f}"
                rest = f"{np.quantile(turnover, 0.99):>7.0f} {new:>5.1f} {np.median(publish):>8.0f}"
                print(f"{name:<14} {rows:>5} {waiting:>8} {figures} {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="built-in policies, or all")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1000], help="running sequences; with --policy")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100_000], help="with --policy")
    parser.add_argument("--states", action="store_true", help="of a model with recurrent states; with --policy")
    args = parser.parse_args()
    if args.policy:
        by_policy(args)
        return
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
