"""Measure the start-up times of light commands against ``python -c pass``, with and without packages with plug-ins.

    python benchmarks/startup.py [--plugins 100] [--repeat 15]

Each package is real metadata in a folder on the path, with a readme of 300 lines, one entry point, and a module that
ends the process when it is imported.  The commands take turns, so that other work on the machine slows all of them.
Figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEAMS = ("attention", "evictor", "executor", "kvformat", "model", "processor", "quantizer", "sampler", "scheduler")
BARE = ("-c", "pass")
COMMANDS = (BARE, ("-m", "minivllm", "--help"), ("-m", "minivllm", "--version"), ("-m", "minivllm", "plugins"))


def install(folder: Path, n: int) -> None:
    for i in range(n):
        info = folder / f"acme_{i}-1.{i}.dist-info"
        info.mkdir()
        readme = "A line of the readme.\n" * 300
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme_{i}\nVersion: 1.{i}\n\n{readme}")
        (info / "entry_points.txt").write_text(f"[minivllm.{SEAMS[i % len(SEAMS)]}]\nplug{i} = acme_{i}_spec:SPEC\n")
        (folder / f"acme_{i}_spec.py").write_text("raise SystemExit('a plug-in was imported')\n")


def once(words: tuple[str, ...], folder: Path) -> float:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], env=env, capture_output=True, check=True, cwd=folder)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugins", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full:
        install(Path(full), args.plugins)
        cases = [(words, Path(folder)) for folder in (empty, full) for words in COMMANDS]
        ms: dict[tuple, list[float]] = {case: [] for case in cases}
        for turn in range(args.repeat + 1):
            for case in cases:
                taken = once(*case)
                if turn:  # the first turn fills the caches of the file system
                    ms[case].append(taken)
        print(f"{'packages':>8} {'ms':>7} {'over bare':>9}  command")
        for (words, folder), taken in ms.items():
            bare = statistics.median(ms[BARE, folder])
            middle = statistics.median(taken)
            n = args.plugins if folder == Path(full) else 0
            print(f"{n:>8} {middle:>7.1f} {middle - bare:>9.1f}  python {' '.join(words)}")


if __name__ == "__main__":
    main()
