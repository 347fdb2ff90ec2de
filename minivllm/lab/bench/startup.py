"""How long it takes from nothing to a first token: each run is a process of its own.

    python -m minivllm.lab.bench.startup FILE       the process: builds the engine of a configuration and says its times

Files are as warm as the file system keeps them: after the first run they come from memory.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from minivllm.errors import ResourceError
from minivllm.registration import fresh

if TYPE_CHECKING:
    from minivllm.config import Loaded

MARK = "minivllm-startup "
PARTS = ("import", "build", "first_token")


def once(loaded: Loaded) -> dict[str, Any]:
    """Return the seconds of one start.  ResourceError if the process fails.

    ``import`` is of Python, torch and minivllm, ``build`` of the engine, ``first_token`` of a prompt of 16 tokens
    (fewer if ``max_model_len`` is smaller), ``startup`` altogether as seen from outside.
    """
    values = loaded.engine.model_dump(mode="json", exclude_unset=True)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file)
        begun = time.monotonic()
        argv = [sys.executable, "-m", "minivllm.lab.bench.startup", path]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=fresh.environ())
    line = next((one for one in done.stdout.splitlines() if one.startswith(MARK)), None)
    if line is None:
        said = " ".join(done.stderr.split()[-40:])
        raise ResourceError(f"the process that was to start an engine ended with {done.returncode}: {said}")
    at = json.loads(line.removeprefix(MARK))
    marks = [begun, at["imported"], at["built"], at["first"]]  # one monotonic clock for all processes of a machine
    spans = [b - a for a, b in itertools.pairwise(marks)]
    return {**{f"{name}_s": span for name, span in zip(PARTS, spans, strict=True)}, "startup_s": at["first"] - begun}


def main(path: str) -> None:
    from minivllm import LLM, SamplingParams

    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    import torch

    assert torch.get_num_threads()
    imported = time.monotonic()
    llm = LLM(config=values)
    built = time.monotonic()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    longest, vocab = llm.engine.wiring.max_model_len, llm.engine.capacity.vocab_size
    llm.generate([[min(1, vocab - 1)] * max(1, min(16, longest - 1))], params, use_tqdm=False)
    first = time.monotonic()
    print(MARK + json.dumps({"imported": imported, "built": built, "first": first}), flush=True)
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
