"""Executor ``ray`` over two machines, which are network namespaces of this one: equal tokens, and failures of a machine
or of the network.

    python tests/robustness/two_machines.py                       all scenes, as root on Linux, with Ray installed
    python tests/robustness/two_machines.py --only serve "the cable is cut"

Each machine has a network, a host name, and a /dev/shm and folder for Ray of its own; a pair of virtual interfaces is
the cable.  A Ray head of one CPU runs on the first machine and a Ray node of one CPU on the second, so that of two
ranks each machine has one.  A scene prints the last output of the engine and its time.  Afterwards no process, file,
shared memory or namespace may be left.  The exit status is 1 after a failure, and 77 if the scenes cannot run here.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import minivllm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from robustness.machines import NAMES, SIZES, STARTS, Engine, Machines, Server, command_of, of_mark, run, why_not

SOON = 10.0  # seconds until the engine must have reported the reason and all ranks have ended
SKIPPED = 77


def tokens_of_one(machines: Machines) -> list[list[int]]:
    """Return the tokens of one process with the executor ``local``."""
    alone = Engine(machines, {**SIZES, "executor": "local"}, tokens=40, once=True)
    alone.ready()
    found = alone.hear()["tokens"]
    alone.process.wait()
    return found


def equal(machines: Machines, cut: float = 0.0, transport: str = "auto") -> str:
    """Check that two machines give the tokens of one process, even if the cable is cut for ``cut`` seconds."""
    want = tokens_of_one(machines)
    engine = Engine(machines, machines.options(transport=transport), tokens=40)
    ranks = engine.ready()
    assert [host for _, host in ranks] == list(NAMES), f"the ranks are on {ranks}"
    rounds = 0
    for turn in range(3):
        if cut and turn == 1:
            machines.link("down")
            time.sleep(cut)
            machines.link("up")
        reported = engine.hear()
        assert reported.get("tokens") == want, f"round {turn}: {reported}, one process gives {want}"
        rounds += 1
    engine.process.terminate()
    assert engine.process.wait(20) in (-signal.SIGTERM, 143), f"exit code {engine.process.returncode}"
    return f"{rounds * len(want)} of {rounds * len(want)} answers are those of one process"


def slow_cable(machines: Machines) -> str:
    """Check equal tokens if every packet is 20 ms late."""
    late = ["qdisc", "add", "dev", machines.links[1], "root", "netem", "delay", "20ms"]
    try:
        run("tc", "-n", machines.names[1], *late)
    except OSError as e:
        return f"skipped: {e}"
    return equal(machines)


def serve(machines: Machines) -> str:
    """Check that the server answers with the tokens of one process, and ends by SIGTERM."""
    want, server = tokens_of_one(machines), Server(machines)
    got = server.answer(40)
    assert got == want, f"{got}, one process gives {want}"
    server.process.terminate()
    server.process.communicate(timeout=60)
    assert server.process.returncode == 0, f"exit code {server.process.returncode}"
    return f"{len(got)} of {len(got)} answers are those of one process; exit code 0"


def serve_and_cut(machines: Machines) -> str:
    """Check that a request gets 503 when the cable is cut, and that the server ends with exit code 7 and the reason."""
    server = Server(machines)
    server.answer(4)
    asks = server.ask(230)
    time.sleep(1.0)
    begun = time.monotonic()
    machines.link("down")
    reported, _ = asks.communicate(timeout=60)
    took = time.monotonic() - begun
    assert reported.startswith("503 ") and took < SOON, f"the client is told after {took:.1f} s: {reported}"
    words = server.process.communicate(timeout=60)[1]
    ended = time.monotonic() - begun
    assert server.process.returncode == 7 and WHO in words, f"exit code {server.process.returncode}: {words[-500:]}"
    why = next(line for line in words.splitlines() if WHO in line)
    return f"the request 503 after {took:.1f} s, the server exit code 7 after {ended:.1f} s: {why}"


def breaks(machines: Machines, do: Callable[[Machines, list[list[Any]]], None], *words: str, **more: Any) -> str:
    """Check that ``do``, called during generation, makes the engine report these words soon."""
    engine = Engine(machines, machines.options(**more))
    ranks = engine.ready()
    assert "tokens" in engine.hear()
    time.sleep(0.3)
    begun = time.monotonic()
    do(machines, ranks)
    reported, took = engine.end(begun)
    missing = [word for word in words if word not in reported]
    assert not missing, f"said after {took:.1f} s: {reported!r}; it lacks {missing}"
    assert took < SOON, f"said after {took:.1f} s: {reported}"
    left = gone([pid for pid, _ in ranks], begun + SOON)
    assert not left, f"ranks {left} live on {SOON:.0f} s later"
    return f"{took:.1f} s: {reported}"


def gone(pids: Sequence[int], end: float) -> list[int]:
    """Return the processes that have not ended by then."""
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "ray::" in command_of(pid)]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return left


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def without_node(machines: Machines) -> str:
    """Start the engine after the second machine has gone."""
    kill_all(machines.of_node(1))
    begun = time.monotonic()
    engine = Engine(machines, machines.options(placement_timeout=3))
    reported, took = engine.end(begun)
    assert engine.process.returncode == 5, f"exit code {engine.process.returncode}: {reported}"
    assert "places" in reported, reported
    return f"{took:.1f} s, exit code 5: {reported}"


def other_sources(machines: Machines) -> tuple[str, str]:
    """Return another version of the package, and the path at which the second machine has it."""
    package, other = Path(minivllm.__file__).parent, Path(machines.folder + ".1", "other")
    shutil.copytree(package, other, ignore=shutil.ignore_patterns("__pycache__"))
    with open(other / "errors.py", "a") as file:
        file.write("# another version\n")
    return str(other), str(package)


def refused(machines: Machines, *words: str) -> str:
    """Check that the engine does not start, reports these words soon and ends with exit code 5."""
    begun = time.monotonic()
    engine = Engine(machines, machines.options(), once=True)
    reported, took = engine.end(begun)
    missing = [word for word in words if word not in reported]
    assert not missing and engine.process.returncode == 5, f"exit code {engine.process.returncode}: {reported}"
    return f"{took:.1f} s, exit code 5: {reported}"


def cut_while_starting(machines: Machines) -> str:
    """Cut the cable after the process of a rank exists, before or after it has joined."""
    engine = Engine(machines, machines.options())
    end = time.monotonic() + STARTS
    while not any("RankPlace" in command_of(pid) for pid in machines.of_node(1)):
        assert time.monotonic() < end, "no rank starts"
        time.sleep(0.1)
    time.sleep(random.uniform(0.0, 3.0))
    begun = time.monotonic()
    machines.link("down")
    reported, took = engine.end(begun)
    assert engine.process.returncode == 5, f"exit code {engine.process.returncode}: {reported}"
    assert took < 2 * SOON, f"said after {took:.1f} s: {reported}"
    return f"{took:.1f} s, exit code 5: {reported}"


def raylet(machines: Machines, where: int) -> list[int]:
    return [pid for pid in machines.of_node(where) if "/raylet/raylet" in command_of(pid).split(" ")[0]]


def head(machines: Machines) -> list[int]:
    return [pid for pid in machines.of_node(0) if "gcs_server" in command_of(pid).split(" ")[0]]


ANOTHER = "the node has another minivllm"
WHO = "rank 1 of 2 (cpu of host-b, process "
SCENES: dict[str, Callable[[Machines], str]] = {
    "offline": equal,
    "over TCP alone": lambda m: equal(m, transport="tcp"),
    "serve": serve,
    "serve, and the cable is cut": serve_and_cut,
    "a cable that is slow": slow_cable,
    "the cable is out for 3 s": lambda m: equal(m, cut=3.0),
    "the cable is cut": lambda m: breaks(m, lambda m, ranks: m.link("down"), WHO, "step"),
    "the cable is cut while it starts": cut_while_starting,
    "the rank there is killed": lambda m: breaks(m, lambda m, ranks: kill_all([ranks[1][0]]), WHO, "step"),
    "the rank there is stopped": lambda m: breaks(
        m, lambda m, ranks: os.kill(ranks[1][0], signal.SIGSTOP), "Missing: rank 1", "host-b", "step", timeout=3
    ),
    "the node's raylet is killed": lambda m: breaks(m, lambda m, ranks: kill_all(raylet(m, 1)), WHO, "step"),
    "the node is killed": lambda m: breaks(m, lambda m, ranks: kill_all(m.of_node(1)), WHO, "step"),
    "the head is killed": lambda m: breaks(m, lambda m, ranks: kill_all(head(m))),
    "the node has gone before": without_node,
    ANOTHER: lambda m: refused(m, WHO, "other files or versions", "source of minivllm"),
}


def belongings() -> set[str]:
    networks = run("ip", "netns", "list").splitlines()
    return {*os.listdir("/dev/shm"), *os.listdir(tempfile.gettempdir()), *networks}


def play(name: str) -> str:
    """Play a scene on machines of its own.  Raise AssertionError with the failure."""
    before = belongings()
    with Machines() as machines:
        machines.cluster(other_sources(machines) if name == ANOTHER else ())
        reported = SCENES[name](machines)
    own = (machines.mark, Path(machines.folder).name, "minivllm")
    left = [what for what in belongings() - before if any(name in what for name in own)]
    left += [f"process {pid}" for pid in of_mark(machines.mark)]
    assert not left, f"left behind: {', '.join(left)}"
    return reported


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENES, default=list(SCENES), metavar="SCENE")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # everything that the scene made is removed then too
    if why := why_not():
        print(f"skipped: {why}")
        return SKIPPED
    wrong = 0
    for name in args.only:
        try:
            print(f"{name}: {play(name)}", flush=True)
        except (AssertionError, OSError) as e:
            wrong += 1
            print(f"{name}: WRONG: {e}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
