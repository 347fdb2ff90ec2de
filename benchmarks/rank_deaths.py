"""End processes that share a model at random moments, and measure the time until the engine reports it and what
remains.

    python benchmarks/rank_deaths.py --times 20 --ranks 2
    python benchmarks/rank_deaths.py --times 5 --executor ray --faults "a rank is killed" "Ctrl-C"

Each try starts an engine in a new process, which answers requests one after another, and causes one fault at a random
moment.  Afterwards no new processes, files in /dev/shm or in the temporary folder, or listening ports may remain.  In
one fault the engine is closed and started three times in its process, which continues.  The exit status is 1 if
something remains, or if a report took too long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ENGINE = """
import json, sys, time
from minivllm import LLM, EngineDeadError, SamplingParams

def say(**words):
    print(json.dumps(words), flush=True)

def make(asked):
    try:
        return LLM(**asked["options"])
    except Exception as e:
        say(start=str(e), at=time.monotonic())
        sys.exit(3)

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.path.insert(0, asked["folder"])
    for _ in range(asked["rounds"]):
        with make(asked) as llm:
            out = llm.generate(["Once"], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
            assert out[0].error is None
    if asked["rounds"]:
        say(stopped=True)
        sys.stdin.read()
        sys.exit()
    llm = make(asked)
    executor = llm.engine.executor
    cluster = getattr(executor, "_cluster", None)
    say(pids=[child.pid for child in executor._ranks()], launcher=cluster and cluster._launcher.pid)
    params = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    with llm:
        while True:
            out = llm.generate(asked["prompts"], params, use_tqdm=False)
            if out[0].finish_reason == "error":
                say(error=out[0].error, at=time.monotonic())
                break
            say(tokens=sum(len(o.tokens) for o in out), at=time.monotonic())
"""
FAILING = """
import os
from dataclasses import replace
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA

class Parts(Sdpa):
    "Fails on one rank alone, once there is a file that names it."
    spec = replace(SDPA, impl="rank_deaths_parts:Parts")
    def forward(self, *args, **more):
        import torch
        if os.path.exists("FLAG") and open("FLAG").read() == str(torch.distributed.get_rank()):
            raise RuntimeError("boom")
        return super().forward(*args, **more)
"""
KILLED, CRASHES, HANGS = "a rank is killed", "a rank crashes", "a rank hangs"
PREFILL, FAILS, TWO = "a rank is killed in a prefill", "a rank fails in a step", "a rank and another are killed"
STARTS, EARLY, AGAIN = "a rank dies while it starts", "the engine dies while it starts", "it is started again"
SLOW, RECEIVED = "one is slow", "one is told to end"  # faults that the engine survives
ENGINE_KILLED, TERMINATED, CTRL_C = "the engine is killed", "the engine is terminated", "Ctrl-C"
BOTH, LAUNCHER = "the engine and one are killed", "the launcher is killed"  # the latter exists only with Ray
FAULTS = (
    KILLED, CRASHES, HANGS, PREFILL, FAILS, TWO, STARTS, EARLY, AGAIN, SLOW, RECEIVED, ENGINE_KILLED,
    TERMINATED, CTRL_C,
    BOTH, LAUNCHER,
)  # fmt: skip
RANK = {"multiprocess": "multiprocess_worker", "ray": r"^ray::RankPlace"}  # command lines
MARK = "RANK_DEATHS_TRY"
SOON = {HANGS: 2.0 + 2.0, FAILS: 1.0 + 5.0}  # seconds until the engine must report a fault, if not 2
# further seconds for a start that fails with Ray, because the error is reported once the cluster has ended
SHUTS_DOWN = 5.0
GONE = 15.0  # seconds until nothing may remain
LONGEST = 300.0  # seconds of a try, at most
SLOWLY = 4.0  # seconds for which a slow rank stops, smaller than its time limit


@dataclass
class Row:
    """The results of the tries of one fault."""

    tries: int = 0
    reported: float = 0.0  # seconds, the longest
    gone: float = 0.0
    left: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def listening() -> dict[str, str]:
    """Return local addresses of listening sockets, by their inodes."""
    found = {}
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}", encoding="ascii") as file:
            found |= {line.split()[9]: line.split()[1] for line in file if line.split()[3] == "0A"}
    return found


def of_others(mark: str) -> set[str]:
    """Return inodes of sockets of processes that belong to no try."""
    ours, found = of_try(mark), set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:[") and int(link.parts[2]) not in ours:
            found.add(target[8:-1])
    return found


def memory_of_others(mark: str) -> set[str]:
    """Return names in /dev/shm that processes hold which belong to no try, such as another cluster of Ray."""
    ours, found = of_try(mark), set()
    for path in (*Path("/proc").glob("[0-9]*/maps"), *Path("/proc").glob("[0-9]*/fd/*")):
        if int(path.parts[2]) in ours:
            continue
        try:
            text = path.read_text() if path.name == "maps" else os.readlink(path)
        except OSError:
            continue
        found |= {word.removeprefix("/dev/shm/").split("/")[0] for word in text.split() if word.startswith("/dev/shm/")}
    return found


def belongings(folder: str) -> dict[str, set]:
    return {
        "shared memory": set(os.listdir("/dev/shm")),
        "temporary files": set(os.listdir(folder)),
        "ports": set(listening().items()),
    }


def of_try(mark: str) -> dict[int, str]:
    """Return all processes with the variable ``MARK`` that are no zombies, with their command lines."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


class Try:
    """One engine and its fault."""

    def __init__(self, args: argparse.Namespace, folder: str, rng: random.Random) -> None:
        self.args, self.rng, self.before = args, rng, belongings(folder)
        self.rank = rng.randrange(args.ranks)
        self.mark, self.folder = secrets.token_hex(8), folder
        self.flag = os.path.join(folder, f"{self.mark}.flag")
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(self.requested())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": folder, MARK: self.mark},
        )

    def requested(self) -> dict:
        """Return the settings of the engine's process."""
        fault, timeout = self.args.fault, 2.0 if self.args.fault == HANGS else 30.0
        how = {"timeout": timeout, "checked": self.rng.random() < 0.5}
        options = dict(model="pocket", device=self.args.device, max_num_seqs=4, max_num_batched_tokens=64)
        options |= dict(num_kvcache_blocks=300, max_model_len=2048, tensor_parallel_size=self.args.ranks)
        options |= dict(executor={"name": self.args.executor, "options": how})
        if fault == FAILS:
            Path(self.parts(), "rank_deaths_parts.py").write_text(FAILING.replace("FLAG", self.flag))
            options |= dict(attention="rank_deaths_parts:Parts", allow_targets=["rank_deaths_parts"])
        prompts, tokens = ["Once upon a time", "The dog"], 200
        if fault == PREFILL:
            prompts, tokens, options["enable_prefix_caching"] = ["Once upon a time there was a dog. " * 150], 2, False
        rounds = 3 if fault == AGAIN else 0
        return dict(options=options, prompts=prompts, tokens=tokens, rounds=rounds, folder=self.parts())

    def parts(self) -> str:
        """Return a folder for a plug-in, which exists before and after a try."""
        return os.path.join(self.folder, "parts")

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def run(self, fault: str, row: Row) -> None:
        row.tries += 1
        late = threading.Timer(LONGEST, self.process.kill)
        late.start()
        try:
            self._run(fault, row)
        finally:
            if late.finished.is_set():
                row.wrong.append(f"{fault}: the engine has not ended within {LONGEST:.0f} s")
            late.cancel()

    def _run(self, fault: str, row: Row) -> None:
        if fault == AGAIN:
            received = self.hear()
            self._left(row, time.monotonic())
            if "stopped" not in received:
                row.wrong.append(f"{fault}: it says {received}")
            return
        if fault == STARTS:
            begun = self._kill_a_starting_rank()
        elif fault == EARLY:
            time.sleep(self.rng.uniform(0.5, 12.0))
            begun = time.monotonic()
            self.process.kill()
        else:
            received = self.hear()
            if "pids" not in received:
                row.wrong.append(f"{fault}: it says {received}")
                return self._left(row, time.monotonic())
            time.sleep(self.rng.uniform(0.0, 1.0))
            if fault in (SLOW, RECEIVED):
                self._bother(fault, received, row)
            begun = time.monotonic()
            self._do(fault, received)
        self._judge(fault, row, begun)

    def _judge(self, fault: str, row: Row, begun: float) -> None:
        """Check the last message of the engine, its time, and what remains."""
        reported = {}
        while self.process.poll() is None or not reported:
            if not (heard := self.hear()):
                break
            reported = heard if "error" in heard or "start" in heard else reported
        took = reported.get("at", time.monotonic()) - begun
        row.reported = max(row.reported, took)
        self._left(row, begun)
        words = reported.get("error", reported.get("start", ""))
        if fault.startswith("a rank"):
            # Ray's places get numbers later; if two ranks died, either may be named
            numbered = fault != TWO and (fault != STARTS or self.args.executor == "multiprocess")
            if (f"rank {self.rank} of {self.args.ranks}" if numbered else "rank") not in words:
                row.wrong.append(f"{fault} {self.rank}: it says {words!r}")
            more = SHUTS_DOWN if fault == STARTS and self.args.executor == "ray" else 0.0
            if took > SOON.get(fault, 2.0) + more:
                row.wrong.append(f"{fault} {self.rank}: said after {took:.1f} s")

    def _kill_a_starting_rank(self) -> float:
        """Kill one rank at a random moment after all have started, while it loads, compiles or captures."""
        found: list[int] = []
        while len(found) < self.args.ranks and self.process.poll() is None:
            found = [pid for pid, words in of_try(self.mark).items() if re.search(RANK[self.args.executor], words)]
            time.sleep(0.02)
        time.sleep(self.rng.uniform(0.0, self.args.start))
        begun = time.monotonic()
        os.kill(sorted(found)[self.rank], signal.SIGKILL)
        return begun

    def _bother(self, fault: str, received: dict, row: Row) -> None:
        """Cause a fault that the engine survives, and check that it answers afterwards."""
        pid = received["pids"][self.rank]
        if fault == SLOW:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.5, SLOWLY))
            os.kill(pid, signal.SIGCONT)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, number)
        since = time.monotonic()
        while (heard := self.hear()).get("at", since + 1) < since:
            pass
        if "tokens" not in heard:
            row.wrong.append(f"{fault} {self.rank}: it says {heard}")

    def _do(self, fault: str, received: dict) -> None:
        numbers = {HANGS: signal.SIGSTOP, CRASHES: signal.SIGSEGV}
        numbers |= dict.fromkeys((TERMINATED, SLOW, RECEIVED), signal.SIGTERM)
        number, rank = numbers.get(fault, signal.SIGKILL), received["pids"][self.rank]
        if fault == CTRL_C:
            os.killpg(self.process.pid, signal.SIGINT)  # like a terminal, which also signals the ranks
        elif fault == FAILS:
            Path(self.flag).write_text(str(self.rank))
        elif fault == TWO:
            for pid in self.rng.sample(received["pids"], 2):
                os.kill(pid, number)
        elif fault == BOTH:
            for pid in self.rng.sample([rank, self.process.pid], 2):
                os.kill(pid, number)
        elif fault.startswith("a rank"):
            os.kill(rank, number)
        else:
            os.kill(received["launcher"] if fault == LAUNCHER else self.process.pid, number)

    def _left(self, row: Row, begun: float) -> None:
        """Wait until nothing remains, and count remaining objects."""
        end = begun + GONE
        Path(self.flag).unlink(missing_ok=True)
        while True:
            now = belongings(self.folder)
            more = {what: now[what] - self.before[what] for what in now}
            if more["ports"]:  # ports of this machine, which other programs use too
                others = of_others(self.mark)
                more["ports"] = {port for port in more["ports"] if port[0] not in others}
            if more["shared memory"]:
                more["shared memory"] -= memory_of_others(self.mark)
            more["processes"] = {str(pid) for pid in of_try(self.mark) if pid != self.process.pid}
            if self.process.poll() is None and self.args.fault != AGAIN:
                more["processes"].add("the engine")
            if not any(more.values()) or time.monotonic() > end:
                break
            time.sleep(0.02)
        row.gone = max(row.gone, time.monotonic() - begun)
        row.left.update({what: len(names) for what, names in more.items() if names})
        for pid in [] if self.args.fault == AGAIN else of_try(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="tries, of all faults together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--executor", default="multiprocess", choices=list(RANK))
    parser.add_argument("--start", type=float, default=1.5, help="seconds within which a starting rank is killed")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.executor != "ray":
        args.faults = [fault for fault in args.faults if fault != LAUNCHER]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without this handler
    rng, rows = random.Random(args.seed), {fault: Row() for fault in args.faults}
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "parts"))
        for i in range(args.times):
            args.fault = args.faults[i % len(args.faults)]
            begun = time.monotonic()
            Try(args, folder, rng).run(args.fault, rows[args.fault])
            print(f"try {i + 1}, {args.fault}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    print(f"{'fault':31} {'tries':>5} {'said within':>11} {'gone within':>11}  left behind")
    for fault, row in rows.items():
        left = ", ".join(f"{n} {what}" for what, n in row.left.items()) or "nothing"
        reported = f"{row.reported:9.2f} s" if fault.startswith(("a rank", "the l")) else f"{'-':>11}"
        print(f"{fault:31} {row.tries:5} {reported} {row.gone:9.2f} s  {left}")
    wrong = [line for row in rows.values() for line in row.wrong]
    print("\n".join(wrong))
    return 1 if wrong or any(row.left for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
