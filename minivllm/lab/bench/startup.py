"""Measure the time from the start of a process to the first token.  Each run is a new process.

    python -m minivllm.lab.bench.startup FILE       build the engine of a configuration and print the times

The operating system caches files, so after the first run they are read from memory.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from minivllm.errors import ResourceError
from minivllm.registration import fresh

from . import Result

if TYPE_CHECKING:
    from minivllm.config import Loaded

MARK = "minivllm-startup "
PARTS = ("import", "build", "first_token")
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def once(loaded: Loaded) -> Result:
    """Measure one start and return its seconds.  Raise ResourceError if the process fails.

    ``import_s`` is the time to start Python and import minivllm, ``build_s`` the time to build the engine.
    ``first_token_s`` is the time of a request with a prompt of 16 tokens, or fewer for a shorter ``max_model_len``.
    ``startup_s`` is the sum.  ``build_imports_s``, ``build_weights_s`` and others are the parts of ``build_s``;
    ``build_other_s`` is the rest.

    The process may store bytecode, also if PYTHONDONTWRITEBYTECODE is set.  An installed package has bytecode, and to
    compile all modules of minivllm takes 2 seconds of each start.
    """
    values = loaded.engine.model_dump(mode="json", exclude_unset=True)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file)
        begun = time.monotonic()
        argv = [sys.executable, "-m", "minivllm.lab.bench.startup", path]
        environ = {name: value for name, value in fresh.environ().items() if name != NO_BYTECODE}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)
    marked = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    line = marked[0] if marked else None
    if line is None:
        errors = " ".join(done.stderr.split()[-40:])
        raise ResourceError(f"the process that was to start an engine ended with {done.returncode}: {errors}")
    times = json.loads(line.removeprefix(MARK))
    marks = [begun, times["imported"], times["built"], times["first"]]  # all processes share the monotonic clock
    found: Result = {}
    for name, (start, end) in zip(PARTS, itertools.pairwise(marks), strict=True):
        found[f"{name}_s"] = end - start
    found["startup_s"] = times["first"] - begun
    parts = times["parts"]
    parts["other"] = found["build_s"] - sum(parts.values())
    for part, seconds in parts.items():
        name = part.lower().replace(" ", "_")
        found[f"build_{name}_s"] = seconds
    return found


def main(path: str) -> None:
    """Build the engine of the configuration in a JSON file, generate a token, and print the times of both."""
    from minivllm import LLM, SamplingParams

    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    imported = time.monotonic()
    llm = LLM(config=values)
    built = time.monotonic()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    vocabulary = llm.engine.capacity.vocab_size
    token = min(1, vocabulary - 1)
    length = max(1, min(16, llm.engine.wiring.max_model_len - 1))
    llm.generate([[token] * length], params, use_tqdm=False)
    first = time.monotonic()
    parts = llm.engine.start_times
    times = {"imported": imported, "built": built, "first": first, "parts": parts}
    print(f"{MARK}{json.dumps(times)}", flush=True)
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
