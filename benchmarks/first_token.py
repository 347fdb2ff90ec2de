"""Measure the seconds from starting ``minivllm generate`` to its first character.

    python benchmarks/first_token.py [--repeat 5]

Modules are read from bytecode, as pip installs them.  A first run, which is not counted, writes it, even with
PYTHONDONTWRITEBYTECODE; compiling the sources takes about 0.2 s more.  Runs alternate with ``import torch`` alone,
which takes most of the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

GENERATE = ("-m", "minivllm", "generate", "Once upon a time", "--max-tokens", "8")
IMPORT = ("-c", "import os, torch; print(1, flush=True); os._exit(0)")


def once(words: tuple[str, ...]) -> float:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *words]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
        assert process.stdout is not None and process.stdout.read(1), "no text came"
        taken = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    once(GENERATE)
    turns = [(once(GENERATE), once(IMPORT)) for _ in range(repeat)]
    for name, times in zip(("first character after", "import torch alone"), zip(*turns, strict=True), strict=True):
        print(
            f"{name} {min(times):.2f} s (best), {statistics.median(times):.2f} s (median), {max(times):.2f} s (worst)"
        )


if __name__ == "__main__":
    main()
