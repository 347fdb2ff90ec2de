"""Ends of processes that share a model, at random moments: how soon the engine says so, and what is left behind.

    python benchmarks/rank_deaths.py --times 20 --ranks 2
    python benchmarks/rank_deaths.py --times 5 --faults "kill a rank" "Ctrl-C"

Each try starts an engine in a process of its own, which answers requests one after another, and does one thing to it
at a random moment.  Afterwards nothing may be there that was not before: processes, files in /dev/shm or in the folder
for temporary ones, ports that somebody listens at.  Exit status 1 if something is, or if a fault took too long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ENGINE = """
import json, sys, time
from minivllm import LLM, EngineDeadError, SamplingParams

def say(**words):
    print(json.dumps(words), flush=True)

if __name__ == "__main__":
    ranks, device, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    options = {"timeout": timeout, "checked": len(sys.argv) > 4}
    try:
        llm = LLM(model="pocket", device=device, max_num_seqs=4, max_num_batched_tokens=64, num_kvcache_blocks=64,
                  max_model_len=256, executor={"name": "multiprocess", "options": options}, tensor_parallel_size=ranks)
    except Exception as e:
        say(start=str(e))
        sys.exit(3)
    say(pids=[child.pid for child in llm.engine.executor._ranks()])
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with llm:
        while True:
            out = llm.generate(["Once upon a time", "The dog"], params, use_tqdm=False)
            if out[0].finish_reason == "error":
                say(error=out[0].error, at=time.monotonic())
                break
            say(tokens=sum(len(o.tokens) for o in out))
"""
SOON = {"Ctrl-C": 15.0, "a rank hangs": 2.0 + 2.0}  # seconds until the engine says so, where they are not 2
GONE = 15.0  # seconds until nothing is left


@dataclass
class Row:
    """What came of the tries of one fault."""

    tries: int = 0
    said: float = 0.0  # seconds, the longest
    gone: float = 0.0
    left: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def listening() -> set[str]:
    """Local addresses of sockets that listen."""
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}", encoding="ascii") as file:
            found |= {line.split()[1] for line in file if line.split()[3] == "0A"}
    return found


def belongings(folder: str) -> dict[str, set[str]]:
    return {
        "shared memory": set(os.listdir("/dev/shm")),
        "temporary files": set(os.listdir(folder)),
        "ports": listening(),
    }


def of_group(group: int) -> list[int]:
    """Processes of a session that are there and no zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if rest[0] != "Z" and int(rest[3]) == group:
            found.append(int(stat.parent.name))
    return found


class Try:
    """One engine and what is done to it."""

    def __init__(self, args: argparse.Namespace, folder: str, rng: random.Random) -> None:
        self.args, self.rng, self.before = args, rng, belongings(folder)
        self.rank = rng.randrange(args.ranks)
        words = [
            str(args.ranks),
            args.device,
            "2" if args.hangs else "30",
            *(["checked"] if rng.random() < 0.5 else []),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": folder},
        )
        self.folder = folder

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def run(self, fault: str, row: Row) -> None:
        row.tries += 1
        if fault == "a rank dies while it starts":
            begun = self._kill_a_starting_rank()
        else:
            pids = self.hear()["pids"]
            time.sleep(self.rng.uniform(0.0, 1.0))
            begun = time.monotonic()
            self._do(fault, pids)
        said = {}
        while self.process.poll() is None or not said:
            if not (heard := self.hear()):
                break
            said = heard if "error" in heard or "start" in heard else said
        row.said = max(row.said, (took := time.monotonic() - begun))
        self._left(row, begun)
        words = said.get("error", said.get("start", ""))
        if fault.startswith("a rank"):
            if f"rank {self.rank} of {self.args.ranks}" not in words:
                row.wrong.append(f"{fault} {self.rank}: it says {words!r}")
            if took > SOON.get(fault, 2.0):
                row.wrong.append(f"{fault} {self.rank}: said after {took:.1f} s")

    def _kill_a_starting_rank(self) -> float:
        """Ranks are the engine's children, in order; some time after there are so many."""
        found: list[int] = []
        while len(found) < self.args.ranks and self.process.poll() is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            found = [int(pid) for pid in children if "multiprocess_worker" in _words(int(pid))]
            time.sleep(0.02)
        time.sleep(self.rng.uniform(0.0, 1.5))
        begun = time.monotonic()
        os.kill(sorted(found)[self.rank], signal.SIGKILL)
        return begun

    def _do(self, fault: str, pids: list[int]) -> None:
        numbers = {
            "a rank is killed": signal.SIGKILL,
            "a rank crashes": signal.SIGSEGV,
            "a rank hangs": signal.SIGSTOP,
            "the engine is killed": signal.SIGKILL,
            "the engine is terminated": signal.SIGTERM,
            "Ctrl-C": signal.SIGINT,
        }
        if fault == "Ctrl-C":
            os.killpg(self.process.pid, numbers[fault])  # as a terminal does, the ranks too
        else:
            os.kill(pids[self.rank] if fault.startswith("a rank") else self.process.pid, numbers[fault])

    def _left(self, row: Row, begun: float) -> None:
        """Wait until nothing is left, and count what is."""
        end = begun + GONE
        while True:
            now = belongings(self.folder)
            more = {what: now[what] - self.before[what] for what in now}
            more["processes"] = {str(pid) for pid in of_group(self.process.pid) if pid != self.process.pid}
            if self.process.poll() is None:
                more["processes"].add("the engine")
            if not any(more.values()) or time.monotonic() > end:
                break
            time.sleep(0.02)
        row.gone = max(row.gone, time.monotonic() - begun)
        row.left.update({what: len(names) for what, names in more.items() if names})
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


FAULTS = (
    "a rank is killed", "a rank crashes", "a rank hangs", "a rank dies while it starts", "the engine is killed",
    "the engine is terminated", "Ctrl-C",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="tries, of all faults together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng, rows = random.Random(args.seed), {fault: Row() for fault in args.faults}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.times):
            fault = args.faults[i % len(args.faults)]
            args.hangs = fault == "a rank hangs"
            Try(args, folder, rng).run(fault, rows[fault])
    print(f"{'fault':28} {'tries':>5} {'said within':>11} {'gone within':>11}  left behind")
    for fault, row in rows.items():
        left = ", ".join(f"{n} {what}" for what, n in row.left.items()) or "nothing"
        said = f"{row.said:9.2f} s" if fault.startswith("a rank") else f"{'-':>11}"
        print(f"{fault:28} {row.tries:5} {said} {row.gone:9.2f} s  {left}")
    wrong = [line for row in rows.values() for line in row.wrong]
    print("\n".join(wrong))
    return 1 if wrong or any(row.left for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
