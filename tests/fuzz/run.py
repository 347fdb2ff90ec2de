"""Draw engine configurations and workloads from seeds, run them, and check every answer.

    python tests/fuzz/run.py --device cuda --configs 3000 --processes 10 --seconds 480 --ledger found.jsonl
    python tests/fuzz/run.py --device cuda --replay 1234 --dtypes bfloat16
    python tests/fuzz/run.py --device cuda --shrink 1234 --dtypes bfloat16

The reference is the answer of a request alone in a plain engine.  __init__.py describes all checks.  The exit status is
1 after faults.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz import power
from fuzz.cases import DEFAULT_DTYPES, KINDS, VERSION, Case, case_of, dtype_of
from fuzz.configs import VOCAB, quantized
from fuzz.ledger import Ledger
from fuzz.pictures import without
from fuzz.pool import Pool, Result
from fuzz.ranks import shared
from fuzz.shrink import Shrinker
from minivllm.config.values import EngineConfig
from minivllm.device.hardware import find_device

STARTED = time.monotonic()
HERE = Path(__file__).resolve().parent
PROGRESS = 30.0  # seconds between two lines
CLOSING = 1.0  # seconds before the end at which processes are ended
SILENCE = {"cpu": 180.0, "cuda": 200.0}  # seconds; compiling a kernel takes long if many processes do it


@dataclass
class Tally:
    """The results of a run so far."""

    device: str
    ignored: list[str] = field(default_factory=list)  # kinds of faults that are counted but do not fail the run
    executor: str = ""  # empty: the default
    configs: int = 0
    requests: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)  # number of configurations by the kind of their first fault
    met: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)  # seconds of the workers by stage
    failed: list[tuple[int, str, str, str]] = field(default_factory=list)  # seed, dtype, kind, message
    reported: float = field(default_factory=time.monotonic)

    def add(self, case: Case, result: Result) -> None:
        for kind in {kind for kind, *_ in result["faults"]} & set(self.ignored):
            self.met[f"ignored: {kind}"] += 1
        result["faults"] = [fault for fault in result["faults"] if fault[0] not in self.ignored]
        self.configs += 1
        self.requests += result["requests"]
        self.tokens += result["tokens"]
        self.met.update(result["met"])
        self.spent.update(result.get("spent", {}))
        if result["faults"]:
            kind, message, _ = result["faults"][0]
            self.faults[kind] += 1
            self.failed.append((case.seed, case.dtype, kind, message))
            print(f"FAULT seed {case.seed} {case.dtype} {kind}: {' '.join(message.split())[:300]}", flush=True)

    def tick(self) -> None:
        if time.monotonic() - self.reported > PROGRESS:
            self.reported = time.monotonic()
            print(
                f"{self.reported - STARTED:6.0f} s: {self.configs} configurations, {self.requests} requests, "
                f"{sum(self.faults.values())} failed",
                flush=True,
            )

    def table(self, cut: int) -> None:
        """Print the table at the end of a run."""
        print(f"\n== {self.device}, generator {VERSION}")
        rows: dict[str, Any] = {
            "configurations": self.configs,
            "requests": self.requests,
            "tokens compared": self.tokens,
            "failed configurations": sum(self.faults.values()),
            "cut off by the end": cut,
            "seconds": round(time.monotonic() - STARTED, 1),
        }
        for name, value in rows.items():
            print(f"{name:24} {value}")
        for kind, count in self.faults.most_common():
            print(f"  fault: {kind:16} {count}")
        print("spent: " + ", ".join(f"{what} {n:.0f} s" for what, n in self.spent.most_common()))
        print("met: " + ", ".join(f"{name} {n}" for name, n in sorted(self.met.items())))
        apart = self.executor not in ("", "local")
        if apart and self.device != "cpu":
            print(f"captures are not seen: steps run in processes of {self.executor}")
        if self.configs and (lacking := power.lacking(self.met, "cpu" if apart else self.device)):
            print("NO POWER, never met: " + ", ".join(lacking))
        print(
            "failing seeds: " + (", ".join(f"{seed}:{dtype}" for seed, dtype, *_ in self.failed) or "none"), flush=True
        )


def cases(ledger: Ledger, args: argparse.Namespace) -> Iterator[Case]:
    """Yield earlier failures, then new seeds, each only if an engine of its case is ``wanted``."""
    first = ledger.next if args.first_seed == "auto" else int(args.first_seed)
    for seed, dtype in list(ledger.failed):
        case = of_seed(args, seed, dtype)
        if dtype in args.dtypes and wanted(case, args):
            yield case
    for seed in range(first, first + args.configs):
        args.last_seed = seed
        case = of_seed(args, seed, dtype_of(seed, args.dtypes))
        if wanted(case, args):
            yield case


def wanted(case: Case, args: argparse.Namespace) -> bool:
    """Return whether an engine of the case has one of ``args.models`` (none mean any) and all ``args.options``."""
    for options in case.engines:
        of_model = not args.models or options["model"] in args.models
        if of_model and all(options.get(name) not in (None, "none") for name in args.options):
            return True
    return False


def fuzz(args: argparse.Namespace, folder: Path) -> int:
    tally, ledger = (
        Tally(args.device, args.ignore, args.executor),
        Ledger(args.device, list(map(Path, args.ledger)), args.executor),
    )
    args.last_seed = -1
    if ledger.failed or ledger.other:
        print(
            f"ledger: {len(ledger.failed)} seeds that failed before come first; {ledger.other} lines are of other "
            "generators"
        )

    def done(case: Case, result: Result) -> None:
        tally.add(case, result)
        kind, message, _ = result["faults"][0] if result["faults"] else ("", "", None)
        ledger.note(case.seed, case.dtype, kind, message, len(case.asks))

    pool, cut = Pool(args.processes, folder, args.silence, STARTED + args.seconds - CLOSING), 0
    try:
        cut = pool.run(cases(ledger, args), done, tally.tick)
    finally:
        run = {
            "last_seed": args.last_seed,
            "configurations": tally.configs,
            "requests": tally.requests,
            "tokens": tally.tokens,
            "faults": dict(tally.faults),
            "dtypes": args.dtypes,
            **({"executor": args.executor} if args.executor else {}),
            "ignored": args.ignore,
            "cut": cut,
            "seconds": round(time.monotonic() - STARTED),
        }
        if tally.configs:
            ledger.add({"run": run})
        tally.table(cut)
    return 1 if tally.faults or not tally.configs else 0  # a run without configurations has tested nothing


def replay(args: argparse.Namespace, folder: Path) -> int:
    """Run one seed, several times if requested, and print all details."""
    case = of_seed(args, args.replay, dtype_of(args.replay, args.dtypes))
    print(f"seed {case.seed}, {case.dtype}, {case.drive}, walk={case.walk}, resets={case.resets}, late={case.late}")
    for options in case.engines:
        print(f"engine {options}")
    for i, ask in enumerate(case.asks):
        print(
            f"request {i}: engine {ask.engine}, wave {ask.wave}, after {ask.after}, leave {ask.leave}, delay "
            f"{ask.delay}, {len(ask.prompt)} tokens, {ask.params}"
        )
    tally = Tally(args.device, args.ignore, args.executor)

    def done(case: Case, result: Result) -> None:
        tally.add(case, result)
        for kind, message, _ in result["faults"]:
            print(f"  {kind}: {message}")

    pool = Pool(args.processes, folder, args.silence, STARTED + args.seconds - CLOSING)
    cut = pool.run(iter([case] * args.times), done, tally.tick)
    tally.table(cut)
    return 1 if tally.faults else 0


def shrink(args: argparse.Namespace, folder: Path) -> int:
    case = of_seed(args, args.shrink, dtype_of(args.shrink, args.dtypes))
    until = STARTED + args.seconds - CLOSING
    made = Shrinker(case, folder, args.processes, args.times, args.silence, until, args.ignore)
    smallest = made.run()
    if smallest is None:
        print(f"seed {case.seed} {case.dtype}: no fault in {made.tried} tries")
        return 0
    print(made.program(smallest))
    return 1


def of_seed(args: argparse.Namespace, seed: int, dtype: str) -> Case:
    """Return the case of a seed, with the options that the command line sets for all engines."""
    case = case_of(seed, args.device, dtype)
    if args.quantized:
        case = replace(case, engines=[quantized(seed, i, options, dtype) for i, options in enumerate(case.engines)])
    if args.executor or args.scheduler:
        case = without(case)
    if args.executor in ("multiprocess", "ray"):
        return shared(case, args.executor, *([find_device("cuda").devices] if args.device == "cuda" else []))
    own = {name: given for name in ("executor", "scheduler") if (given := getattr(args, name))}
    return replace(case, engines=[{**options, **own} for options in case.engines])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--executor",
        default="",
        help="that engines run their steps with; empty: the default; of multiprocess and ray with ranks",
    )
    parser.add_argument("--quantized", action="store_true", help="a quantizer for every engine; mixtures in float32")
    parser.add_argument("--scheduler", default="", help="of every engine, whatever is drawn; without --ledger")
    parser.add_argument("--models", default="", help="run only seeds with an engine of one of these, with commas")
    parser.add_argument(
        "--options", default="", help="run only seeds with an engine that sets all of these options, with commas"
    )
    parser.add_argument("--configs", type=int, default=100, help="new seeds, at most")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=480, help="all in all; the summary comes within them")
    parser.add_argument("--first-seed", default="0", help='a number, or "auto": the first that no ledger has')
    parser.add_argument("--dtypes", default="", help="with commas; default float32, on cuda the halves too")
    parser.add_argument("--ledger", action="append", default=[], help="read, and added to (the first one); repeatable")
    parser.add_argument("--ignore", default="", help="kinds of faults, with commas, that are counted and no failure")
    parser.add_argument("--silence", type=float, help="seconds of a stage of a case after which it hangs")
    parser.add_argument("--folder", type=Path, help="for models, logs and shared answers; kept")
    parser.add_argument("--times", type=int, help="that a seed is replayed, or a candidate tried while shrinking")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    args = parser.parse_args(argv)
    args.dtypes = args.dtypes.split(",") if args.dtypes else list(DEFAULT_DTYPES[args.device])
    args.ignore = [kind for kind in args.ignore.split(",") if kind]
    args.models = [name for name in args.models.split(",") if name]
    args.options = [name for name in args.options.split(",") if name]
    if unknown := set(args.options) - set(EngineConfig.model_fields):
        parser.error(f"--options: {', '.join(sorted(unknown))}: expected names of engine options, such as kvstore")
    if unknown := set(args.models) - set(VOCAB):
        parser.error(f"--models: {', '.join(sorted(unknown))}: expected some of {', '.join(VOCAB)}")
    if unknown := set(args.ignore) - set(KINDS):
        parser.error(f"--ignore: {', '.join(unknown)}: expected some of {', '.join(KINDS)}")
    if args.quantized and args.ledger:
        parser.error("--quantized: a ledger's seeds are those that are drawn without it; expected no --ledger")
    if args.scheduler and args.ledger:
        parser.error("--scheduler: its cases are not those of their seeds, so no ledger can hold them; leave one out")
    args.silence = args.silence or SILENCE[args.device]
    args.times = args.times or (1 if args.replay is not None or args.device == "cpu" else 4)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="minivllm-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "alone", ignore_errors=True)  # these answers were computed by another state of the sources
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # child processes are ended then too
    try:
        if not (folder / "done").exists():
            folders = [str(folder) for folder in (HERE.parent / "helpers", HERE.parent, HERE.parents[1])]
            path = f"import sys; sys.path[:0] = {folders!r}"
            made = f"{path}; from pathlib import Path; from fuzz.models import make; make(Path({str(folder)!r}))"
            subprocess.run([sys.executable, "-c", made], check=True)
        play = fuzz if args.replay is None and args.shrink is None else replay if args.shrink is None else shrink
        return play(args, folder)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
