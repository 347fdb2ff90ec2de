"""Find a trace by its name: a file in one of the published formats, a sample of the package, or a generated one."""

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
WANTED = (
    "want a .csv (Azure, BurstGPT), a .jsonl (Mooncake, Qwen-Bailian), sample:NAME or synthetic:key=value,... "
    "(synthetic:like=NAME,... for a preset)"
)


def read_trace(source: str) -> Trace:
    """``synthetic:...``, ``sample:NAME``, a .csv (Azure, BurstGPT) or a .jsonl (Mooncake, Qwen-Bailian).  ConfigError
    says what is wrong with it."""
    if source == "synthetic" or source.startswith("synthetic:"):
        return generate(parse(source.partition(":")[2]))
    path = Path(source)
    if source.startswith("sample:"):
        name = source.partition(":")[2]
        if name not in SAMPLES:
            raise ConfigError(f"{brief(source, 300)}: no such sample; there are {', '.join(SAMPLES)}")
        path = FOLDER / SAMPLES[name]
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{brief(source, 300)}: {WANTED}")
    try:
        lines = files.read_lines(path, files.HUGE)
        head = [line.removeprefix("\ufeff") for line in itertools.islice(lines, 1)]
        return _reader(source, path, head)(source, itertools.chain(head, lines))
    except csv.Error as e:
        raise ConfigError(f"{source}: no CSV: {e}") from e


def _reader(source: str, path: Path, head: list[str]) -> Callable[[str, Iterator[str]], Trace]:
    """By the first line.  A file that is neither goes to the older format, whose reader says what it wants; but for
    requests with prompts, which are another command's."""
    first = head[0] if head else ""
    if path.suffix == ".csv":
        return read_burstgpt if "Request tokens" in first else read_azure
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):  # its reader says so, with the line
        row = None
    if isinstance(row, str) or (isinstance(row, dict) and "prompt" in row and "hash_ids" not in row):
        raise ConfigError(f"{source}:1: has prompts, and is no trace; {where_requests_go()}")
    return read_bailian if isinstance(row, dict) and "chat_id" in row else read_mooncake


def about(trace: Trace) -> str:
    """One line: how many, how long."""
    seconds = float(trace.arrival[-1])
    return (
        f"{trace.name}: {len(trace)} requests in {seconds:.0f} s, {int(trace.prompt.sum())} prompt "
        f"and {int(trace.output.sum())} output tokens"
    )
