"""Conversion of tokenizers that only transformers can read (tokenizer.model, vocab.json, tekken.json).

It runs in a process with limits, because it tries every division of every piece, so a piece of a megabyte would take
hours.  Only that process imports transformers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError
from minivllm.registration import fresh
from minivllm.runtime.processes.confined import BY_THE_CLOCK, MEMORY, allow, limit_memory

SECONDS = 60.0  # CPU time limit in seconds; a vocabulary of 256,000 pieces takes 8 s
MEGABYTES = 4096


def convert(folder: Path, names: tuple[str, ...], seconds: float = SECONDS) -> dict[str, Any]:
    """Return the JSON of a ``tokenizers.Tokenizer`` as "backend", and the special tokens ``names`` as "special".

    "backend" is None if transformers has only a slow tokenizer.  ModelError for broken files and exceeded limits."""
    read, write = os.pipe()
    argv = fresh.command("minivllm.runtime.text.converted:main", str(folder), str(write), str(seconds), ",".join(names))
    quiet = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    with open(read, "rb") as pipe:
        try:
            process = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, pass_fds=[write], env=quiet)
        finally:
            os.close(write)
        try:
            answer = pipe.read()
        finally:
            process.kill()
            code = process.wait()
    if answer:
        found = json.loads(answer)
        if "refused" in found:
            raise ModelError(f"{folder}: transformers cannot load its tokenizer: {found['refused']}")
        return found
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        reason = f"takes more than {seconds:g} s of CPU time (or {BY_THE_CLOCK * seconds:g} s by the clock)"
    else:
        reason = f"takes more than {MEGABYTES} MiB" if code == MEMORY else f"ended the process with status {code}"
    raise ModelError(f"{folder}: transformers cannot load its tokenizer: it {reason}; expected a tokenizer.json")


def main(folder: str, write: str, seconds: str, names: str) -> None:
    """Convert a tokenizer within the limits, and write the answer as JSON to a pipe."""
    limit_memory(MEGABYTES)
    allow(float(seconds))
    try:
        answer = _answer(folder, names.split(","))
    except MemoryError:
        os._exit(MEMORY)
    except BaseException as e:  # transformers raises many types, and a panic of a library is not an Exception
        lines = str(e).strip().splitlines() or [type(e).__name__]
        answer = {"refused": lines[0]}
    with open(int(write), "wb") as pipe:
        pipe.write(json.dumps(answer).encode())


def _answer(folder: str, names: list[str]) -> dict[str, Any]:
    """Return the result of ``convert``."""
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backend = getattr(slow, "backend_tokenizer", None)
    special = {name: str(text) for name in names if (text := getattr(slow, name, None)) is not None}
    return {"backend": None if backend is None else backend.to_str(), "special": special}
