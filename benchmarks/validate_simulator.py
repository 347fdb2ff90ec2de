"""Compare the simulator with reality, by a calibration and then new traces, at shares of the knee and by policies.

    python benchmarks/validate_simulator.py --seconds 40 --requests 300                 pocket, on this CPU
    python benchmarks/validate_simulator.py --model DIR --dummy --device cuda --like chat --requests 600

The knee is the simulated rate of requests of the trace when all arrive at once.  For each share the real engine serves
the trace in real time ``--repeats`` times, so that the table also shows the variation of reality.  Policies are ranked
by the mean time of a request, simulated and real, at ``--rank`` of the knee.  Kendall's tau is computed over pairs
whose real means differ by more than the variation of reality.  Speed is CPU time of one core.

``--cpu-clock`` is for a shared machine.  The clock of the real engine is then the CPU time of this process, which must
have one thread (OMP_NUM_THREADS=1), and waits are skipped.  It excludes the time of other processes and of the
operating system (late wake-ups).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from typing import Any

from minivllm import LLM
from minivllm.config import load_config
from minivllm.core.engine.engine import Engine
from minivllm.core.engine.parts import CacheOptions, EngineParts
from minivllm.lab.simulate import calibrate as measuring
from minivllm.lab.simulate import cases, figures
from minivllm.lab.traces.read import read_trace
from minivllm.plugins.executor.clocks import RealClock
from minivllm.plugins.executor.costs import CostTable, read_costs
from minivllm.registry import build_part

MUST = {  # relative errors
    "output_throughput": 0.05,
    "mean_ttft_ms": 0.08,
    "mean_tpot_ms": 0.08,
    "p99_ttft_ms": 0.15,
    "p99_tpot_ms": 0.15,
    "p99_e2el_ms": 0.15,
}
POLICIES = (
    ("fcfs", "lru"),
    ("prefill-first", "lru"),
    ("shortest-job", "lru"),
    ("static", "lru"),
    ("prefix-aware", "lru"),
    ("deadline", "lru"),
    ("adaptive", "lru"),
    ("fcfs", "fifo"),
)
TAU, FAST = 0.85, 80_000
NEAR = (0.98, 0.99, 1.0, 1.01, 1.02)  # factors of the costs for simulated runs, whose mean is compared
DRIFT = 2.0  # seconds of each measurement of the machine's speed


class CpuClock(RealClock):
    """A clock of the CPU time of this process plus the skipped waits."""

    skipped = 0.0

    def now(self) -> float:
        return time.process_time() + self.skipped

    def until(self, when: float) -> None:
        self.skipped += max(0.0, when - self.now())


def fresh(llm: Any, case: cases.SimulatedCase, clock: RealClock) -> Engine:
    """Return an engine of the case's policies with an empty cache, on the loaded executor."""
    old = llm.engine
    parts = EngineParts(
        policy=lambda ctx: build_part("scheduler", case.scheduler, ctx),
        evictor=lambda ctx: build_part("evictor", case.evictor, ctx),
        processors=old.processors,
        strategies=old.strategies,
        now=clock.now,
    )
    config = llm.config
    caching = CacheOptions(llm.resolved.windows, config.enable_prefix_caching, config.partial_prefix_hits)
    return Engine(old.wiring, old.executor, old.capacity, parts, caching)


def really(llm: Any, case: cases.SimulatedCase, trace: Any, cpu: bool) -> dict[str, Any]:
    clock = CpuClock() if cpu else RealClock()
    engine = fresh(llm, case, clock)
    cases.warm(engine, trace)
    engine.reset_prefix_cache()
    return figures.figures(cases.run_really(engine, trace, clock), {}, {})


def case_of(options: dict[str, Any], costs: Any, scheduler: str, evictor: str) -> cases.SimulatedCase:
    loaded = load_config(keywords={**options, "scheduler": scheduler, "evictor": evictor}, environ={})
    return cases.cases([(f"{scheduler}, {evictor}", loaded)], costs, lambda text: None)[0]


def drift(llm: Any, costs: CostTable, args: argparse.Namespace) -> float:
    """Return the time of steps relative to the table, because a shared machine is not always equally fast."""
    timer = time.process_time if args.cpu_clock else time.perf_counter
    with measuring.Calibrator(llm.engine, len(POLICIES), timer) as c:
        c.traffic("check", DRIFT)
    return sum(s.seconds for s in c.steps) / sum(costs.seconds(s.counts) for s in c.steps)


def shares(llm: Any, case: Any, trace: Any, costs: Any, knee: float, args: Any) -> list[dict[str, Any]]:
    own = len(trace) / float(trace.arrival[-1])
    print(f"{'share':5}  {'':8}" + "".join(f"{name.removesuffix('_ms'):>18}" for name in MUST))
    rows = []
    for share in args.shares:
        at = cases.at_rate(trace, share * knee / own)
        real, found = [], [drift(llm, costs, args)] if args.drift else []
        for _ in range(args.repeats):
            real.append(really(llm, case, at, args.cpu_clock))
            found += [drift(llm, costs, args)] if args.drift else []
        by = statistics.fmean(found) if found else 1.0
        run = cases.simulate(case, at, costs.scaled(by), answers=False)
        reported = figures.figures(run, {}, {})
        if found:
            busy = statistics.median(one["run_cpu_seconds"] for one in real)
            print(f"{'':5}  steps took {by:.2f} of the table ({', '.join(f'{x:.2f}' for x in found)}); ", end="")
            print(f"busy {busy:.2f} s, simulated {run.busy + by * costs.add * len(at):.2f} s")
        middle = {name: statistics.median(one[name] for one in real) for name in MUST}
        spread = {
            name: (max(one[name] for one in real) - min(one[name] for one in real)) / middle[name] for name in MUST
        }
        off = {name: reported[name] / middle[name] - 1 for name in MUST}
        met = {name: abs(off[name]) <= most for name, most in MUST.items()}
        rows.append({"share": share, "said": reported, "real": real, "off": off, "spread": spread, "met": met})
        print(f"{share:<5}  {'real':8}" + "".join(f"{middle[name]:>18.2f}" for name in MUST))
        print(f"{'':5}  {'spread':8}" + "".join(f"{100 * spread[name]:>16.1f} %" for name in MUST))
        received = (f"{100 * off[name]:+.1f} % {'ok' if met[name] else 'NOT'}" for name in MUST)
        print(f"{'':5}  {'off by':8}" + "".join(f"{text:>18}" for text in received), flush=True)
    print("must be" + " " * 8 + "".join(f"{f'{100 * most:.0f} %':>18}" for most in MUST.values()), flush=True)
    return rows


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def ranking(llm: Any, options: dict[str, Any], trace: Any, costs: Any, knee: float, args: Any) -> dict[str, Any]:
    """Rank policies in rounds, so that a machine that becomes slower affects all of them alike."""
    at = cases.at_rate(trace, args.rank * knee * float(trace.arrival[-1]) / len(trace))
    every = {f"{scheduler}, {evictor}": case_of(options, costs, scheduler, evictor) for scheduler, evictor in POLICIES}
    mean = lambda run: figures.figures(run, {}, {})["mean_e2el_ms"]  # noqa: E731
    real: dict[str, list[float]] = {name: [] for name in every}
    reported: dict[str, list[float]] = {name: [] for name in every}
    for turn in range(args.repeats):
        names = [*every][turn % len(every) :] + [*every][: turn % len(every)]
        for name in names:
            looks = [drift(llm, costs, args)] if args.drift else []
            real[name].append(really(llm, every[name], at, args.cpu_clock)["mean_e2el_ms"])
            looks += [drift(llm, costs, args)] if args.drift else []
            by = statistics.fmean(looks) if looks else 1.0
            # a slightly longer step changes which requests share a step, so a single run is not reliable
            near = [cases.simulate(every[name], at, costs.scaled(by * x), answers=False) for x in NEAR]
            reported[name].append(statistics.fmean(map(mean, near)))
    rows = [(n, statistics.fmean(reported[n]), statistics.median(real[n]), max(real[n]) - min(real[n])) for n in every]
    noise = statistics.median(row[3] for row in rows)
    print(f"policy at {args.rank:g} of the knee: mean ms of a request, simulated and real")
    for name, one, other, spread in sorted(rows, key=lambda row: row[2]):
        print(f"  {name:22} {one:10.1f} {other:10.1f} {100 * (one / other - 1):+6.1f} %  ({spread:.1f} from itself)")
    pairs = list(itertools.combinations(rows, 2))
    far = [(a, b) for a, b in pairs if abs(a[2] - b[2]) > noise]
    taus = {}
    for which, some in (("all pairs", pairs), ("pairs apart", far)):
        signs = [sign((a[1] - b[1]) * (a[2] - b[2])) for a, b in some]
        taus[which] = sum(signs) / len(signs) if signs else float("nan")
        print(f"  Kendall's tau over {which} ({len(some)}): {taus[which]:.2f} (must {TAU})", flush=True)
    return {"rows": rows, "taus": taus, "noise": noise, "said": reported, "real": real}


def costs_of(llm: Any, args: argparse.Namespace) -> CostTable:
    """Return the costs in the file ``--costs``; measure and write them if it does not exist."""
    if args.costs and os.path.exists(args.costs):
        return read_costs(args.costs)
    timer = time.process_time if args.cpu_clock else time.perf_counter
    found = measuring.calibrate(llm.engine, {}, args.seconds, timer=timer)
    if args.costs:
        with open(args.costs, "w", encoding="utf-8") as file:
            json.dump(found.as_json(), file, default=float)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="of calibration")
    parser.add_argument("--like", default="pocket", help="preset of the traces")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.3, 0.6, 0.85])
    parser.add_argument("--rank", type=float, default=0.85, help="share of the knee at which policies are ranked")
    parser.add_argument("--repeats", type=int, default=2, help="real runs of each")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=-1)
    parser.add_argument("--executor", default="local", help="process: steps run while the next ones are planned")
    parser.add_argument("--skip", nargs="*", default=[], choices=["shares", "ranking"])
    parser.add_argument("--cpu-clock", action="store_true", help="CPU time of this process, waits skipped")
    text = "look at how fast the machine is before and after each real run, and scale the table by it"
    parser.add_argument("--drift", action="store_true", help=text)
    parser.add_argument("--costs", default="", help="file of the calibration, so that a run may be done in pieces")
    parser.add_argument("--out", default="", help="all figures as JSON")
    args = parser.parse_args()
    options = {
        "model": args.model,
        "device": args.device,
        "executor": args.executor,
        "max_num_seqs": args.rows,
        "max_num_batched_tokens": args.tokens,
        "max_model_len": args.length,
        "num_kvcache_blocks": args.blocks,
        **({"dtype": "float32"} if args.device == "cpu" else {}),
        **({"load_format": "dummy", "skip_tokenizer_init": True} if args.dummy else {}),
    }
    found: dict[str, Any] = {}
    with LLM(**options) as llm:
        costs = costs_of(llm, args)
        for phase, x in costs.fit.items():
            errors = f"median error {100 * x['median_error']:.1f} %, sum {100 * x['sum_error']:+.1f} %"
            print(f"{phase:8} {x['steps']:6} steps, {errors}")
        trace = read_trace(f"synthetic:like={args.like},requests={args.requests},seed=5")
        case = case_of(options, costs, "fcfs", "lru")
        at_once = cases.simulate(case, cases.at_rate(trace, float("inf")), costs, answers=False)
        knee = figures.figures(at_once, {}, {})["request_throughput"]
        sizes = f"{trace.prompt.mean():.0f} + {trace.output.mean():.0f} tokens"
        print(f"knee {knee:.1f} requests a second; {len(trace)} requests, {sizes}")
        if "shares" not in args.skip:
            found["shares"] = shares(llm, case, trace, costs, knee, args)
        if "ranking" not in args.skip:
            other = read_trace(f"synthetic:like={args.like},requests={args.requests},seed=6")
            found["ranking"] = ranking(llm, options, other, costs, knee, args)
        near = cases.at_rate(trace, 0.85 * knee * float(trace.arrival[-1]) / len(trace))
        cpu = min(cases.simulate(case, near, costs, answers=False).cpu for _ in range(3))
        print(f"speed: {60 * len(trace) / cpu:,.0f} requests a minute of one core at 0.85 of the knee (must {FAST:,})")
        found |= {"knee": knee, "requests_a_minute": 60 * len(trace) / cpu, "fit": dict(costs.fit)}
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(found, file, default=float)


if __name__ == "__main__":
    main()
