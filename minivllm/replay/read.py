"""Read a trace: Azure's or Mooncake's files, or a synthetic one from its parameters."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from minivllm import files
from minivllm.errors import ConfigError, brief

from .synthetic import generate, parse
from .trace import Trace, build

MOONCAKE_BLOCK = 512  # tokens of a hash id


def read_trace(source: str) -> Trace:
    """``synthetic:...``, a .csv (Azure) or a .jsonl (Mooncake).  ConfigError says what is wrong with it."""
    if source == "synthetic" or source.startswith("synthetic:"):
        return generate(parse(source.partition(":")[2]))
    path = Path(source)
    readers = {".csv": read_azure, ".jsonl": read_mooncake}
    if path.suffix not in readers:
        raise ConfigError(f"{brief(source, 300)}: want a .csv (Azure), a .jsonl (Mooncake) or synthetic:key=value,...")
    try:
        return readers[path.suffix](source, files.read_lines(path, files.HUGE))
    except csv.Error as e:
        raise ConfigError(f"{source}: no CSV: {e}") from e


def read_azure(name: str, lines: Iterator[str]) -> Trace:
    """Azure's LLM inference traces (Patel et al., "Splitwise", ISCA 2024): TIMESTAMP, ContextTokens, GeneratedTokens.
    They say nothing about content, so no two requests share any."""
    rows = csv.DictReader(lines)
    want = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    if missing := [c for c in want if c not in (rows.fieldnames or ())]:
        raise ConfigError(f"{name}: no column {missing[0]}; want {', '.join(want)}")
    arrival, prompt, output = [], [], []
    for row in rows:
        try:
            stamp, n, m = (row[c] for c in want)
            # seven digits after the point are one too many for datetime
            whole, _, rest = stamp.partition(".")
            arrival.append(datetime.fromisoformat(whole).timestamp() + float(f"0.{rest or 0}"))
            prompt.append(int(n))
            output.append(int(m))
        except (ValueError, TypeError, AttributeError) as e:
            raise ConfigError(f"{name}:{rows.line_num}: {e}; want a time and two numbers") from e
    runs = [[(2 * i, n)] for i, n in enumerate(prompt)]
    return build(name, arrival, prompt, output, [2 * i + 1 for i in range(len(prompt))], runs)


def read_mooncake(name: str, lines: Iterator[str]) -> Trace:
    """Mooncake's traces (Qin et al., "Mooncake", FAST 2025): timestamp (ms), input_length, output_length, hash_ids, one
    an equal prefix of 512 tokens.  What a turn answers is in no later prompt by name, so answers are never shared."""
    arrival, prompt, output, runs = [], [], [], []
    top = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = files.parse_json(line, name, line=number)
            ids, n = [int(x) for x in row["hash_ids"]], int(row["input_length"])
            arrival.append(float(row["timestamp"]) / 1e3)
            prompt.append(n)
            output.append(max(1, int(row["output_length"])))
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as e:
            raise ConfigError(f"{name}:{number}: {type(e).__name__}: {e}; want Mooncake's fields") from e
        if len(ids) != -(-n // MOONCAKE_BLOCK) or min(ids, default=0) < 0:
            what = f"{len(ids)} hash ids for {n} tokens"
            raise ConfigError(f"{name}:{number}: {what}; want one, from 0 on, for each {MOONCAKE_BLOCK} tokens begun")
        top = max(top, *ids)
        runs.append([(x, MOONCAKE_BLOCK) for x in ids])
    if top + len(runs) >= 2**31 - 1:
        raise ConfigError(f"{name}: a hash id of {top}; want small numbers, counted from 0")
    answers = [top + 1 + i for i in range(len(runs))]
    return build(name, arrival, prompt, output, answers, runs, MOONCAKE_BLOCK)
