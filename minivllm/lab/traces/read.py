"""Find a trace by its name: a file in a published format, a sample of the package, or a generated trace."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from minivllm import files
from minivllm.errors import ConfigError, brief, where_requests_go

from .formats import read_azure, read_bailian, read_burstgpt, read_mooncake
from .synthetic import generate, parse
from .trace import Trace

SAMPLES = {"azure": "azure.csv", "burstgpt": "burstgpt.csv", "mooncake": "mooncake.jsonl", "bailian": "bailian.jsonl"}
FOLDER = Path(__file__).parent / "samples"
ACCEPTED = (
    "expected a .csv (Azure, BurstGPT), a .jsonl (Mooncake, Qwen-Bailian), sample:NAME or synthetic:key=value,... "
    "(synthetic:like=NAME,... for a preset)"
)


def read_trace(source: str) -> Trace:
    """Read or generate the trace with a name: ``synthetic:...``, ``sample:NAME``, or the path of a file.

    A .csv file is in the format of Azure or BurstGPT, a .jsonl file in that of Mooncake or Qwen-Bailian.  Raise
    ConfigError for an unknown name or a file that is not a trace.
    """
    if source == "synthetic" or source.startswith("synthetic:"):
        return generate(parse(source.partition(":")[2]))
    path = Path(source)
    if source.startswith("sample:"):
        name = source.partition(":")[2]
        if name not in SAMPLES:
            raise ConfigError(f"{brief(source, 300)}: no such sample; there are {', '.join(SAMPLES)}")
        path = FOLDER / SAMPLES[name]
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{brief(source, 300)}: {ACCEPTED}")
    try:
        lines = files.read_lines(path, files.HUGE)
        head = list(itertools.islice(lines, 1))
        read = _choose_reader(source, path, head[0] if head else "")
        return read(source, itertools.chain(head, lines))
    except csv.Error as e:
        raise ConfigError(f"{source}: broken CSV: {e}") from e


def _choose_reader(source: str, path: Path, first: str) -> Callable[[str, Iterator[str]], Trace]:
    """Return the reader for a file whose first line is ``first``.

    A file in an unknown format is passed to the reader of Azure or Mooncake, which reports the expected fields.  Raise
    ConfigError for a file of prompts, which other commands read.
    """
    if path.suffix == ".csv":
        return read_burstgpt if "Request tokens" in first else read_azure
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):  # the reader reports the error with the number of the line
        return read_mooncake
    has_prompt = isinstance(row, dict) and "prompt" in row and "hash_ids" not in row
    if has_prompt or isinstance(row, str):
        raise ConfigError(f"{source}:1: holds prompts and is not a trace; {where_requests_go()}")
    return read_bailian if isinstance(row, dict) and "chat_id" in row else read_mooncake


def about(trace: Trace) -> str:
    """Return a line with a trace's name, duration and numbers of requests and tokens."""
    seconds = float(trace.arrival[-1])
    return (
        f"{trace.name}: {len(trace)} requests in {seconds:.0f} s, {int(trace.prompt.sum())} prompt "
        f"and {int(trace.output.sum())} output tokens"
    )
