"""Seconds from starting ``minivllm generate`` to its first character, as a user waits for it.

python benchmarks/first_token.py [--repeat 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def once() -> float:
    command = [sys.executable, "-m", "minivllm", "generate", "Once upon a time", "--max-tokens", "8"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.read(1), "no text came"
        taken = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    times = sorted(once() for _ in range(parser.parse_args().repeat))
    best, middle, worst = times[0], statistics.median(times), times[-1]
    print(f"first character after {best:.2f} s (best), {middle:.2f} s (median), {worst:.2f} s (worst)")


if __name__ == "__main__":
    main()
