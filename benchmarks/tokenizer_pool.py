"""Time the tokenizing of a list of prompts by one thread, by threads and by processes.

    python benchmarks/tokenizer_pool.py [--model pocket] [--mode hf] [--prompts 512] [--characters 8000] [--rounds 9]

The ways take turns, so that another load on the machine falls on all of them.  ``best`` compares the fastest rounds,
which another load disturbs least.  On a busy machine compare CPU times.  ``cpu`` is their sum over all processes.
``idle`` is the speed on ``size`` idle cores that follows from it, from the case that this process works while no other
one does to the case that all work is shared evenly.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path

from minivllm import files
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.frontend.building import open_tokenizer
from minivllm.registry import Catalog
from minivllm.runtime.text.pool import TokenizerPool

TEXT = Path(__file__).resolve().parents[1] / "docs"


def prompts(count: int, characters: int) -> list[str]:
    """Return prompts of random words of the documentation."""
    words = [word for page in sorted(TEXT.glob("*.md")) for word in files.read_text(page).split()]
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=characters))[:characters] for _ in range(count)]


def cpu_of(pids: list[int]) -> list[float]:
    """Return the CPU seconds of this process, and of other processes."""
    found = [time.process_time()]
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def idle_speed(alone: float, parts: list[float], size: int) -> tuple[float, float]:
    """Return the least and the largest speed on ``size`` idle cores, relative to ``alone`` CPU seconds of one thread.

    ``parts`` are the CPU seconds of this process and of others."""
    own, others = parts[0], parts[1:]
    even = alone / max([sum(parts) / size, *others])
    return (alone / (own + max(others)) if others else even), even


def main() -> None:
    """Print the median and the best time of each way, and how many times faster than one thread it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, default in (("prompts", 512), ("characters", 8000), ("rounds", 9), ("size", 2)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--mode", default="auto")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, tokenizer_mode=args.mode, device="cpu", load_format="dummy")
    tokenizer, _ = open_tokenizer(resolve(config, Catalog.discover(), weights=False))
    assert tokenizer is not None
    texts = prompts(args.prompts, args.characters)
    pools = {name: TokenizerPool(tokenizer, name, args.size) for name in ("none", "threads", "process")}
    ways = {"one by one": lambda: [tokenizer.encode(text) for text in texts]}
    ways |= {name: (lambda pool=pool: pool.encode_all(texts)) for name, pool in pools.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[list[float]]] = {name: [] for name in ways}
    want = [way() for way in ways.values()]  # also starts the processes
    assert all(found == want[0] for found in want)
    pids = [process._process.pid for process in pools["process"]._started]
    for _ in range(args.rounds):
        for name, way in ways.items():
            begin, before = time.perf_counter(), cpu_of(pids)
            way()
            times[name].append(time.perf_counter() - begin)
            cpu[name].append([after - start for start, after in zip(before, cpu_of(pids), strict=True)])
    first = times["one by one"]
    print(f"{args.prompts} prompts of {args.characters} characters, size {args.size}, load {os.getloadavg()[0]:.1f}")
    for name, found in times.items():
        pairs = [alone / other for alone, other in zip(first, found, strict=True)]
        figures = statistics.median(found), statistics.median(pairs), min(found), min(first) / min(found)
        print("{:11} median {:.3f} s, {:.2f} times; best {:.3f} s, {:.2f} times".format(name, *figures))
    alone = statistics.median(sum(parts) for parts in cpu["one by one"])
    for name, rounds in cpu.items():
        parts = [statistics.median(column) for column in zip(*rounds, strict=True)]
        shared = parts if name == "process" else parts[:1]
        low, high = idle_speed(alone, shared, args.size if name in ("process", "threads") else 1)
        print(f"{name:11} cpu {sum(shared):.3f} s, idle {low:.2f} to {high:.2f} times")
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
